"""Which implementation of a kernel runs: chosen here for all of them, by device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

INTERPRETED = False
"""Whether tensors elsewhere, as on a CPU, go to the kernels in Triton too. Its interpreter must be on before Triton is
first imported (`TRITON_INTERPRET=1`); it runs one program after another, which is for tests."""


def uses_triton(device: torch.device) -> bool:
    """Whether a tensor there is given to the kernels in Triton, and not to their counterparts in PyTorch."""
    return _has_triton() if device.type == "cuda" else INTERPRETED


def is_async_device(device: torch.device) -> bool:
    """Whether the host waits when it looks at a tensor there."""
    return device.type != "cpu"


def launched_on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current GPU, which is not the tensors' where a model is spread over several."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def upload(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """What the host knows, whole numbers or a tensor, on a device; a GPU is not waited for."""
    there = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return there.to(device, non_blocking=there.device.type == "cpu")  # what comes back must be there to be read


class AsyncHostCopy:
    """Numbers on their way from a device to the host, which waits for them, and for nothing that is launched later."""

    def __init__(self, there: Tensor) -> None:
        on_gpu = there.device.type == "cuda"
        self._on_host = torch.empty(there.shape, dtype=there.dtype, pin_memory=on_gpu)
        self._on_host.copy_(there, non_blocking=True)
        self._arrived = torch.cuda.current_stream(there.device).record_event() if on_gpu else None

    def tolist(self) -> list[Any]:
        """They."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host.tolist()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def processors(device: torch.device) -> int:
    """How many programs run at a time, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Whether a CUDA device computes in bfloat16, from compute capability 8.0 on; flash attention needs the same."""
    return torch.cuda.get_device_capability(device) >= (8, 0)
