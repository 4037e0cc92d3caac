"""The minutes that a command may take."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ends = [math.inf]
"""When the minutes of each block of `time_limit` are over, by `time.monotonic`; infinity outside of all."""


def seconds_left() -> float:
    """Return the seconds until the minutes of the innermost block of `time_limit` are over; infinity outside of all."""
    return _ends[-1] - time.monotonic()


class TimeUp(BaseException):
    """Raised when the minutes of a command are over: no error, as `KeyboardInterrupt` is none."""


@contextmanager
def time_limit(minutes: float | None, began: float | None = None) -> Iterator[None]:
    """Raise `TimeUp` within the block once the minutes are over, wherever the command is by then, as Ctrl-C would.

    They count from `began` on, by `time.monotonic`, or from now on.
    """
    if minutes is None:
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    past = 0.0 if began is None else time.monotonic() - began
    left = max(60 * minutes - past, 1e-3)
    signal.setitimer(signal.ITIMER_REAL, left)
    _ends.append(time.monotonic() + left)
    try:
        yield
    finally:
        _ends.pop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
