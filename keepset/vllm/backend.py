"""What keepset adds to an attention backend of vLLM, whichever it is: mixins for its three classes.

Without a recipe the backend answers with vLLM's own classes, so nothing of keepset runs.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_layout import KVCacheLayout

from keepset.errors import KeepsetError
from keepset.paged.compaction import Compactor
from keepset.paged.grouping import group_of
from keepset.paged.observer import Observer
from keepset.paged.pages import Pages
from keepset.paged.per_head import PerHeadSequences
from keepset.paged.planner import Planner, Step
from keepset.vllm.compat import rotary_table
from keepset.vllm.engine_context import activate, active
from keepset.vllm.hidden_states import LayerInput
from keepset.vllm.spec import KeepSpec

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

    @classmethod
    def supports_rswa(cls) -> bool:
        """Says yes, because the field that hands over prompt lengths is that feature's."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Where heads have tables of their own, each head's page of a block must be a block of its own."""
        layouts = super().supported_kv_cache_layouts()
        current = active()
        if current is None or (current.recipe.method.fixed_total and current.recipe.method.equal_heads):
            return layouts
        return (KVCacheLayout.LBHNC,)


class KeepBuilder:
    """Makes metadata of what is in the cache, from metadata of what has been in it."""

    supports_update_block_table = False  # Another group's layers have other lengths, too.

    def __init__(
        self, kv_cache_spec: KeepSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)  # type: ignore[call-arg]
        current = active()
        assert current is not None
        if kv_cache_spec.block_size != vllm_config.cache_config.block_size:
            raise KeepsetError(
                f"keepset cannot compress blocks of {vllm_config.cache_config.block_size} tokens that the attention "
                f"kernel divides; use --block-size {kv_cache_spec.block_size}."
            )
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
            current.barrier,
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
        metadata = super().build(common_prefix_len, step.metadata, fast_build)  # type: ignore[misc]
        metadata.keepset = step
        return metadata


class KeepImpl:
    """Attends to what is kept, and compresses right after."""

    num_heads: int
    num_kv_heads: int
    num_queries_per_kv: int
    scale: float
    own_metadata: ClassVar[dict[str, Any]] = {}
    """What the backend's metadata say, besides lengths and tables, where heads are requests."""
    _single: KeepImpl | None = None
    _pages: tuple[Tensor, Pages] | None = None
    _observer: Observer | None = None
    _compactor: Compactor | None = None
    source: LayerInput | None = None

    @abstractmethod
    def make_pages(self, layer: Any, kv_cache: Tensor) -> Pages:
        """The layer's cache as sub-pages."""

    def pages(self, layer: Any, kv_cache: Tensor) -> Pages:
        """The same, made once."""
        if self._pages is None or self._pages[0] is not kv_cache:
            self._pages = kv_cache, self.make_pages(layer, kv_cache)
        return self._pages[1]

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new entries; where heads have tables of their own, each head's to its own place."""
        metadata = get_forward_context().attn_metadata
        step = getattr(metadata.get(layer.layer_name) if isinstance(metadata, dict) else None, "keepset", None)
        if step is None or step.ragged is None or not step.ragged.folded:
            if step is not None and step.metadata.slot_mapping.data_ptr() != slot_mapping.data_ptr():
                raise KeepsetError("This vLLM writes to the cache by slots that keepset did not see.")
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
            return
        slots = step.ragged.slots[step.planner.place(layer.layer_name)]
        tokens = slots.shape[0] // self.num_kv_heads
        if tokens < len(key):  # a step that is filled up to a size
            key, value = key[:tokens], value[:tokens]
        self.pages(layer, kv_cache).write(key.flatten(0, 1), value.flatten(0, 1), slots)

    def attend_singly(
        self,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        plain: Any,
        per_head: PerHeadSequences,
        place: int,
        room: Tensor,
    ) -> None:
        """Attention where each KV head is a request with one KV head, by the backend's own way."""
        if self._single is None:
            self._single = copy.copy(self)
            self._single.num_kv_heads, self._single.num_heads = 1, self.num_queries_per_kv
        blocks, heads, size, width = kv_cache.shape
        folded = kv_cache.view(blocks * heads, 1, size, width)
        metadata = self._single_metadata(plain, per_head, place)
        super(KeepImpl, self._single).forward(layer, query, query, query, folded, metadata, room)  # type: ignore[misc]

    def _single_metadata(self, plain: Any, per_head: PerHeadSequences, place: int) -> Any:
        """The backend's own metadata of one layer, from that of the step as it is.

        Of a step there is one, which the layers fill in one after another: to make it anew for each would take longer
        than all else that they do here.
        """
        single = per_head.of(place)
        if per_head.metadata is None:
            per_head.metadata = replace(
                plain,
                num_actual_tokens=single.tokens,
                max_query_len=single.longest_query,
                query_start_loc=single.starts,
                max_seq_len=single.longest,
                scheduler_metadata=None,
                **self.own_metadata,
            )
        vars(per_head.metadata).update(seq_lens=single.lengths, block_table=single.tables)
        return per_head.metadata

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
            per_head, place = step.per_head(), step.planner.place(layer.layer_name)
            room = per_head.room(output)
            self.attend_singly(layer, per_head.spread(query), kv_cache, attn_metadata, per_head, place, room)
            per_head.put_back(room, output)
        else:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc]
        if step is not None:
            self._follow(step, layer, query, kv_cache)
        if self.source is not None:
            self.source.hidden = None
        return output

    def _follow(self, step: Step, layer: Any, query: Tensor, kv_cache: Tensor) -> None:
        planner = step.planner
        place = planner.place(layer.layer_name)
        for chunk in step.chunks:
            self._see(planner, place, query).collect(chunk, query, self.pages(layer, kv_cache))
        if step.early is not None:
            planner.windows.add(place, query, step.early)
        if step.events:
            self._compress(step, layer, query, kv_cache)
        if step.late is not None:
            planner.windows.add(place, query, step.late)

    def _compress(self, step: Step, layer: Any, query: Tensor, kv_cache: Tensor) -> None:
        planner, pages = step.planner, self.pages(layer, kv_cache)
        if self._compactor is None:
            observer = self._see(planner, planner.place(layer.layer_name), query)
            counted = get_tensor_model_parallel_rank() == 0
            self._compactor = Compactor(planner, layer.layer_name, observer, counted)
        if planner.barrier is not None:
            planner.barrier.add(self._compactor, [self._compactor.reach(event, pages) for event in step.events])
            return
        for event in step.events:
            self._compactor.compress(event, pages)

    def _see(self, planner: Planner, place: int, query: Tensor) -> Observer:
        if self._observer is None:
            rotation = None
            if planner.needs.unrotated:
                rotation = rotary_table(planner.model_type, query.shape[-1], query.dtype)
            self._observer = Observer(planner, place, self.scale, rotation, self.source)
        return self._observer
