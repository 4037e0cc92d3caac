"""What keepset will need of a GPU's memory once there is a cache, so that vLLM leaves room for it.

vLLM measures what is taken before it decides how large the cache is. What is held of queries is there by then
(`EngineContext`). Numbers of entries are as many as the cache has slots, and events take entries out of it for a
while: for these as much is held, while vLLM measures, as they can come to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from keepset.allocators.post_processor import PostProcessor
from keepset.core.features.window import WindowAttention
from keepset.paged.entry_columns import COLUMN_BYTES, columns_of
from keepset.paged.eviction_event import MAX_ENTRIES
from keepset.paged.paged_observation import WORKSPACE
from keepset.recipe import Recipe
from keepset.vllm.settings import by_head

_COPIES = 3
"""What an event makes at most of keys and values that are looked at or moved at a time: those of one head of the
longest prompt, or of all where a method looks at them together."""
_PER_ENTRY = 64
"""Bytes that it makes of every entry that it chooses from: positions, scores, their order."""


@dataclass(frozen=True)
class Shape:
    """Of a model's caches in this process.

    Attributes:
        layers, kv_heads: how many.
        entry_bytes: of an entry's key and value in one head.
        longest: tokens of a request, at most.
    """

    layers: int
    kv_heads: int
    entry_bytes: int
    longest: int


def column_bytes(numbers: int, pool: int, entry_bytes: int) -> int:
    """Of so many numbers of each entry, of so many bytes for the cache and them together."""
    beside = numbers * COLUMN_BYTES
    return pool * beside // (entry_bytes + beside)


def event_bytes(recipe: Recipe, shape: Shape, heads_differ: bool) -> int:
    """Return what an event makes at most, of one prompt of the longest or of several others.

    Args:
        recipe: that is served.
        shape: of the caches.
        heads_differ: whether heads have pages of their own (`by_head`).
    """
    entries = shape.longest * shape.kv_heads
    looked_at = shape.longest * shape.entry_bytes
    moved, keep = 0, recipe.budget.keep
    if isinstance(recipe.method, PostProcessor):
        looked_at = entries * shape.entry_bytes
    elif heads_differ:  # all that stays is out of the pages at a time
        share = keep if isinstance(keep, float) else min(1.0, (keep or shape.longest) / shape.longest)
        moved = int((share if recipe.method.fixed_total else 1.0) * entries * shape.entry_bytes)
    return _COPIES * max(WORKSPACE, looked_at) + moved + _PER_ENTRY * max(MAX_ENTRIES, entries)


def own_bytes(recipe: Recipe, group: int, shape: Shape) -> int:
    """Of one request's own sums (`OwnSums`), which those of one prefix need whose windows are open at the same time."""
    sums = sum(math.prod(feature.sums_of.shape(group)) for feature in recipe.method.needs.of(WindowAttention))
    return sums * COLUMN_BYTES * shape.layers * shape.kv_heads * shape.longest


def reserve(config: VllmConfig, recipe: Recipe, group: int, saves: bool, shape: Shape) -> Tensor | None:
    """Holds so much; to be dropped as soon as vLLM has measured. None where it measures nothing."""
    cache = config.cache_config
    if not current_platform.is_cuda_alike() or cache.kv_cache_memory_bytes:
        return None
    free, total = torch.cuda.mem_get_info()
    pool = max(0, int(cache.gpu_memory_utilization * total) - (total - free))
    numbers = sum(map(math.prod, columns_of(recipe, group, saves).values()))
    needed = column_bytes(numbers, pool, shape.entry_bytes) + event_bytes(recipe, shape, by_head(config, recipe))
    if cache.enable_prefix_caching:
        needed += own_bytes(recipe, group, shape)
    return torch.empty(min(needed, free), dtype=torch.uint8, device=current_platform.device_type)
