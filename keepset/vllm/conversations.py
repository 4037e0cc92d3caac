"""Conversations in the scheduler: what ended turns have left in the pool, and which requests go on with it.

The pages of a conversation between two turns are free to the rest of vLLM: they are given away when nothing older is
left, the least recently used first, and the conversation is then computed anew. So conversations never make a running
request wait. The hashes of a request's blocks say which conversation its prompt begins with; they depend on whatever
else vLLM distinguishes prompts by, such as an adapter or a salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from keepset.paged.eviction import RequestPlan
from keepset.paged.turns import EndedTurn, NextTurn

_CHANGED = 32
"""By how many of its last tokens the prompt of a turn may differ when the turn is asked for again: templates end it
otherwise than they continue it."""


@dataclass(eq=False)
class Conversation:
    """What the newest turn of a conversation has left.

    Attributes:
        tokens: the tokens that it stands for.
        prompt: how many of them were the newest turn's prompt.
        blocks: its blocks by logical position, for each group of compressed layers.
        hashes: the hashes of its full blocks.
        compact: whether it was chosen which entries stay when the next turn begins.
        is_busy: whether a request goes on with it, or will.
        is_lost: whether some of its blocks were given away.
    """

    tokens: list[int]
    prompt: int
    blocks: list[list[KVCacheBlock]]
    hashes: list[bytes]
    compact: bool = True
    is_busy: bool = False
    is_lost: bool = False

    @property
    def real_blocks(self) -> list[KVCacheBlock]:
        """The blocks that hold something, the newest first."""
        return [block for blocks in self.blocks for block in reversed(blocks) if not block.is_null]

    @property
    def ended(self) -> EndedTurn:
        """What the layers must know of it."""
        blocks = [[block.block_id for block in of_group] for of_group in self.blocks]
        return EndedTurn(blocks, len(self.tokens), self.prompt)


@dataclass
class ComingTurn:
    """A turn that will go on with a conversation.

    Attributes:
        conversation: the conversation.
        message: what the layers are told.
        surplus: blocks that the turn does not need, once the layers have read them.
        is_ready: whether the layers have made the conversation's pages the turn's.
        is_given_up: whether its request has ended meanwhile.
        is_waiting: whether it could have begun in the step that is scheduled.
    """

    conversation: Conversation
    message: NextTurn
    surplus: list[KVCacheBlock]
    is_ready: bool = False
    is_given_up: bool = False
    is_waiting: bool = False


@dataclass
class Conversations:
    """All conversations that may go on.

    Args:
        pool: vLLM's pool of blocks.
        block_size: tokens per block.
        hashed: tokens per hash.
    """

    pool: BlockPool
    block_size: int
    hashed: int
    _by_hash: dict[bytes, Conversation] = field(default_factory=dict)
    _leaving: list[Conversation] = field(default_factory=list)

    def leave(self, request: Request, tokens: int, blocks: Sequence[Sequence[KVCacheBlock]]) -> Conversation:
        """File what the turn of a request leaves that ends now.

        Args:
            request: the request; vLLM frees its blocks next.
            tokens: how many of its tokens have entries.
            blocks: its blocks by logical position, for each group of compressed layers.
        """
        ended = Conversation(
            list(request.all_token_ids[:tokens]),
            min(request.num_prompt_tokens, tokens),
            [list(of_group[: -(-tokens // self.block_size)]) for of_group in blocks],
            list(request.block_hashes[: tokens // self.hashed]),
        )
        self.pool.touch(ended.real_blocks)
        self._leaving.append(ended)
        self._file(ended)
        return ended

    def release_ended(self) -> None:
        """Give the pages of ended turns to the pool, once vLLM has freed them; called before a step is scheduled."""
        staying = []
        for ended in self._leaving:
            if ended.is_busy:
                continue
            if all(block.ref_cnt == 1 for block in ended.real_blocks):
                self._unpin(ended)
            else:
                staying.append(ended)
        self._leaving = staying

    def find(self, request: Request) -> tuple[Conversation, int] | None:
        """Return the conversation that a request goes on with, and from how many tokens; None if there is none.

        It is the one with which the prompt has the longest beginning in common. A request that only begins like an
        earlier turn, such as one with the same system prompt, is another conversation.
        """
        for number in range(len(request.block_hashes), 0, -1):
            found = self._by_hash.get(request.block_hashes[number - 1])
            if found is not None:
                break
        else:
            return None
        if found.is_busy or found.is_lost:
            return None
        prompt, common = request.all_token_ids, number * self.hashed
        most = min(len(found.tokens), len(prompt) - 1)
        while common < most and found.tokens[common] == prompt[common]:
            common += 1
        common = min(common, most)
        if common < max(found.prompt - _CHANGED, self.block_size):
            return None
        return found, common

    def take(self, found: Conversation, name: str, tokens: int, plan: RequestPlan) -> ComingTurn | None:
        """Make a request go on with a conversation; return None if there is no room.

        Args:
            found: the conversation.
            name: the engine's name of the request.
            tokens: the tokens that it goes on from.
            plan: how the request is compressed.
        """
        idle = [block for block in found.real_blocks if block.ref_cnt == 0]
        more = len(found.blocks) if tokens < len(found.tokens) else 0
        if len(idle) + more > self.pool.get_num_free_blocks():
            return None
        found.is_busy = True
        if found in self._leaving:
            self._leaving.remove(found)
        else:
            self.pool.touch(found.real_blocks)
        ended, whole = found.ended, tokens == len(found.tokens)
        surplus: list[KVCacheBlock] = []
        if not whole:
            width = -(-tokens // self.block_size)
            found.blocks = [self._moved(blocks, width, surplus) for blocks in found.blocks]
        blocks = [[block.block_id for block in of_group] for of_group in found.blocks]
        message = NextTurn(name, ended, blocks, tokens, found.compact and whole, plan)
        return ComingTurn(found, message, surplus)

    def _moved(self, blocks: list[KVCacheBlock], width: int, surplus: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Return the blocks of a conversation that goes on from fewer tokens; those too many go to `surplus`.

        What stays may fill its pages otherwise, and then needs one more block.
        """
        real = [block for block in blocks if not block.is_null]
        if len(real) < width:
            real = [*self.pool.get_new_blocks(1), *real]
        surplus += real[: max(len(real) - width, 0)]
        real = real[-width:]
        return [*[self.pool.null_block] * (width - len(real)), *real]

    def arrive(self, coming: ComingTurn, emptied: Sequence[int]) -> None:
        """Take in that the layers have made a conversation's pages a turn's, and how many leading blocks are empty.

        Args:
            coming: the turn.
            emptied: the empty blocks of each group; none at all if the layers have lost the conversation.
        """
        conversation, tokens = coming.conversation, coming.message.tokens
        self.pool.free_blocks(coming.surplus)
        if not emptied:
            self.forget(conversation)
            self.pool.free_blocks(conversation.real_blocks)
            conversation.is_lost = True
            return
        for blocks, number in zip(conversation.blocks, emptied, strict=True):
            self.pool.free_blocks(block for block in blocks[:number] if not block.is_null)
        null = [self.pool.null_block]
        conversation.blocks = [
            null * number + blocks[number:] for blocks, number in zip(conversation.blocks, emptied, strict=True)
        ]
        self.forget(conversation)
        del conversation.tokens[tokens:], conversation.hashes[tokens // self.hashed :]
        conversation.prompt = min(conversation.prompt, tokens)
        conversation.compact = False
        self._file(conversation)
        coming.is_ready = True

    def give_back(self, coming: ComingTurn) -> None:
        """Leave a conversation as it is to later requests, because the turn has not begun."""
        coming.conversation.is_busy = False
        self._unpin(coming.conversation)

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation, because a turn has begun that goes on with it, or because it is lost."""
        for block_hash in conversation.hashes:
            if self._by_hash.get(block_hash) is conversation:
                del self._by_hash[block_hash]

    def clear(self) -> None:
        """Forget all conversations that no request goes on with."""
        for conversation in {id(one): one for one in self._by_hash.values()}.values():
            if not conversation.is_busy:
                self._lose(conversation)

    def _file(self, conversation: Conversation) -> None:
        self._by_hash.update(dict.fromkeys(conversation.hashes, conversation))

    def _unpin(self, conversation: Conversation) -> None:
        """Give a conversation's pages to the pool, which says when it gives one of them away."""
        blocks = conversation.blocks  # of a later turn they are others
        self.pool.unpin_blocks(
            conversation.real_blocks, lambda _: self._lose(conversation) if conversation.blocks is blocks else None
        )

    def _lose(self, conversation: Conversation) -> None:
        if not (conversation.is_lost or conversation.is_busy):
            conversation.is_lost = True
            self.forget(conversation)
