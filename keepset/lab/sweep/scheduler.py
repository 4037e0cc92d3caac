"""`Scheduler`: decodes the answers of several jobs at once, as many as memory holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from transformers import PreTrainedModel

from keepset.errors import KeepsetError
from keepset.hf.batch import can_go_together
from keepset.lab.generation import Stream, step
from keepset.lab.memory import MemoryBudget, is_out_of_memory, watch_peak

MOST = 32
"""The most answers that are decoded at once."""
Streams = Generator[Stream, None, None]


class Answering(Protocol):
    """A job with one answer or more.

    Attributes:
        tokens: the most tokens whose entries its cache holds at any time.
        peak_bytes: the most bytes that the device had allocated in a call for it; None if that is not measured.
    """

    tokens: int
    peak_bytes: int | None

    def streams(self) -> Streams:
        """Yield the answers. Each is decoded to its end before the next is requested."""


Job = TypeVar("Job", bound=Answering)
Done = Iterator[tuple[Job, Exception | None]]
"""Finished jobs, each with an error if memory was not enough for it alone."""


@dataclass(eq=False)
class _Going(Generic[Job]):
    """A job that has begun, and its answer that is being decoded."""

    job: Job
    streams: Streams
    stream: Stream


class Scheduler(Generic[Job]):
    """Decodes several answers at once; when one ends another begins (continuous batching: Yu and others 2022, Orca).

    A job is taken from the iterator when there may be room for it, and begins when there is. If memory is still not
    enough, the failed jobs start over later, and from then on half as many run at once.

    Args:
        model: the model.
        room: decides whether memory has room for another cache.
        jobs: the jobs.
        most: the most answers that are decoded at once.
    """

    def __init__(self, model: PreTrainedModel, room: MemoryBudget, jobs: Iterator[Job], most: int = MOST) -> None:
        self._model, self._room, self._jobs = model, room, jobs
        self._most = most if can_go_together(model) else 1
        self._waiting: deque[Job] = deque()
        self._going: list[_Going[Job]] = []

    def run(self) -> Done[Job]:
        """Yield each finished job."""
        try:
            while True:
                while (job := self._next()) is not None:
                    yield from self._resume(job, job.streams())
                if not self._going:
                    return
                yield from self._step()
        finally:
            for current in self._going:
                current.streams.close()

    def _next(self) -> Job | None:
        """Return the next job if it may begin now."""
        if len(self._going) >= self._most:
            return None
        job = self._waiting.popleft() if self._waiting else next(self._jobs, None)
        growing = [(current.stream.cache, current.job.tokens) for current in self._going]
        if job is not None and not self._room.takes(job.tokens, growing):
            self._waiting.appendleft(job)
            return None
        return job

    def _resume(self, job: Job, streams: Streams, spoiled: KeepsetError | None = None) -> Done[Job]:
        """Advance a job to its next answer, or yield it if it is done; `spoiled` is its last answer's error."""
        peak = watch_peak(self._model.device)
        try:
            stream = next(streams) if spoiled is None else streams.throw(spoiled)
        except StopIteration:
            stream = None
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            yield from self._again([job], error, len(self._going) + 1)
            return
        _note(job, peak())
        if stream is None:
            yield job, None
        else:
            self._room.learn(stream.cache)
            self._going.append(_Going(job, streams, stream))

    def _step(self) -> Done[Job]:
        """Decode one more token of every current answer."""
        stepped, peak = list(self._going), watch_peak(self._model.device)
        step(self._model, [current.stream for current in stepped])
        called = [current for current in stepped if not current.stream.over]
        failed = [current for current in called if current.stream.error is not None]
        for current in stepped:
            _note(current.job, peak())
            error = current.stream.error
            if error is not None and not isinstance(error, KeepsetError) and not is_out_of_memory(error):
                raise error
        again = []
        for current in stepped:
            error = current.stream.error
            if current.stream.over:
                self._going.remove(current)
                yield from self._resume(current.job, current.streams)
            elif isinstance(error, KeepsetError) and (len(called) == 1 or len(failed) < len(called)):
                self._going.remove(current)
                yield from self._resume(current.job, current.streams, error)
            elif error is not None:  # the call's and not the answer's own, or memory was not enough
                self._going.remove(current)
                current.streams.close()
                again.append(current.job)
        if again:
            failure = failed[0].stream.error
            assert failure is not None
            yield from self._again(again, failure, len(called))

    def _again(self, jobs: list[Job], error: Exception, parallel: int) -> Done[Job]:
        """Restart failed jobs, of which `parallel` ran at once, later; or yield a single one with its error."""
        if parallel == 1:
            yield jobs[0], error
        else:
            self._most = max(1, parallel // 2)
            self._waiting.extendleft(reversed(jobs))


def _note(job: Answering, peak: int | None) -> None:
    if peak is not None:
        job.peak_bytes = max(peak, job.peak_bytes or 0)
