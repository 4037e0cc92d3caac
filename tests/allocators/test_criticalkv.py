from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keepset import Budget, KeepsetError, Observation
from keepset.allocators.adakv import AdaKV
from keepset.allocators.ams import AMS
from keepset.allocators.chunkkv import ChunkKV
from keepset.allocators.criticalkv import CriticalKV
from keepset.core.features.runtime_features import OutputProjection
from keepset.methods.knorm import Knorm
from keepset.methods.snapkv import SnapKV
from tests.methods.naive import DTYPES, EXACT, SHAPES, Given, Shape, kept, length_of, observe
from tests.tiers import examples


def projected_norm(observation: Observation, request: int, query_head: int, entry: int, order: int) -> float:
    """The norm of one value times the projection's weights, number by number."""
    group = observation[OutputProjection()].shape[0] // observation.keys.shape[1]
    value = observation.values[request, query_head // group, entry].double().tolist()
    weights = observation[OutputProjection()][query_head].double().tolist()
    made = [sum(v * row[out] for v, row in zip(value, weights, strict=True)) for out in range(len(weights[0]))]
    return sum(abs(number) ** order for number in made) ** (1 / order)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("block", [1, 2**18], ids=["entry_by_entry", "at_once"])
def test_projected_norms_match_the_naive_formula(
    shape: Shape, dtype: torch.dtype, order: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepset.core.features.runtime_features.CACHE_BLOCK", block)
    observation = observe(shape, dtype=dtype)
    norms = OutputProjection().norms(observation, order)
    assert norms.dtype == torch.float32
    assert norms.shape == (shape.batch, shape.kv_heads * shape.group, shape.entries)
    for request in range(shape.batch):
        for head in range(norms.shape[1]):
            for entry in range(length_of(observation, request)):
                expected = projected_norm(observation, request, head, entry, order)
                assert norms[request, head, entry].item() == pytest.approx(expected, rel=EXACT["rtol"])


def naive(scores: list[float], norms: list[float], count: int, alpha: float) -> list[int]:
    """Two stages over one head: of equal entries the later."""
    lowest = min(0.0, *scores)
    first = math.floor(count * alpha + 1e-9)
    entries = range(len(scores))
    best = sorted(entries, key=lambda entry: (scores[entry], entry), reverse=True)[:first]
    rest = [entry for entry in entries if entry not in best]
    rest.sort(key=lambda entry: ((scores[entry] - lowest + 1e-4) * norms[entry], entry), reverse=True)
    return sorted(best + rest[: count - first])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Tensor, int, int]:
    lengths = tuple(draw(st.lists(st.integers(1, 14), min_size=1, max_size=3)))
    shape = Shape(lengths, draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8])), 2, draw(st.integers(1, 5)))
    score = st.integers(-2, 2).map(float) | st.floats(-1, 1, width=32)
    count = shape.batch * shape.kv_heads * shape.entries
    scores = draw(st.lists(score, min_size=count, max_size=count))
    table = torch.tensor(scores).view(shape.batch, shape.kv_heads, shape.entries)
    return shape, table, draw(st.integers(1, 16)), draw(st.integers(0, 4))


