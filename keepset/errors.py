"""The errors that keepset raises for bad input, by kinds that a service may treat differently."""

import importlib.metadata
from pathlib import Path

_QUOTED = 200
"""The most characters of a path that an error quotes."""


class KeepsetError(ValueError):
    """Bad input or an unsupported combination: one sentence that says what is wrong and what is allowed.

    The command line prints it without a trace-back and exits with 2. The subclasses name a specific cause; the class
    itself is raised for all other arguments.
    """


class RecipeError(KeepsetError):
    """An invalid recipe text, method name or parameter, or methods that cannot be combined."""


class BudgetError(KeepsetError):
    """An invalid budget (`keep`, `sinks`, `recent`), or a schedule that does not suit it."""


class UnsupportedModelError(KeepsetError):
    """The model, or its inputs, are of a kind that keepset cannot compress."""


class UnsupportedEngineError(KeepsetError):
    """The engine's version or configuration cannot serve the recipe."""


class CorruptFileError(KeepsetError):
    """A file is damaged, has another format or version, or is of the wrong kind."""


def quoted(path: Path | str) -> str:
    """Return a path in quotes, cut off where it is very long."""
    text = str(path)
    return repr(text) if len(text) <= _QUOTED else repr(f"{text[:_QUOTED]}...")


def installation(extra: str) -> str:
    """Return the command that installs what an extra of keepset asks for; no package index has keepset itself."""
    marker = f'extra == "{extra}"'
    needed = [line.partition(";") for line in importlib.metadata.requires("keepset") or []]
    wanted = " ".join(f'"{name.strip()}"' for name, _, condition in needed if marker in condition.replace("'", '"'))
    return f"`pip install {wanted}`"
