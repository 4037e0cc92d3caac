"""Codes of entries that two ways of computing give."""

from __future__ import annotations

import torch
from torch import Tensor

from keepset.kernels.entry_format import decode


def check_same_codes(codes: Tensor, expected: Tensor, share: float) -> None:
    """They are apart by a step at most, as sums in another order may be rounded; more than a share of them is equal."""
    for number, right, step in zip(decode(codes), decode(expected), (1 / 512, 1 / 256), strict=True):
        torch.testing.assert_close(number, right, rtol=0, atol=step)
    assert (codes == expected).float().mean() > share
