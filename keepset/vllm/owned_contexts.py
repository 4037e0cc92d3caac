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
"""Beside the folders of owners. Nobody can be called so."""
_ABANDONED = 3600
"""Seconds after which nobody writes to a file any more."""
EVERYBODY = "everybody"
"""Whose they are on a server without keys."""


def owner_of(key: str) -> str:
    """What stands for who has this key. Who does not know the key cannot know it either."""
    return hashlib.sha256(f"keepset owner {key}".encode()).hexdigest()[:32]


class OwnedContexts:
    """One owner's. A version of a context is a file of its own, the newest counts: nobody reads what is being replaced.

    Args:
        contexts: the folder of all contexts.
        owner: as `owner_of` says it, or `EVERYBODY`.

    Raises:
        KeepsetError: nobody can be called so.
    """

    def __init__(self, contexts: Path, owner: str) -> None:
        if owner != EVERYBODY and not re.fullmatch("[0-9a-f]{32}", owner):
            raise KeepsetError(f"{owner!r:.80} is no owner of contexts.")
        self.folder = contexts / _FOLDER / owner
        self._unfinished = contexts / _FOLDER / _UNFINISHED

    def newest(self) -> dict[str, Path]:
        """Of every name the version that counts. Names of versions are in the order of their times."""
        return {path.name.split("@")[0]: path for path in sorted(self._files())}

    def unfinished(self, name: str) -> Path:
        """Return where a new version is to be written. It does not count yet."""
        return self._unfinished / f"{name}@{time.time_ns():020d}-{uuid4().hex[:8]}{SUFFIX}"

    def commit(self, unfinished: Path, limit: int, used: Collection[Path]) -> None:
        """Make the version count that was written there, if it is within the limit.

        Args:
            unfinished: as it was named before.
            limit: bytes that all of the owner's contexts may have together; those that were used longest ago go first.
            used: files that requests still need, which stay in any case.

        Raises:
            KeepsetError: it alone is more.
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
        """Delete versions that were replaced, and of the others what is beyond the limit.

        Args:
            limit: bytes, as for `commit`; without one nothing is deleted.
            used: files that requests still need, which stay in any case.
            last: the version that goes after all others.
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
        """Delete what a process has left that ended while it wrote."""
        for path in (contexts / _FOLDER / _UNFINISHED).glob("*"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED:
                    path.unlink()

    def touch(self, path: Path) -> None:
        """Note that the context is used now."""
        with suppress(OSError):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob(f"*@*{SUFFIX}") if path.is_file()]


def check_save(limit: int | None, name: str, objection: str = "") -> None:
    """Refuses to save under this name.

    Raises:
        KeepsetError: nothing is saved here, nothing can be called so, or `objection` says what alone is saved.
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
