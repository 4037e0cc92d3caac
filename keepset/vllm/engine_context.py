"""The recipe of the model that this process is loading, and which of its layers get it.

vLLM asks an attention backend for classes and for each layer's kind of cache without saying for which model or
layer. It asks for a layer's classes while that layer is built, under the configuration, and for the kinds of cache
layer after layer, in the order in which they were built; both are checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepset.errors import KeepsetError
from keepset.paged.grouping import group_of
from keepset.paged.layer_barrier import LayerBarrier
from keepset.vllm.hidden_states import tap
from keepset.vllm.settings import recipe_of
from keepset.vllm.validation import check, check_layer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    from keepset.recipe import Recipe


class EngineContext:
    """A configuration with a recipe."""

    def __init__(self, config: VllmConfig, recipe: Recipe) -> None:
        check(config, recipe)
        self.config, self.recipe = config, recipe
        self._layers: dict[str, int] = {}
        self._asked = 0
        self.barrier = LayerBarrier() if recipe.method.across_layers else None
        self._tap = tap() if recipe.method.needs.hidden_states else None

    @property
    def layers(self) -> dict[str, int]:
        """The model's attention layers by name, and their indices."""
        if not self._layers:
            from vllm.model_executor.layers.attention import Attention
            from vllm.model_executor.models.utils import extract_layer_index

            for name, layer in self.config.compilation_config.static_forward_context.items():
                if isinstance(layer, Attention):
                    check_layer(name, layer, self._tap is not None)
                    self._layers[name] = extract_layer_index(name)
        return self._layers

    def spec_of_next_layer(self, spec: AttentionSpec) -> AttentionSpec:
        """The kind of cache of the layer that is asked for now."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from keepset.vllm.spec import KeepSpec

        if type(spec) is not FullAttentionSpec:
            raise KeepsetError(f"keepset cannot compress a cache of the kind {type(spec).__name__} under vLLM.")
        if self._tap is not None:  # the model is built
            self._tap.remove()
        indices = tuple(self.layers.values())
        index = indices[self._asked % len(indices)]
        self._asked += 1
        # Prompt lengths reach the attention layers only where this is set; its number plays no part.
        self.config.model_config.model_arch_config.rswa_window = 1
        return KeepSpec.wrap(spec, self.recipe, group_of(self.recipe, index, indices), indices)


_active: EngineContext | None = None


def activate() -> EngineContext | None:
    """What the current configuration says, from now on for all that is asked about its model."""
    from vllm.config import get_current_vllm_config_or_none

    global _active  # noqa: PLW0603
    config = get_current_vllm_config_or_none()
    if _active is None or _active.config is not config:
        recipe = recipe_of(config)
        _active = None if config is None or recipe is None else EngineContext(config, recipe)
    return _active


def active() -> EngineContext | None:
    """What `activate` found for the model that was loaded last."""
    return _active
