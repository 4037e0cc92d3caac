"""Items of a data set, from a user's JSONL file or from the hub, with where each stands for messages."""

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from keepset.errors import CorruptFileError, KeepsetError
from keepset.texts import json_lines


@dataclass(frozen=True)
class DataRecord:
    """One item's fields, and where it stands, as messages name it: file and line."""

    where: str
    fields: Mapping[str, Any]

    def first(self, *names: str) -> Any:
        """The first of these fields that is there."""
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        wanted = " or ".join(map(repr, names))
        there = ", ".join(map(repr, self.fields)) or "no field"
        raise KeepsetError(f"{self.where} lacks the field {wanted}: it has {there}.")


def records(folder: Path, name: str) -> list[DataRecord]:
    """The lines of `<name>.jsonl` in a folder; empty ones are left out."""
    path = folder / f"{name}.jsonl"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise CorruptFileError(f"{path.name} is not encoded in UTF-8: save it as such.") from None
    except OSError:
        raise KeepsetError(
            f"There is no {path.name} that can be read in {str(folder)!r}: put the data of {name} there, one JSON "
            "object per line."
        ) from None
    items = []
    for number, fields in json_lines(text):
        if fields is None:
            raise CorruptFileError(f"{path.name}, line {number}, is not a JSON object: write one on each line.")
        items.append(DataRecord(f"{path.name}, line {number},", fields))
    if not items:
        raise CorruptFileError(f"{path.name} is empty: put one JSON object on each line.")
    return items


def own_records(folder: Path | None, name: str) -> list[DataRecord] | None:
    """The same of a user's folder; None without one, or where it has no such file."""
    return records(folder, name) if folder is not None and (folder / f"{name}.jsonl").is_file() else None


@contextmanager
def seeded(seed: int | str, numpy_seed: int | None = None) -> Iterator[None]:
    """The harness draws from generators that everybody shares: they are lent to it, with these seeds."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(random.getrandbits(32) if numpy_seed is None else numpy_seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def extra(module: str) -> ModuleType:
    """A module that `keepset[eval]` installs."""
    try:
        with warnings.catch_warnings(action="ignore"):  # what its libraries miss is nothing that a user asked for
            return import_module(module)
    except ImportError as error:
        raise KeepsetError(
            f"This task needs {module.partition('.')[0]}, which cannot be imported ({error}): run "
            '`pip install "keepset[eval]"`.'
        ) from error
