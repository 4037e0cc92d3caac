"""Conversations in the scheduler: what ended turns have left in the pool, and which requests go on with it.

The pages of a conversation between two turns are free to the rest of vLLM: they are given away when nothing older is
left, the least recently used first, and the conversation is then computed anew. So conversations never make a running
request wait. The hashes of a request's blocks say which conversation its prompt begins with; they depend on whatever
else vLLM distinguishes prompts by, such as an adapter or a salt.

A turn goes on in the conversation's own pages. If another turn goes on in them already, it gets a copy.

If there is a folder for it, a conversation is written to a file when the first of its pages is given away, and read
into other pages when a turn goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from keepset.core.budget import joined
from keepset.core.edits import Continuation, continuation_of, positions_without
from keepset.core.roles import system_span
from keepset.paged.eviction import RequestPlan
from keepset.paged.turns import PLAIN, EndedTurn, NextTurn
from keepset.vllm import stats
from keepset.vllm.beginnings import Beginnings
from keepset.vllm.conversation import ComingTurn, Conversation, conversation_of, existing, hashes_of
from keepset.vllm.spilled import FilePages, SpilledBytes, StoredFile
from keepset.vllm.window_pages import CopiedPages, WindowPages

logger = init_logger(__name__)

_CHANGED = 32
"""By how many of its last tokens the prompt of a turn may differ when the turn is asked for again: templates end it
otherwise than they continue it."""


@dataclass
class Conversations:
    """All conversations that may go on.

    Args:
        pool: vLLM's pool of blocks.
        block_size: tokens per block.
        longest: the most tokens of a request.
        window: how many of its newest queries a recipe looks at when a turn ends.
        windows: the pages of layers with windows.
        every: tokens of an answer from event to event; None without such events.
        user_mark: the tokens before a user's message, if what comes before the first one is protected.
        files: the bytes of conversations' files; None if conversations that lose their pages are lost.

    Attributes:
        to_spill: conversations that are written to files before the step that is scheduled, with their pages.
        to_delete: files that are deleted with that step.
        abandoned: the newest pages of conversations that are lost, for each group, until the layers are told.
    """

    pool: BlockPool
    block_size: int
    longest: int
    window: int
    windows: WindowPages
    every: int | None
    user_mark: Sequence[int] = ()
    abandoned: list[list[int]] = field(default_factory=list)
    files: SpilledBytes | None = None
    to_spill: list[tuple[Conversation, FilePages]] = field(default_factory=list)
    to_delete: list[str] = field(default_factory=list)
    _in_files: dict[str, Conversation] = field(default_factory=dict)
    _by_hash: dict[tuple[str | None, BlockHash], Conversation] = field(default_factory=dict)
    _idle: dict[int, Conversation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._beginnings = Beginnings(self.pool)
        self._hashed = self.pool.hash_block_size
        # A running turn may not drop entries then, and pages of windows are there for the newest tokens only.
        self._copies = self.every is None and not self.windows.managers

    def leave(
        self,
        request: Request,
        name: str | None,
        tokens: int,
        blocks: Sequence[Sequence[KVCacheBlock]],
        begun: Conversation | None,
    ) -> Conversation:
        """File what the turn of a request leaves that ends now.

        Args:
            request: the request; vLLM frees its blocks next.
            name: the name that its client gives the conversation; None without one.
            tokens: how many of its tokens have entries.
            blocks: its blocks by logical position, for each group of compressed layers.
            begun: what it has begun with; None if with nothing.
        """
        left_out = [] if begun is None else list(begun.left_out)
        ids = list(request.all_token_ids[:tokens])
        said = [ids[position] for position in positions_without(left_out, tokens)]
        hidden = tokens - len(said)
        ended = Conversation(
            ids,
            left_out,
            min(request.num_prompt_tokens, tokens) - hidden,
            [list(of_group[: -(-tokens // self.block_size)]) for of_group in blocks],
            list((hashes_of(request, said) if hidden else request.block_hashes)[: len(said) // self._hashed]),
            name,
            is_plain=self._copies and (begun is None or begun.is_plain),
            windows=self.windows.take(request.request_id),
            system=system_span(ids, self.user_mark) if self.user_mark else (),
        )
        self.pool.unpin_blocks(existing(ended.windows), self.reused)
        if begun is not None:
            self.forget(begun)
        self._file(ended)
        self._idle.update(dict.fromkeys((block.block_id for block in ended.real_blocks), ended))
        if ended.is_plain:
            self._beginnings.file(self._block_hashes(ended.hashes), zip(*ended.blocks, strict=True))
        return ended

    def reused(self, block: KVCacheBlock) -> None:
        """Note that vLLM gives a block away that held a conversation or a beginning.

        Args:
            block: the block.
        """
        self._beginnings.forget([block])
        if (conversation := self._idle.get(block.block_id)) is None:
            return
        # A pool that is reset calls, too. Then the block is still among the free ones, and weights may have changed.
        if self.files is not None and block.next_free_block is None and self._is_filed(conversation):
            self._spill(conversation)
        else:
            self.lose(conversation)

    def _is_filed(self, conversation: Conversation) -> bool:
        """Return whether a request may still find a conversation: not if all its hashes are those of a newer one."""
        keys = ((conversation.name, block_hash) for block_hash in reversed(conversation.hashes))
        return any(self._by_hash.get(key) is conversation for key in keys)

    def _spill(self, conversation: Conversation) -> None:
        """Have a conversation written to a file, whose pages nothing has written to before the next step."""
        assert conversation.turn is None
        file, spans = uuid4().hex, conversation.spans
        blocks = [[block.block_id for block in of_group if not block.is_null] for of_group in conversation.by_group]
        self.to_spill.append((conversation, FilePages(file, conversation.ended, blocks)))
        for block in conversation.real_blocks:
            self._idle.pop(block.block_id, None)
        self._in_files[file] = conversation
        conversation.file, conversation.stored, conversation.blocks, conversation.windows = file, spans, [], []

    def written(self, file: str, sizes: Sequence[int]) -> None:
        """Take in that a conversation's files are written, and delete those that are too many.

        Args:
            file: their name.
            sizes: the bytes of each; a negative number if it could not be written.
        """
        if self.files is None or (conversation := self._in_files.get(file)) is None:
            return
        if min(sizes) < 0:
            self.lose(conversation)
            return
        stats.count(conversations_spilled=1)
        self.files.add(file, conversation.owner, sum(sizes))
        self._evict()

    def _evict(self) -> None:
        assert self.files is not None
        for file in self.files.too_many():
            conversation = self._in_files[file]
            if conversation.turn is None:
                conversation.is_lost = True
                self.forget(conversation)
                stats.count(conversations_evicted=1)
            self.delete_file(conversation)

    def delete_file(self, conversation: Conversation) -> None:
        """Delete a conversation's file, if it has one; what is being read of it is still read."""
        if conversation.file is not None and self.files is not None:
            self.to_delete.append(conversation.file)
            self.files.remove(conversation.file)
            del self._in_files[conversation.file]
            conversation.file = None

    def find_files(self, stored: Iterable[StoredFile], groups: int) -> None:
        """Take in conversations that an earlier engine has written to files, which requests find once they are hashed.

        Args:
            stored: the files, the least recently used first.
            groups: how many groups of layers are compressed.
        """
        assert self.files is not None
        for file, metadata, nbytes in stored:
            try:
                conversation = conversation_of(metadata)
                width, spans = -(-len(conversation.ids) // self.block_size), conversation.stored
                if len(spans) != groups + len(self.windows.managers) or {end for _, end in spans[:groups]} != {width}:
                    raise ValueError("its pages are not those of its tokens")
            except (LookupError, TypeError, ValueError) as error:
                logger.warning("The conversation in %s is computed anew: %s", file, error)
                continue
            conversation.file = file
            self._in_files[file] = conversation
            self.files.add(file, conversation.owner, nbytes)
        self._evict()

    def file_alike(self, request: Request, salt_of: Callable[[str, str | None], str | None]) -> None:
        """File all conversations that are in files, by hashes as the engine makes them.

        Args:
            request: any request, which is left as it was.
            salt_of: returns the salt of hashes for an owner and a client's salt.
        """
        for conversation in list(self._in_files.values()):
            alike = copy(request)
            alike.cache_salt = salt_of(conversation.owner, conversation.salt)
            alike.mm_features, alike.prompt_embeds = [], None
            adapter: Any = conversation.adapter and SimpleNamespace(
                lora_name=conversation.adapter[0], lora_path=conversation.adapter[1]
            )
            alike.lora_request = adapter
            said = [conversation.ids[position] for position in conversation.positions]
            conversation.hashes = hashes_of(alike, said)[: len(said) // self._hashed]
            self._file(conversation)

    def find(self, request: Request, name: str | None) -> tuple[Conversation, Continuation] | None:
        """Return the conversation that a request goes on with, and how; None if there is none.

        It is the one with which the prompt has the longest beginning in common, of those whose newest turn's prompt
        this includes. A request that only begins like an earlier turn, such as one with the same system prompt, is
        another conversation, unless it names this one.

        Args:
            request: the request.
            name: the name that it gives its conversation; None without one.
        """
        seen: Conversation | None = None
        for number in range(len(request.block_hashes), 0, -1):
            found = self._by_hash.get((name, request.block_hashes[number - 1]))
            if found is None or found is seen:
                continue
            if (how := self._continuation(found, request, number * self._hashed, name is not None)) is not None:
                return found, how
            seen = found
        return None

    def _continuation(self, found: Conversation, request: Request, known: int, is_named: bool) -> Continuation | None:
        """Return how a request goes on with a conversation; None if it cannot, or is another one.

        Args:
            found: the conversation.
            request: the request.
            known: how many tokens both begin with at least.
            is_named: whether the request names the conversation.
        """
        if found.is_lost or (found.turn is not None and not found.is_arriving and not self._can_be_copied(found.turn)):
            return None
        known = min(known, request.num_tokens - 1)
        how = continuation_of(found.ids, found.left_out, found.prompt, request.all_token_ids, known)
        if how.said < (self.block_size if is_named else max(found.prompt - _CHANGED, self.block_size)):
            return None
        # Both prompts end with what the template puts before an answer. If they differ earlier, two were asked.
        tail = [found.ids[position] for position in found.positions[how.said : found.prompt]]
        prompt = request.prompt_token_ids or []
        return how if is_named or tail == prompt[len(prompt) - len(tail) :] else None

    def _can_be_copied(self, turn: Request) -> bool:
        """Return whether what a turn has begun with is still in its pages.

        Args:
            turn: the turn's request.
        """
        return self._copies and turn.status in (RequestStatus.RUNNING, RequestStatus.WAITING)

    def take(self, found: Conversation, request: Request, how: Continuation, plan: RequestPlan) -> ComingTurn | None:
        """Make a request go on with a conversation; return None if there is no room.

        Args:
            found: the conversation.
            request: the request.
            how: how its prompt goes on with it.
            plan: how the request is compressed.
        """
        ids = [*found.ids[: how.tokens], *request.all_token_ids[how.matched :]]
        if len(ids) + request.max_tokens > max(self.longest, request.num_tokens + request.max_tokens):
            return None  # its positions are used up: it is computed anew, once
        hashes = list(request.block_hashes[: how.matched // self._hashed])
        if found.turn is not None:
            source = EndedTurn(found.block_ids, how.tokens, 0, 0, running=found.turn.request_id)
            ids_then, left_out = list(found.ids), list(found.left_out)
            copy = replace(found, ids=ids_then, left_out=left_out, blocks=[], compact=False, turn=None)
            return self._copied(copy, found.blocks, source, request, how, plan, ids, hashes)
        answered = len(found.ids) - found.prompt - found.hidden
        if not how.is_over and self.every is not None and answered >= self.every:
            return None  # its answer has dropped entries that it had
        compressed = len(found.spans) - len(self.windows.managers)
        if self.windows.managers and (how.left_out or not self.windows.seen(found.spans[compressed:], how.tokens)):
            return None  # layers with windows hold the newest tokens only, those that are left out among them
        idle = [block for block in found.real_blocks if block.ref_cnt == 0]
        more = 0 if how.is_whole else compressed
        read = None
        if found.file is not None:  # the turn's new tokens shall have room, too, or reading is in vain
            more += sum(total - empty for empty, total in found.spans)
            more += compressed * -(-(len(ids) + 1 - how.tokens) // self.block_size)
        if len(idle) + more > self.pool.get_num_free_blocks():
            return None
        if found.file is None:
            self._begin(found, request)
            self.pool.touch(found.real_blocks)
        else:
            read = self._read_back(found, compressed)
            self._begin(found, request)
        ended = found.ended
        message = NextTurn(
            request.request_id,
            ended,
            found.block_ids,
            how.tokens,
            how.left_out,
            found.compact and how.is_over,
            plan,
        )
        if message.packs:
            self._beginnings.forget(found.real_blocks)
        surplus: list[KVCacheBlock] = []
        if not how.is_whole:
            width = -(-how.tokens // self.block_size)
            found.blocks = [self._moved(blocks, width, surplus) for blocks in found.blocks]
            message = replace(message, blocks=found.block_ids)
        return ComingTurn(found, message, ids, hashes, surplus, read=read)

    def _read_back(self, conversation: Conversation, compressed: int) -> FilePages:
        """Give a conversation blocks, and return what is read into them.

        Args:
            conversation: a conversation in a file.
            compressed: how many groups of layers are compressed.
        """
        assert conversation.file is not None
        blocks = [
            [*[self.pool.null_block] * empty, *self.pool.get_new_blocks(total - empty)]
            for empty, total in conversation.spans
        ]
        conversation.blocks, conversation.windows = blocks[:compressed], blocks[compressed:]
        ids = [[block.block_id for block in of_group if not block.is_null] for of_group in blocks]
        return FilePages(conversation.file, conversation.ended, ids)

    def begin_windows(self, conversation: Conversation) -> list[CopiedPages]:
        """Return what is copied for a turn that begins, to which vLLM has given its blocks.

        Args:
            conversation: what the turn begins with.
        """
        assert conversation.turn is not None
        copied = self.windows.copies(conversation.windows, len(conversation.ids), conversation.turn.request_id)
        # Whoever gets them writes to them after they are copied.
        self.pool.free_blocks(existing(conversation.windows))
        conversation.windows = []
        return copied

    def begin_alike(self, request: Request, name: str | None, plan: RequestPlan) -> ComingTurn | None:
        """Make a request begin with a copy of a beginning in the pool; return None if there is none, or no room.

        Args:
            request: the request, which goes on with no conversation.
            name: the name that it gives its conversation; None without one.
            plan: how it is compressed.
        """
        if not self._copies:
            return None
        hashes = self._block_hashes(request.block_hashes)
        self._beginnings.see(request.request_id, hashes)
        # The queries that the turn's end looks at are its own, whatever others have said.
        most = (request.num_tokens - max(self.window, 1)) // self.block_size
        blocks = self._beginnings.longest(hashes[: max(most, 0)])
        if not blocks:
            return None
        tokens, ids = len(blocks) * self.block_size, list(request.all_token_ids)
        by_group = [list(of_group) for of_group in zip(*blocks, strict=True)]
        source = EndedTurn(
            [[block.block_id for block in of_group] for of_group in by_group], tokens, 0, 0, running=PLAIN
        )
        known = list(request.block_hashes[: tokens // self._hashed])
        begun = Conversation(ids[:tokens], [], tokens, [], known, name, is_plain=False, compact=False)
        how = Continuation(tokens, (), tokens, tokens, is_whole=True, is_over=True)
        coming = self._copied(begun, by_group, source, request, how, plan, ids, known)
        if coming is not None:
            coming.begins = True
        return coming

    def _copied(
        self,
        copy: Conversation,
        blocks: Sequence[Sequence[KVCacheBlock]],
        source: EndedTurn,
        request: Request,
        how: Continuation,
        plan: RequestPlan,
        ids: list[int],
        hashes: list[BlockHash],
    ) -> ComingTurn | None:
        """Make a request go on with a copy of some entries; return None if there is no room for all its tokens.

        Args:
            copy: the conversation that it goes on with, which gets blocks of its own.
            blocks: those that are copied, for each group of compressed layers.
            source: what the layers must know of them.
            request: the request.
            how: how its prompt goes on with them.
            plan: how it is compressed.
            ids: the tokens of its prompt by position.
            hashes: the hashes of those that are copied.
        """
        width = -(-how.tokens // self.block_size)
        copied = existing([of_group[:width] for of_group in blocks])
        idle = [block for block in copied if block.ref_cnt == 0]
        needed = len(blocks) * (-(-(len(ids) + 1) // self.block_size))
        if len(idle) + needed > self.pool.get_num_free_blocks():
            return None
        self.pool.touch(copied)
        copy.blocks = []
        for of_group in blocks:
            emptied = sum(block.is_null for block in of_group[:width])
            first = max(emptied - 1, 0)  # the entries may fill their pages otherwise, and then need one block more
            copy.blocks.append([*[self.pool.null_block] * first, *self.pool.get_new_blocks(width - first)])
        self._begin(copy, request)
        message = NextTurn(request.request_id, source, copy.block_ids, how.tokens, how.left_out, False, plan)
        return ComingTurn(copy, message, ids, hashes, copied=copied)

    def _begin(self, conversation: Conversation, request: Request) -> None:
        """Note that a request goes on with an idle conversation.

        Args:
            conversation: the conversation.
            request: the request.
        """
        conversation.turn, conversation.is_arriving = request, True
        for block in conversation.real_blocks:
            self._idle.pop(block.block_id, None)

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
        self.pool.unpin_blocks(coming.copied, self.reused)
        self.forget(conversation)
        self.delete_file(conversation)
        if not emptied:
            self.pool.free_blocks(conversation.real_blocks)
            conversation.is_lost = True
            return
        self._free_leading(conversation, emptied)
        before = [span for span in conversation.left_out if span[0] < tokens]
        conversation.left_out = list(joined([*before, *coming.message.left_out]))
        del conversation.ids[tokens:]
        conversation.hashes = coming.hashes
        conversation.prompt = min(conversation.prompt, len(conversation.positions))
        conversation.is_plain &= not coming.message.packs  # entries that were packed lie head after head
        conversation.compact = conversation.is_arriving = False
        if not coming.begins:
            self._file(conversation)
        coming.is_ready = True
        stats.count(conversations_read=int(coming.read is not None))

    def _free_leading(self, conversation: Conversation, emptied: Sequence[int]) -> None:
        """Free leading blocks of a conversation. Those of a beginning that several have in common stay to be copied.

        Args:
            conversation: the conversation, with the hashes of the turn before.
            emptied: how many blocks are free, for each group.
        """
        freed = [blocks[:number] for blocks, number in zip(conversation.blocks, emptied, strict=True)]
        if conversation.is_plain:
            hashes = self._block_hashes(conversation.hashes)[: min(emptied)]
            count = sum(self._beginnings.is_shared(block_hash) for block_hash in hashes)  # of a beginning, all
            self._beginnings.file(hashes[:count], zip(*conversation.blocks, strict=True))
        blocks = existing(freed)
        self.pool.unpin_blocks([block for block in blocks if self._beginnings.holds(block)], self.reused)
        self.pool.free_blocks(block for block in blocks if not self._beginnings.holds(block))
        stats.count(blocks_freed=len(blocks))
        null = [self.pool.null_block]
        conversation.blocks = [
            null * number + blocks[number:] for blocks, number in zip(conversation.blocks, emptied, strict=True)
        ]

    def give_back(self, coming: ComingTurn) -> None:
        """Leave a conversation as it is to later requests, because the turn has not begun; a copy is dropped."""
        conversation = coming.conversation
        if coming.is_copy:
            self.forget(conversation)
            self.pool.free_blocks(conversation.real_blocks)
            return
        conversation.turn = None
        self._idle.update(dict.fromkeys((block.block_id for block in conversation.real_blocks), conversation))
        self.pool.unpin_blocks(conversation.real_blocks, self.reused)
        if conversation.is_deleted:
            self.delete(conversation)

    def all(self) -> list[Conversation]:
        """Return all conversations with which requests may go on, those that were filed first in front."""
        return list({id(one): one for one in [*self._in_files.values(), *self._by_hash.values()]}.values())

    def delete(self, conversation: Conversation) -> None:
        """Forget a conversation because its owner says so, and offer its pages to no new one.

        Args:
            conversation: the conversation. A turn that has begun with it, or will, goes on.
        """
        conversation.is_deleted = True
        self.forget(conversation)
        self.delete_file(conversation)
        self._beginnings.forget(conversation.real_blocks)
        if conversation.turn is None:
            self._abandon(conversation)

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation, because its turn has ended, or because it is lost."""
        for block_hash in conversation.hashes:
            key = conversation.name, block_hash
            if self._by_hash.get(key) is conversation:
                del self._by_hash[key]

    def clear(self) -> None:
        """Forget all conversations that no request goes on with, and all beginnings."""
        self._beginnings.clear()
        for conversation in self.all():
            if conversation.turn is None:
                self.lose(conversation)
            else:  # its entries are of other weights
                self.forget(conversation)
                self.delete_file(conversation)

    def _block_hashes(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Return the hashes of full blocks, among those of all multiples of `hash_block_size` tokens."""
        each = self.block_size // self._hashed
        return list(hashes[each - 1 :: each])

    def _file(self, conversation: Conversation) -> None:
        hashes = () if conversation.is_deleted else conversation.hashes
        keys = [(conversation.name, block_hash) for block_hash in hashes]
        before = [one for key in keys if self._in_files and (one := self._by_hash.get(key)) is not None]
        self._by_hash.update(dict.fromkeys(keys, conversation))
        for older in before:
            if older.file is not None and not self._is_filed(older):  # nobody finds it any more
                older.is_lost = True
                self.delete_file(older)

    def lose(self, conversation: Conversation) -> None:
        """Forget an idle conversation, because its entries are gone."""
        if not (conversation.is_lost or conversation.turn):
            self._abandon(conversation)
            self.forget(conversation)
            self.delete_file(conversation)
            stats.count(conversations_lost=1)

    def _abandon(self, conversation: Conversation) -> None:
        """Note that an idle conversation has no pages any more."""
        conversation.is_lost = True
        for block in conversation.real_blocks:
            self._idle.pop(block.block_id, None)
        if conversation.blocks:
            self.abandoned.append([of_group[-1].block_id for of_group in conversation.blocks])
