"""IoU between events, against sets, and its means over depth."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given

from keepset import KeepsetError
from keepset.bench.analysis.diagnostics import by_depth, retained_iou
from tests.bench.analysis.events import Event, histories, same
from tests.tiers import examples


@examples(60, derandomize=False)
@given(events=histories())
def test_iou_is_over_positions_that_existed_before(events: list[Event]) -> None:
    for earlier, later in pairwise(events):
        expected = [
            [
                [len(a & b) / len(a | b) if a | b else 1.0 for a, b in zip(heads, cut(others, length), strict=True)]
                for heads, others, length in zip(requests, nexts, earlier.lengths, strict=True)
            ]
            for requests, nexts in zip(earlier.sets, later.sets, strict=True)
        ]
        same(retained_iou(earlier.snapshot, later.snapshot), torch.tensor(expected, dtype=torch.float64))


def cut(sets: list[set[int]], length: int) -> list[set[int]]:
    return [{t for t in kept if t < length} for kept in sets]


def test_new_tokens_are_no_change() -> None:
    earlier, later = Event([[[{0, 2, 3}]]], [4]), Event([[[{0, 2, 5, 7}]]], [8])
    assert retained_iou(earlier.snapshot, later.snapshot).item() == pytest.approx(2 / 3)


def test_a_longer_row_does_not_lend_its_positions() -> None:
    # The second request had two tokens at the earlier event; its third is new, though the first request had three.
    earlier, later = Event([[[{0, 1}], [{0}]]], [3, 2]), Event([[[{0, 1}], [{0, 2}]]], [3, 3])
    assert retained_iou(earlier.snapshot, later.snapshot).flatten().tolist() == [1, 1]


def test_refusals() -> None:
    one, two, wide = Event([[[{0}]]], [1]), Event([[[{0}]]], [2]), Event([[[{0}, {0}]]], [2])
    with pytest.raises(KeepsetError, match="shorter than the earlier one's"):
        retained_iou(two.snapshot, one.snapshot)
    with pytest.raises(KeepsetError, match="same layers, requests and KV heads"):
        retained_iou(one.snapshot, wide.snapshot)


@pytest.mark.parametrize(
    ("layers", "early", "late"), [(1, 0, 0), (2, 1, 1), (3, 1, 1), (4, 1, 1), (5, 1, 1), (28, 8, 8), (30, 9, 9)]
)
def test_depth(layers: int, early: int, late: int) -> None:
    values = torch.rand(layers, 2, 3, generator=torch.Generator().manual_seed(layers))
    numbers = values.flatten(1).double().mean(-1).tolist()
    parts = {
        "early": numbers[:early],
        "middle": numbers[early : layers - late],
        "late": numbers[layers - late :],
    }
    expected = {name: math.fsum(part) / len(part) for name, part in parts.items() if part}
    assert by_depth(values) == pytest.approx(expected, rel=1e-5)
