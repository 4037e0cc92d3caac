"""Modules that import vLLM, imported late: it takes seconds, of every process that collects tests."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks whatever it collects, whether it is a mock or wraps something
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
