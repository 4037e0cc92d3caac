"""What is known of single requests besides what an engine schedules, in each process that computes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.step import ScheduledRequest, StepBatch


@dataclass
class RequestNote:
    """One request's.

    Attributes:
        name: the engine's name of it.
        tokens: that it has had.
        after_context: whether it began with a context.
        own: when it is compressed, where that is not the group's.
        prompt: tokens that count as its prompt, where the engine says otherwise.
    """

    name: str
    tokens: int
    after_context: bool = False
    own: EvictionSchedule | None = None
    prompt: int | None = None


class RequestNotes:
    """Of one group of layers, filed under the page that holds a request's newest token, or is to hold its first.

    No other request writes there. Who comes to write there later, and who ended, is forgotten.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._notes: dict[int, RequestNote] = {}

    def file(self, page: int, note: RequestNote) -> None:
        """The request that has this page goes on as the note says."""
        self._notes[page] = note

    def forget(self, names: Collection[str]) -> None:
        """These requests have ended, or start again."""
        if self._notes and names:
            self._notes = {page: note for page, note in self._notes.items() if note.name not in names}

    def with_overrides(self, batch: StepBatch) -> Sequence[ScheduledRequest]:
        """The step's requests, with what is noted of them; and where they will be after it."""
        if not self._notes:
            return batch.requests
        size = self._block_size
        columns = [[max(tokens - 1, 0) // size for tokens in (each.before, each.after)] for each in batch.requests]
        rows = batch.tensor([request.row for request in batch.requests])
        pages = batch.block_table[rows[:, None], batch.tensor(columns)].tolist()
        requests = []
        for request, (old, new) in zip(batch.requests, pages, strict=True):
            note = self._notes.pop(old, None)
            self._notes.pop(new, None)
            if note is None or note.tokens != request.before:
                requests.append(request)
                continue
            note.tokens = request.after
            self._notes[new] = note
            prompt = request.prompt if note.prompt is None else note.prompt
            requests.append(replace(request, prompt=prompt, after_context=note.after_context, own=note.own))
        return requests
