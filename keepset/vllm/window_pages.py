"""Windows of conversations: what layers with windows hold at a turn's end is copied to the pages of the next turn.

vLLM gives a turn new pages for the tokens that such layers still see. They are few, so they are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig


class CopiedPages(NamedTuple):
    """Pages of a group of layers with windows that are copied before a step.

    Attributes:
        group: vLLM's number of the group.
        source: the ids of their blocks.
        target: the ids of the turn's blocks for the same tokens.
    """

    group: int
    source: list[int]
    target: list[int]


@dataclass
class WindowPages:
    """The pages of layers with windows, in the process that schedules.

    Args:
        managers: vLLM's managers of their groups, by the number of the group.
    """

    managers: Mapping[int, SingleTypeKVCacheManager]

    def take(self, request_id: str) -> list[list[KVCacheBlock]]:
        """Return the blocks of a request that ends, for each group by logical position; vLLM no longer frees them.

        Args:
            request_id: the request.
        """
        taken = []
        for manager in self.managers.values():
            blocks = manager.req_to_blocks[request_id]
            taken.append(list(blocks))
            blocks[:] = [manager.block_pool.null_block] * len(blocks)
        return taken

    def seen(self, spans: Sequence[tuple[int, int]], tokens: int) -> bool:
        """Return whether blocks hold all that the token after so many sees.

        Args:
            spans: how many of a conversation's blocks hold nothing, and how many there are, for each group.
            tokens: tokens that a turn goes on from.
        """
        return all(
            total >= -(-tokens // manager.block_size) and empty <= self._needed(manager, tokens).start
            for manager, (empty, total) in zip(self.managers.values(), spans, strict=True)
        )

    def copies(self, blocks: Sequence[Sequence[KVCacheBlock]], tokens: int, request_id: str) -> list[CopiedPages]:
        """Return what is copied for a turn that begins, to which vLLM has given its blocks.

        Args:
            blocks: those of the conversation, for each group by logical position.
            tokens: tokens that the turn goes on from.
            request_id: its request.
        """
        copied = []
        for (number, manager), of_group in zip(self.managers.items(), blocks, strict=True):
            needed = self._needed(manager, tokens)
            source, target = of_group[needed], manager.req_to_blocks[request_id][needed]
            copied.append(CopiedPages(number, *([block.block_id for block in part] for part in (source, target))))
        return copied

    def _needed(self, manager: SingleTypeKVCacheManager, tokens: int) -> slice:
        """Return the logical blocks that hold what the token after so many sees.

        Args:
            manager: a group's manager.
            tokens: the number of tokens.
        """
        first = manager.get_num_skipped_tokens(tokens) // manager.block_size
        return slice(first, -(-tokens // manager.block_size))


def copy_pages(pages: Sequence[CopiedPages], config: KVCacheConfig, caches: Mapping[str, Tensor]) -> None:
    """Copy pages in all layers of this process.

    Args:
        pages: what is copied.
        config: vLLM's groups of layers.
        caches: the layers' caches by name, `[pages, ...]`; a block of a manager is one page or several.
    """
    for group, source, target in pages:
        for name in config.kv_cache_groups[group].layer_names:
            blocks = caches[name].unflatten(0, (config.num_blocks, -1))
            sources, targets = (torch.tensor(ids, dtype=torch.long, device=blocks.device) for ids in (source, target))
            blocks[targets] = blocks[sources]
