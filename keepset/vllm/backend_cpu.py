"""keepset on vLLM's CPU backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from keepset.vllm.backend import KeepBackend, KeepBuilder, KeepImpl
from keepset.vllm.pages import CPUPages
from keepset.vllm.single import Single


class CPUKeepImpl(KeepImpl, CPUAttentionBackendImpl):
    """A layer."""

    def make_pages(self, layer: Any, kv_cache: Tensor) -> CPUPages:
        """Packed by instruction set."""
        return CPUPages(kv_cache, layer.isa)

    def own_metadata(self, layer: Any, query: Tensor, single: Single) -> dict[str, Any]:
        """The kernel's own division of work."""
        work = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=single.lengths.shape[0],
            num_heads=self.num_queries_per_kv,
            num_kv_heads=1,
            head_dim=self.head_size,
            seq_lens=single.lengths,
            dtype=query.dtype,
            query_start_loc=single.starts,
            causal=True,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=True,
        )
        return {"scheduler_metadata": work}


class CPUKeepBuilder(KeepBuilder, CPUAttentionMetadataBuilder):
    """Its metadata."""


class CPUKeepBackend(KeepBackend, CPUAttentionBackend):
    """Overrides CPU_ATTN."""

    plain = CPUAttentionBackend
    impl = CPUKeepImpl
    builder = CPUKeepBuilder
