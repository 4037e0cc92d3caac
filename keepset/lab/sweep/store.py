"""The file of a sweep: its configuration, and every cell as soon as it is computed.

The file is an SQLite database. One process writes to it at a time; any number may read it meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from keepset.errors import CorruptFileError, KeepsetError, RecipeError, quoted
from keepset.lab.record import Record
from keepset.recipe import in_full, shown

GroupKey = tuple[str, int, str]
"""A group's name: the task, the seed, the example's id."""

FORMAT = 4
"""The file's version: raise it with every change to its tables or to `Record`. Recipes are written in full."""
_PATIENCE = 60.0
"""Seconds to wait if another program locks the database."""
_APPLICATION = 0x6B705357
_ADVICE = "name another with --out"
_TABLES = """
CREATE TABLE sweep (model TEXT NOT NULL, configuration TEXT NOT NULL);
CREATE TABLE examples (
    task TEXT, seed INTEGER, digest TEXT NOT NULL, ids TEXT NOT NULL, PRIMARY KEY (task, seed)
);
CREATE TABLE cells (
    task TEXT, seed INTEGER, example TEXT, recipe TEXT, cell TEXT NOT NULL, PRIMARY KEY (task, seed, example, recipe)
)
"""


class Store:
    """A sweep's file: `begin` opens it to add cells, `open` only to read.

    `model` is the model's name at the first start, and `configuration` has the settings that all cells share, by names
    that people understand.
    """

    path: Path
    model: str
    configuration: dict[str, Any]

    def __init__(self, path: Path, undo: ExitStack, *, writes: bool) -> None:
        self.path, self._undo, self._is_new = path, undo, False
        self._database = _connect(path, writes=writes)
        undo.callback(self._database.close)

    @classmethod
    def open(cls, path: Path) -> Store:
        """Open a sweep's file to read it.

        Raises:
            KeepsetError: there is no such file, or it is not a sweep's.
        """
        if not os.path.isfile(path):  # unlike Path.is_file, it takes any name
            missing = f"{quoted(path)} is a folder" if os.path.isdir(path) else f"There is no file {quoted(path)}"
            raise KeepsetError(f"{missing}: name a file that `keepset eval` has written.")
        with _sentences(path), ExitStack() as undo:
            store = cls(path, undo, writes=False)
            if not store._is_sweep():
                raise _no_sweep(path)
            store._read()
            store._undo = undo.pop_all()
        return store

    @classmethod
    def begin(cls, path: Path, model: str, configuration: Mapping[str, Any]) -> Store:
        """Open a sweep's file to add to it, or make a new one with the model's name and the cells' common settings.

        Raises:
            KeepsetError: another process adds to the file, the file is not a sweep's, its configuration differs, or it
                cannot be written.
        """
        with _sentences(path), ExitStack() as undo:
            is_new = not path.exists()
            undo.callback(os.close, _locked(path))
            store = cls(path, undo, writes=True)
            # A process that was killed early leaves a database without tables.
            if store._database.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                store._create(model, configuration)
            elif not store._is_sweep():
                raise _no_sweep(path)
            store._database.execute("PRAGMA journal_mode = WAL")  # others can read while this process writes
            store._read()
            store.check(configuration)
            store._undo, store._is_new = undo.pop_all(), is_new
        return store

    def close(self) -> None:
        """Close the file, so that another process can add to it."""
        self._undo.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Close the file, and remove it if it is new and an error came before its first cell."""
        is_left = False
        with suppress(KeepsetError):
            is_left = self._is_new and error is not None and not self.done()
        self.close()
        if is_left:
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(f"{self.path.name}{suffix}").unlink(missing_ok=True)

    def check(self, configuration: Mapping[str, Any]) -> None:
        """Refuse a configuration, or a part of one, that differs from the file's.

        Raises:
            KeepsetError: the configuration differs; the sentence names every difference.
        """
        stored = self.configuration
        differs = [
            f"{name}: {_word(stored.get(name))}, not {_word(value)}"
            for name, value in configuration.items()
            if stored.get(name) != value
        ]
        if differs:
            difference = "; ".join(differs)
            raise KeepsetError(f"{str(self.path)!r} has other settings ({difference}): use those, or {_ADVICE}.")

    def register(self, task: str, seed: int, ids: Sequence[str], digest: str) -> None:
        """Note a task's examples under a seed; a digest distinguishes them from others with the same ids.

        Raises:
            KeepsetError: the file has cells of other examples.
        """
        with self._transaction() as database:
            row = database.execute("SELECT digest FROM examples WHERE task = ? AND seed = ?", [task, seed]).fetchone()
            if row is None:
                database.execute("INSERT INTO examples VALUES (?, ?, ?, ?)", [task, seed, digest, json.dumps(ids)])
        if row is not None and row[0] != digest:
            raise KeepsetError(
                f"{task}'s examples with seed {seed} differ from those in {str(self.path)!r}, because data, tokenizer "
                f"or the task's program changed: {_ADVICE}."
            )

    def examples(self, task: str, seed: int) -> list[str] | None:
        """Return the ids of a task's examples under a seed; None if they were never made."""
        with _sentences(self.path):
            query = "SELECT ids FROM examples WHERE task = ? AND seed = ?"
            row = self._database.execute(query, [task, seed]).fetchone()
        return None if row is None else json.loads(row[0])

    def done(self) -> set[tuple[GroupKey, str]]:
        """Return the group and the recipe of every cell in the file."""
        with _sentences(self.path):
            rows = self._database.execute("SELECT task, seed, example, recipe FROM cells")
            return {((task, seed, example), shown(recipe)) for task, seed, example, recipe in rows}

    def cells(self) -> list[Record]:
        """Return all cells, ordered by the task's examples, then by recipes in the order of their first cells."""
        with _sentences(self.path):
            rows = self._database.execute("SELECT cell FROM cells ORDER BY rowid").fetchall()
            example_rows = self._database.execute("SELECT task, seed, ids FROM examples ORDER BY rowid").fetchall()
        try:
            written = [Record.from_json(json.loads(text)) for (text,) in rows]
            cells = [replace(c, recipe=shown(c.recipe), method=shown(c.method)) for c in written]
            keys = [(task, seed, example) for task, seed, ids in example_rows for example in json.loads(ids)]
            order = {key: at for at, key in enumerate(keys)}
            rank = {recipe: at for at, recipe in enumerate(dict.fromkeys(cell.recipe for cell in cells))}
            return sorted(cells, key=lambda cell: (order[cell.task, cell.seed, cell.example], rank[cell.recipe]))
        except (ValueError, TypeError, KeyError):
            raise _no_sweep(self.path) from None

    def save(self, cell: Record) -> bool:
        """Write a cell; return whether the file did not have it before."""
        cell = replace(cell, recipe=_stored(cell.recipe), method=_stored(cell.method))
        key = (cell.task, cell.seed, cell.example, cell.recipe)
        with self._transaction() as database:
            values = [*key, json.dumps(cell.to_json())]
            return database.execute("INSERT OR IGNORE INTO cells VALUES (?, ?, ?, ?, ?)", values).rowcount > 0

    def _create(self, model: str, configuration: Mapping[str, Any]) -> None:
        with self._transaction() as database:
            for statement in _TABLES.split(";"):
                database.execute(statement)
            database.execute("INSERT INTO sweep VALUES (?, ?)", [model, json.dumps(dict(configuration))])
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute(f"PRAGMA user_version = {FORMAT}")

    def _is_sweep(self) -> bool:
        return self._database.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION

    def _read(self) -> None:
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT:
            raise CorruptFileError(
                f"{str(self.path)!r} is of another version of keepset (format {version}, this one's is {FORMAT}): "
                f"use that version, or {_ADVICE}."
            )
        if self._database.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise _no_sweep(self.path)
        try:
            self.model, text = self._database.execute("SELECT model, configuration FROM sweep").fetchone()
            self.configuration = json.loads(text)
        except (ValueError, TypeError):
            raise _no_sweep(self.path) from None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Make the block's writes a transaction: all or nothing."""
        with _sentences(self.path):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise


