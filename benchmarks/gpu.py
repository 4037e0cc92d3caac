"""Kernels, prefill, decoding and events on a GPU: one command, one JSON, one table.

    python3 benchmarks/gpu.py           # needs a GPU, PyTorch, Triton, transformers, safetensors and jaxtyping
    python3 benchmarks/gpu.py --cpu     # tiny shapes in Triton's interpreter: that it runs, no more
    python3 benchmarks/gpu.py --profile "snapkv(keep=0.25)"     # which kernels a prefill's time goes to

Nothing has to be installed. Random weights in the shapes of Llama-3.1-8B and Qwen3-8B, bfloat16; no hub. Nothing new
begins after nine minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

MINUTES = 8.5
"""Minutes after which no new measurement begins."""
NEEDED = ("torch", "transformers", "safetensors", "jaxtyping")
"""Required packages, beside Triton, which PyTorch's GPU builds bring along."""


def main() -> int:
    """Measure, print and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="tiny shapes in Triton's interpreter; times mean nothing")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"nothing new begins after so many [{MINUTES}]")
    parser.add_argument("--out", type=Path, help="folder of gpu.json and gpu.md [results; with --cpu none]")
    parser.add_argument("--profile", metavar="RECIPE", help="show the kernels of a prefill under a recipe, no more")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt of --profile [8192]")
    options = parser.parse_args()
    if options.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"Not installed here: {', '.join(missing)}. It needs {', '.join(NEEDED)}.", file=sys.stderr)
        return 2
    import torch

    if not options.cpu and not torch.cuda.is_available():
        print(
            "There is no GPU that PyTorch can use: run this on a machine with one, or try it with --cpu.",
            file=sys.stderr,
        )
        return 2
    from on_gpu import kernels, models, profiling
    from on_gpu.measuring import Bench

    from keepset.kernels import dispatch

    dispatch.INTERPRETED = options.cpu and importlib.util.find_spec("triton") is not None
    device = torch.device("cpu" if options.cpu else "cuda")
    bench = Bench(device, time.monotonic() + 60 * options.minutes)
    print(f"{_name(device)}, PyTorch {torch.__version__}; at most about {options.minutes + 0.5:g} minutes", flush=True)
    if options.profile:
        profiling.prefill(bench, options.profile, options.tokens)
        return 0
    bandwidth = bench.bandwidth()
    try:
        bench.graphed = True
        kernels.measure(bench)
        bench.graphed = False
        for number, shape in enumerate(models.SHAPES if bench.on_gpu else list(models.SHAPES)[:1]):
            models.measure(bench, shape, everything=number == 0)
    except KeyboardInterrupt:
        print("stopped: what was measured so far is written", file=sys.stderr)
    machine = {"device": _name(device), "torch": torch.__version__, "bytes_per_millisecond": bandwidth}
    table = "\n".join(_table(bench, bandwidth))
    print(table)
    out = options.out or (None if options.cpu else HERE / "results")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        figures = [figure.to_json() for figure in bench.figures]
        (out / "gpu.json").write_text(json.dumps({"machine": machine, "figures": figures}, indent=1))
        (out / "gpu.md").write_text(table + "\n")
    return int(bench.failed)


def _name(device) -> str:  # type: ignore[no-untyped-def]
    import torch

    from keepset.kernels import dispatch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU, Triton's interpreter" if dispatch.INTERPRETED else "CPU without Triton, PyTorch's operators"


def _table(bench, bandwidth: float) -> Iterator[str]:  # type: ignore[no-untyped-def]
    yield f"{_name(bench.device)}; a copy moves {bandwidth / 1e6:.0f} GB/s"
    part = None
    medians = {(figure.part, figure.what): figure.median for figure in bench.figures}
    for figure in bench.figures:
        if figure.part != part:
            part = figure.part
            yield f"\n| {part} | median (least to most) | of bandwidth | ratio | |"
            yield "| --- | --- | --- | --- | --- |"
        if figure.median is None:
            yield f"| {figure.what} | {figure.missing} | | | |"
            continue
        share = f"{figure.nbytes / figure.median / bandwidth:.0%}" if figure.nbytes else ""
        other = medians.get((figure.part, figure.against))
        ratio = f"{figure.median / other:.2f} of {figure.against}" if other else ""
        extra = ", ".join(f"{name} {value:.4g}" for name, value in figure.extra.items())
        yield f"| {figure.what} | {figure.spread} | {share} | {ratio} | {extra} |"


if __name__ == "__main__":
    sys.exit(main())
