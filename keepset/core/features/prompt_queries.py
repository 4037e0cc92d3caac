"""`PromptQueryAttention`: what entries would receive of the prompt's own queries, right after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from keepset.core.accumulator import Accumulator, Chunk, widened
from keepset.core.feature import Feature
from keepset.core.features.attention_columns import PROMPT_ATTENTION
from keepset.kernels.mean_square import mean_square_attention


class _Asked(Accumulator):
    def __init__(self, features: Sequence[PromptQueryAttention]) -> None:
        self._queries: dict[PromptQueryAttention, list[list[Tensor]]] = {feature: [] for feature in features}
        self._newest: Chunk

    def add(self, chunk: Chunk) -> None:
        assert chunk.source is not None
        self._newest, rows = chunk, chunk.source.undo(chunk.queries, chunk.positions)
        queries = {}
        for feature, parts in self._queries.items():
            # By position, so that neither chunks nor padding change who is asked; the first token always is.
            chosen = chunk.counted(0) & (chunk.positions % feature.stride == 0)
            queries[feature] = [*parts, [row[:, own] for row, own in zip(rows, chosen, strict=True)]]
        self._queries = queries

    def joined(self, others: Sequence[_Asked]) -> _Asked:
        raise NotImplementedError  # only paged runtimes join requests

    def values(self, lengths: Int[Tensor, " batch"], width: int) -> Mapping[Feature[Any], Any]:
        newest = self._newest
        assert newest.source is not None
        turn, entries = newest.source.ahead(lengths, 1), newest.entries()
        values: dict[Feature[Any], Any] = {}
        for feature, parts in self._queries.items():
            asked = [torch.cat(list(rows), 1).transpose(0, 1) for rows in zip(*parts, strict=True)]
            turned = turn(pad_sequence(asked, batch_first=True).transpose(1, 2))
            columns = [
                mean_square_attention(rows[:, : len(own)], keys, newest.scaling)
                for rows, own, (keys, _) in zip(turned, asked, entries, strict=True)
            ]
            values[feature] = widened(columns, width)
        return values


@dataclass(frozen=True)
class PromptQueryAttention(Feature[Float[Tensor, "batch query_heads entries"]]):
    """The mean square of what each entry would receive if the prompt's queries came once more, right after it.

    All see all entries. Its value is `[batch, query_heads, entries]`.

    Attributes:
        stride: of how many tokens one is asked.
    """

    label = "the prompt's queries once more"
    unrotated = True
    accumulator = _Asked
    prompt_only = PROMPT_ATTENTION
    transformers_only = "asks the prompt's queries once more, which was not tried under {engine} yet"

    stride: int
