"""CONTRIBUTING.md keeps its word: its example works everywhere without another line."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import keepset
from keepset import KeepsetError, Recipe, models, registry
from keepset.lab import texts
from keepset.lab.cli import app
from keepset.lab.tasks.find import find
from keepset.lab.tasks.task import TaskSettings
from tests.hf.models import full, generate, left_padded, oracle_gap, prompt, tiny
from tests.lab.cli.conftest import tiny_model
from tests.methods.naive import EXACT, Shape, check_scores, length_of, observe, window_attention

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

COMPOSED = ["example", "adakv(example)", "pyramid(example)", "adakv(pyramid(example))"]
"""The example by itself and in every kind of layout."""


def module_of(name: str, indent: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The guide's one piece of code that is indented so, as a module."""
    (code,) = re.findall(rf"^{indent}```python\n(.*?)^{indent}```$", GUIDE, flags=re.MULTILINE | re.DOTALL)
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that the guide shows, registered for the length of a test."""
    module = module_of("example", "", tmp_path, monkeypatch)
    keepset.register(module.Example)
    yield module
    del registry._methods["example"]


def with_keep(text: str, keep: int | float) -> Recipe:
    return Recipe.parse(text).with_budget(keep=keep)


# --- the guide itself


def test_there_are_five_steps() -> None:
    assert re.findall(r"^### (\d)\. ", GUIDE, flags=re.MULTILINE) == ["1", "2", "3", "4", "5"]


def test_files_and_commands_in_the_guide_exist() -> None:
    paths = set(re.findall(r"[`(]((?:keepset|tests|docs|benchmarks)/[\w./]+|\w+\.md)[`)]", GUIDE))
    assert len(paths) > 15
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"`make (\w+)`", GUIDE)) <= targets


# --- recipes and the command line


def test_recipes_have_a_text(example: ModuleType) -> None:
    recipe = Recipe.parse("example(window=4, power=2, keep=0.25)")
    assert recipe.method == example.Example(window=4, power=2.0)
    assert str(recipe) == "example(window=4, power=2.0, keep=0.25)"
    assert Recipe.parse(str(recipe)) == recipe
    assert str(Recipe.parse("adakv(example(window=8), keep=512)")) == "adakv(example, keep=512)"
    with pytest.raises(KeepsetError, match="example: window=0 is out of range: use 1 or more"):
        Recipe.parse("example(window=0)")
    with pytest.raises(KeepsetError, match="keep=7 is below the 8 entries that always stay"):
        Recipe.parse("example(keep=7)")


def test_catalogue_has_a_row(example: ModuleType) -> None:
    (entry,) = [
        e for e in json.loads(CliRunner().invoke(app, ["methods", "--json", "-"]).stdout) if e["name"] == "example"
    ]
    says = dict(name="example", family="scorer", layout="dense", paper="arXiv:0000.00000", advice="")
    takes = dict(parameters={"window": 8, "power": 1.0}, ranges={"window": "from 1", "power": "from 0.0"})
    serves = dict(sinks=0, recent=8, needs_budget=True, every=True, vllm=True, passes=1, needs=["window of 8 queries"])
    assert entry == {**says, **takes, **serves, "summary": example.Example.__doc__.splitlines()[0]}
    assert "\nexample " in CliRunner().invoke(app, ["methods"]).stdout


@pytest.mark.usefixtures("example")
def test_compare_takes_it(embedded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "load", lambda *_: (tiny_model(), embedded[1]))
    (tmp_path / "text").write_text(texts.essay()[:2000], encoding="utf-8")
    words = ["compare", "--text", str(tmp_path / "text"), "--prompt-tokens", "100", "--continuation", "8"]
    done = CliRunner().invoke(app, [*words, "--json", "-", "--recipes", ", ".join(COMPOSED), "--budgets", "50"])
    assert done.exit_code == 0
    rows = json.loads(done.stdout)["rows"]
    assert [row["recipe"] for row in rows] == [str(with_keep(text, 50)) for text in COMPOSED]
    assert all(row["keep"] == 0.5 and row["kl"] > 0 for row in rows)


# --- the method


@pytest.mark.parametrize("shape", [Shape((17,), 3, 1, 5, 5), Shape((29, 22, 3), 2, 3, 7, 11)])
def test_scores_are_the_formula(example: ModuleType, shape: Shape) -> None:
    observation = observe(shape)
    method = example.Example(window=4, power=2.0)

    def worth(request: int, head: int, entry: int) -> float:
        own = range(head * shape.group, (head + 1) * shape.group)
        attention = sum(row[entry] for q in own for row in window_attention(observation, request, q, 4))
        return attention * sum(x * x for x in observation.values[request, head, entry].double().tolist())

    expected = [
        [[worth(b, h, t) for t in range(length_of(observation, b))] for h in range(shape.kv_heads)]
        for b in range(shape.batch)
    ]
    check_scores(method, observation, expected, **EXACT)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("text", "layout", "architecture", "padding"),
    [
        (COMPOSED[0], "dense", "llama", [0, 7]),
        (COMPOSED[1], "head-ragged", "gemma3", [0, 7]),
        (COMPOSED[2], "layer-ragged", "llama", [0, 0]),
        (COMPOSED[3], "head-ragged", "gemma3", [0, 0]),
    ],
)
def test_runs_exactly(text: str, layout: str, architecture: str, padding: list[int]) -> None:
    model = tiny(architecture)
    ids, mask = left_padded(prompt(2, 40), padding)
    plain = full(model, ids, mask, max_new_tokens=8).sequences
    lengths = mask.sum(-1)
    for keep, asked in ((12, torch.full_like(lengths, 12)), (0.3, (lengths * 3) // 10)):
        cache = keepset.Cache(model, with_keep(text, keep))
        output = generate(model, ids, cache, mask, max_new_tokens=8)
        assert oracle_gap(model, cache, output, mask) < 5e-5
        assert cache.keep_set is not None and cache.keep_set.layout == layout
        counts = cache.keep_set.counts
        assert torch.equal(counts.sum((0, 2)), asked * counts.shape[0] * counts.shape[2])
    whole = generate(model, ids, keepset.Cache(model, with_keep(text, 1.0)), mask, max_new_tokens=8)
    assert torch.equal(whole.sequences, plain)


# --- the benchmark


def test_the_benchmark_is_found_made_and_judged(embedded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module_of("keepset.lab.tasks.passwords", "   ", tmp_path, monkeypatch)
    monkeypatch.setattr("keepset.lab.tasks.find.TASK_MODULES", ("needle", "passwords"))
    (task,) = find(["passwords"], TaskSettings())
    first, second = task.examples(embedded[1], limit=2, seed=1)
    assert task.examples(embedded[1], limit=1, seed=1) == [first] != task.examples(embedded[1], limit=1)
    for example in (first, second):
        (question,) = example.questions
        (guest,) = re.findall(r"guest (\d+)", question.text)
        assert f"guest {guest} is {question.target}." in example.context
        assert task.judge(question, f" {question.target}.") == {task.metric: 1.0}
        assert task.judge(question, " none") == {task.metric: 0.0}


def test_who_adds_a_benchmark_reads_less_than_150_lines() -> None:
    guide = GUIDE[GUIDE.index("## Add a benchmark") : GUIDE.index("## Add a command")]
    files = [(ROOT / "keepset/lab/tasks" / name).read_text(encoding="utf-8") for name in ("task.py", "__init__.py")]
    assert sum(text.count("\n") for text in (guide, *files)) < 150
