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

from keepset.paged.pages import CPUPages
from keepset.paged.per_head import PerHeadSequences
from keepset.vllm.backend import KeepBackend, KeepBuilder, KeepImpl


class CPUKeepImpl(KeepImpl, CPUAttentionBackendImpl):
    """A layer."""

    def make_pages(self, layer: Any, kv_cache: Tensor) -> CPUPages:
        """Packed by instruction set."""
        return CPUPages(kv_cache, layer.isa)

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
        """The kernel without what the impl does around it, which would take as long as all that is done here."""
        single, pages = per_head.of(place), self.pages(layer, kv_cache)
        assert isinstance(pages, CPUPages)
        keys, values = pages.folded()
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
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=room,
            query_start_loc=single.starts,
            seq_lens=single.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=single.tables,
            softcap=self.logits_soft_cap,
            scheduler_metadata=work,
            s_aux=None,
        )


class CPUKeepBuilder(KeepBuilder, CPUAttentionMetadataBuilder):
    """Its metadata."""


class CPUKeepBackend(KeepBackend, CPUAttentionBackend):
    """Overrides CPU_ATTN."""

    plain = CPUAttentionBackend
    impl = CPUKeepImpl
    builder = CPUKeepBuilder
