"""Heads as requests: what a backend's kernel is told where KV heads hold different numbers of entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.paged.page_tables import PerHeadStep


class PerHeadBatch(NamedTuple):
    """One layer's step in which every (request, KV head) is a request with one KV head.

    Attributes:
        num_tokens: queries, heads times those of the step.
        seq_lens, block_table: entries and sub-pages of each.
        query_start_loc: first query of each, and the end of the last one's.
        max_query_len, max_seq_len: most queries and entries of any.
        slot_mapping: sub-page slots of the new entries, in the order of `key.flatten(0, 1)`.
    """

    num_tokens: int
    seq_lens: Int[Tensor, " requests_heads"]
    block_table: Int[Tensor, "requests_heads pages"]
    query_start_loc: Int[Tensor, " requests_heads_plus_1"]
    max_query_len: int
    max_seq_len: int
    slot_mapping: Int[Tensor, " tokens_heads"]


class PerHeadSequences:
    """The `PerHeadBatch` of every layer, made once in a step for all of them.

    While requests only decode, request after request and head after head is the order in which queries lie anyway,
    and nothing is copied. Else the queries are sorted head after head, so that each head's of a request are
    neighbours.
    """

    def __init__(self, step: PerHeadStep, tokens: int, max_query_len: int, block_size: int) -> None:
        rows, layers, heads, pages = step.tables.shape
        device = step.tables.device
        self._heads, self._tokens = heads, tokens
        self._in_order = max_query_len == 1 and tokens == rows
        if self._in_order:
            entries, tables = step.entries.transpose(0, 1), step.tables.transpose(0, 1)
            starts = torch.arange(rows * heads + 1, device=device)
        else:
            entries, tables = step.entries.permute(1, 2, 0), step.tables.permute(1, 2, 0, 3)
            first = torch.arange(heads, device=device)[:, None] * tokens + step.starts.to(device)[:-1]
            starts = torch.cat([first.flatten(), first.new_tensor([heads * tokens])])
        starts, lengths = starts.int(), entries.reshape(layers, -1).int()
        # Contiguous, because kernels walk it by address.
        tables = tables.reshape(layers, rows * heads, pages).int().contiguous()
        assert step.slots is not None
        self._batches = [
            PerHeadBatch(heads * tokens, seq_lens, table, starts, max_query_len, pages * block_size, slots)
            for seq_lens, table, slots in zip(lengths, tables, step.slots, strict=True)
        ]

    def batch(self, place: int) -> PerHeadBatch:
        """Of the layer at this place of its group."""
        return self._batches[place]

    def split(self, queries: Float[Tensor, "n query_heads dim"]) -> Float[Tensor, "heads_n group dim"]:
        """Queries in the order of the heads' requests."""
        tokens, heads = self._tokens, self._heads
        split = queries[:tokens].reshape(tokens, heads, -1, queries.shape[-1])
        return (split if self._in_order else split.transpose(0, 1)).flatten(0, 1)

    def output_buffer(self, output: Float[Tensor, "n query_heads dim"]) -> Float[Tensor, "heads_n group dim"]:
        """Where the attention's results go, in that order."""
        tokens, heads, dim = self._tokens, self._heads, output.shape[-1]
        if self._in_order:
            return output[:tokens].view(tokens * heads, -1, dim)
        return output.new_empty(heads * tokens, output.shape[1] // heads, dim)

    def merge(self, attended: Float[Tensor, "heads_n group dim"], output: Float[Tensor, "n query_heads dim"]) -> None:
        """Writes results in the order of the step's queries; needless where `output_buffer` was a view of them."""
        if not self._in_order:
            tokens, heads = self._tokens, self._heads
            target = output[:tokens].view(tokens, heads, -1, output.shape[-1])
            target.copy_(attended.view(heads, tokens, -1, output.shape[-1]).transpose(0, 1))
