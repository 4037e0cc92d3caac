"""Contexts that requests have saved: files of an owner's folder, with a limit on their bytes."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from keepset.errors import KeepsetError

SUFFIX = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_FOLDER = "saved"
_UNFINISHED = ".unfinished"
"""A folder beside those of owners. No owner can have this name."""
_ABANDONED = 3600
"""Seconds without a write after which an unfinished file is abandoned."""
EVERYBODY = "everybody"
"""The owner of all saved contexts on a server without keys."""


def owner_of(key: str) -> str:
    """Return the owner of an API key. It cannot be computed without the key."""
    return hashlib.sha256(f"keepset owner {key}".encode()).hexdigest()[:32]


class OwnedContexts:
    """The contexts of one owner.

    Each version of a context is its own file, and the newest counts. So no file that is being read is replaced.

    Args:
        contexts: the folder of all contexts.
        owner: the owner, as `owner_of` returns it, or `EVERYBODY`.

    Raises:
        KeepsetError: no owner can have this name.
    """

    def __init__(self, contexts: Path, owner: str) -> None:
        if owner != EVERYBODY and not re.fullmatch("[0-9a-f]{32}", owner):
            raise KeepsetError(f"{owner!r:.80} is no owner of contexts.")
        self.folder = contexts / _FOLDER / owner
        self._unfinished = contexts / _FOLDER / _UNFINISHED

    def newest(self) -> dict[str, Path]:
        """Return the newest version of every context, by name. Versions are named in the order of their times."""
        return {path.name.split("@")[0]: path for path in sorted(self._files())}

    def unfinished(self, name: str) -> Path:
        """Return a path for a new version of a context. It does not count before it is committed."""
        return self._unfinished / f"{name}@{time.time_ns():020d}-{uuid4().hex[:8]}{SUFFIX}"

    def commit(self, unfinished: Path, limit: int, used: Collection[Path]) -> None:
        """Make a written version the newest one.

        Args:
            unfinished: its path, from `unfinished`.
            limit: bytes that all of the owner's contexts may have together. The least recently used are deleted first.
            used: files that requests still need, which are never deleted.

        Raises:
            KeepsetError: the version by itself has more bytes.
        """
        size = unfinished.stat().st_size
        if size > limit:
            unfinished.unlink()
            raise KeepsetError(f"{unfinished.name!r} has {size} bytes, and an owner's contexts may have {limit}.")
        self.folder.mkdir(exist_ok=True)
        finished = self.folder / unfinished.name
        os.replace(unfinished, finished)
        self.sweep(limit, used, finished)

    def sweep(self, limit: int | None, used: Collection[Path], last: Path | None = None) -> None:
        """Delete replaced versions, then the least recently used contexts until the rest is within the limit.

        Args:
            limit: bytes that all of the owner's contexts may have together; None to delete no contexts.
            used: files that requests still need, which are never deleted.
            last: the file that is deleted last.
        """
        if limit is None:
            return
        newest, stats = set(self.newest().values()), {}
        for path in self._files():
            with suppress(OSError):
                stats[path] = path.stat()
        total = sum(stat.st_size for stat in stats.values())
        for path in sorted(stats, key=lambda path: (path in newest, path == last, stats[path].st_atime_ns)):
            if path not in used and (path not in newest or total > limit):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    total -= stats[path].st_size

    @staticmethod
    def clear_unfinished(contexts: Path) -> None:
        """Delete abandoned files of processes that ended while they wrote."""
        for path in (contexts / _FOLDER / _UNFINISHED).glob("*"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED:
                    path.unlink()

    def touch(self, path: Path) -> None:
        """Note that the context in this file is used now."""
        with suppress(OSError):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob(f"*@*{SUFFIX}") if path.is_file()]


def check_save(limit: int | None, name: str, objection: str = "") -> None:
    """Check that a request can be saved.

    Args:
        limit: bytes that an owner's contexts may have; None if the server saves none.
        name: the name to save under, as a client wrote it.
        objection: why the request cannot be saved, as the end of a sentence; "" if it can.

    Raises:
        KeepsetError: it cannot be saved.
    """
    if limit is None:
        raise KeepsetError("This server saves no contexts: start it with --save-bytes.")
    if not _NAME.fullmatch(name):
        raise KeepsetError(
            f"A context cannot be saved as {name!r:.80}: use up to 100 letters, digits, _, - and dots, a letter or a "
            "digit first."
        )
    if objection:
        raise KeepsetError(f"A request that is saved is {objection}.")
