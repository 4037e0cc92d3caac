"""keepset decides which entries of a language model's KV cache to keep, and really frees the rest.

A method looks at an `Observation` and answers with a `KeepSet`; a runtime executes the `KeepSet`.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The stub beside this file lists the names; they are resolved on first use: importing torch takes a second, and asking
# for the version should not.
_LINES = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
_HOMES = {alias.name: line.module for line in _LINES if isinstance(line, ast.ImportFrom) for alias in line.names}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'keepset' has no attribute {name!r}")
    if _HOMES[name] == "keepset":
        return importlib.import_module(f"keepset.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
