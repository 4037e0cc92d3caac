"""Which process is at work on something, and whether it still is."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """A process, told from all that had or will have its number.

    The host is the machine and, where there are such, the space in which process numbers count; `started` says when it
    was, since which start of the machine, or is None where that cannot be known.
    """

    host: str
    pid: int
    started: str | None

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        return cls(_host(), os.getpid(), _started(os.getpid()))

    @property
    def gone(self) -> bool | None:
        """Whether it has ended; None where this machine cannot know."""
        if self.host != _host() or self.started is None:
            return None
        return _started(self.pid) != self.started


def _host() -> str:
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()} {space}".strip()


def _started(pid: int) -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return _started_by_ps(pid)
    try:
        # The second field is the program's name, which may hold spaces and brackets itself.
        state, *fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else f"{boot} {fields[18]}"


def _started_by_ps(pid: int) -> str | None:
    try:
        line = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)]
        state, *when = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return None if state.startswith("Z") else " ".join(when)
