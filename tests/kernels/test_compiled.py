"""Kernels are compiled for GPUs as they are launched there, which takes none: Triton brings NVIDIA's assembler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from tests.posing import LAUNCHED

pytestmark = pytest.mark.full

KERNELS = {name for names in LAUNCHED.values() for name in names}
LLAMA, WIDEST = ("bfloat16", "128", "8", "4"), ("float32", "256", "8", "8")
"""Type, numbers of a head, KV heads, and query heads of each."""


# What a program may have of shared memory is 99 KiB on the GPUs of 8.6 and 8.9, which get the code that 8.0 gets.
@pytest.mark.parametrize(
    ("model", "capability", "most", "variants"),
    [(LLAMA, 80, 99, "all"), (LLAMA, 90, 227, "tiles"), (LLAMA, 100, 227, "once"), (WIDEST, 80, 99, "once")],
)
def test_what_is_launched_fits_a_gpu(model: tuple[str, ...], capability: int, most: int, variants: str) -> None:
    # What `tests.kernels.launches` prints, outside of the interpreter, which this process has turned on.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # takes a part of the time
    command = [sys.executable, "-m", "tests.kernels.launches", *model, str(capability), variants]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert not any("anew" in line for line in lines), "lengths of requests compile nothing"
    assert all(int(shared) <= most * 1024 and int(size) > 0 for _, shared, size in lines), lines
    assert {name for name, *_ in lines} == KERNELS
