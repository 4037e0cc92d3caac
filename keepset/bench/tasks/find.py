"""From the names that users write to tasks: keepset's own, then every task of lm-evaluation-harness."""

import difflib
import importlib.util
from collections.abc import Sequence
from typing import Any

from keepset.bench.tasks.catalogue import MODULES, Settings
from keepset.bench.tasks.task import Task
from keepset.errors import KeepsetError


def find(names: Sequence[str], settings: Settings) -> list[Task]:
    """The tasks that these names stand for, in order; a group's name stands for all of its tasks.

    A name can also be the path of a task's YAML file, written for lm-evaluation-harness. A task that is named twice,
    by itself or by groups, comes once.
    """
    if not names:
        raise KeepsetError("There is no task to evaluate: name one, such as gsm8k.")
    tasks: dict[str, Task] = {}
    for name in names:
        own = next((module for module in map(_module, MODULES) if name in module.NAMES), None)
        for task in _others(name, settings) if own is None else own.make(name, settings):
            tasks.setdefault(task.name, task)
    return list(tasks.values())


def _others(name: str, settings: Settings) -> list[Task]:
    own = [known for module in map(_module, MODULES) for known in module.NAMES]
    if importlib.util.find_spec("lm_eval") is None:
        raise KeepsetError(
            f'There is no task {name!r} without lm-evaluation-harness: pip install "keepset[eval]"{_nearest(name, own)}'
        )
    harness = _module("lm_eval")
    if not harness.knows(name, settings):
        raise KeepsetError(f"There is no task {name!r}{_nearest(name, [*own, *harness.names(settings)])}")
    return harness.make(name, settings)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, dict.fromkeys(known), n=3, cutoff=0.5)
    return (
        f"; did you mean {', '.join(map(repr, close))}?" if close else "; name one such as gsm8k, ruler or hellaswag."
    )


def _module(name: str) -> Any:
    return importlib.import_module(f"keepset.bench.tasks.{name}")
