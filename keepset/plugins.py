"""Methods of other packages: whoever has them installed can name them in recipes."""

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
processes that are started, such as a server's, have it too."""


@cache
def load_methods() -> None:
    """Import what registers methods, once in a process. A module calls `keepset.register`, as a decorator or not.

    Raises:
        KeepsetError: something cannot be imported.
    """
    for module in _modules():
        try:
            import_module(module)
        except Exception as error:  # of code that is not keepset's
            raise KeepsetError(
                f"The plug-in {module!r} cannot be imported ({type(error).__name__}: {error}): fix it, or take it out "
                f"of {MODULES} and --plugin, or uninstall its package."
            ) from error


def _modules() -> Iterator[str]:
    for point in importlib.metadata.entry_points(group=GROUP):
        yield point.value.partition(":")[0]
    yield from filter(None, map(str.strip, os.environ.get(MODULES, "").split(",")))


def add(module: str) -> None:
    """Have this process, and those that it starts, import a module for its methods; the name is as Python imports it.

    Raises:
        KeepsetError: it is no name of a module.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        raise KeepsetError(f"--plugin {module!r} is no name of a module: write one such as my_package.methods.")
    known = os.environ.get(MODULES)
    os.environ[MODULES] = f"{known},{module}" if known else module
