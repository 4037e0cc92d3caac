"""`KeepSpec` and `KeepLatentSpec`: the kinds of KV cache that keepset's layers have in vLLM's registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from keepset.paged.contexts import ContextPlacement
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.recipe import Recipe
from keepset.vllm.manager import KeepManager


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
    def wrap(spec: FullAttentionSpec, **more: Any) -> KeepSpec:
        """Return vLLM's own spec with keepset's fields, given by name."""
        kind = KeepLatentSpec if isinstance(spec, MLAAttentionSpec) else KeepSpec
        return kind(**{field.name: getattr(spec, field.name) for field in fields(spec)}, **more)

    @cached_property
    def schedule(self) -> EvictionSchedule:
        """The schedule by which this group's requests are compressed."""
        recipe = Recipe.parse(self.recipe)
        return EvictionSchedule(
            recipe,
            self.layer,
            self.layers,
            self.num_kv_heads,
            self.head_size,
            self.block_size,
            value_dim=self.value_size,
            per_head=self.per_head,
        )

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


def _same_group(a: KVCacheSpec, b: KVCacheSpec) -> bool:
    if not (isinstance(a, KeepSpec) and isinstance(b, KeepSpec)):
        return False
    return all(getattr(a, name) == getattr(b, name) for name in _OWN)


_OWN = [own.name for own in fields(KeepSpec)[len(fields(FullAttentionSpec)) :]]
