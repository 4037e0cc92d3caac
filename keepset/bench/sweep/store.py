"""The file of a sweep: what was asked for, every cell as soon as it is there, and who is at work on which example.

One SQLite database, which processes of one machine may use at once. A cell is claimed before it is made.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from keepset.bench.cell import Cell
from keepset.bench.sweep.owner import Owner
from keepset.core.files import quoted
from keepset.errors import CorruptFileError, KeepsetError, RecipeError
from keepset.recipe import in_full, shown

Key = tuple[str, int, str]
"""What tells a group: the task's name, the seed, the example's id."""

FORMAT = 3
"""Of the file; raise it with every change to its tables or to `Cell`. Recipes are written in full."""
LEASE = 180.0
"""Seconds after which a claim of another machine is void, unless it was renewed."""
_BEAT = 20.0
_PATIENCE = 60.0
_APPLICATION = 0x6B705357
_FORMER = {"--answer-tokens": "--output-tokens"}
"""What options were called when some files were begun."""
_ADVICE = "name another with --out"
_TABLES = """
CREATE TABLE sweep (model TEXT NOT NULL, configuration TEXT NOT NULL);
CREATE TABLE examples (
    task TEXT, seed INTEGER, digest TEXT NOT NULL, ids TEXT NOT NULL, PRIMARY KEY (task, seed)
);
CREATE TABLE cells (
    task TEXT, seed INTEGER, example TEXT, recipe TEXT, cell TEXT NOT NULL, PRIMARY KEY (task, seed, example, recipe)
);
CREATE TABLE claims (
    task TEXT, seed INTEGER, example TEXT, recipe TEXT, token TEXT NOT NULL,
    host TEXT NOT NULL, pid INTEGER NOT NULL, started TEXT, beat REAL NOT NULL,
    PRIMARY KEY (task, seed, example, recipe)
)
"""
_GROUP = "task = ? AND seed = ? AND example = ?"
_CELL = f"{_GROUP} AND recipe = ?"


class Store:
    """A sweep's file: `begin` writes to it, `open` only reads.

    It has the name that the model was first given, and what all cells have in common, by names for people.
    """

    model: str
    configuration: dict[str, Any]

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self._database = path, database
        self._token, self._owner = uuid4().hex, Owner.me()
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._keep_claims, daemon=True)

    @classmethod
    def open(cls, path: Path) -> Store:
        """The sweep in a file, to be read."""
        if not os.path.isfile(path):  # unlike Path.is_file, it takes any name
            raise KeepsetError(f"There is no file {quoted(path)}: name one that `keepset eval` has written.")
        with _sentences(path), ExitStack() as undo:
            store = cls(path, _connect(path, writes=False))
            undo.callback(store.close)
            if not store._is_sweep():
                raise _no_sweep(path)
            store._read()
            undo.pop_all()
        return store

    @classmethod
    def begin(cls, path: Path, model: str, configuration: Mapping[str, Any]) -> Store:
        """The sweep in a file, to be added to; a new one if there is none."""
        with _sentences(path), ExitStack() as undo:
            store = cls(path, _connect(path, writes=True))
            undo.callback(store.close)
            store._begin(model, configuration)
            store.check(configuration)
            undo.pop_all()
        store._beats.start()
        return store

    @property
    def is_empty(self) -> bool:
        """Whether it has no cell, and nobody is making one."""
        with _sentences(self.path):
            query = "SELECT (SELECT COUNT(*) FROM cells) + (SELECT COUNT(*) FROM claims WHERE token != ?)"
            (count,) = self._database.execute(query, [self._token]).fetchone()
        return not count

    def close(self) -> None:
        """Gives back what is claimed."""
        self._closed.set()
        if self._beats.is_alive():
            self._beats.join()
        with suppress(sqlite3.Error):
            self._database.execute("DELETE FROM claims WHERE token = ?", [self._token])
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, configuration: Mapping[str, Any]) -> None:
        """Refuses another configuration, of which not all has to be known yet."""
        mine = self.configuration
        differs = [
            f"{name}: {_word(mine.get(name))}, not {_word(value)}"
            for name, value in configuration.items()
            if mine.get(name) != value
        ]
        if differs:
            difference = "; ".join(differs)
            raise KeepsetError(f"{str(self.path)!r} was begun otherwise ({difference}): go on as there, or {_ADVICE}.")

    def register(self, task: str, seed: int, ids: Sequence[str], digest: str) -> None:
        """Notes which examples a task has under a seed."""
        with self._transaction() as database:
            known = database.execute("SELECT digest FROM examples WHERE task = ? AND seed = ?", [task, seed]).fetchone()
            if known is None:
                database.execute("INSERT INTO examples VALUES (?, ?, ?, ?)", [task, seed, digest, json.dumps(ids)])
        if known is not None and known[0] != digest:
            raise KeepsetError(
                f"{task}'s examples with seed {seed} are not those that {str(self.path)!r} has cells of, because data, "
                f"tokenizer or the task's program changed: {_ADVICE}."
            )

    def examples(self, task: str, seed: int) -> list[str] | None:
        """The ids of a task's examples under a seed; None where they were never made."""
        with _sentences(self.path):
            query = "SELECT ids FROM examples WHERE task = ? AND seed = ?"
            known = self._database.execute(query, [task, seed]).fetchone()
        return None if known is None else json.loads(known[0])

    def done(self) -> set[tuple[Key, str]]:
        """Group and recipe of every cell that is there."""
        with _sentences(self.path):
            rows = self._database.execute("SELECT task, seed, example, recipe FROM cells")
            return {((task, seed, example), shown(recipe)) for task, seed, example, recipe in rows}

    def cells(self) -> list[Cell]:
        """All that is there: by example, in its task's order, then by recipe, in the order of their first cells."""
        with _sentences(self.path):
            rows = self._database.execute("SELECT cell FROM cells ORDER BY rowid").fetchall()
            known = self._database.execute("SELECT task, seed, ids FROM examples ORDER BY rowid").fetchall()
        try:
            written = [Cell.from_json(json.loads(text)) for (text,) in rows]
            cells = [replace(c, recipe=shown(c.recipe), method=shown(c.method)) for c in written]
            keys = [(task, seed, example) for task, seed, ids in known for example in json.loads(ids)]
            place = {key: at for at, key in enumerate(keys)}
            rank = {recipe: at for at, recipe in enumerate(dict.fromkeys(cell.recipe for cell in cells))}
            return sorted(cells, key=lambda cell: (place[cell.task, cell.seed, cell.example], rank[cell.recipe]))
        except (ValueError, TypeError, KeyError):
            raise _no_sweep(self.path) from None

    def claim(self, key: Key, recipes: Collection[str]) -> list[str] | None:
        """Those of the recipes that the group lacks, which are now this process's to run.

        None where another process is at work on one of them; that of a process that is gone is taken over.
        """
        with self._transaction() as database:
            have = {shown(name) for (name,) in database.execute(f"SELECT recipe FROM cells WHERE {_GROUP}", key)}
            missing = [recipe for recipe in recipes if recipe not in have]
            claims = database.execute(f"SELECT recipe, token, host, pid, started, beat FROM claims WHERE {_GROUP}", key)
            if any(shown(recipe) in missing and self._is_held(*claim) for recipe, *claim in claims):
                return None
            me = self._owner
            for recipe in missing:
                values = [*key, _stored(recipe), self._token, me.host, me.pid, me.started, time.time()]
                database.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            return missing

    def release(self, key: Key, recipes: Collection[str]) -> None:
        """Gives claimed cells back."""
        with self._transaction() as database:
            for recipe in recipes:
                database.execute(
                    f"DELETE FROM claims WHERE {_CELL} AND token = ?", [*key, _stored(recipe), self._token]
                )

    def save(self, cell: Cell) -> bool:
        """Writes a claimed cell, which is then not claimed any more; False if another process has taken it over."""
        cell = replace(cell, recipe=_stored(cell.recipe), method=_stored(cell.method))
        key = (cell.task, cell.seed, cell.example, cell.recipe)
        with self._transaction() as database:
            mine = database.execute(f"DELETE FROM claims WHERE {_CELL} AND token = ?", [*key, self._token])
            if mine.rowcount < 1:
                return False
            database.execute("INSERT INTO cells VALUES (?, ?, ?, ?, ?)", [*key, json.dumps(cell.to_json())])
            return True

    def _begin(self, model: str, configuration: Mapping[str, Any]) -> None:
        # A database without tables is what a process leaves that was killed at once.
        if self._database.execute("SELECT 1 FROM sqlite_master").fetchone() is not None and not self._is_sweep():
            raise _no_sweep(self.path)
        self._create(model, configuration)
        self._write_ahead()
        self._read()

    def _create(self, model: str, configuration: Mapping[str, Any]) -> None:
        with self._transaction() as database:
            if self._is_sweep():  # another process may have been quicker
                return
            for statement in _TABLES.split(";"):
                database.execute(statement)
            database.execute("INSERT INTO sweep VALUES (?, ?)", [model, json.dumps(dict(configuration))])
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute(f"PRAGMA user_version = {FORMAT}")

    def _write_ahead(self) -> None:
        """Readers and a writer at once. SQLite does not wait here for others that do the same."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                self._database.execute("PRAGMA journal_mode = WAL").fetchone()
                return
            except sqlite3.OperationalError as error:
                if not _name(error).startswith("SQLITE_BUSY") or time.monotonic() > end:
                    raise
                time.sleep(0.05)

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
            self.configuration = {_FORMER.get(name, name): value for name, value in json.loads(text).items()}
        except (ValueError, TypeError):
            raise _no_sweep(self.path) from None

    def _is_held(self, token: str, host: str, pid: int, started: str | None, beat: float) -> bool:
        if token == self._token:
            return False
        gone = Owner(host, pid, started).gone
        return time.time() - beat < LEASE if gone is None else not gone

    def _keep_claims(self) -> None:
        """Renews them for whoever cannot see this process, until the store is closed."""
        with closing(_connect(self.path, writes=True)) as database:
            while not self._closed.wait(_BEAT):
                with suppress(sqlite3.Error):  # What is wrong with the file is said where cells are written.
                    database.execute("UPDATE claims SET beat = ? WHERE token = ?", [time.time(), self._token])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Nobody else writes meanwhile; all of it happens, or nothing."""
        with _sentences(self.path):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise


