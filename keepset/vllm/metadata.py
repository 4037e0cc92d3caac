"""Translation between vLLM's and keepset's metadata of a step, and the metadata builder, which plans the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from keepset.core.statistics import HeadShare
from keepset.errors import UnsupportedEngineError
from keepset.kernels.softmax import Softmax
from keepset.paged.engine import EngineSize, StepAdapter
from keepset.paged.eviction import group_leader
from keepset.paged.layer_group import LayerGroup
from keepset.paged.pages import Pages
from keepset.paged.planner import Planner
from keepset.paged.step import RequestRows, StepBatch, StepPlan
from keepset.vllm import stats
from keepset.vllm.compat import PromptLengths, captured_tokens, drafted_tokens, lengths_on_host
from keepset.vllm.engine_context import CurrentStep, EngineContext, PlannedStep, active
from keepset.vllm.query_projection import find_rotation
from keepset.vllm.settings import recipe_of
from keepset.vllm.spec import KeepSpec


class MetadataAdapter(StepAdapter):
    """Translates the common metadata of vLLM's attention."""

    def __init__(self) -> None:
        self._prompts = PromptLengths()
        self._rows: tuple[Tensor, RequestRows] | None = None

    def batch(self, metadata: CommonAttentionMetadata) -> StepBatch:
        # All groups of layers have the same requests. Their metadata of a step share these objects.
        if self._rows is None or self._rows[0] is not metadata.query_start_loc_cpu:
            self._rows = metadata.query_start_loc_cpu, self._requests(metadata)
        return StepBatch(
            self._rows[1],
            metadata.block_table_tensor,
            metadata.seq_lens,
            metadata.slot_mapping,
            metadata.query_start_loc,
            metadata.max_query_len,
        )

    def _requests(self, metadata: CommonAttentionMetadata) -> RequestRows:
        starts = metadata.query_start_loc_cpu[: metadata.num_reqs + 1].numpy()
        first, end, row = starts[:-1], starts[1:], np.arange(metadata.num_reqs)
        prompt, after = self._prompts.of(metadata), lengths_on_host(metadata)
        numbers = np.array((row, first, end, prompt, after - (end - first), after), dtype=np.int64)
        runs = (end > first) & (prompt > 0) & (end - first <= after)
        return RequestRows(numbers if runs.all() else numbers[:, runs])

    def planned(self, metadata: CommonAttentionMetadata, plan: StepPlan) -> CommonAttentionMetadata:
        # The lengths of prompts are removed, because the backend would take them for a window.
        if plan.shifted is None:
            return metadata.replace(rswa_prefix_lens=None)
        shifted, bound = plan.shifted, metadata.seq_lens_cpu_upper_bound
        return metadata.replace(
            rswa_prefix_lens=None,
            block_table_tensor=shifted.block_table,
            seq_lens=shifted.seq_lens,
            seq_lens_cpu_upper_bound=None if bound is None else bound - torch.from_numpy(shifted.dropped).to(bound),
            max_seq_len=metadata.max_seq_len if shifted.max_seq_len is None else shifted.max_seq_len,
            _num_computed_tokens_cache=None,
        )


def layer_group(context: EngineContext, planner: Planner, names: Sequence[str], current: CurrentStep) -> LayerGroup:
    """Return the group of vLLM's layers of these names.

    Args:
        context: the state that keepset's classes share.
        planner: the planner of the layers' steps.
        names: vLLM's names of the layers.
        current: has the step that the layers compute next.

    Raises:
        UnsupportedModelError: the recipe needs the model's rotation, which cannot be determined.
    """
    config = context.config
    layers = [config.compilation_config.static_forward_context[name] for name in names]
    for layer_index, layer in enumerate(layers):
        layer.impl.belong_to(layers, layer_index, current)
    projections, rotary = [context.projections[name] for name in names] if context.projections else [], None
    if context.recipe.method.traits.needs.unrotated:
        model = config.model_config
        rotary = find_rotation(projections, model.get_hidden_size(), context.dtype, model.max_model_len)
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    share = HeadShare(rank, ranks, config.model_config.get_total_num_kv_heads()) if ranks > 1 else None
    count = stats.count if rank == 0 else None  # of several ranks, one counts
    pages = [partial(_pages, layer) for layer in layers]
    ring, tape = context.buffers.ring(names), context.buffers.tape(names)
    return LayerGroup(planner, pages, ring, _softmax(layers), rotary, projections, count, tape, context.columns, share)


