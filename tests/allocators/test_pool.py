"""One budget for several parts, against the same in loops."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget
from keepset.allocators.layers import padded, pooled_counts, total_entries
from tests.methods.naive import Shape, observe
from tests.tiers import examples


def naive_counts(values: list[list[float]], total: int, least: list[int]) -> list[int]:
    """The least of every part, then the best of the rest; of equal ones the earlier place, then the later part."""
    order = [
        sorted(
            (place for place, value in enumerate(part) if value != -math.inf),
            key=lambda place: (part[place], place),
            reverse=True,
        )
        for part in values
    ]
    certain = [(part, place) for part, places in enumerate(order) for place in places[: least[part]]]
    others = [(part, place) for part, places in enumerate(order) for place in places[least[part] :]]

    def best(entries: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return sorted(entries, key=lambda entry: (values[entry[0]][entry[1]], -entry[1], entry[0]), reverse=True)

    chosen = (certain + best(others))[: max(total, 0)] if total >= len(certain) else []
    return [sum(part == mine for part, _ in chosen) for mine in range(len(values))]


@examples(80)
@given(data=st.data(), parts=st.integers(1, 4), places=st.integers(1, 9), double=st.booleans())
def test_the_best_of_all_parts_are_counted(data: st.DataObject, parts: int, places: int, double: bool) -> None:
    number = st.sampled_from([-math.inf, -3e38, -1.0, 0.0, 0.5, 0.5, 1.0, 2.0, 3e38]) | st.floats(-5, 5, width=32)
    values = data.draw(st.lists(st.lists(number, min_size=places, max_size=places), min_size=parts, max_size=parts))
    existing = [sum(value != -math.inf for value in part) for part in values]
    least = [data.draw(st.integers(0, count)) for count in existing]
    total = data.draw(st.integers(sum(least), places * parts + 2))
    tensor = torch.tensor([values], dtype=torch.float64 if double else torch.float32)
    counts = pooled_counts(tensor, torch.tensor([total]), torch.tensor([least]))[0].tolist()
    assert counts == naive_counts(values, total, least)
    assert sum(counts) == min(total, sum(existing))


@examples(80)
@given(data=st.data(), parts=st.integers(1, 4), places=st.integers(1, 9))
def test_where_the_least_is_too_much_the_best_of_it_stay(data: st.DataObject, parts: int, places: int) -> None:
    values = torch.tensor(
        [[[data.draw(st.integers(-3, 3)) / 2 for _ in range(places)] for _ in range(parts)]], dtype=torch.float32
    )
    least = torch.full((1, parts), data.draw(st.integers(1, places)))
    total = data.draw(st.integers(0, int(least.sum())))
    counts = pooled_counts(values, torch.tensor([total]), least)
    assert int(counts.sum()) == total and bool((counts <= least).all())


def test_requests_are_counted_by_themselves() -> None:
    values = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    total, least = torch.tensor([5, 2, 16]), torch.tensor([[1, 0], [0, 1], [2, 2]])
    together = pooled_counts(values, total, least)
    for request in range(3):
        row = slice(request, request + 1)
        assert torch.equal(pooled_counts(values[row], total[row], least[row]), together[row])


@examples(80)
@given(
    keep=st.integers(1, 30) | st.integers(1, 100).map(lambda percent: percent / 100) | st.none(),
    held=st.lists(st.lists(st.integers(1, 24), min_size=2, max_size=2), min_size=1, max_size=4),
    heads=st.integers(1, 3),
)
def test_all_heads_of_all_layers_share_one_number(keep: int | float | None, held: list[list[int]], heads: int) -> None:
    observations = [
        observe(Shape(tuple(counts), heads, 2, 3, 3), layer=layer, layers=range(len(held)))
        for layer, counts in enumerate(held)
    ]
    totals = total_entries(observations, Budget(keep)).tolist()
    for request, total in enumerate(totals):
        existing = heads * sum(counts[request] for counts in held)
        if keep is None:
            assert total == existing
        elif isinstance(keep, float):
            assert total == max(1, existing * round(keep * 100) // 100)
        else:
            assert total == min(keep * heads * len(held), existing)


def test_rankings_of_layers_are_padded_with_nothing() -> None:
    short, long = torch.zeros(1, 2, 3), torch.ones(1, 2, 5)
    first, second = padded([short, long])
    assert torch.equal(first[..., :3], short) and first[..., 3:].isneginf().all() and torch.equal(second, long)
