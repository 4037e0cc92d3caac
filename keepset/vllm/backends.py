"""keepset's attention backends, one for each of vLLM's, under vLLM's names.

Without a recipe a backend returns vLLM's own classes, so nothing of keepset runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec

from keepset.errors import UnsupportedEngineError
from keepset.vllm.attention import CompressedAttentionImpl, CompressedImpl
from keepset.vllm.cpu_pages import CPUPages, RowsImpl, RowsMetadataBuilder, RowsMixin, attend_ragged
from keepset.vllm.engine_context import EngineContext, PlannedStep, activate, active
from keepset.vllm.formats import ROW_SCALES, WHOLE, as_on_gpus
from keepset.vllm.latents import LatentImpl
from keepset.vllm.metadata import KeepBuilder, RecurrentBuilder
from keepset.vllm.settings import recipe_of


class CPUMixin(CompressedAttentionImpl):
    """A mixin for layers whose cache is packed.

    The backend's kernel is called directly, because vLLM's class would add as much time as all the rest.
    """

    head_size: int
    logits_soft_cap: float

    def make_pages(self, layer: Any, caches: Sequence[Tensor]) -> CPUPages:
        return CPUPages(caches, self._place, layer.isa)

    def append_ragged(self, layer: Any, step: PlannedStep, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        per_head, pages = step.per_head, self.pages(layer, kv_cache)
        keys, values = (per_head.split(rows)[:, 0] for rows in (key, value))
        assert isinstance(pages, CPUPages)
        pages.write_folded(keys, values, per_head.batch(self._place).slot_mapping)

    def attend_ragged(self, layer: Any, step: PlannedStep, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Compute attention by the backend's own kernel, which is the fastest.

        The kernel supports neither biases of entries nor sinks that differ between KV heads.

        Args:
            layer: vLLM's attention layer.
            step: the step that is under way.
            query: the step's queries after rotation, `[tokens, query_heads, head_dim]`.
            kv_cache: vLLM's cache tensor of the layer.
            output: is overwritten with the attention, in the shape of the queries.
        """
        layer_index, pages, softmax = self._place, self.pages(layer, kv_cache), self.softmax
        if step.group.columns.bias is not None or softmax.sinks is not None:
            attend_ragged(step, layer_index, pages, query, output, softmax)
            return
        per_head = step.per_head
        batch, buffer = per_head.batch(layer_index), per_head.output_buffer(output)
        assert isinstance(pages, CPUPages)
        keys, values = pages.folded
        work = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch.seq_lens.shape[0],
            num_heads=self.num_queries_per_kv,
            num_kv_heads=1,
            head_dim=self.head_size,
            seq_lens=batch.seq_lens,
            dtype=query.dtype,
            query_start_loc=batch.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=True,
        )
        ops.cpu_attention_with_kv_cache(
            query=per_head.split(query),
            key_cache=keys,
            value_cache=values,
            output=buffer,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=batch.block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=work,
            s_aux=None,
        )
        per_head.merge(buffer, output)


_LAYERS: dict[str, type[CompressedImpl]] = {
    "FLASH_ATTN": CompressedAttentionImpl,
    "FLASHINFER": CompressedAttentionImpl,
    "TRITON_ATTN": CompressedAttentionImpl,
    "CPU_ATTN": CPUMixin,
    "CUTLASS_MLA": LatentImpl,
    "FLASHINFER_MLA": LatentImpl,
    "FLASH_ATTN_MLA": LatentImpl,
    "FLASHMLA": LatentImpl,
    "TRITON_MLA": LatentImpl,
    "CPU_MLA": LatentImpl,
    "AMX_MLA": LatentImpl,
}
"""The mixin for the layers of each backend that keepset knows."""
_ON_CPUS = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")


