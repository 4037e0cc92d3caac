"""Reserves the GPU memory that keepset needs once there is a cache, so that vLLM leaves room for it.

vLLM measures memory before it decides how large the cache is. The room for queries is allocated by then
(`QueryBuffers`). Two things come later: columns, with a number for each slot of the cache, and the workspace of
events. While vLLM measures, as many bytes are held as these can take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from keepset.allocators.post_processor import PostProcessor
from keepset.core.features.window import WindowAttention
from keepset.core.traits import COLUMN_BYTES
from keepset.paged.eviction_event import MAX_ENTRIES
from keepset.paged.pages import WORKSPACE
from keepset.recipe import Recipe
from keepset.vllm.settings import by_head

_COPIES = 3
"""Copies that an event makes of keys and values that are read or moved at a time, at most: of one head of the longest
prompt, or of all heads where a method reads them together."""
_PER_ENTRY = 64
"""Bytes that an event makes for every entry that it chooses from: position, score, order."""


@dataclass(frozen=True)
class Shape:
    """The shape of a model's caches in this process.

    Attributes:
        layers, kv_heads: the number of layers, and of KV heads of each.
        head_dim: numbers of a key, and of a value.
        entry_bytes: bytes of an entry's key and value in one head, as they are stored.
        bytes_read: the same, as they are read.
        longest: tokens of a request, at most.
    """

    layers: int
    kv_heads: int
    head_dim: int
    entry_bytes: int
    bytes_read: int
    longest: int


def column_bytes(numbers: int, pool: int, entry_bytes: int) -> int:
    """Return the bytes of columns of so many numbers per entry; `pool` has the bytes of the cache and of them."""
    beside = numbers * COLUMN_BYTES
    return pool * beside // (entry_bytes + beside)


def event_bytes(recipe: Recipe, shape: Shape, heads_differ: bool) -> int:
    """Return the bytes that an event makes at most: of one of the longest prompts, or of several others."""
    entries = shape.longest * shape.kv_heads
    looked_at = shape.longest * shape.bytes_read
    moved, keep = 0, recipe.budget_of_sizes([(shape.head_dim, shape.head_dim)]).keep
    if isinstance(recipe.method, PostProcessor):
        looked_at = entries * shape.bytes_read
    elif heads_differ:  # all that stays is copied out of the pages at once
        share = keep if isinstance(keep, float) else min(1.0, (keep or shape.longest) / shape.longest)
        moved = int((share if recipe.method.traits.fixed_total else 1.0) * entries * shape.entry_bytes)
    return _COPIES * max(WORKSPACE, looked_at) + moved + _PER_ENTRY * max(MAX_ENTRIES, entries)


def own_bytes(recipe: Recipe, group: int, shape: Shape) -> int:
    """Return the bytes of one request's private sums, which requests with one prefix and open windows need."""
    sums = sum(math.prod(feature.sums_of.shape(group)) for feature in recipe.method.traits.needs.of(WindowAttention))
    return sums * COLUMN_BYTES * shape.layers * shape.kv_heads * shape.longest


def reserve(
    config: VllmConfig, recipe: Recipe, group: int, columns: Mapping[str, tuple[int, ...]], shape: Shape
) -> Tensor | None:
    """Return a tensor of so many bytes, to be dropped once vLLM has measured; None if vLLM measures nothing."""
    cache = config.cache_config
    if not current_platform.is_cuda_alike() or cache.kv_cache_memory_bytes:
        return None
    free, total = torch.cuda.mem_get_info()
    pool = max(0, int(cache.gpu_memory_utilization * total) - (total - free))
    numbers = sum(map(math.prod, columns.values()))
    needed = column_bytes(numbers, pool, shape.entry_bytes) + event_bytes(recipe, shape, by_head(config, recipe))
    if cache.enable_prefix_caching:
        needed += own_bytes(recipe, group, shape)
    return torch.empty(min(needed, free), dtype=torch.uint8, device=current_platform.device_type)
