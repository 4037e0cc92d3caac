"""Methods of other installed packages, which recipes can name."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module

from keepset.errors import KeepsetError

GROUP = "keepset.methods"
"""The group of a package's entry points, each of which names a module that registers methods."""

MODULES = "KEEPSET_PLUGINS"
"""The environment variable with the names of further modules, separated by commas. `keepset --plugin` adds to it, and
child processes, such as a server's, inherit it."""


@cache
def load_methods() -> None:
    """Import the modules that register methods by `keepset.register`, once in a process.

    Raises:
        KeepsetError: a module cannot be imported.
    """
    for module in _modules():
        try:
            import_module(module)
        except Exception as error:  # plug-ins are not keepset's code
            raise KeepsetError(
                f"The plug-in {module!r} cannot be imported ({type(error).__name__}: {error}): fix it, or take it out "
                f"of {MODULES} and --plugin, or uninstall its package."
            ) from error


def _modules() -> Iterator[str]:
    for point in importlib.metadata.entry_points(group=GROUP):
        yield point.value.partition(":")[0]
    yield from filter(None, map(str.strip, os.environ.get(MODULES, "").split(",")))


def add(module: str) -> None:
    """Make this process, and its child processes, import a module for its methods; the name is Python's dotted name.

    Raises:
        KeepsetError: it is not a module's name.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        raise KeepsetError(f"--plugin {module!r} is no name of a module: write one such as my_package.methods.")
    known = os.environ.get(MODULES)
    os.environ[MODULES] = f"{known},{module}" if known else module