def _stored(text: str) -> str:
    """A recipe's or a method's text in full; the full cache's, and those of methods not registered, as they are."""
    with suppress(RecipeError):
        return in_full(text)
    return text


def _connect(path: Path, *, writes: bool) -> sqlite3.Connection:
    path = path.resolve()
    if path.is_dir() or not path.parent.is_dir():
        raise KeepsetError(f"{str(path)!r} is no place for a file: give one in a folder that exists.")
    mode = "mode=rwc" if writes else "mode=rw"
    if not writes and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        # Readers, too, want to write beside a file that others write to; where nobody can, nobody does.
        mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    database = sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, timeout=_PATIENCE, isolation_level=None)
    if not writes:
        database.execute("PRAGMA query_only = 1")
    return database


def _name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", None) or ""


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    """Says in one sentence what is wrong with the file."""
    try:
        yield
    except sqlite3.Error as error:
        name, file = _name(error), repr(str(path))
        if name.startswith("SQLITE_CONSTRAINT"):
            raise
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            reason = f"{file} cannot be written ({error}): make room there, and give the same command again to go on"
        elif name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
            reason = f"{file} cannot be written ({error}): make it writable, or {_ADVICE}"
        elif name.startswith("SQLITE_BUSY"):
            reason = f"{file} has been in use by another process for {_PATIENCE:.0f} s: try again later"
        else:
            raise _no_sweep(path) from error
        raise KeepsetError(f"{reason}; cells that are there are kept.") from error


def _no_sweep(path: Path) -> KeepsetError:
    return CorruptFileError(f"{str(path)!r} is damaged, or no file of `keepset eval`: {_ADVICE}.")


def _word(value: Any) -> str:
    word = {None: "none", True: "yes", False: "no"}.get(value) if value is None or isinstance(value, bool) else None
    text = word or str(value)
    return text if len(text) <= 40 else text[:37] + "..."
