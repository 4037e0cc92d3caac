"""`KeepSpec`: the kind of KV cache that vLLM's own registry knows keepset's layers by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
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
    entries: a hungry layer then holds no other layer's pages.

    Attributes:
        recipe: the recipe's text.
        layer: the layer whose number of kept entries is this group's.
        layers: all layers that are compressed.
        tokens_per_step, steps_ahead: of the engine's scheduler, as `Admission` has them.
        per_head: as `EvictionSchedule` has it.
    """

    recipe: str
    layer: int
    layers: tuple[int, ...]
    tokens_per_step: int
    steps_ahead: int
    per_head: bool

    @classmethod
    def wrap(cls, spec: FullAttentionSpec, **more: Any) -> Self:
        """vLLM's own spec, and what keepset adds."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec)}, **more)

    @cached_property
    def schedule(self) -> EvictionSchedule:
        """When this group's requests are compressed."""
        recipe = Recipe.parse(self.recipe)
        return EvictionSchedule(
            recipe, self.layer, self.layers, self.num_kv_heads, self.block_size, per_head=self.per_head
        )

    @cached_property
    def contexts(self) -> dict[Any, ContextPlacement]:
        """Where contexts are in the blocks of requests, by the hash of the first one: the scheduler's."""
        return {}

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether one block table could serve all of these layers."""
        return all(_same_group(self, spec) for spec in kv_cache_specs.values())

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for a group; an AssertionError tells vLLM that these layers are not one."""
        first, names = specs[0], [field.name for field in fields(FullAttentionSpec)]
        assert all(_same_group(first, spec) for spec in specs)
        plain = [FullAttentionSpec(**{name: getattr(spec, name) for name in names}) for spec in specs]
        return cls.wrap(FullAttentionSpec.merge(plain), **{name: getattr(first, name) for name in _OWN})


def _same_group(a: KVCacheSpec, b: KVCacheSpec) -> bool:
    if not (isinstance(a, KeepSpec) and isinstance(b, KeepSpec)):
        return False
    return all(getattr(a, name) == getattr(b, name) for name in _OWN)


_OWN = [own.name for own in fields(KeepSpec)[len(fields(FullAttentionSpec)) :]]
