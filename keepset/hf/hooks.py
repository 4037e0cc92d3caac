"""Hooks on a model that do not keep alive whom they tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


def remove(handles: list[RemovableHandle]) -> None:
    """Takes these hooks away, and empties the list."""
    for handle in handles:
        handle.remove()
    handles.clear()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, without holding its object."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return None if (alive := reference()) is None else alive(*args)

    return call
