"""Wipe-out, middle retention and bursts, against sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keepset import KeepsetError
from keepset.bench.analysis.diagnostics import gone, longest_run, middle_retention, wipeout_rate
from tests.bench.analysis.events import Event, histories, same
from tests.tiers import examples


@examples(60, derandomize=False)
@given(events=histories(), region=st.sampled_from([1, 2, 5, 16, 100]))
def test_wipeout_counts_regions_of_which_nothing_is_left(events: list[Event], region: int) -> None:
    def naive(kept: set[int], length: int) -> float:
        regions = [set(range(at, min(at + region, length))) for at in range(0, length, region)]
        return sum(not part & kept for part in regions) / len(regions)

    for event in events:
        same(wipeout_rate(event.snapshot, region), event.each(naive))


def test_wipeout_by_hand() -> None:
    event = Event([[[{0, 1, 33}, {15, 16, 32}, set()]]], [34])
    assert wipeout_rate(event.snapshot)[0, 0].tolist() == pytest.approx([1 / 3, 0, 1])


@pytest.mark.parametrize("region", [0, -1])
def test_a_region_has_tokens(region: int) -> None:
    with pytest.raises(KeepsetError, match=f"region={region} is not a number of tokens"):
        wipeout_rate(Event([[[{0}]]], [1]).snapshot, region)


@examples(60, derandomize=False)
@given(events=histories())
def test_middle_retention_is_the_share_of_the_middle_third(events: list[Event]) -> None:
    def naive(kept: set[int], length: int) -> float:
        middle = [t for t in range(length) if length // 3 <= t < length - length // 3]
        return sum(t in kept for t in middle) / len(middle)

    for event in events:
        same(middle_retention(event.snapshot), event.each(naive))


def test_the_middle_of_ten_tokens() -> None:
    event = Event([[[{0, 1, 2, 7, 8, 9}, {3, 4, 5, 6}, {3, 9}]]], [10])
    assert middle_retention(event.snapshot)[0, 0].tolist() == [0, 1, 0.25]


def true_at(flags: Tensor) -> list[list[list[set[int]]]]:
    return [[[set(row.nonzero()[:, 0].tolist()) for row in heads] for heads in b] for b in flags]


@examples(60, derandomize=False)
@given(events=histories())
def test_gone_is_what_was_there_and_is_not_now(events: list[Event]) -> None:
    for event in events:
        all_gone = true_at(gone(event.snapshot))
        for layer, requests in enumerate(event.sets):
            for request, heads in enumerate(requests):
                length = event.lengths[request]
                for head, kept in enumerate(heads):
                    assert all_gone[layer][request][head] == set(range(length)) - kept


@examples(60, derandomize=False)
@given(rows=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4))
def test_longest_run(rows: list[list[bool]]) -> None:
    def naive(row: list[bool]) -> int:
        return max(len(run) for run in "".join("x" if flag else " " for flag in row).split(" "))

    assert longest_run(torch.tensor(rows)).tolist() == [naive(row) for row in rows]


def test_no_positions_no_run() -> None:
    assert longest_run(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]
