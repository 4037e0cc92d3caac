"""Whether a score that is NaN is an error. It is none of a request that is served, and one of what is measured."""

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
    """Within it they are refused: figures of a recipe that chose by none would be another's. Costs a wait per layer."""
    before = _refused.set(True)
    try:
        yield
    finally:
        _refused.reset(before)


def are_refused() -> bool:
    """Whether that is so here."""
    return _refused.get()
