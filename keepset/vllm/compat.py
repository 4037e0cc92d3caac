"""Everything that keepset uses of vLLM's internals, as of 0.32.0 and 0.33.0.

Everything else that the plug-in uses is an interface for plug-ins: backends, kinds of KV cache and their managers, KV
connectors, `additional_config`.

Methods that keepset's classes override or call are used elsewhere, but `BORROWED` names them, and they are checked when
an engine starts. Facts that this check cannot see are checked where the code relies on them:

- `AttentionBackend.customize_spec` is called layer after layer in the order of `static_forward_context`, without the
  layer's name (the metadata builder checks the result);
- `get_impl_cls` is called while the layer is built, under the model's configuration;
- `do_kv_cache_update` writes to the very tensor `CommonAttentionMetadata.slot_mapping`, which
  `CompressedAttentionImpl` checks;
- a lookup's `max_length` is at most the prompt's less one (`KeepManager`), and a request's first blocks come from
  `allocate_new_blocks`, right after `remove_skipped_blocks` told its prompt's length;
- a request that runs needs blocks for its newest tokens alone (`KeepManager.get_num_blocks_to_allocate`);
- layers call a connector only if it has metadata (`BlockCountConnector`);
- a request that was rejected reaches the connector, with what it is told in `kv_transfer_params` (`Question`);
- a request that waited for a connector is scheduled like a new one if then it has no computed tokens and no blocks
  (`ContextConnector`).
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator
from hashlib import sha256
from pkgutil import resolve_name
from typing import Any

import numpy as np
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

from keepset.errors import UnsupportedEngineError

SUPPORTED = ("0.32", "0.33")
"""The vLLM versions with which keepset is tested. 0.33 has no build for CPUs: its Python ran on the kernels of 0.32."""

_MANAGER = "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager."
_POOL = "vllm.v1.core.block_pool.BlockPool."
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1."
_METADATA = (
    *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "max_seq_len", "num_reqs"),
    *("max_query_len", "block_table_tensor", "slot_mapping", "is_prefilling", "rswa_prefix_lens"),
    *("req_idx", "_num_computed_tokens_cache"),
)
BORROWED: dict[str, tuple[str, ...]] = {
    "vllm.v1.attention.backend.AttentionBackend.customize_spec": ("spec",),
    "vllm.v1.attention.backend.AttentionBackend.supports_rswa": (),
    "vllm.v1.attention.backend.AttentionBackend.supported_kv_cache_layouts": (),
    "vllm.v1.attention.backend.AttentionBackend.validate_configuration": ("head_size", "device_capability"),
    "vllm.v1.attention.backend.AttentionMetadataBuilder.build": ("common_prefix_len", "common_attn_metadata"),
    "vllm.v1.attention.backend.AttentionMetadataBuilder.supports_update_block_table": (),
    "vllm.v1.attention.backend.AttentionImpl.fused_output_quant_supported": ("quant_key",),
    "vllm.v1.attention.backend.AttentionImpl.fused_rope_kvcache_supported": (),
    "vllm.v1.attention.backend.CommonAttentionMetadata": _METADATA,
    _MANAGER + "remove_skipped_blocks": ("request_id", "processed_computed_tokens", "num_prompt_tokens"),
    _MANAGER + "_remove_blocks_in_range": ("request_id", "first_block", "last_block"),
    _MANAGER + "get_num_blocks_to_allocate": ("request_id", "num_tokens", "apply_admission_cap"),
    _MANAGER + "allocate_new_blocks": ("request_id", "num_tokens"),
    _MANAGER + "allocate_external_computed_blocks": ("request_id",),
    _MANAGER + "pop_blocks_for_free": ("request_id",),
    _MANAGER + "cache_blocks": ("request", "num_tokens"),
    _MANAGER + "find_longest_cache_hit": ("max_length", "kv_cache_spec"),
    _MANAGER + "new_step_starts": (),
    _POOL + "touch": ("blocks",),
    _POOL + "unpin_blocks": ("blocks", "on_reuse"),
    _POOL + "free_blocks": ("ordered_blocks",),
    _POOL + "get_new_blocks": ("num_blocks",),
    "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots": ("request", "num_new_tokens"),
    "vllm.v1.core.kv_cache_manager.KVCacheManager.free": ("request",),
    "vllm.v1.request.Request.update_block_hashes": (),
    "vllm.engine.protocol.EngineClient.notify_kv_transfer_request_rejected": ("request_id", "kv_transfer_params"),
    _CONNECTOR + "has_connector_metadata": (),
    _CONNECTOR + "bind_connector_metadata": ("connector_metadata",),
    _CONNECTOR + "clear_connector_metadata": (),
    _CONNECTOR + "handle_preemptions": ("kv_connector_metadata",),
    "vllm.v1.kv_cache_interface.KVCacheConfig.needs_kv_cache_zeroing": (),
    "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase.get_kv_cache_spec": ("vllm_config",),
    "vllm.config.ModelConfig.rswa_window": (),
    "vllm.model_executor.layers.attention.attention.unified_kv_cache_update": ("key", "value", "layer_name"),
    "vllm.model_executor.layers.attention.attention.unified_attention_with_output": ("query", "layer_name"),
}
"""Names that must exist, and the parameters or fields that each must have."""

_TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionImpl."
BORROWED_OF_ROWS: dict[str, tuple[str, ...]] = {
    _TRITON + "_ensure_scale_caches": ("kv_cache",),
    _TRITON + "do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
}
"""Names needed for GPUs' caches in which each key and each value has a scale."""

