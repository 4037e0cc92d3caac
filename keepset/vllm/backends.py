"""keepset's attention backends, one for each of vLLM's, under the name that vLLM has for it.

Without a recipe a backend answers with vLLM's own classes, so nothing of keepset runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from keepset.errors import UnsupportedEngineError
from keepset.vllm.attention import KeepImpl, TritonMixin
from keepset.vllm.cpu import CPUMixin
from keepset.vllm.engine_context import activate, active
from keepset.vllm.metadata import KeepBuilder
from keepset.vllm.settings import recipe_of

_LAYERS: dict[str, type[KeepImpl]] = {"CPU_ATTN": CPUMixin, "FLASH_ATTN": KeepImpl, "TRITON_ATTN": TritonMixin}
"""What is added to the layers of the backends that keepset knows."""


class KeepBackend(AttentionBackend):
    """Chooses between keepset's classes and vLLM's own."""

    plain: ClassVar[type[AttentionBackend]]
    impl: ClassVar[type[Any]]
    builder: ClassVar[type[Any]]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:  # type: ignore[override]
        return cls.plain.get_impl_cls() if activate() is None else cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[Any]:  # type: ignore[override]
        return cls.plain.get_builder_cls() if active() is None else cls.builder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)
        context = active()
        return spec if context is None else context.spec_of_next_layer(spec)

    @classmethod
    def supports_rswa(cls) -> bool:
        """Says yes, because the field that hands over prompt lengths is that feature's."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Where heads have tables of their own, each head's page of a block must be a block of its own."""
        layouts = super().supported_kv_cache_layouts()
        context = active()
        if context is None or (context.recipe.method.fixed_total and context.recipe.method.equal_heads):
            return layouts
        return (KVCacheLayout.LBHNC,)


class UnservedBackend(AttentionBackend):
    """vLLM's own backend, under which a recipe cannot be executed.

    A recipe that is silently ignored would be worse than an engine that does not start.
    """

    plain: ClassVar[type[AttentionBackend]]

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """With a recipe vLLM passes it over; one that was asked for by name says itself why it cannot serve."""
        reasons = super().validate_configuration(*args, **kwargs)
        config = get_current_vllm_config_or_none()
        if config is None or recipe_of(config) is None or config.attention_config.backend is not None:
            return reasons
        return [*reasons, "keepset does not compress under it"]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:  # type: ignore[override]
        context = activate()  # says first what else cannot be served
        if context is None:
            return cls.plain.get_impl_cls()
        raise UnsupportedEngineError(
            f"keepset cannot serve {context.recipe}: this engine chose the attention backend {cls.get_name()}; choose "
            "one of FLASH_ATTN, TRITON_ATTN (--attention-backend) or, on CPUs, CPU_ATTN."
        )


def __getattr__(name: str) -> type[AttentionBackend]:
    """The backend that vLLM calls by this name."""
    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    return _backend(name)


@cache
def _backend(name: str) -> type[AttentionBackend]:
    """vLLM's backend with keepset's mixins. It is found by module and name again, so it bears those of this file."""
    plain = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    place = {"__module__": __name__}
    if name not in _LAYERS:
        return type(name, (UnservedBackend, plain), place | {"plain": plain})
    layer, impl, builder = _LAYERS[name], plain.get_impl_cls(), plain.get_builder_cls()
    classes = {
        "plain": plain,
        "impl": type(impl.__name__.replace("Attention", "Keep").replace("Backend", ""), (layer, impl), place),
        "builder": type(f"Keep{builder.__name__}", (KeepBuilder, builder), place),
    }
    return type(name, (KeepBackend, plain), place | classes)
