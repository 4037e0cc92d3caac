"""GVote against its algorithm 1, number by number, and its samples against their distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keepset import Budget, Observation, Recipe
from keepset.core.features.moments import HiddenDistribution, HiddenMoments
from keepset.kernels.softmax import Softmax
from keepset.methods.gvote import GVote, nucleus
from keepset.methods.positions import normal, stream
from tests.methods.naive import (
    HIDDEN,
    Rope,
    Shape,
    attention_of,
    check_scores,
    dot,
    every_shape,
    heads_of,
    length_of,
    observe,
    projection,
    window_attention,
)
from tests.tiers import examples

FUTURE = 3
NO_BUDGET = Budget()


class Sampled(GVote):
    """GVote whose normal numbers are another generator's."""

    name = "sampled"

    def hidden_states(self, observation: Observation) -> Tensor:
        moments, rows = observation[HiddenMoments(self.skip)], range(len(observation.keys))
        return torch.tensor([drawn(moments, row, self.samples) for row in rows], dtype=torch.float32)


def drawn(moments: HiddenDistribution, request: int, samples: int) -> list[list[float]]:
    """Hidden states of one request, number by number."""
    noise = torch.randn(samples, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64).tolist()
    mean, variance = moments.mean[request].tolist(), moments.variance[request].tolist()
    return [[m + math.sqrt(v) * z for m, v, z in zip(mean, variance, row, strict=True)] for row in noise]


def needed(attention: Sequence[float], mass: float) -> int:
    """Size of the smallest set of best entries that holds so much attention."""
    total, count = 0.0, 0
    for share in sorted(attention, reverse=True):
        total, count = total + share, count + 1
        if total >= mass:
            break
    return count


def sampled_logits(observation: Observation, request: int, query_head: int, method: GVote) -> list[list[float]]:
    """Lines 5 to 8 of Algorithm 1: for every sample its logits over the request's entries."""
    weights, length = projection(observation)[:, query_head].double(), length_of(observation, request)
    rope = Rope((int(observation.lengths[request]),))
    head = query_head // (observation.queries.shape[1] // observation.keys.shape[1])  # type: ignore[union-attr]
    keys = observation.keys[request, head, :length].double().tolist()
    rows = []
    for hidden in drawn(observation[HiddenMoments(method.skip)], request, method.samples):
        plain = [dot(hidden, weights[:, channel].tolist()) for channel in range(weights.shape[1])]
        query = rope(torch.tensor(plain, dtype=torch.float64)[None, None, None], method.future).flatten().tolist()
        rows.append([dot(query, key) * observation.scaling for key in keys])
    return rows


def algorithm_1(
    observation: Observation, request: int, head: int, method: GVote
) -> tuple[list[int], list[int], list[float]]:
    """Entries in the union, the votes of every entry, and its mean attention."""
    group = observation.queries.shape[1] // observation.keys.shape[1]  # type: ignore[union-attr]
    length = length_of(observation, request)
    union, votes, attention = set(), [0] * length, [0.0] * length
    for query_head in range(head * group, head * group + group):
        (newest,) = window_attention(observation, request, query_head, 1)
        step = needed([share / sum(newest) for share in newest], method.p_nuc)  # what a sink takes is no entry's
        for products in sampled_logits(observation, request, query_head, method):
            best = sorted(range(length), key=lambda entry: (products[entry], entry), reverse=True)[:step]
            union |= set(best)
            for entry in best:
                votes[entry] += 1
            for entry, share in enumerate(attention_of(products, observation, query_head)):
                attention[entry] += share / (group * method.samples)
    return sorted(union), votes, attention


