"""Common parts of the workers of `events.py`: shapes, random inputs, the clock, and the protocol."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from time import process_time
from typing import Any

import torch
from torch import Tensor

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
WINDOW, SNAPKV_WINDOW, BUFFER = 128, 64, 256
SINKS, RECENT = 4, 32

Run = Callable[[], object]
Prepare = Callable[[int, int], Run]
"""Makes the timed function, given the entries before and after the event."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scores(tokens: int) -> Tensor:
    return randn(1, KV_HEADS, tokens, seed=1)


def usage(tokens: int) -> Tensor:
    """Return uneven random numbers like attention: a few entries get most of it."""
    return randn(1, KV_HEADS, tokens, seed=2).mul(3).softmax(-1)


def serve(cases: dict[str, Prepare], packages: tuple[str, ...]) -> None:
    """Say which versions measure, then time cases until standard input ends."""
    parser = argparse.ArgumentParser(description="Started by events.py; answers requests line by line.")
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    torch.set_grad_enabled(False)

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    print(json.dumps({"versions": {name: version(name) for name in packages}}), file=answers)
    ready: dict[tuple[str, int, int], Run] = {}
    for line in sys.stdin:
        try:
            answer = _answer(cases, ready, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def _answer(cases: dict[str, Prepare], ready: dict[tuple[str, int, int], Run], request: Any) -> dict[str, float]:
    case = request["what"], request["tokens"], request["keep"]
    if case not in ready:
        ready.clear()  # inputs of one case at a time, because those of long texts are large
        ready[case] = cases[case[0]](*case[1:])
        ready[case]()
    seconds = []
    for _ in range(request["calls"]):
        began = process_time()
        ready[case]()
        seconds.append(process_time() - began)
    return {"seconds": statistics.median(seconds)}
