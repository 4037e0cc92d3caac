"""A signal while vLLM starts ends `keepset serve` and all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from keepset.lab.server_process import free_port
from tests.vllm.processes import ROOT, SPARING
from tests.vllm.served import OPTIONS

pytestmark = pytest.mark.full

PATIENCE = 300.0
MARK = "KEEPSET_TEST_OF_SIGNALS"


def living(mark: str) -> list[int]:
    """Return the processes that have this in their environments, other than those that are dead and not yet buried."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            marked = f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes()
            if marked and (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(int(folder.name))
    return found


@contextmanager
def starting(model: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A `keepset serve` that has just been started."""
    words = ["serve", str(model), "--recipe", "snapkv(window=8, keep=40, every=24)", "--port", str(free_port())]
    more = {**SPARING, MARK: str(log), "PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "keepset", *words, *OPTIONS],
            env=os.environ | more,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            for pid in living(str(log)):
                os.kill(pid, signal.SIGKILL)
            process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_signal_ends_all_that_was_started(tiny_and_tokenizer: Path, tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("launcher", "engine")]
    with starting(tiny_and_tokenizer, logs[0]) as early, starting(tiny_and_tokenizer, logs[1]) as late:
        # Supervisor and launcher come first, then an engine's processes, for which the launcher waits.
        for process, log, count, number in ((early, logs[0], 2, signal.SIGINT), (late, logs[1], 4, signal.SIGTERM)):
            until = time.monotonic() + PATIENCE
            while len(living(str(log))) < count:
                assert time.monotonic() < until and process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.1)
            time.sleep(1.0)
            process.send_signal(number)
            assert process.wait(60) != 0 and not living(str(log))
