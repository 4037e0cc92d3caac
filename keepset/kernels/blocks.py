"""How many float32 numbers kernels make at a time, so that attention is never there as a whole."""

from __future__ import annotations

import torch

CACHE_BLOCK = 2**18
"""Half of what a CPU core's cache holds, or less: for passes over the numbers."""

PRODUCT_BLOCK = 2**20
"""Matrices large enough for products at a CPU core's full speed, small beside a cache of keys and values."""

DEVICE_BLOCK = 2**26
"""Where operations are launched: few of them, in a quarter of a gigabyte."""


def block_size(device: torch.device, on_cpu: int) -> int:
    """`on_cpu` there, `DEVICE_BLOCK` on every other device."""
    return on_cpu if device.type == "cpu" else DEVICE_BLOCK