class KeepBackend(AttentionBackend):
    """Chooses between keepset's classes and vLLM's own.

    If the backend cannot serve the recipe, the engine does not start, rather than silently ignore the recipe.

    Attributes:
        registered: vLLM's name of the backend.
        plain: vLLM's own backend.
        own: keepset's layer and metadata builder; None for backends that keepset does not know.
        of_rows: those for quantised caches.
    """

    registered: ClassVar[str]
    plain: ClassVar[type[AttentionBackend]]
    own: ClassVar[tuple[type[Any], type[Any]] | None]
    of_rows: ClassVar[tuple[type[Any], type[Any]] | None]
    supports_kv_cache_update_bypass = False  # in vLLM 0.33 the model itself would write to the cache

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Return why vLLM must pass over this backend. One that was chosen by name raises its own error later."""
        reasons = super().validate_configuration(*args, **kwargs)
        config = get_current_vllm_config_or_none()
        recipe = recipe_of(config)
        if config is None or recipe is None or config.attention_config.backend is not None:
            return reasons
        return reasons if cls.registered in _LAYERS else [*reasons, "keepset does not serve the recipe with it"]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:  # type: ignore[override]
        context = activate()  # raises first if something else cannot be served
        if context is None:
            cls._check_plain()
            return cls.plain.get_impl_cls()
        classes = cls._own_classes(context)
        if classes is None:
            served = [name for name, layer in _LAYERS.items() if (layer is LatentImpl) == cls.plain.is_mla()]
            on_gpus = ", ".join(name for name in served if name not in _ON_CPUS)
            on_cpus = " or ".join(name for name in served if name in _ON_CPUS)
            raise UnsupportedEngineError(
                f"keepset cannot serve {context.recipe}: this engine chose the attention backend {cls.registered}; "
                f"choose one of {on_gpus} (--attention-backend) or, on CPUs, {on_cpus}."
            )
        return classes[0]

    @classmethod
    def _check_plain(cls) -> None:
        """Refuse kinds of caches that vLLM itself takes on CPUs, and then reads in another format than it writes."""
        config = get_current_vllm_config_or_none()
        kind = "auto" if config is None else config.cache_config.cache_dtype
        if cls.registered not in _ON_CPUS or kind in (*WHOLE, *cls.plain.supported_kv_cache_dtypes):
            return
        served = ", or name a recipe, with which keepset serves it" if kind in ROW_SCALES else ""
        raise UnsupportedEngineError(
            f"vLLM's attention for CPUs answers noise from a KV cache of kind {kind}, though it starts with one: set "
            f"kv_cache_dtype (--kv-cache-dtype) to fp8, or leave it out{served}."
        )

    @classmethod
    def get_builder_cls(cls) -> type[Any]:  # type: ignore[override]
        # While the model is built, layers that attend to chunks derive their builder from this one, perhaps first.
        context = active() if get_current_vllm_config_or_none() is None else activate()
        classes = None if context is None else cls._own_classes(context)
        return cls.plain.get_builder_cls() if classes is None else classes[1]

    @classmethod
    def _own_classes(cls, context: EngineContext) -> tuple[type[Any], type[Any]] | None:
        return cls.own if context.config.cache_config.cache_dtype in WHOLE else cls.of_rows

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)
        context = active()
        if context is not None and cls.of_rows is not cls.own:
            spec = as_on_gpus(spec)
        return spec if context is None else context.customize_spec(spec)

    @classmethod
    def supports_rswa(cls) -> bool:
        """Return True, because prompt lengths are passed in a field of this feature."""
        return True


def __getattr__(name: str) -> type[AttentionBackend]:
    """Return the backend that vLLM calls by this name."""
    if name in MambaAttentionBackendEnum.__members__:
        return _recurrent_backend(name)
    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    return _backend(name)


@cache
def _recurrent_backend(name: str) -> type[AttentionBackend]:
    """Return vLLM's backend of recurrent layers; its builder refuses a model that has only such layers."""
    plain = resolve_obj_by_qualname(MambaAttentionBackendEnum[name].value)
    namespace = {"__module__": __name__}
    builder = type(f"Keep{plain.get_builder_cls().__name__}", (RecurrentBuilder, plain.get_builder_cls()), namespace)
    return type(name, (plain,), namespace | {"get_builder_cls": staticmethod(lambda: builder)})


@cache
def _backend(name: str) -> type[AttentionBackend]:
    """Return vLLM's backend with keepset's mixins. Its classes are in this module, where vLLM looks them up by name."""
    plain = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    namespace = {"__module__": __name__}
    classes: dict[str, Any] = {"registered": name, "plain": plain, "own": None, "of_rows": None}
    if name in _LAYERS:
        impl, builder = plain.get_impl_cls(), plain.get_builder_cls()
        impl_name = impl.__name__.replace("Attention", "").replace("Backend", "").replace("Impl", "KeepImpl")
        own_builder = type(f"Keep{builder.__name__}", (KeepBuilder, builder), namespace)
        classes["own"] = classes["of_rows"] = type(impl_name, (_LAYERS[name], impl), namespace), own_builder
        if name == "CPU_ATTN":
            of_rows = type("CPURowsKeepImpl", (RowsMixin, RowsImpl, impl), namespace)
            classes["of_rows"] = of_rows, type("KeepRowsBuilder", (KeepBuilder, RowsMetadataBuilder), namespace)
    return type(name, (KeepBackend, plain), namespace | classes)
