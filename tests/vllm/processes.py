"""Processes that engines start: new ones, but for vLLM, which one process has imported for all of them."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any


def make_ready() -> None:
    """Starts that process, if it does not run yet."""
    forkserver.set_forkserver_preload(["tests.vllm.loaded"])
    forkserver.ensure_running()


def use(log: str) -> None:
    """Where vLLM would spawn a process, it is forked from that one, which a parent of this one has made ready.

    What it has to say goes to this file.
    """
    get_context, context = multiprocessing.get_context, Context()
    Process.log = log
    forkserver._forkserver.ensure_running = lambda: None  # it would look for a child of its own
    multiprocessing.get_context = lambda method=None: context if method == "spawn" else get_context(method)


class Process(ForkServerProcess):
    """A process with the environment of who makes it, as if spawned."""

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
        return super()._bootstrap(*args, **options)


class Context(ForkServerContext):
    """Makes those."""

    Process = Process
