"""Processes of engines and servers: forks of one process that has imported vLLM for all tests of a run.

That import takes longer than most of what is tested here. The processes of a run find the importing one by its address,
and the first that asks for it starts it. It ends with the run, see `tests.lifetime`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests import lifetime

ROOT = Path(__file__).parents[2]
SPARING = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it would take as many threads as there are cores after all
    "TORCH_COMPILE_DISABLE": "1",  # vLLM would compile one small function in each rank, for as long as all else
}
"""What vLLM's processes are told of this machine."""


def own_environment(runner_v2: bool) -> dict[str, str]:
    """Return what vLLM is told in addition when it is imported."""
    more = {"TRITON_INTERPRET": "1"} if runner_v2 else {}  # see `tests.vllm.loaded`
    return {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner_v2)), "VLLM_LOGGING_LEVEL": "ERROR", **more}


def run(target: Callable[..., None], *args: Any, log: str, env: Mapping[str, str], runner_v2: bool = False) -> int:
    """Run a function in a process of its own.

    Args:
        target, args: the function and its arguments.
        log: the file that the process writes its output to.
        env: the process's environment.
        runner_v2: whether vLLM's model runner V2 is used.

    Returns:
        The exit code.
    """
    Path(log).touch()
    Process.log = log
    process = Process(target=target, args=args)
    process.environment = dict(env)
    _start(process, f"\0keepset-tests-{lifetime.name()}-{runner_v2}", runner_v2)
    try:
        process.join()
    except BaseException:  # a test that took too long, for one
        process.kill()
        raise
    assert process.exitcode is not None
    return process.exitcode


def _start(process: Process, address: str, runner_v2: bool) -> None:
    """Have the process forked by the one at this address."""
    server, nothing = forkserver._forkserver, os.open(os.devnull, os.O_RDONLY)
    known = {"_forkserver_address": address, "_forkserver_alive_fd": nothing, "ensure_running": lambda: None}
    try:
        with patch.multiple(server, **known):
            while True:
                _ensure_imported(address, runner_v2)
                with suppress(ConnectionRefusedError):  # it was found before it listened
                    return process.start()
                time.sleep(0.01)
    finally:
        os.close(nothing)


def _ensure_imported(address: str, runner_v2: bool) -> None:
    """Start the process that imports vLLM, unless there is one at this address, which may still be importing."""
    with socket.socket(socket.AF_UNIX) as listener, open(lifetime.path(), "rb", buffering=0) as alive:
        try:
            listener.bind(address)
        except OSError:
            return
        listener.listen(64)
        fds = listener.fileno(), alive.fileno()
        preload = f"from multiprocessing.forkserver import main; main({fds[0]}, {fds[1]}, ['tests.vllm.loaded'])"
        plain = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        env = plain | SPARING | own_environment(runner_v2) | {"PYTHONPATH": str(ROOT)}
        subprocess.Popen(
            [sys.executable, "-c", preload], env=env, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
        )


class Process(ForkServerProcess):
    """A process with the environment of who makes it, as if spawned; so are those that it starts."""

    log: str

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.environment, self._own_log = dict(os.environ), self.log

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.environ.clear()
        os.environ.update(self.environment)
        log = os.open(self._own_log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        self._be_asked_for_more()
        atexit._clear()  # what the process that was forked has to tidy up
        threading.Thread(target=_end_with, args=(parent_sentinel,), daemon=True).start()
        try:
            return super()._bootstrap(parent_sentinel)
        finally:
            atexit._run_exitfuncs()  # as a spawned one does; forks of Python 3.11 do not

    def _be_asked_for_more(self) -> None:
        """Replace the processes that vLLM would spawn from here by others of these."""
        get_context, context = multiprocessing.get_context, Context()
        Process.log = self._own_log
        forkserver._forkserver.ensure_running = lambda: None  # it would look for a child of its own
        multiprocessing.get_context = lambda method=None: context if method == "spawn" else get_context(method)


class Context(ForkServerContext):
    """Makes those."""

    Process = Process


def _end_with(parent: int) -> None:
    """End this process when the one that asked for it has ended, of which it is no child."""
    connection.wait([parent])
    os._exit(1)
