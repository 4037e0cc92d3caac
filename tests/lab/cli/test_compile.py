import json
from pathlib import Path
from typing import Any

import pytest

from keepset.core.tables import load, save
from keepset.lab import texts
from keepset.lab.compile import compiler, cql
from keepset.lab.compile.cql import WEIGHTS
from keepset.lab.compile.judge import Judge
from keepset.recipe import in_short
from tests.core.test_tables import random_tables
from tests.lab.cli.conftest import Run, check_refused

SMALL = (
    *("--recipe", "compilerkv(window=8)", "--budgets", "16,24", "--sample", "3"),
    *("--prompt-tokens", "48", "--continuation", "5", "--text", "text"),
)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "HEAD_ROWS", 3)
    monkeypatch.setattr(compiler, "GATE_ROWS", 2)
    monkeypatch.setattr(cql, "STEPS", 20)


@pytest.mark.usefixtures("text")
def test_writes_a_file_that_recipes_can_name(run: Run, tiny_folder: Path) -> None:
    done = run("compile", "--model", str(tiny_folder), "--out", "tables", *SMALL)
    assert (done.code, done.err) == (0, "")
    tables = load("tables")
    assert tables.weights.shape == (2, 2, 4) and tables.budgets.tolist() == [16, 24]
    assert int(tables.counts.sum()) == 3
    known = tables.provenance
    assert known["rows"] == {"head": 3 * 2 * 3, "gate": 3 * 2 * 2} and len(known["marks"]) == 3
    assert known["weights"] == list(WEIGHTS) and (known["reward"], known["gate"]) == ("said", "table")
    assert in_short(known["method"]) == "compilerkv(window=8)" and known["seed"] == 0
    # What compiling prints is what showing does, and what is in the file.
    shown = run("compile", "--show", "tables")
    assert (shown.code, shown.err) == (0, "") and done.out == f"tables:\n{shown.out}"
    assert shown.out.startswith(f"tables of {tiny_folder.name}: 2 layers of 4 query heads, budgets 16, 24\n")
    assert "recipe compilerkv(window=8), contexts 3, tokens 48, continuation 5" in shown.out
    assert "bins have fewer than 2 contexts" in shown.out
    recipe = "compilerkv(tables='tables', window=8, keep=16)"
    done = run("generate", "Hello " * 40, "--model", str(tiny_folder), "--recipe", recipe, "--output-tokens", "4")
    assert done.code == 0 and "of 72 prompt tokens" in done.err


@pytest.mark.usefixtures("text", "tiny")
def test_an_interrupted_run_is_told_how_it_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Judge, "verdict", interrupted)
    done = run("compile", "--out", "again", *SMALL, "--log", "log")
    assert done.code == 130 and "the same command goes on from there" in done.err and not Path("again").exists()
    words = ("compile", "--out", "other", *SMALL, "--log", "log", "--seed", "1")
    check_refused(run, *words, because="'log' is the log of another compilation")


@pytest.mark.usefixtures("tiny", "text")
def test_fewer_contexts_than_asked_for_are_said(run: Run) -> None:
    Path("few.jsonl").write_text(json.dumps({"text": texts.essay()[:500]}), encoding="utf-8")
    done = run("compile", "--out", "a", *SMALL[:-2], "--text", "few.jsonl")
    assert done.code == 0 and "The texts have 2 contexts, fewer than the 3 asked for." in done.err
    assert load("a").provenance["contexts"] == 2


def test_a_strangers_tables_are_shown_without_harm(run: Run, tmp_path: Path) -> None:
    tables = random_tables()
    for provenance in ({}, {"model": {"name": "\x1b[31mred"}, "corpus": 3, "curves": [1], "seed": None}):
        save(type(tables)(**{**vars(tables), "provenance": provenance}), tmp_path / "tables")
        done = run("compile", "--show", "tables")
        assert (done.code, done.err) == (0, "") and "\x1b" not in done.out
        assert "3 layers of 4 query heads, budgets 8, 64" in done.out
    order = tables.weights[1].flatten().argsort(descending=True)[:1].item()
    assert f"layer.head: {order // 4}.{order % 4} (" in done.out.split("keep=64")[1]
