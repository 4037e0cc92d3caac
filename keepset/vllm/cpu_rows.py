"""Attention over quantised caches on CPUs, few or none of which vLLM's own CPU backend can read.

PyTorch's operators compute it. It is a reference for what GPUs do, not a fast way to serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from keepset.kernels.page_layout import PageGroup
from keepset.kernels.paged import attend_pages
from keepset.kernels.paged_arguments import FiledLayouts, PagedTokens
from keepset.kernels.paged_heads import attend_heads
from keepset.kernels.softmax import Softmax
from keepset.paged.engine import Pages
from keepset.paged.pages import decoded_entries
from keepset.vllm.attention import CompressedAttentionImpl
from keepset.vllm.engine_context import PlannedStep


@dataclass
class RowsMetadata:
    """A step of requests whose heads all have the same entries, at the places of vLLM's block tables.

    Attributes:
        starts: the index of each request's first token, and the end of the last request.
        block_table: blocks of each request.
        lengths: entries of each request.
        kv_heads: KV heads of a layer.
    """

    starts: list[int]
    block_table: Int[Tensor, "rows width"]
    lengths: Int[Tensor, " rows"]
    kv_heads: int

    @cached_property
    def decoding(self) -> Int[Tensor, " some"]:
        """The rows that have one new token."""
        return torch.tensor([row for row in range(len(self.lengths)) if self._new(row) == 1], dtype=torch.int64)

    @cached_property
    def heads(self) -> tuple[Int[Tensor, "some_heads width"], Int[Tensor, " some_heads"], Int[Tensor, " some"]]:
        """The sub-pages and entries of each head of the rows with one new token, and the indices of the tokens."""
        tables = self.block_table[self.decoding].long()
        tables = tables[:, None] * self.kv_heads + torch.arange(self.kv_heads)[:, None]
        lengths = self.lengths[self.decoding].long().repeat_interleave(self.kv_heads)
        return tables.flatten(0, 1), lengths, torch.tensor(self.starts)[self.decoding]

    @cached_property
    def prompts(self) -> PagedTokens | None:
        """The tokens of rows with several new tokens."""
        several = [
            (self.starts[row] + i, row, int(length) - self._new(row) + i + 1)
            for row, length in enumerate(self.lengths)
            if self._new(row) > 1
            for i in range(self._new(row))
        ]
        if not several:
            return None
        places, rows, lengths = torch.tensor(several).unbind(1)
        return PagedTokens(self.block_table, lengths, int(lengths.max()), places, rows)

    def _new(self, row: int) -> int:
        return self.starts[row + 1] - self.starts[row]


class RowsMetadataBuilder(AttentionMetadataBuilder[RowsMetadata]):
    """Builds the metadata."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RowsMetadata:
        rows = common_attn_metadata.num_reqs
        return RowsMetadata(
            common_attn_metadata.query_start_loc_cpu[: rows + 1].tolist(),
            common_attn_metadata.block_table_tensor[:rows],
            common_attn_metadata.seq_lens[:rows],
            self.kv_cache_spec.num_kv_heads,  # type: ignore[attr-defined]
        )


class RowsImpl:
    """A mixin that replaces how vLLM's layers for CPUs write to their cache and attend to it."""

    num_kv_heads: int
    num_queries_per_kv: int

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new entries to their slots; negative slots are skipped."""
        pages = self.pages(layer, kv_cache)  # type: ignore[attr-defined]
        real, size = (slot_mapping >= 0).nonzero()[:, 0], pages.block_size
        slots = slot_mapping[real].long()
        of_heads = ((slots // size)[:, None] * self.num_kv_heads + torch.arange(self.num_kv_heads)) * size
        of_heads += (slots % size)[:, None]
        write(pages, key[real].flatten(0, 1), value[real].flatten(0, 1), of_heads.flatten())

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: RowsMetadata | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the attention of a step's requests; nothing without metadata, when vLLM warms up."""
        if attn_metadata is None:
            return output
        pages = self.pages(layer, kv_cache)  # type: ignore[attr-defined]
        if len(attn_metadata.decoding):
            tables, lengths, places = attn_metadata.heads
            own = query[places].unflatten(1, (self.num_kv_heads, -1)).flatten(0, 1)
            attended = torch.empty_like(own)
            softmax = self.softmax.by_query_group(len(places), self.num_kv_heads)  # type: ignore[attr-defined]
            attend_heads(own, pages.read, tables, lengths, pages.block_size, softmax, attended, pages.format)
            output[places] = attended.unflatten(0, (len(places), -1)).flatten(1, 2)
        if (tokens := attn_metadata.prompts) is not None:
            whole = FiledLayouts.empty(len(attn_metadata.lengths), 1, self.num_kv_heads, query.device).layout
            blocks = pages.slots // (self.num_kv_heads * pages.block_size)
            attend_pages(
                query,
                partial(decoded_entries, pages),
                pages.block_size,
                tokens,
                whole,
                PageGroup(range(1), 1, blocks),
                self.softmax,  # type: ignore[attr-defined]
                output,
            )
        return output


