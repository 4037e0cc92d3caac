"""The check of a path before a file is written there, and the quotation of paths in errors."""

from __future__ import annotations

import stat
from pathlib import Path

from keepset.errors import KeepsetError

_QUOTED = 200
"""The most characters of a path that an error quotes."""


def quoted(path: Path | str) -> str:
    """Return a path in quotes, cut off where it is very long."""
    text = str(path)
    return repr(text) if len(text) <= _QUOTED else repr(f"{text[:_QUOTED]}...")


def check_replaceable(path: Path) -> None:
    """Refuse to write to a path that is no regular file, such as a folder, a named pipe or a device.

    Raises:
        KeepsetError: if it is none, or no file can have this name.
    """
    try:
        regular, cause = stat.S_ISREG(path.stat().st_mode), "it is no regular file"
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        regular, cause = False, getattr(error, "strerror", None) or str(error)
    if not regular:
        raise KeepsetError(f"{quoted(path)} cannot be written ({cause}): name another file.")
