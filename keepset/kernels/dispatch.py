"""The implementation of kernels and the block sizes for each device, and copies between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

CACHE_BLOCK = 2**18
"""Block of element-wise passes on a CPU: 1 MiB, at most half of a core's cache."""

PRODUCT_BLOCK = 2**20
"""Block of matrix products on a CPU: 4 MiB, large enough for full speed and small beside a KV cache."""

DEVICE_BLOCK = 2**26
"""Block on devices with a launch cost: 256 MiB, so that launches are few."""


def block_size(device: torch.device, on_cpu: int) -> int:
    """Return how many float32 numbers to compute at a time.

    Args:
        device: where they are computed.
        on_cpu: how many on a CPU; elsewhere it is always `DEVICE_BLOCK`.
    """
    return on_cpu if device.type == "cpu" else DEVICE_BLOCK


INTERPRETED = False
"""Whether the Triton kernels also compute CPU tensors; for tests.

Triton's interpreter must be on before Triton is first imported (`TRITON_INTERPRET=1`). It runs programs one by one.
"""


def uses_triton(device: torch.device) -> bool:
    """Return whether the Triton kernels compute tensors on this device, not those in PyTorch."""
    return _has_triton() if device.type == "cuda" else INTERPRETED


def is_async_device(device: torch.device) -> bool:
    """Return whether reading a tensor on this device makes the host wait."""
    return device.type != "cpu"


def launched_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager in which Triton launches on this device.

    Triton launches on the current GPU, which differs from the tensors' GPU if a model is spread over several.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def upload(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Return host values on a device, without a host sync.

    Args:
        values: whole numbers, or a tensor on the host.
        device: where the result goes.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")  # a copy to the host must be complete


class AsyncHostCopy:
    """An asynchronous copy from a device to the host. Reading it waits for the copy, not for later launches."""

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.device.type == "cuda"
        self._on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self._on_host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.current_stream(tensor.device).record_event() if on_gpu else None

    def tolist(self) -> list[Any]:
        """Wait for the copy, and return the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host.tolist()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def processors(device: torch.device) -> int:
    """Return a lower bound of the programs that the device runs at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Return whether a CUDA device computes in bfloat16 (capability 8.0 or newer), as flash attention requires."""
    return torch.cuda.get_device_capability(device) >= (8, 0)