def check_free(path: Path) -> None:
    """Refuse, with a `KeepsetError`, a file that another process is adding to."""
    if path.is_file():
        os.close(_locked(path))


def _locked(path: Path) -> int:
    """Return a descriptor that holds a sweep's file against other writers until it is closed, after the database.

    Closing any descriptor of a file gives up the locks that SQLite holds on it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise KeepsetError(
            f"{str(path)!r} cannot be written ({error.strerror}): make it writable, or {_ADVICE}."
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise KeepsetError(
            f"Another process is adding to {str(path)!r}: wait until it has ended, or {_ADVICE}; one process uses many "
            "machines with --ray."
        ) from None
    return descriptor


def _stored(text: str) -> str:
    """Return a recipe's or a method's text in full; texts of the full cache and of unregistered methods unchanged."""
    with suppress(RecipeError):
        return in_full(text)
    return text


def _connect(path: Path, *, writes: bool) -> sqlite3.Connection:
    path, mode = path.resolve(), "mode=rw"
    if not writes and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        # Readers also write files beside a database in use. If nobody can write, no such file is needed.
        mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    database = sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, timeout=_PATIENCE, isolation_level=None)
    if not writes:
        database.execute("PRAGMA query_only = 1")
    return database


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a `KeepsetError` that says in one sentence what is wrong with the file."""
    try:
        yield
    except sqlite3.Error as error:
        name, file = getattr(error, "sqlite_errorname", None) or "", repr(str(path))
        if name.startswith("SQLITE_CONSTRAINT"):
            raise
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            reason = f"{file} cannot be written ({error}): make room there, and run the same command again to continue"
        elif name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
            reason = f"{file} cannot be written ({error}): make it writable, or {_ADVICE}"
        elif name.startswith("SQLITE_BUSY"):
            reason = f"{file} has been in use by another program for {_PATIENCE:.0f} s: try again later"
        else:
            raise _no_sweep(path) from error
        raise KeepsetError(f"{reason}; cells that are there are kept.") from error


def _no_sweep(path: Path) -> KeepsetError:
    return CorruptFileError(f"{str(path)!r} is damaged, or no file of `keepset eval`: name another file.")


def _word(value: Any) -> str:
    word = {None: "none", True: "yes", False: "no"}.get(value) if value is None or isinstance(value, bool) else None
    text = word or str(value)
    return text if len(text) <= 40 else text[:37] + "..."
