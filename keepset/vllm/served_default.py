"""The recipe of a server where none is named: the default of the other commands, less what the engine cannot serve."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepset.core.features.runtime_features import QuantizedEntries
from keepset.core.method import Allocator, Method
from keepset.core.traits import Traits
from keepset.methods.snapkv import SnapKV
from keepset.recipe import Recipe

INT8 = "int8_per_token_head"
"""The `kv_cache_dtype` that a recipe int8(...) asks for."""

ONE_ROTATION = ("llama", "mistral", "qwen2", "qwen3")
"""Model types in which all layers rotate, with the same table."""


@dataclass(frozen=True)
class EngineLimits:
    """What decides which steps of a recipe an engine can serve.

    Attributes:
        several_gpus: whether the model is divided over several GPUs.
        drafts: whether tokens are drafted, and may be taken back.
        int8: whether the cache has 8 bits a number, each key and value with a scale.
        connector: whether a KV connector tells the scheduler how much was dropped.
        contexts: whether requests share contexts, so that all layers must keep as many entries.
        model_type: the model's type, in its configuration; "" if it is not known.
    """

    several_gpus: bool = False
    drafts: bool = False
    int8: bool = True
    connector: bool = True
    contexts: bool = False
    model_type: str = ""

    def nearest(self, recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
        """Return a recipe without the steps that this engine cannot serve.

        A step that only divides or stores what another method chooses is left out. A scorer that cannot be served is
        replaced by `snapkv`, which every engine serves.

        Args:
            recipe: the recipe.

        Returns:
            The recipe, and the names of the steps that are not in it.
        """
        missing: list[str] = []
        method = self._nearest(recipe.method, missing)
        budget, short = recipe.budget, recipe.budget.short
        return Recipe.of(method, keep=budget.keep, bytes=budget.bytes, short=short), tuple(missing)

    def _nearest(self, method: Method, missing: list[str]) -> Method:
        if isinstance(method, Allocator):
            served = self._serves(method.own_traits)
            if not served:
                missing.append(method.name)
            inner = self._nearest(method.scorer, missing)
            return replace(method, scorer=inner) if served else inner
        if self._serves(method.traits):
            return method
        missing.append(method.name)
        return SnapKV()

    def _serves(self, own: Traits) -> bool:
        """Return whether a step of a recipe can be served, by its own traits."""
        return not (
            (self.several_gpus and own.across_layers)
            or (self.drafts and (own.biased or not own.equal_heads))
            or (not self.connector and not own.fixed_total)
            or (self.contexts and not (own.fixed_total and own.equal_layers))
            or (not self.int8 and own.needs.of(QuantizedEntries))
            or (self.model_type not in ("", *ONE_ROTATION) and own.needs.unrotated)
        )
