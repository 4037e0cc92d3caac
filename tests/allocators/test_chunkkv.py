"""ChunkKV: what its paper says in words."""

from __future__ import annotations

import pytest
import torch

from keepset import Budget, KeepsetError, Recipe
from keepset.allocators.adakv import AdaKV
from keepset.allocators.chunkkv import ChunkKV
from keepset.allocators.pyramid import Pyramid
from keepset.methods.knorm import Knorm
from tests.methods.naive import Given, Shape, kept, observe


def test_chunks_are_of_what_is_there_after_an_earlier_compression() -> None:
    positions = torch.tensor([[[0, 3, 4, 8, 9, 11]]])
    scores = torch.tensor([[[1.0, 1, 1, 5, 0, 0]]])
    observation = observe(Shape((6,), 1, 1, 1, 1), positions=positions, window=1, state={"scores": scores})
    assert kept(ChunkKV(Given(), chunk=2).select(observation, Budget(4)), observation, 0, 0) == [0, 3, 4, 8]


def test_heads_that_hold_different_entries_rank_their_own_chunks() -> None:
    positions = torch.tensor([[[0, 1, 2, 3], [0, 2, 3, 5]]])
    scores = torch.tensor([[[4.0, 4, 1, 1], [1, 1, 3, 3]]])
    observation = observe(Shape((4,), 2, 1, 1, 1), positions=positions, window=1, state={"scores": scores})
    keep_set = ChunkKV(Given(), chunk=2).select(observation, Budget(2))
    assert [kept(keep_set, observation, 0, head) for head in range(2)] == [[0, 1], [3, 5]]
    alike = observe(Shape((4,), 2, 1, 1, 1), state={"scores": scores})
    keep_set = ChunkKV(Given(), chunk=2).select(alike, Budget(2))
    assert [kept(keep_set, alike, 0, head) for head in range(2)] == [[0, 1], [0, 1]]


def test_chunks_of_one_entry_are_the_scorer_itself() -> None:
    observation = observe(Shape((23, 9), 1, 1, 5, 5))
    budget = Budget(8, sinks=2, recent=3)
    alone, chunks = Knorm().select(observation, budget), ChunkKV(Knorm(), chunk=1).select(observation, budget)
    for request in range(2):
        assert kept(chunks, observation, request, 0) == kept(alone, observation, request, 0)


def test_a_chunk_with_a_score_that_is_no_number_is_the_last() -> None:
    scores = torch.tensor([[[9.0, 9, 9, 1, 1, 1, 9, torch.nan, 9]]])
    observation = observe(Shape((9,), 1, 1, 1, 1), state={"scores": scores})
    assert kept(ChunkKV(Given(), chunk=3).select(observation, Budget(7)), observation, 0, 0) == [0, 1, 2, 3, 4, 5, 8]


def test_inside_adakv_and_around_pyramid() -> None:
    observation = observe(Shape((24,), 3, 1, 4, 4), layer=2, layers=(0, 1, 2))
    inside = AdaKV(ChunkKV(Knorm(), chunk=4)).select(observation, Budget(9))
    assert inside.counts.sum() == 27 and inside.counts.unique().numel() > 1
    around = ChunkKV(Pyramid(Knorm()), chunk=4).select(observation, Budget(9))
    assert torch.equal(around.counts, Pyramid(Knorm()).select(observation, Budget(9)).counts)


@pytest.mark.parametrize("text", ["chunkkv(adakv(knorm), keep=9)", "chunkkv(uniform(chunkkv(knorm)), keep=9)"])
def test_two_that_choose_are_refused(text: str) -> None:
    with pytest.raises(KeepsetError, match="chooses the entries of every head itself"):
        Recipe.parse(text)
