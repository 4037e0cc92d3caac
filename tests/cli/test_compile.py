from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepset import models, texts
from keepset.core.tables import load, save
from keepset.offline.compile import compiler, cql
from keepset.offline.compile.actions import WEIGHTS
from keepset.offline.compile.judge import Judge
from keepset.recipe import in_short
from tests.cli.conftest import Run
from tests.core.test_tables import random_tables

SMALL = (
    *("--recipe", "compilerkv(window=8)", "--keeps", "16,24", "--sample", "3"),
    *("--prompt-tokens", "48", "--continuation", "5", "--text", "text"),
)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "HEAD_ROWS", 3)
    monkeypatch.setattr(compiler, "GATE_ROWS", 2)
    monkeypatch.setattr(cql, "STEPS", 20)


@pytest.mark.usefixtures("text")
def test_writes_a_file_that_recipes_can_name(run: Run, tiny_folder: Path) -> None:
    done = run("compile", "--model", str(tiny_folder), "--out", "tables", *SMALL, "--html", "page.html")
    assert (done.code, done.err) == (0, "")
    tables = load("tables")
    assert tables.weights.shape == (2, 2, 4) and tables.budgets.tolist() == [16, 24]
    assert int(tables.counts.sum()) == 3
    known = tables.provenance
    assert known["rows"] == {"head": 3 * 2 * 3, "gate": 3 * 2 * 2} and len(known["marks"]) == 3
    assert known["weights"] == list(WEIGHTS) and (known["reward"], known["gate"]) == ("expected", "table")
    assert in_short(known["method"]) == "compilerkv(window=8)" and known["seed"] == 0
    # What compiling prints is what showing does, and what is in the file.
    shown = run("compile", "--show", "tables")
    assert (shown.code, shown.err) == (0, "") and done.out == f"tables:\n{shown.out}"
    assert shown.out.startswith(f"tables of {tiny_folder.name}: 2 layers of 4 query heads, budgets 16, 24\n")
    assert "recipe compilerkv(window=8), contexts 3, tokens 48, continuation 5" in shown.out
    assert "bins have fewer than 2 contexts" in shown.out
    assert Path("page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    recipe = "compilerkv(tables='tables', window=8, keep=16)"
    done = run("generate", "Hello " * 40, "--model", str(tiny_folder), "--recipe", recipe, "--output-tokens", "4")
    assert done.code == 0 and "of 72 prompt tokens" in done.err


@pytest.mark.full
@pytest.mark.usefixtures("text", "tiny")
def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("compile", "--out", "whole", *SMALL).code == 0
    true, left = Judge.verdict, [7]

    def interrupted(self: Judge, *args: Any, **kwargs: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return true(self, *args, **kwargs)

    monkeypatch.setattr(Judge, "verdict", interrupted)
    done = run("compile", "--out", "again", *SMALL, "--log", "log")
    assert done.code == 130 and "the same command goes on from there" in done.err and not Path("again").exists()
    monkeypatch.setattr(Judge, "verdict", true)
    assert run("compile", "--out", "again", *SMALL, "--log", "log").code == 0
    assert Path("again").read_bytes() == Path("whole").read_bytes()
    done = run("compile", "--out", "other", *SMALL, "--log", "log", "--seed", "1")
    assert done.code == 2 and "'log' is the log of another compilation" in done.err


@pytest.mark.usefixtures("tiny", "text")
def test_fewer_contexts_than_asked_for_are_said(run: Run) -> None:
    Path("few.jsonl").write_text(json.dumps({"text": texts.essay()[:500]}), encoding="utf-8")
    done = run("compile", "--out", "a", *SMALL[:-2], "--text", "few.jsonl")
    assert done.code == 0 and "The texts have 2 contexts, fewer than the 3 asked for." in done.err
    assert load("a").provenance["contexts"] == 2


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize(
    ("words", "because"),
    [
        ((), "Give either --out, the file to write, or --show"),
        (("--out", "a", "--show", "b"), "Give either --out, the file to write, or --show"),
        (("--show", "absent"), "There is no file 'absent' with tables"),
        (("--show", "text"), "'text' is no file of CompilerKV's tables"),
        (("--out", "."), "--out '.' is no place for a file"),
        (("--out", "text"), "'text' exists"),
        (("--out", "a", "--html", "absent/page.html"), "'absent/page.html' cannot be written"),
        (("--out", "a", "--sample", "0"), "--sample 0 is out of range"),
        (("--out", "a", "--continuation", "1"), "--continuation 1 is out of range: use a whole number from 2"),
        (("--out", "a", "--seed", "-1"), "--seed -1 is out of range"),
        (("--out", "a", "--keeps", "128,a"), "--keeps '128,a' is no list of budgets"),
        (("--out", "a", "--keeps", "64"), "A budget of 64 leaves nothing to decide"),
        (("--out", "a", "--prompt-tokens", "512"), "A budget of 512 leaves nothing to decide"),
        (("--out", "a", "--recipe", "snapkv"), "--recipe 'snapkv' is not compilerkv"),
        (("--out", "a", "--recipe", "compilerkv(keep=70)"), "and the budgets as --keep"),
        (("--out", "a", "--recipe", "compilerkv(tables='b')"), "has tables already: leave tables= out"),
        (("--out", "a", "--weights", "1,b"), "--weights '1,b' is no list of numbers"),
        (("--out", "a", "--weights", "1"), "Weights 1 are no choice"),
        (("--out", "a", "--text", "absent"), "'absent' cannot be read"),
        (("--out", "a", "--text", "bad.jsonl"), "Line 2 of 'bad.jsonl' is no JSON object"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], because: str
) -> None:
    Path("bad.jsonl").write_text('{"text": "a"}\n{', encoding="utf-8")
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded"))
    done = run("compile", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("keepset: ") and because in done.err and done.err.count("\n") == 1
    assert not Path("a").exists()


@pytest.mark.usefixtures("text", "tiny")
def test_contexts_fit_text_and_model(run: Run) -> None:
    done = run("compile", "--out", "a", "--text", "text")
    assert done.code == 2 and "No text has 1072 tokens" in done.err
    done = run("compile", "--out", "a", "--text", "text", "--prompt-tokens", "2048")
    assert done.code == 2 and "are more than the model's context of 2048" in done.err


def test_a_strangers_tables_are_shown_without_harm(run: Run, tmp_path: Path) -> None:
    tables = random_tables()
    for provenance in ({}, {"model": {"name": "\x1b[31mred"}, "corpus": 3, "curves": [1], "seed": None}):
        save(type(tables)(**{**vars(tables), "provenance": provenance}), tmp_path / "tables")
        done = run("compile", "--show", "tables", "--html", "page.html")
        assert (done.code, done.err) == (0, "") and "\x1b" not in done.out
        assert "3 layers of 4 query heads, budgets 8, 64" in done.out
    order = tables.weights[1].flatten().argsort(descending=True)[:1].item()
    assert f"layer.head: {order // 4}.{order % 4} (" in done.out.split("keep=64")[1]
