"""A supervisor, which starts a command and ends all of its processes: `python -m keepset.serving.supervisor`.

vLLM's launcher may miss a signal while its engine starts, and both then run forever. So `keepset serve` becomes this
process, which forwards signals and kills the rest of vLLM after a few seconds. It imports only the standard library,
because it runs for as long as vLLM does.
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
    """Start a process in its own session, so that it can be ended together with its child processes.

    Args:
        command: the words of the command.
        **options: further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(command, start_new_session=True, **options)


def end(process: subprocess.Popen[bytes]) -> int:
    """Kill a process of `start` and all its child processes, and return its exit code."""
    _kill(process)
    return process.wait()


def supervise(command: Sequence[str], seconds: float) -> int:
    """Run a command to its end; kill it and its child processes `seconds` after the first signal.

    Args:
        command: the words of the command.
        seconds: how long the command has to end after a signal.

    Returns:
        The exit code; 128 plus the signal's number if a signal has ended the command.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    process = start(command, preexec_fn=_begin)

    def hand_on(number: int, _: Any) -> None:
        if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        process.send_signal(number)

    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, hand_on)
    signal.signal(signal.SIGALRM, lambda *_: _kill(process))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    process.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # there is no process left to forward them to
    code = end(process)
    return code if code >= 0 else 128 - code


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _begin() -> None:
    """Unblock signals and, on Linux, ask for one when the supervisor is killed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[2:], float(sys.argv[1])))