@every_shape
@pytest.mark.parametrize(("p_nuc", "samples"), [(0.0, 5), (0.5, 1), (0.95, 8), (0.8, 4)])
def test_is_algorithm_1(shape: Shape, p_nuc: float, samples: int) -> None:
    """The last case is after an earlier compression, with another scaling, a soft cap and sinks."""
    positions = 2 * torch.arange(shape.entries).expand(shape.batch, shape.kv_heads, -1) + 1
    capped = Softmax(0.9, 3.0, torch.linspace(-1.0, 2.0, shape.kv_heads * shape.group))
    later: dict[str, Any] = dict(positions=positions, softmax=capped, window=1) if p_nuc == 0.8 else {}
    observation, method = observe(shape, skips=(0,), **later), Sampled(p_nuc, samples, FUTURE, skip=0)
    scores = []
    for request in range(shape.batch):
        scores.append([])
        for head, found in enumerate(heads_of(method, observation, NO_BUDGET, request)):
            union, votes, attention = algorithm_1(observation, request, head, method)
            assert found == observation.positions[request, head][union].tolist()
            scores[-1].append([vote + share for vote, share in zip(votes, attention, strict=True)])
    check_scores(method, observation, scores, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_close_to_algorithm_1() -> None:
    """Near ties fall either way, so what differs must have logits that bfloat16 hardly tells apart."""
    observation = observe(Shape((40, 23), 2, 3, 7, 5), dtype=torch.bfloat16)
    method, differing, total = Sampled(0.9, 4, FUTURE), 0, 0
    for request in range(2):
        for head, found in enumerate(heads_of(method, observation, NO_BUDGET, request)):
            union = algorithm_1(observation, request, head, method)[0]
            differing, total = differing + len(set(union) ^ set(found)), total + len(union)
    assert differing <= 0.05 * total


def test_blocks_of_samples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    observation, method = observe(Shape((29, 22), 2, 3, 7, 11)), GVote(samples=7)
    whole = method.score(observation)
    for block in (1, 2 * 6 * 29, 5 * 6 * 29):
        monkeypatch.setattr("keepset.methods.gvote._BLOCK", block)
        torch.testing.assert_close(method.score(observation), whole)


# --- line 2: the nucleus


@examples(200)
@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=12), sixteenths=st.integers(0, 16))
def test_the_nucleus_is_the_smallest_set_that_reaches_its_mass(weights: list[int], sixteenths: int) -> None:
    """Weights are whole numbers that sum to a power of two, so that no rounding decides. All attention keeps all."""
    weights = [*weights, 2**7 - sum(weights)]
    attention = torch.tensor(weights) / 2**7
    count, mass = int(nucleus(attention, sixteenths / 16)), sixteenths * 8
    best = sorted(weights, reverse=True)
    assert sum(best[:count]) >= mass
    assert count == len(weights) if sixteenths == 16 else count == 1 or sum(best[: count - 1]) < mass


def test_a_prompt_without_statistics_stays_whole() -> None:
    observation = observe(Shape((4, 5, 1, 40), 2, 2, 4, 4))
    counts = GVote(p_nuc=0.1, samples=1).select(observation, NO_BUDGET).counts[0]
    assert counts[[0, 2]].tolist() == [[4, 4], [1, 1]]
    assert counts[1].max() < 5 and counts[3].max() < 40


# --- line 5: the samples


def test_samples_have_the_asked_mean_and_variance() -> None:
    count = 4096
    mean, variance = torch.tensor([[2.0, -1.0, 0.0, 5.0]]), torch.tensor([[4.0, 0.25, 1.0, 0.0]])
    observation = observe(
        Shape((9,), 1, 1, 2, 2),
        features={HiddenMoments(4): HiddenDistribution(mean, variance, lambda hidden, _: hidden)},
    )
    (hidden,) = GVote(samples=count).hidden_states(observation).double()
    # Five standard errors of a mean, of a variance and of a correlation.
    off = 5 / math.sqrt(count)
    assert ((hidden.mean(0) - mean[0]).abs() <= off * variance[0].sqrt()).all()
    assert ((hidden.var(0) - variance[0]).abs() <= off * math.sqrt(2) * variance[0]).all()
    assert hidden[:, :3].T.corrcoef().triu(1).abs().max() <= off


def test_noise_is_normal_and_streams_are_not_related() -> None:
    noise = torch.stack([normal(stream(7, layer, torch.arange(40)), 500) for layer in range(5)]).double()
    count, normally = noise.numel(), torch.distributions.Normal(0.0, 1.0)
    for value in (-2.5, -1.0, -0.1, 0.0, 0.3, 1.7, 3.0):
        share = float(normally.cdf(torch.tensor(value)))
        assert abs(float((noise <= value).double().mean()) - share) < 5 * math.sqrt(share * (1 - share) / count)
    rows = noise.flatten(0, 1)
    assert len(rows.unique()) > 0.99 * count
    correlation = rows.corrcoef()
    assert correlation.triu(1).abs().max() < 6 / math.sqrt(500)
    assert rows.T[:-1].flatten().dot(rows.T[1:].flatten()).abs() / count < 5 / math.sqrt(count)


