"""What a plain cache of transformers holds."""

from __future__ import annotations

from torch import Tensor
from transformers import DynamicCache


def nbytes(cache: DynamicCache) -> int:
    """Bytes of its keys and values."""
    held = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))