_MLA = "vllm.model_executor.layers.attention.mla_attention."
BORROWED_OF_LATENTS: dict[str, tuple[str, ...]] = {
    _MLA + "MLAAttention.forward": ("q", "kv_c_normed", "k_pe"),
    _MLA + "MLACommonImpl.forward_mha": ("q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata"),
    _MLA + "MLACommonImpl.forward_mqa": ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
    _MLA + "MLACommonImpl.do_kv_cache_update": ("kv_c_normed", "k_pe", "kv_cache", "slot_mapping"),
    _MLA + "MLACommonMetadata": ("num_decode_tokens",),
    _MLA + "unified_mla_kv_cache_update": ("kv_c_normed", "k_pe", "layer_name"),
    _MLA + "unified_mla_attention_with_output": ("q", "layer_name"),
    "vllm.v1.kv_cache_interface.MLAAttentionSpec": ("head_size", "non_causal_multi_token_decode"),
}
"""Names needed for layers that cache latents. It is not checked that `MLAAttention.W_UK_T` maps queries to latents."""


def changed(rows: bool = False, latents: bool = False) -> Iterator[str]:
    """Yield the borrowed names that this vLLM lacks, or has with other parameters.

    Args:
        rows: whether each key and each value has its own scale.
        latents: whether layers cache latents.
    """
    names = BORROWED | (BORROWED_OF_ROWS if rows else {}) | (BORROWED_OF_LATENTS if latents else {})
    for name, parts in names.items():
        try:
            target = resolve_name(name)
        except (ImportError, AttributeError):
            yield name
            continue
        if parts and not set(parts) <= set(inspect.signature(target).parameters):
            yield name


def fill_scales(layer: Any, kv_cache: Tensor) -> None:
    """Make vLLM fill the scales of a layer's rows with ones now, if they have any.

    Otherwise vLLM does so when the layer first runs, which would overwrite pages written before, such as a context's.

    Args:
        layer: vLLM's attention layer.
        kv_cache: vLLM's cache tensor of the layer.
    """
    if getattr(layer.impl, "_is_per_token_head_quant", False):
        layer.impl._ensure_scale_caches(kv_cache)


