"""How many float32 numbers a kernel in PyTorch makes at a time, so that attention is never held as a whole."""

from __future__ import annotations

import torch

CACHE_BLOCK = 2**18
"""For element-wise passes on a CPU: 1 MiB, at most half of a core's cache."""

PRODUCT_BLOCK = 2**20
"""For matrix products on a CPU: 4 MiB, large enough for full speed and small beside a KV cache."""

DEVICE_BLOCK = 2**26
"""For devices with a launch cost: 256 MiB, so that launches are few."""


def block_size(device: torch.device, on_cpu: int) -> int:
    """Return how many float32 numbers to make at a time.

    Args:
        device: device that computes.
        on_cpu: the number for a CPU; every other device gets `DEVICE_BLOCK`.
    """
    return on_cpu if device.type == "cpu" else DEVICE_BLOCK
