"""The division of a budget among layers, and what holds for every allocator that divides it."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, KeepsetError, Recipe
from keepset.allocators.adakv import AdaKV
from keepset.allocators.criticalkv import CriticalKV
from keepset.allocators.dynamic import Dynamic
from keepset.allocators.layers import LayerAllocator, divide
from keepset.allocators.pyramid import Pyramid
from keepset.allocators.uniform import Uniform
from keepset.allocators.zigzag import ZigZag
from keepset.methods.snapkv import SnapKV
from tests.methods.naive import Given, Shape, kept, observe
from tests.tiers import examples

KINDS = [ZigZag, Dynamic]


def level(shares: list[int], total: int, room: list[int]) -> list[Fraction]:
    """Divide in proportion to shares; a full part leaves the rest to the others, round after round."""
    given = [Fraction(0)] * len(shares)
    open_ = {part for part, share in enumerate(shares) if share and room[part]}
    left = Fraction(min(total, sum(room[part] for part in open_)))
    while open_ and left:
        pace = left / sum(shares[part] for part in open_)
        full = {part for part in open_ if shares[part] * pace >= room[part]}
        for part in full or open_:
            given[part] = Fraction(room[part]) if full else shares[part] * pace
        left = left - sum(room[part] for part in full) if full else Fraction(0)
        open_ -= full
    return given


@examples(60)
@given(data=st.data(), parts=st.integers(1, 7), total=st.integers(0, 90))
def test_divides_in_proportion_and_never_beyond_the_room(data: st.DataObject, parts: int, total: int) -> None:
    shares = data.draw(st.lists(st.integers(1, 12), min_size=parts, max_size=parts))
    room = data.draw(st.lists(st.integers(0, 20), min_size=parts, max_size=parts))
    counts = divide(torch.tensor([shares]).double(), torch.tensor([total]), torch.tensor([room]))[0].tolist()
    assert sum(counts) == min(total, sum(room))
    assert all(0 <= count <= most for count, most in zip(counts, room, strict=True))
    # Rounded to a neighbour; 1e-6 for a share that is never quite zero.
    for count, ideal in zip(counts, level(shares, total, room), strict=True):
        assert abs(count - ideal) < 1 + Fraction(1, 10**6)


def test_no_share_at_all_is_an_equal_share() -> None:
    shares = torch.tensor([[0.0, 0.0, 0.0], [0.0, 5.0, 0.0], [1.0, 1.0, 2.0]])
    total, room = torch.tensor([6, 9, 8]), torch.tensor([[9, 9, 9], [4, 5, 4], [9, 9, 3]])
    assert divide(shares, total, room).tolist() == [[2, 2, 2], [2, 5, 2], [3, 2, 3]]


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(data=st.data(), seed=st.integers(0, 99), keep=st.integers(1, 40))
def test_layers_that_hold_different_numbers_share_what_there_is(
    kind: type[LayerAllocator], data: st.DataObject, seed: int, keep: int
) -> None:
    """At an event after others the other layers keep what one is too short for."""
    held = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=5))
    length = 30
    observations = [
        observe(
            Shape((count,), 2, 2, 3, 3),
            layer=layer,
            layers=range(len(held)),
            seed=seed + layer,
            positions=torch.arange(length - count, length).expand(1, 2, count),
            state={"scores": torch.randn(1, 2, count, generator=torch.Generator().manual_seed(seed + layer))},
        )
        for layer, count in enumerate(held)
    ]
    counts = kind(Given()).select_all(observations, Budget(keep, recent=min(keep, 3))).counts[:, 0]
    assert torch.equal(counts[:, 0], counts[:, 1])
    assert int(counts[:, 0].sum()) == min(keep * len(held), sum(held))
    assert all(1 <= count <= most for count, most in zip(counts[:, 0].tolist(), held, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_is_the_scorer_alone(kind: type[LayerAllocator]) -> None:
    observation = observe(Shape((40, 19), 2, 3, 4, 4), layer=5, layers=[5])
    for budget in (Budget(11, recent=4), Budget(0.5, recent=4)):
        alone = SnapKV(window=4).select(observation, budget)
        mine = kind(SnapKV(window=4)).select(observation, budget)
        for request in range(2):
            for head in range(2):
                assert kept(mine, observation, request, head) == kept(alone, observation, request, head)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_inside_chooses_in_each_layer(kind: type[LayerAllocator]) -> None:
    observations = [observe(Shape((40, 19), 2, 2, 4, 4), seed=i, layer=i, layers=range(4)) for i in range(4)]
    budget, scorer = Budget(9, recent=3), SnapKV(window=3)
    counts = kind(scorer).select_all(observations, budget).counts
    for inner in (AdaKV(scorer), CriticalKV(scorer), AdaKV(CriticalKV(scorer))):
        keep_set = kind(inner).select_all(observations, budget)
        assert torch.equal(keep_set.counts.sum(-1), counts.sum(-1))
        for observation in observations:
            for request in range(2):
                number = int(counts[observation.layer, request, 0])
                alike = inner.select(observation, Budget(number, budget.sinks, min(budget.recent, number)))
                for head in range(2):
                    expected = kept(alike, observation, request, head)
                    assert kept(keep_set, observation, request, head) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_who_else_divides_among_layers_is_refused(kind: type[LayerAllocator]) -> None:
    for inner in (Pyramid(SnapKV()), AdaKV(Pyramid(SnapKV())), ZigZag(SnapKV()), Dynamic(SnapKV())):
        with pytest.raises(KeepsetError, match="says how much every layer keeps, and so does"):
            kind(inner)
    for outer in (Uniform, AdaKV, CriticalKV):
        with pytest.raises(
            KeepsetError, match=rf"put {outer.name} inside, as in {kind.name}\({outer.name}\(snapkv\)\)"
        ):
            outer(kind(SnapKV()))
    text = f"{kind.name}(adakv(snapkv(window=8)), keep=0.25)"
    assert str(Recipe.parse(text)) == text