def write_rows(kind: str, keys: Tensor, values: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Write keys and values, `[n, kv_heads, head_dim]`, as a layer of vLLM's Triton backend does.

    Args:
        kind: vLLM's name of the cache's type.
        keys, values: keys and values of the new entries.
        kv_cache: a layer's cache.
        slots: the slot of each token.
    """
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl  # loaded only when needed

    heads, head_dim = keys.shape[1:]
    impl: Any = TritonAttentionImpl(heads, head_dim, 1.0, heads, None, None, kind)
    impl.do_kv_cache_update(None, keys, values, kv_cache, slots)


def ask_for_prompt_lengths(config: VllmConfig) -> None:
    """Make the runner pass prompt lengths to attention, in a field of reference sliding windows (R-SWA).

    The field is filled if the model has such a window and the backend supports it. The window's size has no effect,
    because `MetadataAdapter.planned` hides the field from the backend.
    """
    config.model_config.model_arch_config.rswa_window = 1


class PromptLengths:
    """Reads the lengths of prompts.

    Model runner V1 has them on the host, with zeros in a dummy run. V2 has them on the device, and has none in a dummy
    run or for rows that pad a graph's batch. A request's length is fetched during its prompt, so decoding needs no host
    sync.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, metadata: CommonAttentionMetadata) -> np.ndarray:
        """Return the tokens of each row's prompt; 0 for rows of a dummy run, and for padding.

        Raises:
            UnsupportedEngineError: this vLLM does not give prompt lengths.
        """
        lengths, rows, at_prompt = metadata.rswa_prefix_lens, metadata.num_reqs, metadata.is_prefilling
        any_at_prompt = at_prompt is None or bool(at_prompt.any())
        if lengths is None:
            if not any_at_prompt:
                return np.zeros(rows, dtype=np.int64)
            raise UnsupportedEngineError(
                "This vLLM does not give prompt lengths where keepset looks for them: use a supported version."
            )
        if lengths.device.type == "cpu" or metadata.req_idx is None:
            counts = lengths[:rows].numpy()
        else:
            requests = metadata.req_idx[:rows].tolist()
            if any_at_prompt or not self._known.keys() >= set(requests):
                self._known.update(zip(requests, lengths[: len(requests)].tolist(), strict=True))
            counts = np.array([self._known[request] for request in requests], dtype=np.int64)
        return counts if len(counts) == rows else np.pad(counts, (0, rows - len(counts)))


def lengths_on_host(metadata: CommonAttentionMetadata) -> np.ndarray:
    """Return the tokens of each row after the step: the runner's upper bound, exact without speculative decoding."""
    bound = metadata.seq_lens_cpu_upper_bound
    return (metadata.seq_lens if bound is None else bound)[: metadata.num_reqs].cpu().numpy()


def attention_layers(config: VllmConfig) -> Iterator[tuple[str, Any, int]]:
    """Yield name, layer and index of the model's attention layers, in the order in which they were built."""
    for name, layer in config.compilation_config.static_forward_context.items():
        if isinstance(layer, Attention | MLAAttention):
            yield name, layer, extract_layer_index(name)


def softcap_of(impl: Any) -> float | None:
    """Return the bound of a layer's logits; None if they are not capped, which backends mark by different numbers."""
    return getattr(impl, "logits_soft_cap", None) or None


def layer_specs(config: VllmConfig) -> Iterator[tuple[str, KVCacheSpec]]:
    """Yield the layers' names, and the kinds of their caches or other states."""
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():  # type: ignore[type-abstract]
        if (spec := layer.get_kv_cache_spec(config)) is not None:
            yield name, spec


def hide_answer(request: Request) -> None:
    """Hide from other requests the blocks of a new request's answer, which are not in its hashes yet.

    Layers that are not compressed offer all their blocks to other requests. Behind the prompt these blocks depend on
    compressed layers.
    """
    hashes, salt = request._block_hasher, secrets.token_bytes(16)
    assert hashes is not None
    request._block_hasher = lambda hashed_request: [
        BlockHash(sha256(salt + block_hash).digest()) for block_hash in hashes(hashed_request)
    ]


def all_layers(config: VllmConfig, layer_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of the model's attention layers.

    Args:
        config: vLLM's configuration.
        layer_ids: indices of the attention layers of this process.
    """
    if config.parallel_config.pipeline_parallel_size == 1:
        return layer_ids
    return tuple(range(config.model_config.get_total_num_hidden_layers()))


def drafted_tokens(config: VllmConfig) -> int:
    """Return the largest number of a request's tokens that are drafted for a step."""
    drafts = config.speculative_config
    return 0 if drafts is None else int(drafts.num_speculative_tokens)


def captured_tokens(config: VllmConfig) -> int:
    """Return the most tokens of a step whose attention a CUDA graph may capture; 0 if none does."""
    compilation = config.compilation_config
    mode, most = compilation.cudagraph_mode, compilation.max_cudagraph_capture_size or 0
    if not mode or not mode.has_full_cudagraphs():
        return 0
    decoding = config.scheduler_config.max_num_seqs * (1 + drafted_tokens(config))
    return most if mode.mixed_mode() == CUDAGraphMode.FULL else min(most, decoding)
