"""`Log`: the results of a compilation so far, in SQLite, so that it can be interrupted, continued and shared.

Several processes of one machine may use a log at once, and each sees what the others have added. If two add the same
trial, the first result is kept.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from keepset.errors import CorruptFileError, KeepsetError

_PATIENCE = 60.0
"""Seconds to wait while another process writes."""
_TABLES = """
CREATE TABLE IF NOT EXISTS compilation (settings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS contexts (name TEXT PRIMARY KEY, entropy REAL NOT NULL, perplexity REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS rewards (
    context TEXT NOT NULL, kind TEXT NOT NULL, keep INTEGER NOT NULL, number INTEGER NOT NULL,
    actions BLOB NOT NULL, propensity REAL NOT NULL,
    said REAL NOT NULL, expected REAL NOT NULL, kept REAL NOT NULL, admitted REAL NOT NULL,
    PRIMARY KEY (context, kind, keep, number)) STRICT;
"""


@dataclass(frozen=True)
class Trial:
    """One joint action and its results.

    Attributes:
        context: the context's name.
        kind: `head` or `gate`, the table to which the actions belong.
        keep: the budget, entries per KV head.
        number: number of the trial among those of its context, kind and budget.
        actions: one byte for each decision.
        propensity: the probability with which each single action was chosen.
        said, expected, kept, admitted: see `Verdict`.
    """

    context: str
    kind: str
    keep: int
    number: int
    actions: bytes
    propensity: float
    said: float
    expected: float
    kept: float
    admitted: float


class Log:
    """The log of one compilation.

    Args:
        path: the file; None to keep the log in memory.
        settings: the settings that determine the results.

    Raises:
        KeepsetError: the file is not such a log, cannot be written, or belongs to a compilation with other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path, ours = path, json.dumps(settings, sort_keys=True)
        self._mine = False
        with self._readable(), ExitStack() as undo:
            self._base = sqlite3.connect(path or ":memory:", timeout=_PATIENCE, isolation_level=None)
            undo.callback(self.close)
            written = self._begun(ours)
            undo.pop_all()
        if written != ours:
            self.close()
            raise KeepsetError(
                f"{str(path)!r} is the log of another compilation ({_difference(written, settings)} differ): name "
                "another file, or continue with the same model, texts and options."
            )

    def _begun(self, ours: str) -> str:
        """Begin the file if it is new, and return its settings."""
        self._base.execute("BEGIN IMMEDIATE")  # another process may also begin it
        names = {name for (name,) in self._base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if names and "compilation" not in names:
            raise sqlite3.DatabaseError("it holds other tables")
        if not names:
            for statement in _TABLES.split(";"):
                self._base.execute(statement)
            self._base.execute("INSERT INTO compilation VALUES (?)", (ours,))
            self._mine = True
        (written,) = self._base.execute("SELECT settings FROM compilation").fetchone()
        self._base.execute("COMMIT")
        return str(written)

    def close(self) -> None:
        """Close the file, and remove it if this process has created it and nothing was added."""
        nothing = self._mine and not self._has("contexts", ())
        self._base.close()
        if nothing and self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def risks(self) -> dict[str, tuple[float, float]]:
        """Return entropy and perplexity of every context that was measured, by its name."""
        with self._readable():
            rows = self._base.execute("SELECT * FROM contexts")
            return {name: (entropy, perplexity) for name, entropy, perplexity in rows}

    def add_risk(self, name: str, risk: tuple[float, float]) -> None:
        """Add a context's entropy and perplexity.

        Args:
            name: the context's name.
            risk: entropy and perplexity.
        """
        self._insert("contexts", (name, *risk))

    @property
    def trials(self) -> list[Trial]:
        """Return all trials, in an order that does not depend on when they were added."""
        with self._readable():
            ordered = "SELECT * FROM rewards ORDER BY context, kind, keep, number"
            return [Trial(*values) for values in self._base.execute(ordered)]

    def add(self, trial: Trial) -> None:
        """Add a trial."""
        self._insert("rewards", astuple(trial))

    def has_risk(self, name: str) -> bool:
        """Return whether a context was measured."""
        return self._has("contexts WHERE name = ?", (name,))

    def has(self, *trial: str | int) -> bool:
        """Return whether there is a trial of this context, kind, budget and number."""
        return self._has("rewards WHERE context = ? AND kind = ? AND keep = ? AND number = ?", trial)

    def _has(self, where: str, values: tuple[Any, ...]) -> bool:
        with self._readable():
            return self._base.execute(f"SELECT 1 FROM {where}", values).fetchone() is not None

    def _insert(self, table: str, values: tuple[Any, ...]) -> None:
        with self._readable():
            self._base.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise CorruptFileError(
                f"{str(self._path)!r} cannot be used as a log ({error}): name another file, or one that a compilation "
                "has begun."
            ) from error


def _difference(written: str, settings: Mapping[str, Any]) -> str:
    try:
        before = dict(json.loads(written))
    except (ValueError, TypeError, RecursionError):
        return "settings"
    ours = json.loads(json.dumps(settings))
    return ", ".join(name for name in ours if before.get(name) != ours[name]) or "settings"