def test_a_seed_repeats_and_seeds_and_layers_differ() -> None:
    def states(seed: int, layer: int) -> Tensor:
        return GVote(seed=seed).hidden_states(observe(Shape((9,), 1, 1, 2, 2), layer=layer, layers=(0, 1)))

    assert torch.equal(states(1, 0), states(1, 0))
    assert not torch.isclose(states(1, 0), states(2, 0)).any()
    assert not torch.isclose(states(1, 0), states(1, 1)).any()
    fewer = GVote(samples=3, seed=1).hidden_states(observe(Shape((9,), 1, 1, 2, 2), layers=(0, 1)))
    assert torch.equal(fewer, states(1, 0)[:, :3])


# --- ties, numbers that overflowed, caps


def test_of_equal_logits_the_later_wins() -> None:
    observation = observe(Shape((10,), 2, 2, 4, 4), keys=torch.zeros(1, 2, 10, 4))
    assert heads_of(GVote(p_nuc=0.35), observation, NO_BUDGET) == [[6, 7, 8, 9]] * 2


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_heads_whose_newest_query_overflowed_stay_whole(poison: float) -> None:
    observation, method = observe(Shape((20, 13), 2, 2, 4, 4)), GVote(p_nuc=0.3, samples=2)
    before = [heads_of(method, observation, NO_BUDGET, request) for request in range(2)]
    observation.queries[0, 1, -1] = poison  # type: ignore[index]
    after = [heads_of(method, observation, NO_BUDGET, request) for request in range(2)]
    assert after[0][0] == list(range(20)) != before[0][0]
    assert (after[0][1], after[1]) == (before[0][1], before[1])


def test_keys_that_overflowed_go_to_the_samples_that_look_their_way() -> None:
    observation, method = observe(Shape((20,), 2, 2, 4, 4)), GVote(p_nuc=0.3, samples=2)
    observation.queries[0, :, -1, 0] = -1  # type: ignore[index]
    observation.keys[0, :, 7, 0] = math.inf  # The newest query does not see it at all.
    scores = method.score(observation)
    assert scores.isfinite().all()
    towards = (method.queries(observation)[0, ..., 0] > 0).view(2, 4).sum(1)
    assert scores[0, :, 7].floor().tolist() == towards.tolist() and towards.unique().numel() == 2


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    heads=st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 8])),
    keep=st.integers(1, 30) | st.integers(1, 100).map(lambda percent: percent / 100),
    always=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 1000),
)
def test_a_cap_leaves_the_best_of_the_union(
    lengths: list[int], heads: tuple[int, int], keep: int | float, always: tuple[int, int], seed: int
) -> None:
    observation = observe(Shape(tuple(lengths), *heads, 3, 2), seed=seed)
    method, (sinks, recent) = GVote(p_nuc=0.5, samples=3, future=FUTURE, seed=seed), always
    if isinstance(keep, int):
        keep = max(keep, sinks + recent, 1)
    budgets = Budget(None, sinks, recent), NO_BUDGET, Budget(keep, sinks, recent)
    scores = method.score(observation)
    for request, length in enumerate(lengths):
        first, last = set(range(min(sinks, length))), set(range(max(length - recent, 0), length))
        least = min(max(1, sinks + recent), length)
        cap = min(keep, length) if isinstance(keep, int) else max(least, length * round(keep * 100) // 100)
        sets = [heads_of(method, observation, budget, request) for budget in budgets]
        for row, free, plain, found in zip(scores[request].tolist(), *sets, strict=True):
            assert set(free) == set(plain) | first | last and len(found) == min(cap, len(free))
            rank = {e: (e in first, -e if e in first else 0, e in last, row[e], e) for e in free}
            if len(first | last) <= cap:
                assert found == sorted(sorted(free, key=rank.__getitem__, reverse=True)[:cap])


def test_needs_no_budget() -> None:
    recipe = Recipe.parse("gvote()")
    assert recipe.require_budget() is recipe and recipe == Recipe.of(GVote()) and str(recipe) == "gvote"
    assert (recipe.budget.sinks, recipe.budget.recent) == (0, 0)
    assert not recipe.method.traits.equal_heads and not recipe.method.traits.fixed_total
