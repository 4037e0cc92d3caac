"""Processes that engines start: new ones, but for vLLM, which one process has imported for all of them."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

LOADED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
]


def make_ready() -> None:
    """Starts that process, if it does not run yet."""
    forkserver.set_forkserver_preload(LOADED)
    forkserver.ensure_running()


def use() -> None:
    """Where vLLM would spawn a process, it is forked from that one, which a parent of this one has made ready."""
    get_context, context = multiprocessing.get_context, Context()
    forkserver._forkserver.ensure_running = lambda: None  # it would look for a child of its own
    multiprocessing.get_context = lambda method=None: context if method == "spawn" else get_context(method)


class Process(ForkServerProcess):
    """A process with the environment of who makes it, as if spawned."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment = dict(os.environ)

    def _bootstrap(self, *args: Any, **options: Any) -> int:
        os.environ.clear()
        os.environ.update(self._environment)
        return super()._bootstrap(*args, **options)


class Context(ForkServerContext):
    """Makes those."""

    Process = Process
