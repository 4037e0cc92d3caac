"""The file of a sweep: its configuration, and every cell as soon as it is computed.

The file has one JSON object a line, and only grows: the configuration first, then the examples of tasks and the cells.
One process adds to it at a time; any number may read it meanwhile. A line that a crash has cut short counts as missing.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepset.errors import CorruptFileError, KeepsetError, RecipeError, quoted
from keepset.lab.record import Record
from keepset.recipe import in_full, shown

Key = tuple[str, int, str, str]
"""A cell's name: the task, the seed, the example's id, the recipe in short."""

FORMAT = 5
"""The file's version: raise it with every change to its lines or to `Record`. Recipes are written in full."""
_KIND = "keepset sweep"
"""The first name in a file, which the version follows."""
_SQLITE = b"SQLite format 3\0"
_ADVICE = "name another with --out"


class Store:
    """A sweep's file: `begin` opens it to add cells, `open` reads what it holds now.

    Attributes:
        path: the file.
        model: the model's name at the first start.
        configuration: the settings that all cells share, by names that people understand.
    """

    path: Path
    model: str
    configuration: dict[str, Any]

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path, self._descriptor, self._is_new = path, descriptor, False
        self._examples: dict[tuple[str, int], tuple[str, list[str]]] = {}
        self._cells: dict[tuple[str, int, str, str], Record] = {}  # by recipes in full
        self._end = 0  # of the last whole line, in bytes

    @classmethod
    def open(cls, path: Path) -> Store:
        """Read a sweep's file.

        Args:
            path: the file, which another process may be adding to.

        Raises:
            KeepsetError: there is no such file, or it is not a sweep's.
        """
        if not os.path.isfile(path):  # unlike Path.is_file, it takes any name
            missing = f"{quoted(path)} is a folder" if os.path.isdir(path) else f"There is no file {quoted(path)}"
            raise KeepsetError(f"{missing}: name a file that `keepset eval` has written.")
        store = cls(path)
        store._read()
        return store

    @classmethod
    def begin(cls, path: Path, model: str, configuration: Mapping[str, Any]) -> Store:
        """Open a sweep's file to add to it, or make a new one.

        Args:
            path: the file.
            model: the model's name.
            configuration: the settings that all cells share.

        Raises:
            KeepsetError: another process adds to the file, the file is not a sweep's, its configuration differs, or it
                cannot be written.
        """
        is_new = not path.exists()
        store = cls(path, descriptor := _locked(path))
        try:
            if not os.fstat(descriptor).st_size:
                store._add({_KIND: FORMAT, "model": model, "configuration": dict(configuration)})
            store._read()
            os.ftruncate(descriptor, store._end)  # without a line that a crash has cut short
            store.check(configuration)
        except BaseException:
            store.close()
            raise
        store._is_new = is_new
        return store

    def close(self) -> None:
        """Close the file, so that another process can add to it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Close the file, and remove it if it is new and an error came before its first cell."""
        if self._is_new and error is not None and not self._cells:
            self.path.unlink(missing_ok=True)
        self.close()

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
        """Note a task's examples under a seed.

        Args:
            task: the task's name.
            seed: the seed.
            ids: the examples' ids.
            digest: distinguishes the examples from others with the same ids.

        Raises:
            KeepsetError: the file has cells of other examples, or cannot be written.
        """
        if (task, seed) not in self._examples:
            self._add({"task": task, "seed": seed, "digest": digest, "ids": list(ids)})
            self._examples[task, seed] = digest, list(ids)
        elif self._examples[task, seed][0] != digest:
            raise KeepsetError(
                f"{task}'s examples with seed {seed} differ from those in {str(self.path)!r}, because data, tokenizer "
                f"or the task's program changed: {_ADVICE}."
            )

    def examples(self, task: str, seed: int) -> list[str] | None:
        """Return the ids of a task's examples; None if they were never made.

        Args:
            task: the task's name.
            seed: the seed.
        """
        return self._examples[task, seed][1] if (task, seed) in self._examples else None

    def done(self) -> set[Key]:
        """Return the names of all cells in the file."""
        return {(task, seed, example, shown(recipe)) for task, seed, example, recipe in self._cells}

    def cells(self) -> list[Record]:
        """Return all cells, ordered by the task's examples, then by recipes in the order of their first cells.

        Raises:
            CorruptFileError: a cell is of no example of the file.
        """
        cells = [replace(cell, recipe=shown(cell.recipe), method=shown(cell.method)) for cell in self._cells.values()]
        keys = [(*names, example) for names, (_, ids) in self._examples.items() for example in ids]
        order = {key: at for at, key in enumerate(keys)}
        rank = {recipe: at for at, recipe in enumerate(dict.fromkeys(cell.recipe for cell in cells))}
        try:
            return sorted(cells, key=lambda cell: (order[cell.task, cell.seed, cell.example], rank[cell.recipe]))
        except KeyError:
            raise _no_sweep(self.path) from None

    def save(self, cell: Record) -> bool:
        """Write a cell; return whether the file did not have it before.

        Raises:
            KeepsetError: the file cannot be written; it is as it was before.
        """
        cell = replace(cell, recipe=_stored(cell.recipe), method=_stored(cell.method))
        key = (cell.task, cell.seed, cell.example, cell.recipe)
        if key in self._cells:
            return False
        self._add(cell.to_json())
        self._cells[key] = cell
        return True

    def _read(self) -> None:
        """Read all whole lines."""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise KeepsetError(f"{str(self.path)!r} cannot be read ({error.strerror}): make it readable.") from None
        if content.startswith(_SQLITE):
            raise CorruptFileError(
                f"{str(self.path)!r} is an SQLite file, as older versions of keepset wrote: use such a "
                "version, or name another file."
            )
        self._end = content.rfind(b"\n") + 1
        try:
            head, *lines = [json.loads(line) for line in content[: self._end].splitlines()]
            if head[_KIND] != FORMAT:
                raise CorruptFileError(
                    f"{str(self.path)!r} is of another version of keepset (format {head[_KIND]}, this one's is "
                    f"{FORMAT}): use that version, or {_ADVICE}."
                )
            self.model, self.configuration = str(head["model"]), dict(head["configuration"])
            for line in lines:
                if "ids" in line:
                    self._examples[line["task"], line["seed"]] = line["digest"], list(line["ids"])
                else:
                    cell = Record.from_json(line)
                    self._cells.setdefault((cell.task, cell.seed, cell.example, cell.recipe), cell)
        except CorruptFileError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _no_sweep(self.path) from None

    def _add(self, line: Mapping[str, Any]) -> None:
        """Write a line, whole or not at all, so that neither a crash nor a power cut can take it back."""
        assert self._descriptor is not None, "the file is open to be read"
        rest = memoryview(f"{json.dumps(line)}\n".encode())
        end = self._end + len(rest)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            if not isinstance(error, OSError):
                raise
            raise KeepsetError(
                f"{str(self.path)!r} cannot be written ({error.strerror}): make room there, and run the same command "
                "again to continue; cells that are there are kept."
            ) from error
        self._end = end


def check_free(path: Path) -> None:
    """Refuse, with a `KeepsetError`, a file that another process is adding to."""
    if path.is_file():
        os.close(_locked(path))


def _locked(path: Path) -> int:
    """Return a descriptor that appends to a sweep's file, and holds it against other writers until it is closed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
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


def _no_sweep(path: Path) -> KeepsetError:
    return CorruptFileError(f"{str(path)!r} is damaged, or no file of `keepset eval`: name another file.")


def _word(value: Any) -> str:
    word = {None: "none", True: "yes", False: "no"}.get(value) if value is None or isinstance(value, bool) else None
    text = word or str(value)
    return text if len(text) <= 40 else text[:37] + "..."
