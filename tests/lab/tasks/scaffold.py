"""Tasks as a user asks for them, and data files as a user writes them."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from keepset.lab.tasks.find import find
from keepset.lab.tasks.task import Example, Task, TaskSettings

# It takes many seconds to import: a test that needs it imports it itself.
WITH_HARNESS = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("lm_eval", "jieba", "fuzzywuzzy", "rouge")),
    reason='pip install ".[eval]"',
)


def make_task(name: str, data: Path | None = None, length: int = 4096) -> Task:
    [found] = find([name], TaskSettings(data, (length,)))
    return found


def examples_of(made: Task, *, limit: int | None = None) -> Sequence[Example]:
    """Of a task that counts no tokens."""
    return made.examples(None, limit=limit)  # type: ignore[arg-type]


def write_items(path: Path, *items: Mapping[str, Any]) -> Path:
    """A JSON object on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    return path


def prompt_of(example: Example) -> str:
    [question] = example.questions
    return example.context + question.text + question.prefix
