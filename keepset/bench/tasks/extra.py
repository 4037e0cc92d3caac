"""What only evaluation needs is imported when a task needs it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from keepset.errors import KeepsetError


def extra(module: str) -> ModuleType:
    """A module that `keepset[eval]` installs.

    Raises:
        KeepsetError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise KeepsetError(
            f"This task needs {module.partition('.')[0]}, which cannot be imported ({error}): run "
            '`pip install "keepset[eval]"`.'
        ) from error