def write(pages: Pages, keys: Tensor, values: Tensor, slots: Int[Tensor, " n"]) -> None:
    """Write keys and values, `[n, head_dim]`, in the cache's format to slots of the layer."""
    rows = (keys, values) if pages.format is None else pages.format.encode_entries(keys, values)
    pages.write(*rows, slots)


def attend_ragged(step: PlannedStep, place: int, pages: Pages, query: Tensor, output: Tensor, softmax: Softmax) -> None:
    """Compute the attention of each head over its own entries, with biases if entries have them.

    Args:
        step: the step, in which heads have their own pages.
        place: the layer's index in the group.
        pages: the layer's cache.
        query: queries of the step, `[tokens, query_heads, head_dim]`.
        output: of the same shape; written to.
        softmax: the layer's softmax; its sinks are `[query_heads]`.
    """
    ragged, bias, size = step.plan.ragged, step.group.columns.bias, pages.block_size
    assert ragged is not None and ragged.tokens is not None
    rows, layout = ragged.tokens.rows, ragged.of_layer(place)
    if rows is not None and len(rows.unique()) < len(rows):
        group = ragged.group._replace(places=range(place, place + 1))
        read = partial(decoded_entries, pages)
        attend_pages(query, read, size, ragged.tokens, layout, group, softmax, output, bias)
        return
    per_head = step.per_head
    batch, buffer, kv_heads = per_head.batch(place), per_head.output_buffer(output), layout.counts.shape[2]
    tables, lengths = batch.block_table, batch.seq_lens
    counts = layout.counts[: len(lengths) // kv_heads] if rows is None else layout.counts[rows]
    before = place * pages.slots // size  # sub-pages of the layers before, from which on tables count

    def biases(heads: Int[Tensor, " some"], entries: int) -> Float[Tensor, "some entries"]:
        """Return the biases of some heads' first entries; entries since the event have none."""
        assert bias is not None
        entry = torch.arange(entries)
        slots = tables[heads][:, entry // size].long() * size + entry % size
        return bias.view(-1)[slots].where(entry < counts.flatten()[heads, None], 0)

    attend_heads(
        per_head.split(query),
        lambda own: pages.read(own - before),
        tables,
        lengths,
        size,
        softmax.by_query_group(len(lengths) // kv_heads, kv_heads),
        buffer,
        pages.format,
        None if bias is None else biases,
    )
    per_head.merge(buffer, output)


class RowsMixin(CompressedAttentionImpl):
    """A mixin for layers on CPUs whose cache is quantised."""

    def mixing(self, layer: Any) -> None:
        """Return None, because `RowsImpl` mixes by the pages' format."""

    def append_ragged(self, layer: Any, step: PlannedStep, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        per_head, pages = step.per_head, self.pages(layer, kv_cache)
        keys, values = (per_head.split(rows)[:, 0] for rows in (key, value))
        write(pages, keys, values, per_head.batch(self._place).slot_mapping - self._place * pages.slots)

    def attend_ragged(self, layer: Any, step: PlannedStep, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        pages = self.pages(layer, kv_cache)
        attend_ragged(step, self._place, pages, query, output, self.softmax)
