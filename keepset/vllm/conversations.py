"""Conversations in the scheduler: what ended turns have left in the pool, and which requests go on with it.

The pages of a conversation between two turns are free to the rest of vLLM: they are given away when nothing older is
left, the least recently used first, and the conversation is then computed anew. So conversations never make a running
request wait. The hashes of a request's blocks say which conversation its prompt begins with; they depend on whatever
else vLLM distinguishes prompts by, such as an adapter or a salt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

from keepset.core.budget import joined
from keepset.core.edits import Edit, Span, edit_of, positions_without
from keepset.paged.eviction import RequestPlan
from keepset.paged.turns import EndedTurn, NextTurn
from keepset.vllm import stats

_CHANGED = 32
"""By how many of its last tokens the prompt of a turn may differ when the turn is asked for again: templates end it
otherwise than they continue it."""


@dataclass(eq=False)
class Conversation:
    """What the newest turn of a conversation has left.

    Attributes:
        ids: the token at each position.
        left_out: spans of positions that the client has left out since, apart and in order; they have no entries.
        prompt: how many tokens of what was said were the newest turn's prompt.
        blocks: its blocks by logical position, for each group of compressed layers.
        hashes: the hashes of what was said, for each of its full blocks.
        compact: whether it was chosen which entries stay when the next turn begins.
        is_busy: whether a request goes on with it, or will.
        is_lost: whether some of its blocks were given away.
    """

    ids: list[int]
    left_out: list[Span]
    prompt: int
    blocks: list[list[KVCacheBlock]]
    hashes: list[BlockHash]
    compact: bool = True
    is_busy: bool = False
    is_lost: bool = False

    @property
    def positions(self) -> list[int]:
        """The positions of the tokens that were said, without those that the client has left out."""
        return positions_without(self.left_out, len(self.ids))

    @property
    def real_blocks(self) -> list[KVCacheBlock]:
        """The blocks that hold something, the newest first."""
        return [block for blocks in self.blocks for block in reversed(blocks) if not block.is_null]

    @property
    def block_ids(self) -> list[list[int]]:
        """The ids of its blocks, for each group of compressed layers."""
        return [[block.block_id for block in of_group] for of_group in self.blocks]

    @property
    def hidden(self) -> int:
        """How many of its tokens the client has left out."""
        return sum(end - first for first, end in self.left_out)

    @property
    def ended(self) -> EndedTurn:
        """What the layers must know of it."""
        hidden = self.hidden
        return EndedTurn(self.block_ids, len(self.ids), self.prompt + hidden, len(self.ids) - hidden)


@dataclass
class ComingTurn:
    """A turn that will go on with a conversation.

    Attributes:
        conversation: the conversation.
        message: what the layers are told.
        ids: the tokens of its prompt by position: those of the conversation, and the new ones.
        hashes: the hashes of what it has of the conversation.
        surplus: blocks that the turn does not need, once the layers have read them.
        is_ready: whether the layers have made the conversation's pages the turn's.
        is_given_up: whether its request has ended meanwhile.
        is_waiting: whether it could have begun in the step that is scheduled.
    """

    conversation: Conversation
    message: NextTurn
    ids: list[int]
    hashes: list[BlockHash]
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
    _by_hash: dict[BlockHash, Conversation] = field(default_factory=dict)

    def leave(
        self, request: Request, tokens: int, blocks: Sequence[Sequence[KVCacheBlock]], left_out: Sequence[Span]
    ) -> Conversation:
        """File what the turn of a request leaves that ends now.

        Args:
            request: the request; vLLM frees its blocks next.
            tokens: how many of its tokens have entries.
            blocks: its blocks by logical position, for each group of compressed layers.
            left_out: spans of positions that the client has left out.
        """
        ids = list(request.all_token_ids[:tokens])
        said = [ids[position] for position in positions_without(left_out, tokens)]
        hidden = tokens - len(said)
        ended = Conversation(
            ids,
            list(left_out),
            min(request.num_prompt_tokens, tokens) - hidden,
            [list(of_group[: -(-tokens // self.block_size)]) for of_group in blocks],
            list((hashes_of(request, said) if hidden else request.block_hashes)[: len(said) // self.hashed]),
        )
        self._file(ended)
        return ended

    def when_lost(self, conversation: Conversation) -> Callable[[KVCacheBlock], None]:
        """Return what vLLM calls when it gives a page of an idle conversation away.

        Args:
            conversation: the conversation, with the blocks that it has now.
        """
        blocks = conversation.blocks  # of a later turn they are others
        return lambda _: self._lose(conversation) if conversation.blocks is blocks else None

    def find(self, request: Request, named: bool) -> tuple[Conversation, Edit] | None:
        """Return the conversation that a request goes on with, and what it has of it; None if there is none.

        It is the one with which the prompt has the longest beginning in common. A request that only begins like an
        earlier turn, such as one with the same system prompt, is another conversation, unless it names this one.

        Args:
            request: the request.
            named: whether it names its conversation, which its hashes then include.
        """
        for number in range(len(request.block_hashes), 0, -1):
            found = self._by_hash.get(request.block_hashes[number - 1])
            if found is not None:
                break
        else:
            return None
        if found.is_busy or found.is_lost:
            return None
        said = [found.ids[position] for position in found.positions] if found.left_out else found.ids
        edit = edit_of(said, request.all_token_ids, min(number * self.hashed, request.num_tokens - 1))
        least = self.block_size if named else max(found.prompt - _CHANGED, self.block_size)
        return (found, edit) if edit.end >= least else None

    def take(
        self, found: Conversation, request: Request, edit: Edit, plan: RequestPlan, longest: int
    ) -> ComingTurn | None:
        """Make a request go on with a conversation; return None if there is no room.

        Args:
            found: the conversation.
            request: the request.
            edit: what its prompt has of the conversation.
            plan: how the request is compressed.
            longest: the most tokens of a request.
        """
        positions = found.positions
        whole = edit.end == len(positions)
        tokens = len(found.ids) if whole else positions[edit.end - 1] + 1
        ids = [*found.ids[:tokens], *request.all_token_ids[edit.matched :]]
        if len(ids) + request.max_tokens > max(longest, request.num_tokens + request.max_tokens):
            return None  # its positions are used up: it is computed anew, once
        idle = [block for block in found.real_blocks if block.ref_cnt == 0]
        more = 0 if whole else len(found.blocks)
        if len(idle) + more > self.pool.get_num_free_blocks():
            return None
        found.is_busy = True
        self.pool.touch(found.real_blocks)
        ended = found.ended
        surplus: list[KVCacheBlock] = []
        if not whole:
            width = -(-tokens // self.block_size)
            found.blocks = [self._moved(blocks, width, surplus) for blocks in found.blocks]
        left_out = [(positions[first], positions[end - 1] + 1) for first, end in edit.left_out]
        # A client may send another answer than it got, or the same in other tokens; that turn is over, too.
        is_over = whole or (edit.end >= found.prompt and request.num_tokens - edit.matched > 1)
        message = NextTurn(
            request.request_id, ended, found.block_ids, tokens, left_out, found.compact and is_over, plan
        )
        hashes = list(request.block_hashes[: edit.matched // self.hashed])
        return ComingTurn(found, message, ids, hashes, surplus)

    def _moved(self, blocks: list[KVCacheBlock], width: int, surplus: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Return the blocks of a conversation that goes on from fewer tokens; those too many go to `surplus`.

        What stays may fill its pages otherwise, and then needs one more block.

        Args:
            blocks: the conversation's blocks, by logical position.
            width: the number of blocks that the tokens need.
            surplus: gets the blocks that are not needed.
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
        self.forget(conversation)
        if not emptied:
            self.pool.free_blocks(conversation.real_blocks)
            conversation.is_lost = True
            return
        freed = [block for blocks, n in zip(conversation.blocks, emptied, strict=True) for block in blocks[:n]]
        freed = [block for block in freed if not block.is_null]
        self.pool.free_blocks(freed)
        stats.count(blocks_freed=len(freed))
        null = [self.pool.null_block]
        conversation.blocks = [
            null * number + blocks[number:] for blocks, number in zip(conversation.blocks, emptied, strict=True)
        ]
        before = [span for span in conversation.left_out if span[0] < tokens]
        conversation.left_out = list(joined([*before, *coming.message.left_out]))
        del conversation.ids[tokens:]
        conversation.hashes = coming.hashes
        conversation.prompt = min(conversation.prompt, len(conversation.positions))
        conversation.compact = False
        self._file(conversation)
        coming.is_ready = True

    def give_back(self, coming: ComingTurn) -> None:
        """Leave a conversation as it is to later requests, because the turn has not begun."""
        conversation = coming.conversation
        conversation.is_busy = False
        self.pool.unpin_blocks(conversation.real_blocks, self.when_lost(conversation))

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

    def _lose(self, conversation: Conversation) -> None:
        if not (conversation.is_lost or conversation.is_busy):
            conversation.is_lost = True
            self.forget(conversation)
            stats.count(conversations_lost=1)


def hashes_of(request: Request, tokens: Sequence[int]) -> list[BlockHash]:
    """Return the hashes of other tokens, as if they were the request's.

    Args:
        request: vLLM's request, which is left as it was.
        tokens: token ids that are hashed.
    """
    own, own_hashes = list(request._all_token_ids), request.block_hashes
    request._all_token_ids[:], request.block_hashes = tokens, []
    request.update_block_hashes()
    hashes = request.block_hashes
    request._all_token_ids[:], request.block_hashes = own, own_hashes
    return hashes
