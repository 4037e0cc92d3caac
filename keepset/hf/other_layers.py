"""What a cache does with layers that are transformers' own, such as sliding windows and linear attention."""

from __future__ import annotations

import copy
from typing import Any

from keepset.errors import KeepsetError


def cropped(layer: Any, removed: int, length: int) -> dict[str, Any]:
    """Return the attributes that a layer has without its newest tokens; the layer itself stays as it is.

    Args:
        layer: of a transformers cache.
        removed: how many tokens are taken back.
        length: tokens that stay, padding included.

    Raises:
        KeepsetError: the layer holds no longer what it would have to go back to.
    """
    if not removed and not getattr(layer, "record_past", False):
        return {}
    copied = copy.copy(layer)
    vars(copied).update({name: dict(part) for name, part in vars(layer).items() if isinstance(part, dict)})
    try:
        goes_back = not removed or getattr(layer, "is_croppable", True)
        copied.crop(-removed)
    except RuntimeError:
        goes_back = False
    if goes_back and getattr(layer, "is_sliding", False) and layer.is_initialized:
        goes_back = copied.keys.shape[-2] >= min(layer.sliding_window - 1, length)
    if not goes_back:
        raise KeepsetError(
            f"A {type(layer).__name__} among the model's layers cannot take back {removed} tokens, so no layer has: go "
            "on from a copy made before them (cache.fork())."
        )
    return vars(copied)
