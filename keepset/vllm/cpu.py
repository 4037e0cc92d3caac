"""`CPUMixin`: a mixin for the attention layers of vLLM's CPU backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm import _custom_ops as ops

from keepset.kernels.paged import attend_pages
from keepset.vllm.attention import CompressedAttentionImpl, eight_bits
from keepset.vllm.cpu_pages import CPUPages
from keepset.vllm.engine_context import PlannedStep


class CPUMixin(CompressedAttentionImpl):
    """A mixin for layers whose cache is packed.

    The backend's kernel is called directly: what vLLM's class does around it would take as long as the rest.
    """

    head_size: int
    logits_soft_cap: float

    def make_pages(self, layer: Any, caches: Sequence[Tensor], place: int) -> CPUPages:
        return CPUPages(caches, place, layer.isa, eight_bits(layer, caches[place]))

    def append_ragged(self, layer: Any, step: PlannedStep, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        per_head, heads = step.per_head, self.num_kv_heads
        slots = per_head.batch(step.places[layer.layer_name]).slot_mapping
        keys, values = (per_head.split(rows, heads)[:, 0] for rows in (key, value))
        pages = self.pages(layer, kv_cache)
        assert isinstance(pages, CPUPages)
        pages.write_folded(keys, values, slots)

    def attend_ragged(self, layer: Any, step: PlannedStep, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Compute attention by the backend's own kernel, which is the quickest, unless entries have biases."""
        place = step.places[layer.layer_name]
        pages, bias = self.pages(layer, kv_cache), step.group.columns.bias
        if bias is not None:
            ragged = step.plan.ragged
            assert ragged is not None and ragged.tokens is not None
            group = ragged.group._replace(places=range(place, place + 1))
            layout = ragged.of_layer(place)
            attend_pages(query, pages.read, ragged.block_size, ragged.tokens, layout, group, self.scale, output, bias)
            return
        per_head, heads = step.per_head, self.num_kv_heads
        batch, buffer = per_head.batch(place), per_head.output_buffer(output, heads)
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
            query=per_head.split(query, heads),
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
