import os
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from keepset.lab import server_process as module
from keepset.lab.server_process import ServerError, ServerProcess, free_port

FAKE = [sys.executable, str(Path(__file__).with_name("small_server.py"))]


def start(*words: str) -> ServerProcess:
    port = free_port()
    return ServerProcess([*FAKE, "--port", str(port), *words], port)


def lives(pid: int) -> bool:
    """Whether there is such a process, other than one that is dead and not yet buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    until = time.monotonic() + 5
    while lives(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not lives(pid)


def pid_of(server: ServerProcess) -> int:
    assert server._process is not None
    return server._process.pid


def test_answers_inside_the_block_and_is_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(module.time, "sleep", lambda seconds: (ticks.append(seconds), sleep(seconds)))
    with start("--late") as server:
        server.wait(30)
        assert urlopen(f"{server.url}/health").status == 200
        server.check()
        pid = pid_of(server)
        assert os.getpgid(pid) == pid != os.getpgid(0)
    assert ticks and gone(pid)
    with pytest.raises(OSError):
        urlopen(f"{server.url}/health")


@pytest.mark.full
def test_stopped_whatever_happens_and_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STOP_SECONDS", 0.3)
    with pytest.raises(KeyboardInterrupt), start("--child", "--stubborn") as server:
        server.wait(30)
        child = int(server.last_lines()[0].split()[1])
        pid = pid_of(server)
        assert lives(child)
        raise KeyboardInterrupt
    assert gone(pid) and gone(child)


def test_one_that_stops_says_why_and_one_that_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(ServerError, match="The server stopped with exit code 7") as error, start("--crash") as server:
        server.wait(30)
    assert len(error.value.log) == 20
    assert error.value.log[-1].startswith("\x1b[31m[red]out of memory[/red]")
    assert error.value.log[-2] == "line 99"
    with pytest.raises(ServerError, match=r"did not answer within 0\.5 s"), start("--silent") as server:
        pid = pid_of(server)
        server.wait(0.5)
    assert gone(pid)
