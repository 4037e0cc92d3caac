"""Processes of engines: forks of one that has imported vLLM for all of them, and nothing else."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any


def make_ready() -> None:
    """Starts that one."""
    forkserver.set_forkserver_preload(["tests.vllm.loaded"])
    forkserver.ensure_running()


def run(target: Callable[..., None], *args: Any, log: str) -> int:
    """The exit code of a process that does this, and says what it has to say to this file."""
    Path(log).touch()
    Process.log = log
    process = Process(target=target, args=args)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


class Process(ForkServerProcess):
    """A process with the environment of who makes it, as if spawned; so are those that it starts."""

    log: str

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment, self._own_log = dict(os.environ), self.log

    def _bootstrap(self, *args: Any, **options: Any) -> int:
        os.environ.clear()
        os.environ.update(self._environment)
        log = os.open(self._own_log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        self._be_asked_for_more()
        atexit._clear()  # what the process that was forked has to tidy up
        try:
            return super()._bootstrap(*args, **options)
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
