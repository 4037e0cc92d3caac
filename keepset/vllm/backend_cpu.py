"""keepset on vLLM's CPU backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from keepset.vllm.backend import KeepBackend, KeepBuilder, KeepImpl
from keepset.vllm.pages import CPUPages
from keepset.vllm.step import Step


class CPUKeepImpl(KeepImpl, CPUAttentionBackendImpl):
    """A layer. Where heads hold different numbers of entries, each is attended like a request with one KV head."""

    def pages(self, layer: Any, kv_cache: Tensor) -> CPUPages:
        """Packed by instruction set."""
        return CPUPages(kv_cache, layer.isa)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new entries; with single heads' tables, each head's to its own place."""
        metadata = get_forward_context().attn_metadata
        step = getattr(metadata.get(layer.layer_name) if isinstance(metadata, dict) else None, "keepset", None)
        if step is None or step.ragged is None or not step.ragged.folded:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        slots = step.ragged.slots[step.planner.place(layer.layer_name)]
        tokens = slots.shape[0] // self.num_kv_heads
        self.pages(layer, kv_cache).write(key[:tokens].flatten(0, 1), value[:tokens].flatten(0, 1), slots)

    def attend_folded(self, step: Step, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Attention with one page table, and one length, for every (KV head, request)."""
        assert step.ragged is not None
        ragged, place = step.ragged, step.planner.place(layer.layer_name)
        heads, group, tokens = self.num_kv_heads, self.num_queries_per_kv, int(ragged.starts[-1])
        # Head after head, so that each head's queries of a request are neighbours.
        queries = query[:tokens].view(tokens, heads, group, -1).transpose(0, 1).reshape(heads * tokens, group, -1)
        attended = torch.empty_like(queries)
        first = (torch.arange(heads)[:, None] * tokens + ragged.starts[:-1]).flatten()
        starts = torch.cat([first, torch.tensor([heads * tokens])]).int()
        lengths = ragged.entries[:, place].t().flatten().int()
        tables = ragged.tables[:, place].transpose(0, 1).flatten(0, 1).int()
        keys, values = self.pages(layer, kv_cache).folded()
        scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=lengths.shape[0],
            num_heads=group,
            num_kv_heads=1,
            head_dim=self.head_size,
            seq_lens=lengths,
            dtype=query.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=True,
        )
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=keys,
            value_cache=values,
            output=attended,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=tables.contiguous(),  # the kernel walks it by address
            softcap=0.0,
            scheduler_metadata=scheduler_metadata,
            s_aux=None,
        )
        output[:tokens].view(tokens, heads, group, -1).copy_(attended.view(heads, tokens, group, -1).transpose(0, 1))


class CPUKeepBuilder(KeepBuilder, CPUAttentionMetadataBuilder):
    """Its metadata."""

    def folded_metadata(self, step: Step) -> CPUAttentionMetadata:
        """Only what a layer is asked for: lengths and tables are in the step."""
        metadata = step.metadata
        return CPUAttentionMetadata(
            num_actual_tokens=metadata.num_actual_tokens,
            max_query_len=metadata.max_query_len,
            query_start_loc=metadata.query_start_loc,
            max_seq_len=metadata.max_seq_len,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table_tensor,
            slot_mapping=metadata.slot_mapping,
            scheduler_metadata=None,
        )


class CPUKeepBackend(KeepBackend, CPUAttentionBackend):
    """Overrides CPU_ATTN."""

    plain = CPUAttentionBackend
    impl = CPUKeepImpl
    builder = CPUKeepBuilder
