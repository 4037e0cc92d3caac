"""One conversation: what its newest turn has left, what its file says of it, and the turn that goes on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

from keepset.core.budget import Ranges
from keepset.core.edits import Span, positions_without
from keepset.paged.turns import EndedTurn, NextTurn
from keepset.vllm.contexts import EVERYBODY
from keepset.vllm.spilled import FilePages


@dataclass(eq=False)
class Conversation:
    """What the newest turn of a conversation has left, or what a turn has begun with that runs.

    Attributes:
        ids: the token at each position.
        left_out: spans of positions that the client has left out since, apart and in order; they have no entries.
        prompt: how many tokens of what was said were the newest turn's prompt.
        blocks: its blocks by logical position, for each group of compressed layers.
        hashes: the hashes of what was said, for each of its full blocks.
        name: the name that its client gives it; None without one.
        is_plain: whether nothing was packed: every block holds all its tokens, in their order.
        compact: whether it was chosen which entries stay when the next turn begins.
        turn: the request that goes on in its pages; None if there is none.
        is_arriving: whether the layers are making its pages that request's.
        is_lost: whether some of its blocks were given away.
        windows: its blocks by logical position, for each group of layers with windows.
        system: where all before the first user's message is, if the recipe protects it.
        owner: whose it is.
        is_deleted: whether its owner has deleted it.
        salt: the salt that its client gives; None without one.
        adapter: name and path of the adapter with which it was computed; None without one.
        file: the file that holds it; None if its blocks do.
        stored: `spans` while it is in a file.
    """

    ids: list[int]
    left_out: list[Span]
    prompt: int
    blocks: list[list[KVCacheBlock]]
    hashes: list[BlockHash]
    name: str | None
    is_plain: bool
    compact: bool = True
    turn: Request | None = None
    is_arriving: bool = False
    is_lost: bool = False
    windows: list[list[KVCacheBlock]] = field(default_factory=list)
    system: Ranges = ()
    owner: str = EVERYBODY
    is_deleted: bool = False
    salt: str | None = None
    adapter: tuple[str, str] | None = None
    file: str | None = None
    stored: list[Span] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        """The first logical block that holds something, and the number of blocks: for each group, windows last."""
        if self.file is not None:
            return self.stored
        return [(sum(block.is_null for block in blocks), len(blocks)) for blocks in self.by_group]

    @property
    def positions(self) -> list[int]:
        """The positions of the tokens that were said, without those that the client has left out."""
        return positions_without(self.left_out, len(self.ids))

    @property
    def by_group(self) -> list[list[KVCacheBlock]]:
        """Its blocks by logical position, for each group, windows last."""
        return [*self.blocks, *self.windows]

    @property
    def real_blocks(self) -> list[KVCacheBlock]:
        """The blocks that hold something, the newest first."""
        return existing(self.by_group)

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
        return EndedTurn(self.block_ids, len(self.ids), self.prompt + hidden, len(self.ids) - hidden, self.system)


@dataclass
class ComingTurn:
    """A turn that will go on with a conversation.

    Attributes:
        conversation: the conversation, in the pages that the turn will have.
        message: what the layers are told.
        ids: the tokens of its prompt by position: those of the conversation, and the new ones.
        hashes: the hashes of what it has of the conversation.
        surplus: blocks that the turn does not need, once the layers have read them.
        copied: blocks of others that the layers copy.
        begins: whether it is the first turn of a conversation that begins like another.
        is_ready: whether the layers have made the conversation's pages the turn's.
        is_given_up: whether its request has ended meanwhile.
        is_waiting: whether it could have begun in the step that is scheduled.
        read: the pages that are read from the conversation's file; None if they hold it.
    """

    conversation: Conversation
    message: NextTurn
    ids: list[int]
    hashes: list[BlockHash]
    surplus: list[KVCacheBlock] = field(default_factory=list)
    copied: list[KVCacheBlock] = field(default_factory=list)
    begins: bool = False
    is_ready: bool = False
    is_given_up: bool = False
    is_waiting: bool = False
    read: FilePages | None = None

    @property
    def is_copy(self) -> bool:
        """Whether it has pages of its own, and the conversation that it goes on with stays as it is."""
        return bool(self.copied)


def metadata_of(conversation: Conversation) -> dict[str, Any]:
    """Return what a conversation's file says of it, besides its pages; plain JSON."""
    plain = {name: getattr(conversation, name) for name in _PLAIN}
    adapter = conversation.adapter
    return {**plain, "stored": conversation.stored, "adapter": adapter and [*adapter, _changed_at(adapter[1])]}


def conversation_of(metadata: Mapping[str, Any]) -> Conversation:
    """Return the conversation of which a file says this; its hashes are unknown.

    Raises:
        LookupError, TypeError, ValueError: something is missing, or no conversation is like that.
    """
    plain = {name: metadata[name] for name in _PLAIN}
    spans: list[list[Span]] = [
        [(int(a), int(b)) for a, b in metadata[name]] for name in ("left_out", "system", "stored")
    ]
    left_out, system, stored = spans
    ids = np.asarray(plain["ids"], dtype=np.int64)
    ends = [0, *(bound for span in left_out for bound in span), len(ids)]
    if ids.ndim != 1 or ids.min() < 0 or ends != sorted(ends) or not 0 < plain["prompt"] <= len(ids):
        raise ValueError("its tokens are none")
    if not all(isinstance(plain[name], str | None) for name in ("name", "salt")) or type(plain["owner"]) is not str:
        raise ValueError("it is nobody's")
    if not all(0 <= empty < total for empty, total in stored):
        raise ValueError("its pages are none")
    if (adapter := metadata["adapter"]) is not None:
        *adapter, changed_at = adapter
        if changed_at != _changed_at(adapter[1]):
            raise ValueError("its adapter has changed")
        adapter = adapter[0], adapter[1]
    plain |= {"left_out": left_out, "system": tuple(system), "stored": stored, "adapter": adapter}
    return Conversation(**plain, blocks=[], hashes=[])


def _changed_at(adapter: str) -> int:
    """Return when files of an adapter were last written, in nanoseconds; 0 if there are none here.

    Args:
        adapter: its path.
    """
    return max((path.stat().st_mtime_ns for path in Path(adapter).glob("*")), default=0)


_PLAIN = ("ids", "left_out", "prompt", "name", "is_plain", "compact", "system", "owner", "salt")
"""What a file says of a conversation as it is."""


def existing(blocks: Sequence[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
    """Return the blocks that hold something, the newest first.

    Args:
        blocks: blocks by logical position, for each group.
    """
    return [block for of_group in blocks for block in reversed(of_group) if not block.is_null]


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
