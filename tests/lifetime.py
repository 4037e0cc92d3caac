"""The life of a run of tests, which ends with the process that was started first: pytest, whatever it starts."""

from __future__ import annotations

import os

_NAME = "KEEPSET_TESTS_RUN"


def begin() -> None:
    """Begin a run, unless this process is of one that has begun."""
    if _NAME not in os.environ:
        reading, _ = os.pipe()  # whose other end nobody writes to, and closes when this process ends
        os.environ[_NAME] = f"/proc/{os.getpid()}/fd/{reading}"


def path() -> str:
    """Return a file to read from, whose end comes when the run ends."""
    return os.environ[_NAME]


def name() -> str:
    """Return the run's name, which no other run has."""
    return path().split("/")[2]
