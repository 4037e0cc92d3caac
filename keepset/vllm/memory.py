"""GPU memory that keepset needs beside vLLM's cache, so that vLLM leaves room for it.

vLLM measures memory before it decides how large the cache is. The buffers for queries are allocated by then
(`QueryBuffers`). Two things are allocated later: columns, with a number for each slot of the cache, and the workspace
of events. While vLLM measures, their largest possible size is held (`reserve`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from keepset.paged.query_records import slots_for
from keepset.recipe import Recipe
from keepset.recording.features import Recording
from keepset.recording.ring import QueryRing
from keepset.vllm.settings import by_head

_COPIES = 3
"""The most copies that an event makes of the keys and values that it reads or moves at a time: those of one head of the
longest prompt, or of all heads if a method reads them together."""
_PER_ENTRY = 64
"""Bytes that an event allocates for every entry that it chooses from: position, score, order."""


@dataclass(frozen=True)
class Shape:
    """The shape of a model's caches in this process.

    Attributes:
        layers, kv_heads: the number of layers, and of KV heads of each.
        head_dim: numbers of a key, and of a value.
        entry_bytes: bytes of an entry's stored key and value in one head.
        bytes_read: bytes of an entry's key and value in one head after they are read.
        longest: the most tokens of a request.
    """

    layers: int
    kv_heads: int
    head_dim: int
    entry_bytes: int
    bytes_read: int
    longest: int


def column_bytes(numbers: int, pool: int, entry_bytes: int) -> int:
    """Return the bytes of columns with `numbers` numbers per entry; `pool` is the bytes of cache and columns."""
    beside = numbers * COLUMN_BYTES
    return pool * beside // (entry_bytes + beside)


def event_bytes(recipe: Recipe, shape: Shape, heads_differ: bool) -> int:
    """Return the most bytes that an event allocates, for one of the longest prompts or for several shorter ones."""
    entries = shape.longest * shape.kv_heads
    looked_at = shape.longest * shape.bytes_read
    moved, keep = 0, recipe.budget_of_sizes([(shape.head_dim, shape.head_dim)]).keep
    if isinstance(recipe.method, PostProcessor):
        looked_at = entries * shape.bytes_read
    elif heads_differ:  # all kept entries are copied out of the pages at once
        share = keep if isinstance(keep, float) else min(1.0, (keep or shape.longest) / shape.longest)
        moved = int((share if recipe.method.traits.fixed_total else 1.0) * entries * shape.entry_bytes)
    return _COPIES * max(WORKSPACE, looked_at) + moved + _PER_ENTRY * max(MAX_ENTRIES, entries)


def own_bytes(recipe: Recipe, group: int, shape: Shape) -> int:
    """Return the bytes of one request's private sums, needed when requests share a prefix with open windows."""
    sums = sum(math.prod(feature.sums_of.shape(group)) for feature in recipe.method.traits.needs.of(WindowAttention))
    return sums * COLUMN_BYTES * shape.layers * shape.kv_heads * shape.longest


def reserve(
    config: VllmConfig, recipe: Recipe, group: int, columns: Mapping[str, tuple[int, ...]], shape: Shape
) -> Tensor | None:
    """Return a tensor of the needed bytes, to be dropped once vLLM has measured; None if vLLM does not measure."""
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


class QueryBuffers:
    """The rings of all layers, and the tape to which layers copy their queries while a graph captures them.

    Groups of layers get consecutive parts.

    Args:
        recording: the plan of which queries are recorded.
        layers: the number of layers.
        requests: the most requests that run at once.
        heads, head_dim, dtype, device: those of a layer's queries.
        tokens: tokens of the longest step that a graph captures; 0 if none does.
    """

    def __init__(
        self,
        recording: Recording,
        layers: int,
        requests: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        tokens: int,
    ) -> None:
        self._ring = QueryRing(recording, layers, slots_for(requests), heads, head_dim, dtype, device)
        self._tape: Tensor | None = None
        if tokens and recording:
            self._tape = torch.zeros(layers, tokens, heads, head_dim, dtype=dtype, device=device)
        self._places: dict[str, int] = {}

    def ring(self, layers: Sequence[str]) -> QueryRing:
        """Return the rings of a group of layers, given by their names."""
        return self._ring.part(self._first(layers), len(layers))

    def tape(self, layers: Sequence[str]) -> Tensor | None:
        """Return the tape of the layers of these names; None if no graph captures queries."""
        first = self._first(layers)
        return None if self._tape is None else self._tape[first : first + len(layers)]

    def leave(self, layer: str, queries: Tensor) -> None:
        """Copy the queries of a step that a graph may capture to the tape.

        Args:
            layer: the layer's name.
            queries: its queries, after rotation; those beyond the length of the tape only pad the step.
        """
        if self._tape is not None:
            tape = self._tape[self._places[layer]]
            tape[: len(queries)].copy_(queries[: len(tape)])

    def _first(self, layers: Sequence[str]) -> int:
        """Return the index of a group's first layer in the buffers."""
        if layers[0] not in self._places:
            first = len(self._places)
            self._places |= {name: first + place for place, name in enumerate(layers)}
        return self._places[layers[0]]
