"""Items of a data set, from a user's JSONL file or from the hub, and helpers for lm-evaluation-harness."""

import importlib.metadata
import random
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from keepset.errors import CorruptFileError, KeepsetError, installation
from keepset.lab.texts import json_lines
from keepset.models import offline_if_unreachable


@dataclass(frozen=True)
class DataRecord:
    """One item of a data set: its values by name, and its file and line for messages."""

    where: str
    fields: Mapping[str, Any]

    def first(self, *names: str) -> Any:
        """Return the first of these fields that exists; raise `KeepsetError` if the item has none of them."""
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        alternatives = " or ".join(map(repr, names))
        available = ", ".join(map(repr, self.fields)) or "no field"
        raise KeepsetError(f"{self.where} lacks the field {alternatives}: it has {available}.")


class HubData(NamedTuple):
    """A data set on the hub: its path there, subset and split."""

    path: str
    subset: str | None
    split: str


def load_records(name: str, folder: Path | None, hub: HubData) -> list[DataRecord]:
    """Return the items of a data set: from `<name>.jsonl` if a user's folder has it, else from the hub.

    Args:
        name: the name of the data set.
        folder: the user's folder; None for none.
        hub: where the hub has it.

    Raises:
        KeepsetError: if the file is damaged, or the hub cannot be reached.
    """
    user_records = find_records(folder, name)
    if user_records is not None:
        return user_records
    with loading(name):
        items = import_extra("datasets").load_dataset(hub.path, hub.subset, split=hub.split)
        return [DataRecord(f"{hub.path}, item {index},", item) for index, item in enumerate(items)]


def find_records(folder: Path | None, name: str) -> list[DataRecord] | None:
    """Return the items of `<name>.jsonl` in a user's folder; None without a folder or such a file.

    Args:
        folder: the user's folder; None for none.
        name: the file's name without `.jsonl`.
    """
    return read_records(folder, name) if folder is not None and (folder / f"{name}.jsonl").is_file() else None


def read_records(folder: Path, name: str) -> list[DataRecord]:
    """Return the items of `<name>.jsonl` in a folder; empty lines are left out.

    Args:
        folder: the folder.
        name: the file's name without `.jsonl`.

    Raises:
        KeepsetError: if there is no such file, or a line is not a JSON object.
    """
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


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn any error while this task's data are loaded into a `KeepsetError` of one sentence.

    If the hub does not answer, its libraries use earlier downloads without waiting.
    """
    datasets = import_extra("datasets")
    before = datasets.config.HF_HUB_OFFLINE
    try:
        with offline_if_unreachable() as online:
            datasets.config.HF_HUB_OFFLINE = before or not online
            yield
    except KeepsetError:
        raise
    except ImportError as error:
        first = _first(error)
        raise KeepsetError(
            f"{name} needs a package that is missing ({_cause(first)}): {_installation(first.name or '')}."
        ) from error
    except Exception as error:
        raise KeepsetError(
            f"{name} cannot be loaded ({_cause(error)}): check the connection to the hub, or give a folder "
            f"with {name}.jsonl as data."
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _cause(error: Exception) -> str:
    return re.split(r"\. |\n", str(error).strip())[0].rstrip(".") or type(error).__name__


def _first(error: ImportError) -> ImportError:
    """Return Python's own error, which some tasks of the harness replace by theirs."""
    return error.__context__ if isinstance(error.__context__, ImportError) else error


def _installation(missing: str) -> str:
    """Return what to do about a module that a task of the harness lacks: most are in an extra of the harness."""
    package = canonicalize_name(missing.partition(".")[0])
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in map(Requirement, importlib.metadata.requires("lm-eval") or []):
            extra = re.search(r'extra == "([^"]+)"', str(requirement.marker))
            if extra is not None and canonicalize_name(requirement.name) == package:
                return f'run `pip install "lm-eval[{extra[1]}]"`'
    return "install it"


def import_extra(module: str, package: str | None = None) -> ModuleType:
    """Return a module that may not be installed.

    Args:
        module: the module's name.
        package: the package that has it; None for the extra `eval`.

    Raises:
        KeepsetError: it cannot be imported.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about packages that no user of keepset asked for
            return import_module(module)
    except ImportError as error:
        run = installation("eval") if package is None else f'`pip install "{package}"`'
        raise KeepsetError(
            f"This task needs a package that cannot be imported ({_cause(_first(error))}): run {run}."
        ) from error


@contextmanager
def seeded(seed: int | str, numpy_seed: int | None = None) -> Iterator[None]:
    """Seed the generators of `random` and `numpy`, from which the harness draws, and restore them afterwards.

    Args:
        seed: the seed.
        numpy_seed: `numpy`'s seed; drawn from `random` if None.
    """
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(random.getrandbits(32) if numpy_seed is None else numpy_seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
