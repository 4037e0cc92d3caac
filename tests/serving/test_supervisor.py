"""`keepset serve`'s process ends with all that vLLM has started, whatever vLLM does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from keepset.serving.command import supervised
from tests.lab.test_server_process import gone, lives

SCRIPT = """
import signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
if "ends" in sys.argv:
    sys.exit(7)
time.sleep(600)
"""


@contextmanager
def supervisor(
    *words: str, seconds: float = 60.0, ignored: Collection[signal.Signals] = ()
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A supervised script, and the process that the script has started; signals are ignored from the start."""
    command = [sys.executable, "-m", "keepset.serving.supervisor", str(seconds), sys.executable, "-c", SCRIPT, *words]
    begin = partial(_with_signals, ignored)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=begin)  # noqa: PLW1509 (no threads)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _with_signals(ignored: Collection[signal.Signals]) -> None:
    """Whoever runs the tests may ignore some, as a shell does in the background."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


def test_under_nohup_it_outlives_its_terminal() -> None:
    with supervisor(seconds=0.2, ignored=[signal.SIGHUP]) as (process, child):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.6)
        assert process.poll() is None and lives(child)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM and gone(child)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_handed_on(number: signal.Signals) -> None:
    with supervisor() as (process, child):
        assert lives(child)
        process.send_signal(number)
        assert process.wait(30) in (128 + number, 1) and gone(child)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_does_not_end_is_ended(number: signal.Signals) -> None:
    with supervisor("stubborn", seconds=0.3) as (process, child):
        start = time.monotonic()
        while process.poll() is None and time.monotonic() < start + 30:
            process.send_signal(number)  # again and again, which gives it no more time
            time.sleep(0.1)
        assert process.wait(1) == 128 + signal.SIGKILL and gone(child) and time.monotonic() >= start + 0.3


def test_the_exit_code_is_the_commands_and_nothing_is_left() -> None:
    with supervisor("ends") as (process, child):
        assert process.wait(30) == 7 and gone(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_supervisor_that_is_killed_takes_the_command_along() -> None:
    with supervisor() as (process, child):
        script = int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1])
        process.kill()
        assert gone(script)
        os.kill(child, signal.SIGKILL)


def test_requests_that_are_drained_have_their_time() -> None:
    assert supervised(["vllm"], [])[4:] == ["10.0", "vllm"]
    assert supervised(["vllm"], ["--shutdown-timeout", "60"])[4:] == ["70.0", "vllm"]
    assert supervised(["vllm"], ["--shutdown_timeout=soon"])[4:] == ["10.0", "vllm"]


def test_the_supervisor_is_light() -> None:
    code = "import sys, keepset.serving.supervisor; print(len(sys.modules), {'torch', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, heavy = done.stdout.split(maxsplit=1)
    assert int(count) < 150 and heavy == "set()\n"
