"""What is noted of a request goes with it from page to page, and with nobody else."""

from __future__ import annotations

import torch

from keepset.kernels.paged import follow_layouts
from keepset.kernels.paged_arguments import FiledLayouts
from keepset.paged.request_notes import RequestNote, RequestNotes
from keepset.paged.step import ScheduledRequest, StepBatch

SIZE = 4


def marked(notes: RequestNotes, *requests: tuple[list[int], int, int]) -> list[bool]:
    """Whether each request, of these pages and tokens before and after a step, is the one that is noted."""
    width = max(len(pages) for pages, _, _ in requests)
    table = torch.tensor([pages + [0] * (width - len(pages)) for pages, _, _ in requests])
    nobody = torch.zeros(len(requests), dtype=torch.int64)
    some = [ScheduledRequest(row, 0, 1, 9, before, after) for row, (_, before, after) in enumerate(requests)]
    batch = StepBatch(some, table, nobody, nobody, nobody, nobody, 1)
    return [request.after_context for request in notes.with_overrides(batch)]


def test_it_follows_its_request() -> None:
    notes = RequestNotes(SIZE)
    notes.file(7, RequestNote("a", 0, after_context=True))
    assert marked(notes, ([5], 0, 3), ([7, 8], 0, 6)) == [False, True]
    assert marked(notes, ([7, 8], 6, 8), ([5], 3, 4)) == [True, False]
    assert marked(notes, ([5, 9], 4, 5)) == [False]  # it rests
    assert marked(notes, ([7, 8, 2], 8, 9)) == [True]


def test_who_has_its_page_later_is_another() -> None:
    notes = RequestNotes(SIZE)
    notes.file(7, RequestNote("a", 8, after_context=True))
    assert marked(notes, ([3, 7], 5, 6)) == [False]  # its newest token is there
    assert marked(notes, ([3, 7, 1], 8, 9)) == [False]


def test_who_has_ended_is_forgotten() -> None:
    notes = RequestNotes(SIZE)
    notes.file(7, RequestNote("a", 8, after_context=True))
    notes.file(6, RequestNote("b", 8, after_context=True))
    notes.forget({"a"})
    assert marked(notes, ([3, 7, 1], 8, 9), ([4, 6, 2], 8, 9)) == [False, True]


def test_who_was_not_compressed_has_no_layout_of_anothers() -> None:
    """A page that a prompt ran over keeps what was filed there; who begins behind it as a prefix must not find that."""
    filed, rows = (FiledLayouts.empty(number, 1, 2, torch.device("cpu")) for number in (9, 2))
    filed.layout.counts[7], filed.tokens[7] = 3, 8
    table, lost = torch.tensor([[3, 7, 2], [3, 7, 4]]), torch.zeros(1, dtype=torch.int32)
    before = torch.tensor([8, 8])
    follow_layouts(filed, table, before, before + 1, torch.tensor([0, 1]), lost, SIZE, rows.layout)
    assert rows.layout.counts.tolist() == [[[0, 0]], [[3, 3]]] and not lost
