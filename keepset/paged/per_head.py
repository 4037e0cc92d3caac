"""Heads as requests: what a backend's kernel is told where KV heads hold different numbers of entries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.paged.page_tables import RaggedStep


class Single(NamedTuple):
    """One layer's step in which every (request, KV head) is a request with one KV head.

    Attributes:
        tokens: queries, heads times those of the step.
        lengths, tables: entries and sub-pages of each.
        starts: first query of each, and the end of the last one's.
        longest_query, longest: most queries and entries of any.
    """

    tokens: int
    lengths: Int[Tensor, " requests_heads"]
    tables: Int[Tensor, "requests_heads pages"]
    starts: Int[Tensor, " requests_heads_plus_1"]
    longest_query: int
    longest: int


class PerHeadSequences:
    """The `Single` of every layer, made once in a step for all of them.

    While requests only decode, request after request and head after head is the order in which queries lie anyway,
    and nothing is copied. Else the queries are sorted head after head, so that each head's of a request are
    neighbours.

    Args:
        ragged: the step's tables.
        tokens: queries of the step.
        longest_query: most queries of any request.
        block_size: entries per page.

    Attributes:
        metadata: what the backend makes of it.
    """

    metadata: Any = None

    def __init__(self, ragged: RaggedStep, tokens: int, longest_query: int, block_size: int) -> None:
        rows, layers, heads, pages = ragged.tables.shape
        device = ragged.tables.device
        self._heads, self._tokens, self._longest_query = heads, tokens, longest_query
        self._longest = pages * block_size
        self._in_order = longest_query == 1 and tokens == rows
        if self._in_order:
            entries, tables = ragged.entries.transpose(0, 1), ragged.tables.transpose(0, 1)
            starts = torch.arange(rows * heads + 1, device=device)
        else:
            entries, tables = ragged.entries.permute(1, 2, 0), ragged.tables.permute(1, 2, 0, 3)
            first = torch.arange(heads, device=device)[:, None] * tokens + ragged.starts.to(device)[:-1]
            starts = torch.cat([first.flatten(), first.new_tensor([heads * tokens])])
        self._starts = starts.int()
        self._lengths = entries.reshape(layers, -1).int().unbind()
        # Contiguous, because kernels walk it by address.
        self._tables = tables.reshape(layers, rows * heads, pages).int().contiguous().unbind()

    def of(self, place: int) -> Single:
        """Of one layer."""
        return Single(
            self._heads * self._tokens,
            self._lengths[place],
            self._tables[place],
            self._starts,
            self._longest_query,
            self._longest,
        )

    def spread(self, queries: Float[Tensor, "n query_heads dim"]) -> Float[Tensor, "heads_n group dim"]:
        """Queries in the order of the per_head."""
        tokens, heads = self._tokens, self._heads
        if self._in_order:
            return queries[:tokens].reshape(tokens * heads, -1, queries.shape[-1])
        split = queries[:tokens].reshape(tokens, heads, -1, queries.shape[-1])
        return split.transpose(0, 1).reshape(heads * tokens, -1, queries.shape[-1])

    def room(self, output: Float[Tensor, "n query_heads dim"]) -> Float[Tensor, "heads_n group dim"]:
        """Where the attention's results go, in the order of the per_head."""
        tokens, heads, dim = self._tokens, self._heads, output.shape[-1]
        if self._in_order:
            return output[:tokens].view(tokens * heads, -1, dim)
        return output.new_empty(heads * tokens, output.shape[1] // heads, dim)

    def put_back(
        self, attended: Float[Tensor, "heads_n group dim"], output: Float[Tensor, "n query_heads dim"]
    ) -> None:
        """Results in the order of the queries."""
        if not self._in_order:
            tokens, heads = self._tokens, self._heads
            target = output[:tokens].view(tokens, heads, -1, output.shape[-1])
            target.copy_(attended.view(heads, tokens, -1, output.shape[-1]).transpose(0, 1))
