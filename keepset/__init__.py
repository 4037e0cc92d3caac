"""keepset decides which entries of a language model's KV cache to keep, and really frees the rest.

A method looks at an `Observation` and answers with a `KeepSet`; a runtime executes the `KeepSet`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepset import models
    from keepset.core.budget import Budget
    from keepset.core.keep_set import KeepSet
    from keepset.core.method import Method
    from keepset.core.observation import Observation
    from keepset.core.schedule import Schedule
    from keepset.errors import KeepsetError
    from keepset.hf.cache import Cache
    from keepset.recipe import Recipe
    from keepset.registry import METHODS, register

__version__ = "0.1.0"

# Resolved on first use: importing torch takes a second, and asking for the version should not.
_HOMES = {
    "Budget": "keepset.core.budget",
    "Cache": "keepset.hf.cache",
    "KeepSet": "keepset.core.keep_set",
    "KeepsetError": "keepset.errors",
    "METHODS": "keepset.registry",
    "Method": "keepset.core.method",
    "Observation": "keepset.core.observation",
    "Recipe": "keepset.recipe",
    "Schedule": "keepset.core.schedule",
    "models": "keepset.models",
    "register": "keepset.registry",
}

__all__ = [
    "METHODS",
    "Budget",
    "Cache",
    "KeepSet",
    "KeepsetError",
    "Method",
    "Observation",
    "Recipe",
    "Schedule",
    "models",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'keepset' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if _HOMES[name] == f"keepset.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
