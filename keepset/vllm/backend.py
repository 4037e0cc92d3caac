"""What keepset adds to an attention backend of vLLM, whichever it is: mixins for its three classes.

Without a recipe the backend answers with vLLM's own classes, so nothing of keepset runs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata

from keepset.errors import KeepsetError
from keepset.vllm import moments
from keepset.vllm.active import activate, active
from keepset.vllm.compact import Compactor
from keepset.vllm.grouping import group_of
from keepset.vllm.pages import Pages
from keepset.vllm.rotation import Rotation
from keepset.vllm.spec import KeepSpec
from keepset.vllm.step import Planner, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


class KeepBackend(AttentionBackend):
    """Chooses between keepset's classes and vLLM's own."""

    plain: ClassVar[type[AttentionBackend]]
    impl: ClassVar[type[Any]]
    builder: ClassVar[type[Any]]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:  # type: ignore[override]
        """The class of a layer that is being built."""
        return cls.plain.get_impl_cls() if activate() is None else cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[Any]:  # type: ignore[override]
        """The class that makes the layers' metadata."""
        return cls.plain.get_builder_cls() if active() is None else cls.builder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The kind of a layer's cache."""
        spec = super().customize_spec(spec)
        current = active()
        return spec if current is None else current.spec_of_next_layer(spec)


class KeepBuilder:
    """Makes metadata of what is in the cache, from metadata of what has been in it."""

    def __init__(
        self, kv_cache_spec: KeepSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)  # type: ignore[call-arg]
        current = active()
        assert current is not None
        wrong = [
            name
            for name in layer_names
            if group_of(current.recipe, current.layers[name], kv_cache_spec.layers) != kv_cache_spec.layer
        ]
        if wrong:
            raise KeepsetError(f"This vLLM asks for layers' caches in an unknown order ({wrong[0]}).")
        self._planner = Planner(
            kv_cache_spec,
            {name: current.layers[name] for name in layer_names},
            vllm_config.model_config.hf_text_config.model_type,
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.cache_config.num_gpu_blocks or 0,
        )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """None: lengths and tables change from step to step in ways that a graph does not know."""
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """vLLM's metadata, and the step's plan with it."""
        step = self._planner.plan(common_attn_metadata)
        if step.ragged is not None and step.ragged.folded:
            metadata = self.folded_metadata(step)
        else:
            metadata = super().build(common_prefix_len, step.metadata, fast_build)  # type: ignore[misc]
        metadata.keepset = step
        return metadata

    @abstractmethod
    def folded_metadata(self, step: Step) -> Any:
        """Metadata of a step in which heads hold different numbers of entries."""


class KeepImpl:
    """Attends to what is kept, and compresses right after."""

    _compactor: Compactor | None = None
    _rotation: Rotation | None = None

    @abstractmethod
    def pages(self, layer: Any, kv_cache: Tensor) -> Pages:
        """The layer's cache as sub-pages."""

    @abstractmethod
    def attend_folded(self, step: Step, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Attention of a step in which heads hold different numbers of entries."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """vLLM's attention; then what the step's plan says."""
        step: Step | None = getattr(attn_metadata, "keepset", None)
        if step is not None and step.ragged is not None and step.ragged.folded:
            self.attend_folded(step, layer, query, kv_cache, output)
        else:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc]
        if step is not None:
            self._follow(step, layer, query, kv_cache)
        return output

    def _follow(self, step: Step, layer: Any, query: Tensor, kv_cache: Tensor) -> None:
        planner = step.planner
        place = planner.place(layer.layer_name)
        for statistics in step.statistics:
            moments.collect(statistics, place, planner, query, self.rotation(query, planner))
        if step.early is not None:
            planner.windows.add(place, query, step.early)
        for event in step.events:
            if self._compactor is None:
                self._compactor = Compactor(
                    planner,
                    layer.layer_name,
                    self.scale,  # type: ignore[attr-defined]
                    self.rotation(query, planner) if planner.looks_ahead else None,
                    get_tensor_model_parallel_rank() == 0,
                )
            self._compactor.compress(event, self.pages(layer, kv_cache), kv_cache.shape[:3].numel())
        if step.late is not None:
            planner.windows.add(place, query, step.late)

    def rotation(self, query: Tensor, planner: Planner) -> Rotation:
        """How the model rotates queries."""
        if self._rotation is None:
            self._rotation = Rotation.of_model(planner.model_type, query.shape[-1], query.dtype)
        return self._rotation
