"""From vLLM's metadata of a step to keepset's and back, and the builder that plans in between."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from keepset.errors import UnsupportedEngineError
from keepset.paged.engine import StepAdapter
from keepset.paged.grouping import group_leader
from keepset.paged.planner import Planner
from keepset.paged.step import ScheduledRequest, StepBatch, StepPlan
from keepset.vllm.compat import PromptLengths, captured_tokens, lengths_on_host
from keepset.vllm.engine_context import PlannedStep, active
from keepset.vllm.layers import layer_group
from keepset.vllm.spec import KeepSpec


class MetadataAdapter(StepAdapter):
    """Common metadata of vLLM's attention."""

    def __init__(self) -> None:
        self._prompts = PromptLengths()

    def batch(self, metadata: CommonAttentionMetadata) -> StepBatch:
        starts = metadata.query_start_loc_cpu[: metadata.num_reqs + 1]
        first_queries, requests = starts.tolist(), []
        for row, (prompt, after) in enumerate(zip(self._prompts.of(metadata), lengths_on_host(metadata), strict=True)):
            first, end = first_queries[row], first_queries[row + 1]
            if end > first and prompt > 0 and end - first <= after:
                requests.append(ScheduledRequest(row, first, end, prompt, after - (end - first), after))
        return StepBatch(
            requests,
            metadata.block_table_tensor,
            metadata.seq_lens,
            metadata.slot_mapping,
            metadata.query_start_loc,
            metadata.query_start_loc_cpu,
            metadata.max_query_len,
        )

    def planned(self, metadata: CommonAttentionMetadata, plan: StepPlan) -> CommonAttentionMetadata:
        # Without the prompts' lengths, which the backend would take for a window.
        if plan.shifted is None:
            return metadata.replace(rswa_prefix_lens=None)
        shifted, bound = plan.shifted, metadata.seq_lens_cpu_upper_bound
        return metadata.replace(
            rswa_prefix_lens=None,
            block_table_tensor=shifted.block_table,
            seq_lens=shifted.seq_lens,
            seq_lens_cpu_upper_bound=None if bound is None else bound - bound.new_tensor(shifted.dropped),
            max_seq_len=metadata.max_seq_len if shifted.max_seq_len is None else shifted.max_seq_len,
            _num_computed_tokens_cache=None,
        )


class KeepBuilder:
    """Makes metadata of what is in the cache, from metadata of what has been in it."""

    supports_update_block_table = False  # Another group's layers have other lengths, too.

    def __init__(
        self, kv_cache_spec: KeepSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)  # type: ignore[call-arg]
        context = active()
        assert context is not None
        if kv_cache_spec.block_size != vllm_config.cache_config.block_size:
            raise UnsupportedEngineError(
                f"keepset cannot compress blocks of {vllm_config.cache_config.block_size} tokens that the attention "
                f"kernel divides; use --block-size {kv_cache_spec.block_size}."
            )
        for name in layer_names:
            if group_leader(context.recipe, context.layers[name], kv_cache_spec.layers) != kv_cache_spec.layer:
                raise UnsupportedEngineError(f"This vLLM asks for layers' caches in an unknown order ({name}).")
        self._context, self._adapter = context, MetadataAdapter()
        self._places = {name: place for place, name in enumerate(layer_names)}
        planner = Planner(
            kv_cache_spec.schedule,
            context.recording,
            [context.layers[name] for name in layer_names],
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.cache_config.num_gpu_blocks or 0,
            context.freed_blocks,
            replays=captured_tokens(vllm_config) > 0,
        )
        self._group = layer_group(context, planner, layer_names)
        context.add(self._group, layer_names)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """vLLM's own; where heads differ, of steps that only decode: prompts beside them have vLLM's attention."""
        assert isinstance(kv_cache_spec, KeepSpec)
        support: AttentionCGSupport = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        if kv_cache_spec.schedule.ragged:
            return min(support, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda each: each.value)
        return support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """vLLM's metadata of what is left, while the context learns what the layers are to do besides."""
        plan = self._context.events.plan(self._group, self._adapter.batch(common_attn_metadata))
        common = self._adapter.planned(common_attn_metadata, plan)
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        if plan.dummy and plan.ragged is not None:
            _ = self._group.columns  # are there before a graph looks for them
        self._context.begin(PlannedStep(self._group, plan, self._places, metadata))
        return metadata
