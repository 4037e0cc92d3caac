"""The switch that makes scores of NaN an error: off while requests are served, on while recipes are measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

NAN_MODEL = (
    "The model predicts NaN: its weights are damaged, or too large for their precision; load it anew, or in float32 or "
    "bfloat16."
)
_refused: ContextVar[bool] = ContextVar("_refused", default=False)


@contextmanager
def nan_scores_refused() -> Iterator[None]:
    """Refuse scores of NaN inside this context, because a measured figure would be that of another choice.

    It costs a wait for the device per layer.
    """
    before = _refused.set(True)
    try:
        yield
    finally:
        _refused.reset(before)


def are_refused() -> bool:
    """Return whether scores of NaN are refused at this point."""
    return _refused.get()
