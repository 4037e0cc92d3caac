"""A supervisor, which starts a command and ends all of its processes: `python -m keepset.serving.supervisor`.

vLLM's launcher may miss a signal that comes while its engine starts, and both then run forever. So `keepset serve`
becomes this process, which passes signals on and kills what is left of vLLM after a few seconds. It imports the
standard library alone, because it runs for as long as vLLM does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that it can be ended with all that it starts."""
    return subprocess.Popen(command, start_new_session=True, **options)


def end(process: subprocess.Popen[bytes]) -> int:
    """End a process of `start` at once with all that it has started, and return its exit code."""
    _kill(process)
    return process.wait()


def supervise(command: Sequence[str], seconds: float) -> int:
    """Run a command to its end, for so many seconds, with all that it has started, after the first signal.

    Returns:
        The exit code; 128 and the signal's number if a signal has ended the command.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    process = start(command, preexec_fn=_begin)

    def hand_on(number: int, _: Any) -> None:
        if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        process.send_signal(number)

    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, hand_on)
    signal.signal(signal.SIGALRM, lambda *_: _kill(process))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    process.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # nobody is left to pass them on to
    code = end(process)
    return code if code >= 0 else 128 - code


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _begin() -> None:
    """Take signals again, and on Linux be told by one when the supervisor is killed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[2:], float(sys.argv[1])))
