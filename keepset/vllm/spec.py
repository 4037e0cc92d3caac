"""What keepset's layers hold in GPU memory: the kinds of their KV cache, and the bytes and buffers beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from keepset.allocators.post_processors import PostProcessor
from keepset.core.features.queries import WindowAttention
from keepset.core.traits import COLUMN_BYTES
from keepset.paged.contexts import ContextPlacement
from keepset.paged.eviction import MAX_ENTRIES, EvictionSchedule
from keepset.paged.pages import WORKSPACE
from keepset.paged.query_records import slots_for
from keepset.recipe import Recipe
from keepset.recording import QueryRing, Recording
from keepset.vllm.manager import KeepManager
from keepset.vllm.settings import by_head

_COPIES = 3
"""The most copies that an event makes of the keys and values that it reads or moves at a time: those of one head of the
longest prompt, or of all heads if a method reads them together."""
_PER_ENTRY = 64
"""Bytes that an event allocates for every entry that it chooses from: position, score, order."""


@register_kv_cache_spec(manager_class=KeepManager)
@dataclass(frozen=True, kw_only=True)
class KeepSpec(FullAttentionSpec):
    """A growing cache that a recipe compresses.

    Layers with equal specs share block tables, so `layer` differs between layers that keep different numbers of
    entries. So a layer that keeps many does not make others hold as many pages.

    Attributes:
        recipe: the recipe's text.
        layer: the first layer of the group, whose number of kept entries is the group's.
        layers: all compressed layers of the model.
        tokens_per_step, steps_ahead: facts of the engine's scheduler; see `Admission`.
        value_size: numbers of a value.
        per_head: whether heads have their own pages; see `EvictionSchedule`.
        alone: whether the model has no other kinds of layers.
    """

    recipe: str
    layer: int
    layers: tuple[int, ...]
    tokens_per_step: int
    steps_ahead: int
    value_size: int
    per_head: bool
    alone: bool

    @staticmethod
    def wrap(spec: FullAttentionSpec, **values: Any) -> KeepSpec:
        """Return vLLM's own spec with keepset's fields, given by name.

        Args:
            spec: vLLM's spec of the layer.
            **values: the fields that keepset adds.
        """
        kind = KeepLatentSpec if isinstance(spec, MLAAttentionSpec) else KeepSpec
        return kind(**{field.name: getattr(spec, field.name) for field in fields(spec)}, **values)

    @cached_property
    def schedule(self) -> EvictionSchedule:
        """The schedule by which this group's requests are compressed."""
        recipe = Recipe.parse(self.recipe)
        return EvictionSchedule(
            recipe,
            self.layer,
            self.layers,
            self.num_kv_heads,
            self._entry_sizes[0],
            self.block_size,
            value_dim=self._entry_sizes[1],
            per_head=self.per_head,
        )

    @property
    def _entry_sizes(self) -> tuple[int, int]:
        """The numbers that an entry holds of a key and of a value."""
        return self.head_size, self.value_size

    @cached_property
    def contexts(self) -> dict[Any, ContextPlacement]:
        """The placements of contexts, by the hash of a request's first block, in the process that schedules."""
        return {}

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Return whether all of these layers can share one block table."""
        return all(_same_group(self, spec) for spec in kv_cache_specs.values())

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Return one spec for a group. An AssertionError tells vLLM that these layers cannot share a group."""
        first, plain = specs[0], MLAAttentionSpec if issubclass(cls, MLAAttentionSpec) else FullAttentionSpec
        assert all(_same_group(first, spec) for spec in specs)
        names = [field.name for field in fields(plain)]
        merged = plain.merge([plain(**{name: getattr(spec, name) for name in names}) for spec in specs])
        return cls.wrap(merged, **{name: getattr(first, name) for name in _OWN})  # type: ignore[return-value]


@register_kv_cache_spec(manager_class=KeepManager)
@dataclass(frozen=True, kw_only=True)
class KeepLatentSpec(KeepSpec, MLAAttentionSpec):
    """The growing cache of layers that cache latents; see `KeepSpec`."""

    @property
    def _entry_sizes(self) -> tuple[int, int]:
        return self.value_size, self.head_size - self.value_size


def _same_group(a: KVCacheSpec, b: KVCacheSpec) -> bool:
    if not (isinstance(a, KeepSpec) and isinstance(b, KeepSpec)):
        return False
    return all(getattr(a, name) == getattr(b, name) for name in _OWN)


_OWN = [own.name for own in fields(KeepSpec)[len(fields(FullAttentionSpec)) :]]


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
    """Return the bytes of columns with `numbers` numbers per entry; `pool` is the bytes of cache and columns.

    Args:
        numbers: numbers per entry.
        pool: bytes of cache and columns together.
        entry_bytes: bytes of an entry's stored key and value in one head.
    """
    extra_bytes = numbers * COLUMN_BYTES
    return pool * extra_bytes // (entry_bytes + extra_bytes)


def event_bytes(recipe: Recipe, shape: Shape, heads_differ: bool) -> int:
    """Return the most bytes that an event allocates, for one of the longest prompts or for several shorter ones.

    Args:
        recipe: the recipe.
        shape: the shape of the model's caches.
        heads_differ: whether heads may keep different numbers of entries, as `by_head` says.
    """
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
    """Return the bytes of one request's private sums, needed when requests share a prefix with open windows.

    Args:
        recipe: the recipe.
        group: query heads per KV head.
        shape: the shape of the model's caches.
    """
    sums = sum(math.prod(feature.sums_of.shape(group)) for feature in recipe.method.traits.needs.of(WindowAttention))
    return sums * COLUMN_BYTES * shape.layers * shape.kv_heads * shape.longest


def reserve(
    config: VllmConfig, recipe: Recipe, group: int, columns: Mapping[str, tuple[int, ...]], shape: Shape
) -> Tensor | None:
    """Return a tensor of the needed bytes, to be dropped once vLLM has measured; None if vLLM does not measure.

    Args:
        config: vLLM's configuration.
        recipe: the recipe.
        group: query heads per KV head.
        columns: the shape of each column per entry, by name.
        shape: the shape of the model's caches.
    """
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
            self._places |= {name: first + index for index, name in enumerate(layers)}
        return self._places[layers[0]]
