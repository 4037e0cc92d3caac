from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, Observation
from keepset.allocators.adakv import AdaKV
from keepset.methods.knorm import Knorm
from keepset.methods.snapkv import SnapKV
from tests.allocators.formulas import heads_of
from tests.methods.naive import Given, Shape, observe
from tests.tiers import examples


def observed(*requests: list[list[float]]) -> Observation:
    """Requests whose entries have these scores."""
    lengths = tuple(len(request[0]) for request in requests)
    scores = torch.full((len(requests), len(requests[0]), max(lengths)), math.nan)
    for request, heads in enumerate(requests):
        scores[request, :, : lengths[request]] = torch.tensor(heads)
    shape = Shape(lengths, len(requests[0]), 1, 1, 1)
    return observe(shape, state={"scores": scores})


def test_the_default_floor_is_a_fifth() -> None:
    scores = [[9.0 - t for t in range(10)], [-float(t) for t in range(10)], [-20.0 - t for t in range(10)]]
    assert AdaKV(Given()).floor == 0.2
    # Of the 15 best the heads hold 10, 5 and 0; with the fifth of 5: 9, 5 and 1.
    assert heads_of(AdaKV(Given()), observed(scores), Budget(5)) == [list(range(9)), list(range(5)), [0]]


def test_a_floor_of_one_is_uniform() -> None:
    observation = observe(Shape((33, 21), 3, 2, 5, 5))
    scorer = SnapKV(window=4)
    for budget in (Budget(8, recent=4), Budget(0.3, recent=4)):
        for request in range(2):
            adaptive = heads_of(AdaKV(scorer, floor=1), observation, budget, request)
            assert adaptive == heads_of(scorer, observation, budget, request)


def test_one_kv_head_is_uniform() -> None:
    observation = observe(Shape((33, 21), 1, 6, 5, 5))
    for request in range(2):
        adaptive = heads_of(AdaKV(SnapKV(window=4)), observation, Budget(8, recent=4), request)
        assert adaptive == heads_of(SnapKV(window=4), observation, Budget(8, recent=4), request)


@pytest.mark.parametrize("score", [0.0, math.nan, math.inf, -math.inf])
def test_heads_with_equal_scores_get_equal_shares(score: float) -> None:
    scores = [[score] * 10 for _ in range(3)]
    assert heads_of(AdaKV(Given(), floor=0), observed(scores), Budget(4)) == [[6, 7, 8, 9]] * 3


def test_a_fraction_below_what_always_stays_keeps_that_in_every_head() -> None:
    scores = [[float(head * t) for t in range(10)] for head in range(3)]
    always = [0, *range(4, 10)]
    assert heads_of(AdaKV(Given(), floor=0), observed(scores), Budget(0.4, sinks=1, recent=6)) == [always] * 3


@examples(150, derandomize=False)
@given(
    held=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    keep=st.integers(1, 30),
    percent=st.integers(0, 100),
    seed=st.integers(0, 99),
)
def test_heads_that_hold_little_do_not_shrink_the_layer(held: list[int], keep: int, percent: int, seed: int) -> None:
    most, heads = max(held), len(held)
    valid = torch.arange(most) < torch.tensor(held)[:, None]
    keys = torch.rand(1, heads, most, 2, generator=torch.Generator().manual_seed(seed))
    observation = Observation(keys=keys, values=keys, valid=valid[None])
    counts = AdaKV(Knorm(), floor=percent / 100).select(observation, Budget(keep)).counts[0, 0].tolist()
    assert all(count <= there for count, there in zip(counts, held, strict=True))
    assert sum(counts) == min(heads * keep, sum(held))
    if percent == 100 and keep <= min(held):
        assert counts == [keep] * heads


@examples(25, derandomize=False)
@given(every=st.sampled_from([1, 3]), seed=st.integers(0, 99), floor=st.sampled_from([0.0, 0.2]))
def test_a_layer_keeps_its_budget_event_after_event(every: int, seed: int, floor: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    held = [list(torch.rand(40, generator=draw).tolist()) for _ in range(3)]
    held[0] = [0.2 * number for number in held[0]]  # It draws little: knorm keeps small keys.
    held[1] = [5.0 + number for number in held[1]]
    for _ in range(8):
        most = max(map(len, held))
        valid = torch.tensor([[True] * len(head) + [False] * (most - len(head)) for head in held])
        norms = torch.tensor([head + [0.0] * (most - len(head)) for head in held])
        observation = Observation(keys=norms[None, ..., None], values=norms[None, ..., None], valid=valid[None])
        kept = AdaKV(Knorm(), floor=floor).select(observation, Budget(12))
        assert int(kept.counts.sum()) == 36
        held = [[head[i] for i in kept.positions(0, 0, h).tolist()] for h, head in enumerate(held)]
        for head, scale in zip(held, (0.2, 5.0, 1.0), strict=True):
            head += [scale * number for number in torch.rand(every, generator=draw).tolist()]
