"""Selection is a total order: masks, roundings and ranks against sorts."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, Observation
from keepset.core.select import _best_by_order, _best_by_value, ranked_scores, round_to_total, top_mask
from tests.observations import changed
from tests.tiers import examples

NAN, INF = math.nan, math.inf


def observation(entries: int, **parts: torch.Tensor) -> Observation:
    return Observation(keys=torch.zeros(1, 1, entries, 1), values=torch.zeros(1, 1, entries, 1), **parts)


def best_first(scores: list[float], budget: Budget, **parts: torch.Tensor) -> list[int]:
    """Return all entries of one head in the order in which selection takes them."""
    ranked = ranked_scores(torch.tensor([[scores]]), observation(len(scores), **parts), budget)
    taken: list[int] = []
    for quota in range(1, len(scores) + 1):
        mask = top_mask(ranked, torch.tensor([[quota]]))[0, 0].tolist()
        taken += [entry for entry, chosen in enumerate(mask) if chosen and entry not in taken]
        assert len(taken) == sum(mask) == quota
    return taken


number = st.integers(-2, 2).map(float) | st.floats(allow_nan=False, width=32)


@examples(150, derandomize=False)
@given(data=st.data(), rows=st.integers(1, 4), entries=st.integers(1, 8))
def test_top_mask_is_a_sort_in_which_later_entries_win_ties(data: st.DataObject, rows: int, entries: int) -> None:
    """On a CPU and as elsewhere."""
    scores = [data.draw(st.lists(number, min_size=entries, max_size=entries)) for _ in range(rows)]
    quotas = [data.draw(st.integers(0, entries + 1)) for _ in range(rows)]
    masks = [best(torch.tensor(scores), torch.tensor(quotas)) for best in (_best_by_value, _best_by_order)]
    assert torch.equal(*masks)
    for row, quota, chosen in zip(scores, quotas, masks[0].tolist(), strict=True):
        order = sorted(range(entries), key=lambda entry: (row[entry], entry), reverse=True)
        assert {entry for entry, kept in enumerate(chosen) if kept} == set(order[:quota])


@examples(150, derandomize=False)
@given(weights=st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any), total=st.integers(0, 500))
def test_round_to_total_sums_exactly_and_stays_next_to_the_shares(weights: list[int], total: int) -> None:
    shares = [weight * total / sum(weights) for weight in weights]
    rounded = round_to_total(torch.tensor(shares, dtype=torch.float64), torch.tensor(total)).tolist()
    assert sum(rounded) == total
    assert all(abs(whole - share) < 1 + 1e-9 for whole, share in zip(rounded, shares, strict=True))
    up = [share - math.floor(share) for whole, share in zip(rounded, shares, strict=True) if whole > share]
    down = [share - math.floor(share) for whole, share in zip(rounded, shares, strict=True) if whole <= share]
    assert min(up, default=1) >= max((part for part in down if part < 1 - 1e-9), default=0)


def test_round_to_total_raises_the_earlier_of_equal_remainders() -> None:
    shares = torch.tensor([[1.5, 2.5, 0.5, 0.5], [0.25, 0.75, 1.0, 1.0]])
    assert round_to_total(shares, torch.tensor([5, 3])).tolist() == [[2, 3, 0, 0], [0, 1, 1, 1]]


PROTECTS = Budget(sinks=1, recent=2, protect=[[3, 5], [6, 8]])


@pytest.mark.parametrize(
    ("scores", "budget", "parts", "order"),
    [
        ([0, NAN, 5, -INF, INF, NAN, -3, 9, 1, 2.0], Budget(sinks=2, recent=2), {}, [0, 1, 9, 8, 4, 7, 2, 6, 3, 5]),
        ([NAN, 1, -INF, 0, INF, 7], Budget(sinks=1, recent=1), dict(valid=[1, 1, 1, 1, 0, 0]), [0, 3, 1, 2]),
        ([1.0] * 8, Budget(sinks=4, recent=3), {}, [0, 1, 2, 3, 7, 6, 5, 4]),
        ([0.0] * 4, Budget(sinks=4, recent=4), {}, [0, 1, 2, 3]),
        ([0.0] * 9, PROTECTS, {}, [0, 3, 4, 6, 7, 8, 5, 2, 1]),
        ([0, 5, 1, 2, 0, 0.0], Budget(sinks=2, recent=3), dict(positions=[1, 3, 6, 7, 10, 11]), [0, 5, 4, 1, 3, 2]),
    ],
    ids=["all ranks", "holes last", "first and newest", "suffix over sinks", "ranges", "told by position"],
)
def test_order(scores: list[float], budget: Budget, parts: dict[str, Any], order: list[int]) -> None:
    tensors = {name: torch.tensor([[part]]) for name, part in parts.items()}
    tensors |= {name: part.bool() for name, part in tensors.items() if name == "valid"}
    assert best_first(scores, budget, **tensors)[: len(order)] == order


def test_a_protected_prompt_is_above_the_suffix_the_first_token_first() -> None:
    shown = changed(observation(9), prompts=torch.tensor([5]))
    ranked = ranked_scores(torch.arange(9.0).expand(1, 1, 9), shown, Budget(7, 1, 2, protect_prompt=True))[0, 0]
    assert ranked.argsort(descending=True).tolist()[:5] == [0, 1, 2, 3, 4]
    assert ranked[4] > ranked[7] == ranked[8] > ranked[6] > ranked[5]


@pytest.mark.parametrize("sinks", [1, 1000])
def test_sinks_are_above_the_suffix(sinks: int) -> None:
    ranked = ranked_scores(torch.zeros(1, 1, 1002), observation(1002), Budget(sinks=sinks, recent=1))[0, 0]
    assert ranked[:sinks].min() > ranked[-1] > ranked[sinks]
    assert ranked[:sinks].unique().numel() == sinks


def test_half_precision_scores_keep_their_order() -> None:
    scores = torch.tensor([[[3e38, -3e38, 1.0, 0.0]]], dtype=torch.bfloat16)
    ranked = ranked_scores(scores, observation(4), Budget())
    assert ranked.dtype == torch.float32 and ranked[0, 0].argsort(descending=True).tolist() == [0, 2, 3, 1]
