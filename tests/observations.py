"""Observations that differ in some parts."""

from __future__ import annotations

import inspect
from typing import Any

from keepset import Observation

_PARTS = inspect.signature(Observation).parameters.keys() - {"layer", "count", "longest"}


def changed(observation: Observation, **parts: Any) -> Observation:
    """The same observation with other parts."""
    return Observation(**{name: getattr(observation, name) for name in _PARTS} | parts)
