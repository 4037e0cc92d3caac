"""Tasks by the names that users write: keepset's own first, then every task of lm-evaluation-harness."""

import difflib
import importlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepset.errors import KeepsetError, installation
from keepset.lab.tasks import TASK_MODULES
from keepset.lab.tasks.task import Task, TaskSettings


def find(names: Sequence[str], settings: TaskSettings) -> list[Task]:
    """Return the tasks of these names, in order, each once.

    Args:
        names: tasks, groups of tasks, or paths of YAML files for lm-evaluation-harness.
        settings: the settings of all tasks.

    Raises:
        KeepsetError: if there is no such task; the sentence names similar ones.
    """
    check_names(names)
    tasks: dict[str, Task] = {}
    for name in names:
        task_module = next((module for module in map(_module, TASK_MODULES) if name in module.NAMES), None)
        for task in _of_harness(name, settings) if task_module is None else task_module.make(name, settings):
            tasks.setdefault(task.name, task)
    return list(tasks.values())


def check_names(names: Sequence[str]) -> None:
    """Refuse names that cannot be tasks within two seconds; the harness takes much longer to read its tasks.

    Raises:
        KeepsetError: a name is neither keepset's own nor stands in any file of the harness, or there is none.
    """
    if not names:
        raise KeepsetError("There is no task to evaluate: name one, such as gsm8k.")
    own_names = _own()
    foreign = [name for name in names if name not in own_names and not name.endswith(".yaml")]
    folder = harness_folder() if foreign else None
    if folder is None:
        return
    texts = [file.read_text("utf-8", errors="replace") for file in folder.rglob("*.yaml")]
    for name in foreign:
        if not name or not any(name in text for text in texts):
            harness_names = [found for text in texts for found in _NAMED.findall(text)]
            raise KeepsetError(f"There is no task {name!r}{_nearest(name, [*own_names, *harness_names])}")


_NAMED = re.compile(r"""^(?:task|group|tag):[ ]*["']?([\w./-]+)""", re.MULTILINE)
"""Matches the names of tasks in a file of the harness."""


def harness_folder() -> Path | None:
    """Return the folder of lm-evaluation-harness' tasks; None if it is not installed."""
    package = importlib.util.find_spec("lm_eval")
    return None if package is None or package.origin is None else Path(package.origin).parent / "tasks"


def _own() -> list[str]:
    return [name for module in map(_module, TASK_MODULES) for name in module.NAMES]


def _of_harness(name: str, settings: TaskSettings) -> list[Task]:
    names = _own()
    if importlib.util.find_spec("lm_eval") is None:
        raise KeepsetError(
            f"There is no task {name!r} without lm-evaluation-harness: {installation('eval')}{_nearest(name, names)}"
        )
    harness = _module("harness")
    if not harness.knows(name, settings):
        raise KeepsetError(f"There is no task {name!r}{_nearest(name, names)}")
    return harness.make(name, settings)


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, dict.fromkeys(names), n=3, cutoff=0.5)
    return (
        f"; did you mean {', '.join(map(repr, close))}?" if close else "; name one such as gsm8k, ruler or hellaswag."
    )


def _module(name: str) -> Any:
    return importlib.import_module(f"keepset.lab.tasks.{name}")
