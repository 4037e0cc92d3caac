"""The kernels of a prefill on a GPU by time, beside those of the full cache."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from on_gpu import models
from on_gpu.measuring import Bench
from on_gpu.networks import write as write_networks

_SHOWN = 30


def prefill(bench: Bench, recipe: str, tokens: int) -> None:
    """Print the kernels of a prefill under a recipe, longest first.

    Args:
        bench: the device.
        recipe: `{stats}` in it is a file of random networks.
        tokens: tokens of the prompt; 80 without a GPU.
    """
    model = models.random_model(bench, next(iter(models.SHAPES)))
    n = tokens if bench.on_gpu else 80
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "networks.safetensors"
        write_networks(model.config, models.head_size(model.config), stats)
        for text in (None, recipe.format(stats=stats)):
            _show(bench, "full cache" if text is None else recipe, models.prefill(bench, model, n, text))


def _show(bench: Bench, name: str, run: Callable[[], Any]) -> None:
    for _ in range(bench.runs(1)):
        run()  # kernels are compiled
    began = time.perf_counter()
    activities = [ProfilerActivity.CUDA] if bench.on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        run()
        if bench.on_gpu:
            torch.cuda.synchronize()
    wall = 1e3 * (time.perf_counter() - began)
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in seen.events():
        launches[event.name] += 1
        times[event.name] += event.device_time_total if bench.on_gpu else event.self_cpu_time_total
    print(f"\n{name}: {wall:.1f} ms, of which kernels {times.total() / 1e3:.1f} ms, {launches.total()} launches")
    for kernel, microseconds in times.most_common(_SHOWN):
        print(f"{microseconds / 1e3:10.3f} ms {launches[kernel]:6d}  {kernel[:90]}")
