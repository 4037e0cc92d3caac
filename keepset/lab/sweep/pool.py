"""`Pool`: decodes the answers of several jobs at once, as many as memory holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from transformers import PreTrainedModel

from keepset.errors import KeepsetError
from keepset.hf.batch import can_go_together
from keepset.lab.generation import Answer, step
from keepset.lab.memory import MemoryBudget, is_out_of_memory, watch_peak
from keepset.lab.record import Record

MOST = 32
"""The most answers that are decoded at once."""

Answers = Generator[Answer, None, list[Record]]
"""Answers to decode, each to its end before the next is requested; then a record of each. An answer's `KeepsetError` is
thrown into the generator."""


@dataclass(eq=False)
class Job:
    """Answers that follow one another on one cache, or on its forks.

    Attributes:
        begin: starts the answers, and starts them over at a second call.
        tokens: the most tokens whose entries its cache holds at any time, including its start.
        peak_bytes: the most bytes that the device had allocated in a call for it; None if that is not measured.
        answers, answer: while the job runs, its answers and the one that is being decoded.
    """

    begin: Callable[[], Answers]
    tokens: int
    peak_bytes: int | None = None
    answers: Answers = field(init=False, repr=False)
    answer: Answer = field(init=False, repr=False)


AnyJob = TypeVar("AnyJob", bound=Job)
Ended = Iterator[tuple[AnyJob, list[Record] | None]]
"""Jobs that have ended, each with its records; None if memory was not enough for the job alone."""


class Pool(Generic[AnyJob]):
    """Decodes several answers at once; when one ends another begins (continuous batching: Yu and others 2022, Orca).

    A job is taken from the iterator when there may be room for it, and begins when there is. If memory is still not
    enough, the failed jobs start over later, and from then on half as many run at once.

    Args:
        model: the model.
        room: decides whether memory has room for another cache.
        jobs: the jobs.
        most: the most answers that are decoded at once.
    """

    def __init__(self, model: PreTrainedModel, room: MemoryBudget, jobs: Iterator[AnyJob], most: int) -> None:
        self._model, self._room, self._jobs = model, room, jobs
        self._most = most if can_go_together(model) else 1
        self._waiting: deque[AnyJob] = deque()
        self._running: list[AnyJob] = []

    def run(self) -> Ended[AnyJob]:
        """Yield each job when it has ended."""
        try:
            while True:
                while (job := self._next()) is not None:
                    job.answers = job.begin()
                    yield from self._resume(job)
                if not self._running:
                    return
                yield from self._step()
        finally:
            for job in self._running:
                job.answers.close()

    def _next(self) -> AnyJob | None:
        """Return the next job if it may begin now."""
        if len(self._running) >= self._most:
            return None
        job = self._waiting.popleft() if self._waiting else next(self._jobs, None)
        growing = [(running.answer.cache, running.tokens) for running in self._running]
        if job is not None and not self._room.takes(job.tokens, growing):
            self._waiting.appendleft(job)
            return None
        return job

    def _resume(self, job: AnyJob, spoiled: KeepsetError | None = None) -> Ended[AnyJob]:
        """Advance a job to its next answer, or yield it if it has ended.

        Args:
            job: the job.
            spoiled: the error of its last answer, if there was one.
        """
        peak = watch_peak(self._model.device)
        try:
            job.answer = next(job.answers) if spoiled is None else job.answers.throw(spoiled)
        except StopIteration as end:
            _note(job, peak())
            yield job, end.value
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            yield from self._again([job], len(self._running) + 1)
        else:
            _note(job, peak())
            self._room.learn(job.answer.cache)
            self._running.append(job)

    def _step(self) -> Ended[AnyJob]:
        """Decode one more token of every current answer."""
        stepped, peak = list(self._running), watch_peak(self._model.device)
        step(self._model, [job.answer for job in stepped])
        called = [job for job in stepped if not job.answer.over]
        failed = [job for job in called if job.answer.error is not None]
        for job in stepped:
            _note(job, peak())
            error = job.answer.error
            if error is not None and not isinstance(error, KeepsetError) and not is_out_of_memory(error):
                raise error
        again = []
        for job in stepped:
            error = job.answer.error
            if job.answer.over:
                self._running.remove(job)
                yield from self._resume(job)
            elif isinstance(error, KeepsetError) and (len(called) == 1 or len(failed) < len(called)):
                self._running.remove(job)
                yield from self._resume(job, error)
            elif error is not None:  # the call's and not the answer's own, or memory was not enough
                self._running.remove(job)
                job.answers.close()
                again.append(job)
        if again:
            yield from self._again(again, len(called))

    def _again(self, jobs: list[AnyJob], parallel: int) -> Ended[AnyJob]:
        """Restart failed jobs later; or yield a single one without records.

        Args:
            jobs: the jobs.
            parallel: how many answers were decoded at once when they failed.
        """
        if parallel == 1:
            yield jobs[0], None
        else:
            self._most = max(1, parallel // 2)
            self._waiting.extendleft(reversed(jobs))


def _note(job: Job, peak: int | None) -> None:
    if peak is not None:
        job.peak_bytes = max(peak, job.peak_bytes or 0)
