"""Which of a prompt's queries stand for those of what follows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keepset.core.feature import Chunk, Needs, QuerySource, Turn
from keepset.core.features.queries import ReferenceQueries
from keepset.kernels.softmax import Softmax


class _AsTheyAre(QuerySource):
    """Queries that do not rotate."""

    @property
    def hidden(self) -> Tensor:
        raise AssertionError("nobody looks at hidden states")

    def undo(self, queries: Tensor, positions: Tensor) -> Tensor:
        return queries

    def ahead(self, lengths: Tensor, future: int) -> Turn:
        return lambda rows: rows

    def queries(self, hidden: Tensor, lengths: Tensor, future: int) -> Tensor:
        raise AssertionError("nobody makes queries")


def _positions_asked(
    features: list[ReferenceQueries], numbers: tuple[int, int], lengths: list[int], chunks: list[int]
) -> list[list[int]]:
    """Return the positions of each request's reference queries, whose numbers are their positions; left padding."""
    collected, longest, first = ReferenceQueries.accumulator(list(Needs(*features))), max(lengths), 0
    for size in chunks:
        token_indices = torch.arange(first, first + size)
        positions = torch.stack([token_indices - (longest - length) for length in lengths])
        queries = positions.float()[:, None, :, None].expand(-1, 2, -1, 4)
        valid = None if len(set(lengths)) == 1 else positions >= 0
        start = first if valid is None else None
        source = _AsTheyAre()
        collected.add(Chunk(queries, list, positions, valid, Softmax(1.0), source=source, start=start))
        first += size
    (value,) = collected.values(torch.tensor(lengths), 0).values()
    return [rows[0, :, 0].int().tolist() for rows in value.at_most(*numbers).rows]


def _wanted(length: int, spread: int, newest: int) -> list[int]:
    stride = 1
    while len(range(0, length, stride)) > spread:
        stride *= 2
    return [*range(0, length, stride), *range(max(length - newest, 0), length)]


@pytest.mark.parametrize("lengths", [[1], [37], [64, 23], [5, 40, 1]])
@pytest.mark.parametrize(("spread", "newest"), [(1, 0), (8, 5), (64, 128), (16, 16)])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_some_at_equal_distances_and_the_newest(lengths: list[int], spread: int, newest: int, size: int) -> None:
    longest = max(lengths)
    chunks = [min(size, longest - first) for first in range(0, longest, size)]
    feature = ReferenceQueries(spread, newest)
    assert _positions_asked([feature], (spread, newest), lengths, chunks) == [
        _wanted(length, spread, newest) for length in lengths
    ]


@pytest.mark.parametrize("numbers", [(4, 9), (16, 2), (3, 0)])
def test_whoever_asks_for_fewer_gets_them(numbers: tuple[int, int]) -> None:
    features = [ReferenceQueries(*numbers), ReferenceQueries(16, 1), ReferenceQueries(2, 9)]
    found = _positions_asked(features, numbers, [50, 6], [20, 30])
    assert found == [_wanted(length, *numbers) for length in (50, 6)]