@examples(80)
@given(case=cases())
def test_matches_the_two_stages_written_out(case: tuple[Shape, Tensor, int, int]) -> None:
    shape, scores, keep, quarters = case
    observation = observe(shape, state={"scores": scores})
    # Values that are powers of two, one number each: products with the score are exact, and ties stay ties.
    powers = torch.randint(-1, 2, observation.values.shape[:3], generator=torch.Generator().manual_seed(keep))
    observation.values[..., :] = 0.0
    observation.values[..., 0] = 2.0**powers
    weights = observation[OutputProjection()].zero_()
    weights[:, 0, 1] = -1.0
    keep_set = CriticalKV(Given(), alpha=quarters / 4).select(observation, Budget(keep))
    for request, length in enumerate(shape.lengths):
        for head in range(shape.kv_heads):
            norms = (2.0 ** powers[request, head, :length]).tolist()
            numbers = scores[request, head, :length]
            lowest = numbers.clamp(max=0).min()
            # As the code rounds: in float32.
            weighed = ((numbers - lowest + 1e-4) * torch.tensor(norms)).tolist()
            first = math.floor(min(keep, length) * quarters / 4)
            entries = range(length)
            best = sorted(entries, key=lambda e: (numbers[e].item(), e), reverse=True)[:first]
            rest = sorted((e for e in entries if e not in best), key=lambda e: (weighed[e], e), reverse=True)
            assert kept(keep_set, observation, request, head) == sorted(best + rest[: min(keep, length) - first])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_snapkv_in_two_stages(shape: Shape, dtype: torch.dtype) -> None:
    observation = observe(shape, dtype=dtype)
    scorer, keep = SnapKV(window=3, kernel=3), 7
    scores = scorer.score(observation)
    keep_set = CriticalKV(scorer).select(observation, Budget(keep))
    group = shape.group
    for request, length in enumerate(shape.lengths):
        for head in range(shape.kv_heads):
            norms = [
                sum(projected_norm(observation, request, head * group + one, entry, 1) for one in range(group)) / group
                for entry in range(length)
            ]
            expected = naive(scores[request, head, :length].tolist(), norms, min(keep, length), 0.5)
            assert kept(keep_set, observation, request, head) == expected


def test_a_stage_of_its_own() -> None:
    """Among ten entries of about equal score those of large values are the second half; alpha 1 changes nothing."""
    observation = observe(Shape((10,), 1, 2, 3, 3), state={"scores": torch.arange(10.0)[None, None] * 1e-6})
    observation.values[0, 0] = 0.001
    observation.values[0, 0, [1, 3]] = 5.0
    assert kept(CriticalKV(Given()).select(observation, Budget(4)), observation, 0, 0) == [1, 3, 8, 9]
    assert kept(CriticalKV(Given(), alpha=1).select(observation, Budget(4)), observation, 0, 0) == [6, 7, 8, 9]
    assert kept(CriticalKV(Given(), alpha=0).select(observation, Budget(2)), observation, 0, 0) == [1, 3]
    # What always stays counts towards the first stage.
    always = Budget(4, sinks=1, recent=1)
    assert kept(CriticalKV(Given()).select(observation, always), observation, 0, 0) == [0, 1, 3, 9]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_overflowed_come_last_or_first_and_change_no_count(bad: float) -> None:
    observation = observe(Shape((12,), 2, 2, 3, 3), state={"scores": torch.ones(1, 2, 12)})
    observation.values[0, :, 5] = bad
    keep_set = CriticalKV(Given(), alpha=0).select(observation, Budget(11))
    assert keep_set.counts.flatten().tolist() == [11, 11]
    assert all(5 not in kept(keep_set, observation, 0, head) for head in range(2))


def test_adakv_around_it_divides_by_the_scores_alone() -> None:
    observation = observe(Shape((33, 21), 3, 2, 5, 5))
    scorer, budget = SnapKV(window=4), Budget(8, recent=4)
    plain = AdaKV(scorer).select(observation, budget)
    critical = AdaKV(CriticalKV(scorer)).select(observation, budget)
    assert torch.equal(critical.counts, plain.counts)
    assert len(set(plain.counts.flatten().tolist())) > 1
    assert not torch.equal(critical.layer(0).packed_positions, plain.layer(0).packed_positions)


def test_refuses_to_choose_for_one_that_chooses() -> None:
    for inner in (AdaKV(Knorm()), ChunkKV(Knorm())):
        with pytest.raises(KeepsetError, match="and so does"):
            CriticalKV(inner)
    for outer in (ChunkKV, AMS):
        with pytest.raises(KeepsetError, match="criticalkv"):
            outer(CriticalKV(Knorm()))


def test_says_what_it_needs() -> None:
    observation = Observation(keys=torch.ones(1, 1, 4, 2), values=torch.ones(1, 1, 4, 2))
    with pytest.raises(KeepsetError, match=r"give Observation\(features=\{OutputProjection\(\): \.\.\.\}\)"):
        CriticalKV(Knorm()).select(observation, Budget(2))
    assert CriticalKV(SnapKV()).traits.needs.names() == ["window of 64 queries", "output projection"]
