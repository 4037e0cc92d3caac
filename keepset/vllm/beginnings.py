"""Beginnings of prompts whose entries are still in the pool, whole and in order, so that new conversations copy them.

Conversations compress their own pages, so none reads pages of another. A system prompt is therefore copied from pages
that still hold it: those of a conversation in its first turn, or those that a compression has emptied since, until vLLM
gives them away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

_SEVERAL = ""
"""In place of a request's id: several requests began so."""

BlockOfGroups = tuple[KVCacheBlock, ...]
"""A block of the same tokens in each group of compressed layers."""


@dataclass
class Beginnings:
    """The blocks that hold beginnings of prompts.

    Args:
        pool: vLLM's pool of blocks.
    """

    pool: BlockPool
    _blocks: dict[BlockHash, BlockOfGroups] = field(default_factory=dict)
    _hash_of: dict[int, BlockHash] = field(default_factory=dict)
    _seen: OrderedDict[BlockHash, str] = field(default_factory=OrderedDict)

    def see(self, request_id: str, hashes: Sequence[BlockHash]) -> None:
        """Note how a new conversation begins; a beginning that several have in common is worth its pages.

        Args:
            request_id: its request.
            hashes: those of its full blocks.
        """
        for block_hash in hashes:
            first = self._seen.pop(block_hash, request_id)
            self._seen[block_hash] = first if first == request_id else _SEVERAL
        while len(self._seen) > self.pool.num_gpu_blocks:
            self._seen.popitem(last=False)

    def is_shared(self, block_hash: BlockHash) -> bool:
        """Return whether several conversations have begun so.

        Args:
            block_hash: the hash of the last block of the beginning.
        """
        return self._seen.get(block_hash) == _SEVERAL

    def holds(self, block: KVCacheBlock) -> bool:
        """Return whether a block is offered to new conversations."""
        return block.block_id in self._hash_of

    def longest(self, hashes: Sequence[BlockHash]) -> list[BlockOfGroups]:
        """Return the blocks of the longest beginning that is still there.

        Args:
            hashes: those of a prompt's full blocks.
        """
        found = []
        for block_hash in hashes:
            if (blocks := self._blocks.get(block_hash)) is None:
                break
            found.append(blocks)
        return found

    def file(self, hashes: Sequence[BlockHash], blocks: Iterable[BlockOfGroups]) -> None:
        """Offer blocks to new conversations, from a prompt's first on, unless others are offered for the same tokens.

        Args:
            hashes: those of the blocks.
            blocks: the blocks, of which each holds all its tokens in their order.
        """
        for block_hash, of_groups in zip(hashes, blocks, strict=False):
            if block_hash not in self._blocks:
                self._blocks[block_hash] = of_groups
                self._hash_of.update(dict.fromkeys((block.block_id for block in of_groups), block_hash))

    def forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Offer blocks no longer, because something else is written to them.

        Args:
            blocks: any blocks.
        """
        for block in blocks:
            if (block_hash := self._hash_of.get(block.block_id)) is not None:
                for other in self._blocks.pop(block_hash):
                    del self._hash_of[other.block_id]

    def clear(self) -> None:
        """Forget all beginnings, because weights have changed."""
        self._blocks.clear()
        self._hash_of.clear()
