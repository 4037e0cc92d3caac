"""What is checked of a place before a file is written there."""

from __future__ import annotations

import stat
from pathlib import Path

from keepset.errors import KeepsetError


def check_replaceable(path: Path) -> None:
    """Refuse to write where something is that is no file, such as a folder, a named pipe or a device.

    Raises:
        KeepsetError: there is such a thing, or no file can have this name.
    """
    try:
        regular, cause = stat.S_ISREG(path.stat().st_mode), "it is no regular file"
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        regular, cause = False, getattr(error, "strerror", None) or str(error)
    if not regular:
        shown = str(path) if len(str(path)) <= _SHOWN else f"{str(path)[:_SHOWN]}..."
        raise KeepsetError(f"{shown!r} cannot be written ({cause}): name another file.")


_SHOWN = 200
