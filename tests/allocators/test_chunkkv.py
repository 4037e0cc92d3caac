"""ChunkKV against lists: chunks best first, the last one filled with its best."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, KeepsetError, Recipe
from keepset.allocators.adakv import AdaKV
from keepset.allocators.chunkkv import ChunkKV
from keepset.allocators.pyramid import Pyramid
from keepset.methods.knorm import Knorm
from tests.methods.naive import Given, Shape, kept, length_of, observe
from tests.tiers import examples


def naive(heads: list[list[float]], head: int, chunk: int, keep: int, sinks: int, recent: int) -> list[int]:
    """Entries of one head, of which none was dropped before; all heads together say which chunk is the better."""
    scores, length = heads[head], len(heads[head])
    first = [entry for entry in range(length) if entry < sinks]
    newest = [entry for entry in reversed(range(length)) if entry >= length - recent and entry not in first]
    always = first + newest
    if keep <= len(always):
        return sorted(always[:keep])
    chosen = list(always)
    chunks = []
    for start in range(0, length, chunk):
        rest = [entry for entry in range(start, min(start + chunk, length)) if entry not in always]
        if rest:
            mean = sum(sum(scores[entry] for entry in rest) for scores in heads) / len(heads)
            chunks.append((mean / len(rest), start, rest))
    for _, _, rest in sorted(chunks, reverse=True):
        best = sorted(rest, key=lambda entry: (scores[entry], entry), reverse=True)
        chosen += best[: keep - len(chosen)]
    return sorted(chosen)


@examples(150, derandomize=False)
@given(data=st.data(), chunk=st.integers(1, 9), sinks=st.integers(0, 5), recent=st.integers(0, 5))
def test_whole_chunks_stay_the_best_first(data: st.DataObject, chunk: int, sinks: int, recent: int) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))
    shape = Shape(lengths, data.draw(st.sampled_from([1, 3])), 1, 1, 1)
    keep = data.draw(st.integers(max(1, sinks + recent), 32) | st.floats(0.05, 1.0))
    # Few different whole numbers: many ties, and means that no rounding touches.
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    size = (shape.batch, shape.kv_heads, shape.entries)
    scores = torch.randint(0, data.draw(st.sampled_from([1, 4, 1000])), size, generator=draw).float()
    observation = observe(shape, state={"scores": scores})
    budget = Budget(keep, sinks, recent)
    keep_set = ChunkKV(Given(), chunk=chunk).select(observation, budget)
    for request, head in [(r, h) for r in range(shape.batch) for h in range(shape.kv_heads)]:
        length = length_of(observation, request)
        number = int(budget.quotas(observation.sizes)[request, head])
        expected = naive(scores[request, :, :length].tolist(), head, chunk, number, sinks, recent)
        assert len(expected) == number
        assert kept(keep_set, observation, request, head) == expected


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
