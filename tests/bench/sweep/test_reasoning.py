"""Reasoning tasks under a model that answers from a script: judged, cut off, interrupted and gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepset import Recipe
from keepset.bench.candidate import candidates
from keepset.bench.record import FULL
from keepset.bench.sweep.runner import Runner
from keepset.bench.sweep.store import Store
from keepset.bench.sweep.sweep import SweepGrid, run, unfinished
from keepset.bench.tasks.find import find
from keepset.bench.tasks.task import Generation, TaskSettings
from tests.bench.sweep.sweeping import CONFIGURATION
from tests.cli.conftest import tiny_model

pytest.importorskip("math_verify", reason='pip install "keepset[eval]"')

MOST = 40
TASKS = ["gsm8k", "math500", "aime24"]
# Of each problem: the file's item, what the model says, whether that is right, and whether it comes to its end.
PROBLEMS: list[tuple[str, dict[str, Any], str, bool, bool]] = [
    ("gsm8k", {"question": "How many eggs?", "answer": "9 + 9 = 18\n#### 18"}, r"So it is \boxed{18}.", True, True),
    ("gsm8k", {"question": "How many robes are there?", "answer": "#### 3"}, r"So it is \boxed{4}.", False, True),
    (
        "math500",
        {"problem": "Add halves, both of them, please.", "answer": r"\frac{1}{2}"},
        r"That is \boxed{0.5}.",
        True,
        True,
    ),
    (
        "math500",
        {"problem": "Count on and on and on and on and on and on.", "answer": "7"},
        "one two three " * 40,
        False,
        False,
    ),
    (
        "aime24",
        {"Problem": "Walk to coffee, then on to tea, then to the next, then back home.", "Answer": 204},
        r"Hence \boxed{204}",
        True,
        True,
    ),
    ("aime24", {"Problem": "Do say.", "Answer": 25}, "", False, True),
]


@pytest.fixture
def model(embedded: Any) -> Iterator[Any]:
    """Says what stands in the script after each problem."""
    model, tokenizer = tiny_model(), embedded[1]
    replies: dict[int, str] = {}  # by the lengths of their problems, which differ

    def script(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        past, logits = kwargs["past_key_values"], torch.full_like(output.logits, -10.0)
        for row, cache in enumerate(getattr(past, "_caches", [past])):
            length = cache.progress.prompt
            if ids.shape[1] > 1:
                asked = tokenizer.decode(ids[0])
                (reply,) = (said for _, item, said, _, _ in PROBLEMS if str(next(iter(item.values()))) in asked)
                assert replies.setdefault(length, reply) == reply
            said = tokenizer(replies[length], add_special_tokens=False)["input_ids"]
            said = [*said, model.generation_config.eos_token_id]
            logits[row, -1, said[cache.progress.logical - length]] = 10.0
        return replace(output, logits=logits)

    handle = model.register_forward_hook(script, with_kwargs=True)
    yield model
    handle.remove()


class StoppedError(Exception):
    """Somebody has had enough."""


@pytest.mark.full
def test_judged_cut_off_and_gone_on_with(model: Any, embedded: Any, tmp_path: Path) -> None:
    for name in TASKS:
        items = (item for task, item, *_ in PROBLEMS if task == name)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, items)))
    tasks = find(TASKS, TaskSettings(data=tmp_path))
    for task in tasks:
        assert task.generation.tokens >= 1024
        task.generation = Generation(MOST, task.generation.until)
    asked = candidates(Recipe.parse_list("knorm, tova"), [16], every=8)
    runner = Runner(model, embedded[1], mode="prompt", chat=True)
    grid = SweepGrid(tasks, [0], dict.fromkeys(TASKS, asked), None)
    path = tmp_path / "sweep"
    made: list[int] = []

    def note() -> None:
        made.append(1)
        if len(made) == 7:
            raise StoppedError

    with Store.begin(path, "model", CONFIGURATION) as store, pytest.raises(StoppedError):
        run(store, grid.groups(store, embedded[1]), runner, note)
    with Store.begin(path, "model", CONFIGURATION) as store:
        left = unfinished(grid.groups(store, embedded[1]), store.done())
        assert run(store, left, runner, note) == []
        cells = store.cells()
    assert len(made) == len(cells) == len(PROBLEMS) * 3 and {cell.recipe for cell in cells} == {
        FULL,
        *(c.text for c in asked[1:]),
    }
    for (name, _, said, right, ends), group in zip(PROBLEMS, grid_order(cells), strict=True):
        tokens = len(embedded[1](said, add_special_tokens=False)["input_ids"])
        for cell in group:
            assert cell.error is None
            assert (cell.task, cell.score) == (name, float(right))
            assert cell.figures["finished"] == float(ends)
            assert cell.figures["tokens"] == (tokens + 1 if ends else MOST)
            (reply,) = cell.replies
            assert reply == said.strip() if ends else said.startswith(reply)
            assert (cell.figures["repetition"] > 0.5) == (not ends)
            whole = cell.recipe == FULL
            assert (cell.figures["kv_bytes"] == cell.figures["kv_bytes_full"]) == whole


def grid_order(cells: Any) -> list[list[Any]]:
    """The cells of each problem, in the problems' order."""
    groups: dict[tuple[str, int], list[Any]] = {}
    for cell in cells:
        groups.setdefault((cell.task, int("".join(filter(str.isdigit, cell.example)) or 0)), []).append(cell)
    return [groups[key] for key in sorted(groups, key=lambda key: (TASKS.index(key[0]), key[1]))]
