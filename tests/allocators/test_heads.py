"""Allocators that divide or choose inside one layer: what their papers say in words, and events after others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keepset import METHODS, Budget, KeepsetError, Observation
from keepset.allocators.heads import AdaKV, ChunkKV, CriticalKV, Uniform
from keepset.allocators.layers import Pyramid
from keepset.core.features.runtime_features import OutputProjection
from keepset.core.method import Allocator, Method
from keepset.methods.keys import Knorm
from keepset.methods.window import SnapKV
from tests.methods.naive import DTYPES, EXACT, SHAPES, Given, Shape, every_shape, heads_of, length_of, observe
from tests.tiers import examples


def scored(*requests: list[list[float]], **parts: Tensor) -> Observation:
    """Requests whose entries have these scores."""
    lengths = tuple(len(request[0]) for request in requests)
    scores = torch.full((len(requests), len(requests[0]), max(lengths)), math.nan)
    for request, heads in enumerate(requests):
        scores[request, :, : lengths[request]] = torch.tensor(heads)
    return observe(Shape(lengths, len(requests[0]), 1, 1, 1), window=1, state={"scores": scores}, **parts)


# The others look across layers, or say themselves how much every head keeps.
SCORERS = [
    kind()
    for kind in METHODS.values()
    if not issubclass(kind, Allocator) and not kind().traits.across_layers and kind().traits.equal_layers
]


@pytest.mark.parametrize(
    ("allocator", "scorer", "heads"),
    [
        *(pytest.param(Uniform(scorer), scorer, 2, id=f"uniform({scorer.name})") for scorer in SCORERS),
        pytest.param(AdaKV(SnapKV(window=4), floor=1), SnapKV(window=4), 3, id="adakv of floor 1"),
        pytest.param(AdaKV(SnapKV(window=4)), SnapKV(window=4), 1, id="adakv of one head"),
        pytest.param(ChunkKV(Knorm(), chunk=1), Knorm(), 1, id="chunks of one entry"),
    ],
)
def test_is_the_scorer_itself(allocator: Method, scorer: Method, heads: int) -> None:
    if isinstance(allocator, Uniform):
        assert allocator.traits == replace(scorer.traits, needs_budget=True)
    observation = observe(Shape((33, 21), heads, 3, 5, 5))
    for budget in (Budget(9, sinks=1, recent=4), Budget(0.4), Budget(0.3, recent=4)):
        for request in range(2):
            alone = heads_of(scorer, observation, budget, request)
            assert heads_of(allocator, observation, budget, request) == alone


# --- AdaKV


def test_the_default_floor_is_a_fifth() -> None:
    scores = [[9.0 - t for t in range(10)], [-float(t) for t in range(10)], [-20.0 - t for t in range(10)]]
    # Of the 15 best the heads hold 10, 5 and 0; with the fifth of 5: 9, 5 and 1.
    assert heads_of(AdaKV(Given()), scored(scores), Budget(5)) == [list(range(9)), list(range(5)), [0]]


@pytest.mark.parametrize("score", [0.0, math.nan, math.inf, -math.inf])
def test_heads_with_equal_scores_get_equal_shares(score: float) -> None:
    assert heads_of(AdaKV(Given(), floor=0), scored([[score] * 10] * 3), Budget(4)) == [[6, 7, 8, 9]] * 3


def test_a_fraction_below_what_always_stays_keeps_that_in_every_head() -> None:
    scores = [[float(head * t) for t in range(10)] for head in range(3)]
    always = [0, *range(4, 10)]
    assert heads_of(AdaKV(Given(), floor=0), scored(scores), Budget(0.4, sinks=1, recent=6)) == [always] * 3


@examples(150, derandomize=False)
@given(
    entry_counts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    keep=st.integers(1, 30),
    percent=st.integers(0, 100),
    seed=st.integers(0, 99),
)
def test_heads_that_hold_little_do_not_shrink_the_layer(
    entry_counts: list[int], keep: int, percent: int, seed: int
) -> None:
    keys = torch.rand(1, len(entry_counts), max(entry_counts), 1, generator=torch.Generator().manual_seed(seed))
    valid = torch.arange(max(entry_counts)) < torch.tensor(entry_counts)[:, None]
    observation = Observation(keys=keys, values=keys, valid=valid[None])
    counts = AdaKV(Knorm(), floor=percent / 100).select(observation, Budget(keep)).counts[0, 0].tolist()
    assert all(count <= most for count, most in zip(counts, entry_counts, strict=True))
    assert sum(counts) == min(len(entry_counts) * keep, sum(entry_counts))
    if percent == 100 and keep <= min(entry_counts):
        assert counts == [keep] * len(entry_counts)


# --- ChunkKV


@pytest.mark.parametrize(
    ("chunk", "keep", "scores", "positions", "kept"),
    [
        # Chunks are of what is there after an earlier compression.
        (2, 4, [[1, 1, 1, 5, 0, 0.0]], [[0, 3, 4, 8, 9, 11]], [[0, 3, 4, 8]]),
        # Heads that hold different entries rank their own chunks.
        (2, 2, [[4.0, 4, 1, 1], [1, 1, 3, 3]], [[0, 1, 2, 3], [0, 2, 3, 5]], [[0, 1], [3, 5]]),
        (2, 2, [[4.0, 4, 1, 1], [1, 1, 3, 3]], [[0, 1, 2, 3]] * 2, [[0, 1], [0, 1]]),
        # A chunk with a score that is no number is the last.
        (3, 7, [[9.0, 9, 9, 1, 1, 1, 9, math.nan, 9]], [list(range(9))], [[0, 1, 2, 3, 4, 5, 8]]),
    ],
)
def test_chunks(
    chunk: int, keep: int, scores: list[list[float]], positions: list[list[int]], kept: list[list[int]]
) -> None:
    observation = scored(scores, positions=torch.tensor([positions]))
    assert heads_of(ChunkKV(Given(), chunk=chunk), observation, Budget(keep)) == kept


def test_chunks_inside_adakv_and_around_pyramid() -> None:
    observation = observe(Shape((24,), 3, 1, 4, 4), layer=2, layers=(0, 1, 2))
    inside = AdaKV(ChunkKV(Knorm(), chunk=4)).select(observation, Budget(9))
    assert inside.counts.sum() == 27 and inside.counts.unique().numel() > 1
    around = ChunkKV(Pyramid(Knorm()), chunk=4).select(observation, Budget(9))
    assert torch.equal(around.counts, Pyramid(Knorm()).select(observation, Budget(9)).counts)


# --- CriticalKV


def projected_norm(observation: Observation, request: int, query_head: int, entry: int, order: int) -> float:
    """The norm of one value times the projection's weights, number by number."""
    group = observation[OutputProjection()].shape[0] // observation.keys.shape[1]
    value = observation.values[request, query_head // group, entry].double().tolist()
    weights = observation[OutputProjection()][query_head].double().tolist()
    projected = [sum(v * row[out] for v, row in zip(value, weights, strict=True)) for out in range(len(weights[0]))]
    return sum(abs(number) ** order for number in projected) ** (1 / order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("block", [1, 2**18], ids=["entry_by_entry", "at_once"])
def test_projected_norms_match_the_naive_formula(
    dtype: torch.dtype, order: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepset.core.features.runtime_features.CACHE_BLOCK", block)
    for shape in SHAPES:
        observation = observe(shape, dtype=dtype)
        norms = OutputProjection().norms(observation, order)
        assert norms.dtype == torch.float32
        assert norms.shape == (shape.batch, shape.kv_heads * shape.group, shape.entries)
        for request in range(shape.batch):
            for head in range(norms.shape[1]):
                for entry in range(length_of(observation, request)):
                    expected = projected_norm(observation, request, head, entry, order)
                    assert norms[request, head, entry].item() == pytest.approx(expected, rel=EXACT["rtol"])


def two_stages(scores: Tensor, norms: list[float], count: int, alpha: float) -> list[int]:
    """Two stages over one head, rounded as float32 rounds: of equal entries the later."""
    weighed = ((scores - scores.clamp(max=0).min() + 1e-4) * torch.tensor(norms)).tolist()
    first, entries = math.floor(count * alpha + 1e-9), range(len(norms))
    best = sorted(entries, key=lambda entry: (scores[entry].item(), entry), reverse=True)[:first]
    compared = sorted(set(entries) - set(best), key=lambda entry: (weighed[entry], entry), reverse=True)
    return sorted(best + compared[: count - first])


@examples(80)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    heads=st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 8]), st.just(2), st.integers(1, 5)),
    data=st.data(),
    keep=st.integers(1, 16),
    quarters=st.integers(0, 4),
)
def test_matches_the_two_stages_written_out(
    lengths: list[int], heads: tuple[int, int, int, int], data: st.DataObject, keep: int, quarters: int
) -> None:
    shape = Shape(tuple(lengths), *heads)
    size, number = (
        (shape.batch, shape.kv_heads, shape.entries),
        st.integers(-2, 2).map(float) | st.floats(-1, 1, width=32),
    )
    scores = torch.tensor(data.draw(st.lists(number, min_size=math.prod(size), max_size=math.prod(size)))).view(size)
    observation = observe(shape, state={"scores": scores})
    # Values that are powers of two, one number each: products with the score are exact, and ties stay ties.
    powers = torch.randint(-1, 2, observation.values.shape[:3], generator=torch.Generator().manual_seed(keep))
    observation.values[..., :] = 0.0
    observation.values[..., 0] = 2.0**powers
    weights = observation[OutputProjection()].zero_()
    weights[:, 0, 1] = -1.0
    for request, length in enumerate(lengths):
        kept = heads_of(CriticalKV(Given(), alpha=quarters / 4), observation, Budget(keep), request)
        for head, found in enumerate(kept):
            norms = (2.0 ** powers[request, head, :length]).tolist()
            assert found == two_stages(scores[request, head, :length], norms, min(keep, length), quarters / 4)


