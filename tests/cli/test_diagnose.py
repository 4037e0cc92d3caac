from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keepset.bench.analysis.synthetic import next_query
from keepset.methods.gvote import GVote
from tests.cli.conftest import Run
from tests.cli.test_bad_input import check_refused

FIGURES = ["overlap", "usage", "needed", "correlation"]


PAPER = {"overlap": 0.929, "usage": 0.594, "needed": 0.4, "correlation": 0.7759}


def test_json(run: Run, tiny: Any, text: Path) -> None:
    done = run(
        "diagnose", "gvote", "--recipe", "gvote(future=3)", "--text", "text", "--prompt-tokens", "60", "--json", "-"
    )
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert (result["recipe"], result["tokens"], result["paper"]) == ("gvote(future=3)", 60, PAPER)
    ids = tiny[1](text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][:, :60]
    agreements = next_query(tiny[0], GVote(future=3), ids)
    assert [layer["layer"] for layer in result["layers"]] == list(agreements) == [0, 1]
    for name in FIGURES:
        numbers = torch.stack([getattr(each, name).double() for each in agreements.values()])
        torch.testing.assert_close(torch.tensor([layer[name] for layer in result["layers"]]).double(), numbers)
        assert result["mean"][name] == pytest.approx(float(numbers.mean()))


def test_table(run: Run, tiny: Any, text: Path) -> None:
    done = run("diagnose", "gvote", "--text", "text", "--prompt-tokens", "60")
    assert (done.code, done.err) == (0, "")
    first, header, *rows, mean, paper = done.out.partition("\noverlap: ")[0].splitlines()
    assert first == "SmolLM2-135M-Instruct, gvote: 60 tokens, the last one masked."
    assert header.split() == ["layer", "overlap", "by", "head", "usage", "by", "head", "needed", "correlation"]
    result = json.loads(run("diagnose", "gvote", "--text", "text", "--prompt-tokens", "60", "--json", "-").out)
    for row, layer in zip(rows, result["layers"], strict=True):
        number, overlap, heads, usage, uses, needed, correlation = row.split()
        assert number == str(layer["layer"])
        assert [int(digit) for digit in heads] == [min(int(10 * x), 9) for x in layer["overlap"]]
        assert [int(digit) for digit in uses] == [min(int(10 * x), 9) for x in layer["usage"]]
        for cell, name in zip((overlap, usage, needed, correlation), FIGURES, strict=True):
            assert float(cell) == pytest.approx(sum(layer[name]) / 4, abs=6e-4)
    assert mean.split() == ["mean", *(f"{result['mean'][name]:.3f}" for name in FIGURES)]
    assert paper.split() == ["paper", "0.929", "0.594", "0.400", "0.776"]


def test_an_essay_and_a_text_that_is_shorter(run: Run, tiny: Any, tmp_path: Path) -> None:
    assert json.loads(run("diagnose", "gvote", "--prompt-tokens", "40", "--json", "-").out)["tokens"] == 40
    (tmp_path / "short").write_text("It is a short text, of few words.", encoding="utf-8")
    assert 7 < json.loads(run("diagnose", "gvote", "--text", "short", "--json", "-").out)["tokens"] < 20
    (tmp_path / "shorter").write_text("Short.", encoding="utf-8")
    check_refused(run, "diagnose", "gvote", "--text", "shorter", because="are too few: statistics leave out")
    check_refused(
        run, "diagnose", "gvote", "--prompt-tokens", "4000", because="is more than the model's context of 2048"
    )


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["--recipe", "snapkv"], "write gvote with its parameters"),
        (["--recipe", "gvote(keep=0.5)"], "leave all but gvote's parameters out"),
        (["--recipe", "gvote(recent=3)"], "leave all but gvote's parameters out"),
        (["--recipe", "gvote(samples=0)"], "samples=0 is out of range"),
        (["--prompt-tokens", "6"], "--prompt-tokens 6 is too few for gvote: use 7 or more"),
        (["--text", "nowhere"], "'nowhere' cannot be read"),
    ],
)
def test_bad_input(run: Run, words: list[str], because: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from keepset import models

    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded before input was checked"))
    check_refused(run, "diagnose", "gvote", *words, because=because)
