"""Timing on a device, and figures that could not be measured."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

WARM_UP = 2
L2 = 256 * 2**20
"""Bytes that are written between two runs of a kernel, so that none finds its inputs in the second-level cache."""


@dataclass
class Figure:
    """One line of the tables: median and spread in milliseconds, or why there is none.

    Attributes:
        part: which table it belongs to.
        what: the line's name.
        nbytes: the least bytes to move, for a share of the device's bandwidth.
        against: the name of the line that it is compared with.
        extra: other figures, such as tokens per second.
    """

    part: str
    what: str
    milliseconds: list[float] = field(default_factory=list)
    nbytes: int = 0
    against: str = ""
    extra: dict[str, float] = field(default_factory=dict)
    missing: str = ""

    @property
    def median(self) -> float | None:
        """The median of all runs, in milliseconds."""
        return statistics.median(self.milliseconds) if self.milliseconds else None

    @property
    def spread(self) -> str:
        """Median, least and most, in words."""
        return f"{self.median:.3f} ({min(self.milliseconds):.3f} to {max(self.milliseconds):.3f}) ms"

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "median": self.median}


@dataclass
class Bench:
    """Collects figures; no new measurement begins after the deadline."""

    device: torch.device
    deadline: float
    figures: list[Figure] = field(default_factory=list)
    failed: bool = False
    graphed: bool = False
    """Whether timed launches are captured as a CUDA graph, so that the host's work is excluded."""

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU; otherwise shapes are tiny, and times are meaningless."""
        return self.device.type == "cuda"

    @property
    def kv_heads(self) -> int:
        """The KV heads of Llama-3.1-8B and Qwen3-8B."""
        return 8 if self.on_gpu else 2

    @property
    def group(self) -> int:
        """The query heads of each KV head, in the same models."""
        return 4 if self.on_gpu else 2

    @property
    def head_dim(self) -> int:
        """The numbers of a key, in the same models."""
        return 128 if self.on_gpu else 16

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of GPUs' computation; float32 in the interpreter, which cannot multiply bfloat16."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def run(self, part: str, what: str, make: Callable[[], Callable[[], Any]], **about: Any) -> Figure:
        """Time the function that `make` returns; a lack of memory or time is noted in the table."""
        repeats = about.pop("repeats", 20 if self.on_gpu else 1)
        figure = Figure(part, what, **about)
        self.figures.append(figure)
        if time.monotonic() > self.deadline:
            figure.missing = "not measured: no time was left"
            return figure
        try:
            function = make()
            if self.graphed and self.on_gpu:
                figure.extra["host us"] = self.host_microseconds(function)
                function = self.graph_of(function)
            figure.milliseconds = self.times(function, repeats)
        except torch.cuda.OutOfMemoryError:
            figure.missing = "does not fit"
        except Exception as error:  # the other figures are worth having
            no_kernel = "No available kernel" in str(error)
            figure.missing = "PyTorch has no such kernel here" if no_kernel else f"failed: {type(error).__name__}"
            if not no_kernel:
                self.failed = True
                traceback.print_exc()
        if self.on_gpu:
            torch.cuda.empty_cache()
        print(f"{part}: {what}: {figure.missing or figure.spread}", flush=True)
        return figure

    def runs(self, repeats: int) -> int:
        """Return how often a function is called for `repeats` measured times."""
        return repeats + min(WARM_UP, repeats) if self.on_gpu else 1

    def times(self, function: Callable[[], Any], repeats: int) -> list[float]:
        """Return the milliseconds of each run, by the device's own clock."""
        if not self.on_gpu:
            began = time.perf_counter()
            function()
            return [1e3 * (time.perf_counter() - began)]
        for _ in range(self.runs(repeats) - repeats):
            function()
        flushed = torch.empty(L2, dtype=torch.int8, device=self.device)
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for before, after in marks:
            flushed.zero_()
            before.record()
            function()
            after.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in marks]

    def host_microseconds(self, function: Callable[[], Any], repeats: int = 50) -> float:
        """Return the host's microseconds for launching the function."""
        for _ in range(self.runs(repeats) - repeats):
            function()
        torch.cuda.synchronize()
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            function()
            taken.append(1e6 * (time.perf_counter() - began))
            torch.cuda.synchronize()
        return statistics.median(taken)

    def graph_of(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that replays the launches; the function itself if a graph cannot capture it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                kept = function()
        except RuntimeError:  # it waits for the device, or takes numbers from the host
            torch.cuda.synchronize()
            return function

        def replay() -> Any:
            graph.replay()
            return kept

        return replay

    def bandwidth(self) -> float:
        """Return the bytes per millisecond that a large copy reads and writes."""
        size = 2**30 if self.on_gpu else 2**20
        source = torch.empty(size, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / statistics.median(self.times(lambda: target.copy_(source), 10))
