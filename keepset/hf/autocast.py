"""`Autocast`: the mixed precision in which a model runs. Keepset's own arithmetic runs without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))
"""Kinds of devices that have autocast."""


@dataclass(frozen=True)
class Autocast:
    """Autocast as it is enabled on one kind of device.

    Attributes:
        kind: of the device, such as `"cuda"`.
        dtype: the type in which the model's products are computed.
    """

    kind: str
    dtype: torch.dtype

    def off(self) -> AbstractContextManager[Any]:
        """Return a context without autocast."""
        return torch.autocast(self.kind, enabled=False)

    def cast(self, *parts: Tensor) -> list[Tensor]:
        """Return queries, keys and values in the type in which PyTorch's own attention would compute them."""
        return [part if part.dtype == torch.float64 else part.to(self.dtype) for part in parts]


def resumed(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """Return a context for calls of the model from keepset's arithmetic, in the precision in which the model runs."""
    return nullcontext() if autocast is None else torch.autocast(autocast.kind, autocast.dtype)
