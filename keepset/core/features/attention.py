"""Attention that entries receive from the prompt, from its queries moved behind it, and from a second pass over it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from keepset.core.feature import Accumulator, Chunk, Feature, widened
from keepset.kernels.columns import ColumnStatistic, attention_columns, mean_square_attention

_PROMPT_ATTENTION = "looks at the attention of the whole prompt, which only exists at the prompt's end"
"""Why these features do not exist at later events."""


class _Columns(Accumulator):
    def __init__(self, features: Sequence[AttentionColumns]) -> None:
        self._features = features
        self._requests: list[dict[str, Float[Tensor, "query_heads entries"]]] = []

    def add(self, chunk: Chunk) -> None:
        entries = chunk.entries()
        names = [feature.statistic for feature in self._features]
        requests = []
        for request, (keys, real) in enumerate(entries):
            queries, lse = chunk.queries[request][:, real], None if chunk.lse is None else chunk.lse[request]
            columns = attention_columns(queries, keys, softmax=chunk.softmax, names=names, lse=lse)
            for name, before in self._requests[request].items() if self._requests else ():
                longer = F.pad(before, (0, keys.shape[1] - before.shape[1]))
                columns[name] = ColumnStatistic(name).merge(columns[name], longer)
            requests.append(columns)
        self._requests = requests

    def merged_with(self, following: Sequence[_Columns]) -> _Columns:
        copied = copy.copy(self)
        copied._requests = [columns for part in (self, *following) for columns in part._requests]
        return copied

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Feature[Any], Any]:
        return {
            feature: widened([columns[feature.statistic] for columns in self._requests], width)
            for feature in self._features
        }


@dataclass(frozen=True)
class AttentionColumns(Feature[Float[Tensor, "batch query_heads entries"]]):
    """A statistic of each column of the prompt's causal attention. It is streamed; no attention matrix exists.

    Its value is `[batch, query_heads, entries]`.

    Attributes:
        statistic: the sum or the maximum.
    """

    log_sum_exp = True
    accumulator = _Columns
    prompt_only = _PROMPT_ATTENTION

    statistic: ColumnStatistic

    @property
    def name(self) -> str:
        return f"column {self.statistic}"


class _PromptQueries(Accumulator):
    def __init__(self, features: Sequence[PromptQueryAttention]) -> None:
        (self._feature,) = features  # each stride is computed separately
        self._queries: list[list[Tensor]] = []
        self._newest: Chunk
        self._others: Sequence[_PromptQueries] = ()

    def add(self, chunk: Chunk) -> None:
        assert chunk.source is not None
        self._newest, rows = chunk, chunk.source.undo(chunk.queries, chunk.positions)
        # By position, so that neither chunks nor padding change which queries count; the first token's always does.
        strided = [row[:, chunk.every(self._feature.stride, request)] for request, row in enumerate(rows)]
        self._queries = [*self._queries, strided]

    def merged_with(self, following: Sequence[_PromptQueries]) -> _PromptQueries:
        copied = copy.copy(self)
        copied._others = following
        return copied

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Feature[Any], Any]:
        parts = zip((self, *self._others), lengths.tensor_split(1 + len(self._others)), strict=True)
        return {
            self._feature: widened(
                [column for part, part_queries in parts for column in part._columns(part_queries)], width
            )
        }

    def _columns(self, lengths: Int[Tensor, " batch"]) -> list[Tensor]:
        """Return the columns of each request."""
        newest = self._newest
        assert newest.source is not None
        turn, entries = newest.source.ahead(lengths, 1), newest.entries()
        queries = [torch.cat(list(rows), 1).transpose(0, 1) for rows in zip(*self._queries, strict=True)]
        turned = turn(pad_sequence(queries, batch_first=True).transpose(1, 2))
        return [
            mean_square_attention(rows[:, : len(row_queries)], keys, newest.softmax)
            for rows, row_queries, (keys, _) in zip(turned, queries, entries, strict=True)
        ]


@dataclass(frozen=True)
class PromptQueryAttention(Feature[Float[Tensor, "batch query_heads entries"]]):
    """The mean square of what each entry would receive if the prompt's queries came once more, right after it.

    Each query sees all entries. Its value is `[batch, query_heads, entries]`.

    Attributes:
        stride: every `stride`-th query counts.
    """

    name = "the prompt's queries once more"
    unrotated = True
    accumulator = _PromptQueries
    prompt_only = _PROMPT_ATTENTION

    stride: int

    @property
    def cost(self) -> PromptQueryAttention:
        """The feature itself: each stride is computed separately."""
        return self


@dataclass(frozen=True, eq=False)
class SecondPassColumns:
    """Attention that every entry of the prompt received in a second pass.

    Attributes:
        statistics: by name, one number for each query head and entry; zero where an entry received nothing.
        tokens: how many tokens attended to the entries.
        opening: how many of the first entries were left out, as the chat template's opening; None if none were.
    """

    statistics: Mapping[ColumnStatistic, Float[Tensor, "batch query_heads entries"]]
    tokens: Int[Tensor, " batch"]
    opening: Int[Tensor, " batch"] | None = None


@dataclass(frozen=True)
class SecondPass(Feature[SecondPassColumns]):
    """Tokens that run once more after the prompt's whole cache, for the attention that they pay to it.

    They are the task's tokens if the cache was given some, else the prompt's own. Their entries are dropped.

    Attributes:
        statistics: statistics of the columns of that attention.
        chunk: how many tokens of the prompt run together. They see the whole prompt and one another, but no other
            chunk. 0: all tokens run together.
        repeat: whether each chunk follows words that ask to repeat it. Its softmax then covers only the chunk, these
            words, the prompt's first few entries and the chunk's entries in the prompt (KVzip).
    """

    name = "a second pass"
    prompt_only = _PROMPT_ATTENTION
    transformers_only = (
        "has tokens look at the prompt a second time, for which {engine} has no step: take another recipe, or compress "
        "texts beforehand with keepset context build"
    )

    statistics: frozenset[ColumnStatistic]
    chunk: int = 0
    repeat: bool = False

    @property
    def cost(self) -> SecondPass:
        """The pass without its statistics: passes that differ only in these run once."""
        return replace(self, statistics=frozenset())
