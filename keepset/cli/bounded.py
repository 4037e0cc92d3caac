"""`bounded`: work that shows what it has come to when its minutes are over, or at Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from typer import Exit

from keepset.cli.console import note
from keepset.cli.time_limit import TimeUp, time_limit
from keepset.errors import KeepsetError


@dataclass
class Ending:
    """How a command's work ended: done within its minutes, interrupted by Ctrl-C, or neither."""

    minutes: float | None
    finished: bool = False
    interrupted: bool = False

    def before(self, what: str) -> BaseException:
        """Return what to raise if it ended before `what`, the first thing that would have been shown."""
        if self.interrupted:
            return KeyboardInterrupt()
        return KeepsetError(f"--minutes {self.minutes:g} were over before {what}: give it more, or a shorter text.")

    def say(self, where: str) -> None:
        """Note where the work ended if it was not finished, and end the command after Ctrl-C."""
        if not self.finished:
            note(f"{'interrupted' if self.interrupted else 'stopped'} {where}")
        if self.interrupted:
            raise Exit(130)


@contextmanager
def bounded(minutes: float | None, began: float) -> Iterator[Ending]:
    """End the block, quietly, when the minutes since `began` are over or at Ctrl-C; what it yields says which."""
    ending = Ending(minutes)
    try:
        with time_limit(minutes, began):
            yield ending
            ending.finished = True
    except TimeUp:
        pass
    except KeyboardInterrupt:
        ending.interrupted = True
