from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keepset.bench.analysis.synthetic import next_query
from keepset.cli.diagnose import _digits
from keepset.methods.gvote import GVote
from tests.cli.conftest import Run

FIGURES = ["overlap", "usage", "needed", "correlation"]


def test_figures_and_table(run: Run, tiny: Any, text: Path) -> None:
    words = ("--recipe", "gvote(future=3)", "--text", "text", "--prompt-tokens", "60", "--json", "figures")
    done = run("diagnose", "gvote", *words)
    assert (done.code, done.err) == (0, "figures: figures\n")
    result = json.loads(Path("figures").read_text())
    paper = {"overlap": 0.929, "usage": 0.594, "needed": 0.4, "correlation": 0.7759}
    assert (result["recipe"], result["tokens"], result["paper"]) == ("gvote(future=3)", 60, paper)
    ids = tiny[1](text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][:, :60]
    agreements = next_query(tiny[0], GVote(future=3), ids)
    assert [layer["layer"] for layer in result["layers"]] == list(agreements) == [0, 1]
    for name in FIGURES:
        numbers = torch.stack([getattr(each, name).double() for each in agreements.values()])
        torch.testing.assert_close(torch.tensor([layer[name] for layer in result["layers"]]).double(), numbers)
        assert result["mean"][name] == pytest.approx(float(numbers.mean()))
    first, header, *rows, mean, paper = done.out.partition("\noverlap: ")[0].splitlines()
    assert first == "SmolLM2-135M-Instruct, gvote(future=3): 60 tokens, the last one masked." and "overlap" in header
    for row, layer in zip(rows, result["layers"], strict=True):
        number, overlap, heads, usage, uses, needed, correlation = row.split()
        assert number == str(layer["layer"])
        for shown, name in ((heads, "overlap"), (uses, "usage")):
            assert [int(digit) for digit in shown] == [min(int(10 * x), 9) for x in layer[name]]
        for cell, name in zip((overlap, usage, needed, correlation), FIGURES, strict=True):
            assert float(cell) == pytest.approx(sum(layer[name]) / 4, abs=6e-4)
    assert mean.split() == ["mean", *(f"{result['mean'][name]:.3f}" for name in FIGURES)]
    assert paper.split() == ["paper", "0.929", "0.594", "0.400", "0.776"]


def test_a_digit_is_a_tenth() -> None:
    assert _digits([0.0, 0.55, 0.999, 1.0]) == "0599"