@every_shape
@pytest.mark.parametrize("dtype", DTYPES)
def test_snapkv_in_two_stages(shape: Shape, dtype: torch.dtype) -> None:
    observation, scorer, keep, group = observe(shape, dtype=dtype), SnapKV(window=3, kernel=3), 7, shape.group
    scores = scorer.score(observation)
    for request, length in enumerate(shape.lengths):
        for head, found in enumerate(heads_of(CriticalKV(scorer), observation, Budget(keep), request)):
            norms = [
                sum(projected_norm(observation, request, head * group + member, entry, 1) for member in range(group))
                / group
                for entry in range(length)
            ]
            assert found == two_stages(scores[request, head, :length], norms, min(keep, length), 0.5)


def test_a_stage_of_its_own() -> None:
    """Among ten entries of about equal score those of large values are the second half; alpha 1 changes nothing."""
    observation = observe(Shape((10,), 1, 2, 3, 3), state={"scores": torch.arange(10.0)[None, None] * 1e-6})
    observation.values[0, 0] = 0.001
    observation.values[0, 0, [1, 3]] = 5.0
    for alpha, budget, kept in (
        (0.5, Budget(4), [1, 3, 8, 9]),
        (1, Budget(4), [6, 7, 8, 9]),
        (0, Budget(2), [1, 3]),
        (0.5, Budget(4, sinks=1, recent=1), [0, 1, 3, 9]),  # what always stays counts towards the first stage
    ):
        assert heads_of(CriticalKV(Given(), alpha=alpha), observation, budget) == [kept]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_overflowed_come_last_or_first_and_change_no_count(bad: float) -> None:
    observation = observe(Shape((12,), 2, 2, 3, 3), state={"scores": torch.ones(1, 2, 12)})
    observation.values[0, :, 5] = bad
    for kept in heads_of(CriticalKV(Given(), alpha=0), observation, Budget(11)):
        assert len(kept) == 11 and 5 not in kept


def test_adakv_around_criticalkv_divides_by_the_scores_alone() -> None:
    observation, scorer, budget = observe(Shape((33, 21), 3, 2, 5, 5)), SnapKV(window=4), Budget(8, recent=4)
    plain, critical = (AdaKV(inner).select(observation, budget) for inner in (scorer, CriticalKV(scorer)))
    assert torch.equal(critical.counts, plain.counts)
    assert len(set(plain.counts.flatten().tolist())) > 1
    assert not torch.equal(critical.layer(0).packed_positions, plain.layer(0).packed_positions)


def test_criticalkv_says_what_it_needs() -> None:
    observation = Observation(keys=torch.ones(1, 1, 4, 2), values=torch.ones(1, 1, 4, 2))
    with pytest.raises(KeepsetError, match=r"give Observation\(features=\{OutputProjection\(\): \.\.\.\}\)"):
        CriticalKV(Knorm()).select(observation, Budget(2))
    assert CriticalKV(SnapKV()).traits.needs.names() == ["window of 64 queries", "output projection"]