def _softmax(layers: Sequence[Any]) -> Softmax:
    """Return the layers' softmax."""
    softmaxes: list[Softmax] = [layer.impl.softmax for layer in layers]
    sinks = [softmax.sinks for softmax in softmaxes if softmax.sinks is not None]
    return replace(softmaxes[0], sinks=torch.stack(sinks).float() if sinks else None)


def _pages(layer: Any) -> Pages:
    """Return a layer's cache, which vLLM makes after it has measured memory."""
    return layer.impl.pages(layer, layer.kv_cache)


class KeepBuilder:
    """A mixin for vLLM's metadata builders that plans each step. Attention's metadata then describes kept entries.

    For layers that are not compressed it works like vLLM's builder.

    Raises:
        UnsupportedEngineError: this vLLM divides blocks, or asks for layers in an unknown order.
        UnsupportedModelError: the recipe needs the model's rotation, which cannot be determined.
    """

    supports_update_block_table = False  # another group's layers also have other lengths

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)  # type: ignore[call-arg]
        self._group: LayerGroup | None = None
        if not isinstance(kv_cache_spec, KeepSpec):
            return
        context = active()
        assert context is not None
        if kv_cache_spec.block_size != context.block_size:
            raise UnsupportedEngineError(
                f"keepset cannot compress blocks of {context.block_size} tokens that the attention kernel divides into "
                f"blocks of {kv_cache_spec.block_size}; use --block-size {kv_cache_spec.block_size}."
            )
        for name in layer_names:
            if group_leader(context.recipe, context.layers[name], kv_cache_spec.layers) != kv_cache_spec.layer:
                raise UnsupportedEngineError(f"This vLLM asks for layers' caches in an unknown order ({name}).")
        context.adapter = context.adapter or MetadataAdapter()
        self._context, self._adapter, self._current = context, context.adapter, CurrentStep()
        size = EngineSize(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.cache_config.num_gpu_blocks or 0,
            drafts=drafted_tokens(vllm_config),
            replays=captured_tokens(vllm_config) > 0,
        )
        layers = [context.layers[name] for name in layer_names]
        planner = Planner(kv_cache_spec.schedule, context.recording, layers, size, context.emptied_blocks)
        self._group = layer_group(context, planner, layer_names, self._current)
        context.add(self._group, layer_names)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Return vLLM's support for CUDA graphs, limited to decode steps if heads keep different numbers of entries."""
        support: AttentionCGSupport = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        if isinstance(kv_cache_spec, KeepSpec) and kv_cache_spec.schedule.ragged:
            return min(support, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda level: level.value)
        return support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """Plan the step, and return vLLM's metadata for the entries that are kept.

        `common_attn_metadata` describes the step as if nothing had ever been dropped.
        """
        if self._group is None:  # the backend would take the lengths of prompts for a window
            alone = common_attn_metadata.replace(rswa_prefix_lens=None)
            return super().build(common_prefix_len, alone, fast_build)  # type: ignore[misc]
        plan = self._context.events.plan(self._group, self._adapter.batch(common_attn_metadata))
        common = self._adapter.planned(common_attn_metadata, plan)
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        if plan.dummy and plan.ragged is not None:
            _ = self._group.columns  # allocated before a graph captures its address
        self._current.planned = PlannedStep(self._group, plan, metadata)
        return metadata


class RecurrentBuilder:
    """A mixin for vLLM's metadata builders of recurrent layers, which are never compressed.

    A model that has only such layers uses none of keepset's backends, so it is refused here.

    Raises:
        UnsupportedModelError: the configuration has a recipe, and no layer of the model is compressed.
    """

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any, **kwargs: Any
    ) -> None:
        recipe, context = recipe_of(vllm_config), active()
        if recipe is not None and (context is None or context.config is not vllm_config):
            _ = EngineContext(vllm_config, recipe).layers  # raises if none is compressed
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)  # type: ignore[call-arg]
