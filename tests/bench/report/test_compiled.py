"""The page of CompilerKV's tables, in Chromium, against the tables that it was made of."""

from __future__ import annotations

from typing import Any

import pytest

from keepset.bench.report.compiled import render
from tests.bench.report.pages import CURVE, data_of, tables, traces


def test_figures_are_the_tables() -> None:
    figures, made = data_of(render(tables()))["figures"], tables()
    assert figures["budgets"] == [8, 64] and figures["counts"] == made.counts.tolist()
    for budget in range(2):
        for layer in range(3):
            weights, gate = figures["weights"][budget][layer], figures["gate"][budget][layer]
            assert weights == pytest.approx(made.weights[budget, layer].tolist(), abs=1e-4)
            for bins, expected in zip(gate, made.gate[budget, layer].tolist(), strict=True):
                assert bins == pytest.approx(expected, abs=1e-4)
    assert figures["curves"]["gate"] == [{name: float(x) for name, x in point.items()} for point in CURVE]


@pytest.mark.parametrize("curves", [None, [1], {"head": 3}, {"head": [{"step": "x"}]}, {"head": [{"step": 1}]}])
def test_a_strangers_curves_are_left_out(curves: Any) -> None:
    assert data_of(render(tables(curves=curves)))["figures"]["curves"] == {"head": [], "gate": []}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_maps_and_curves_are_the_tables(load: Any, scheme: str) -> None:
    page, figures = load(render(tables()), color_scheme=scheme), data_of(render(tables()))["figures"]
    for budget in range(2):
        page.select_option("#budget", str(budget))
        assert traces(page, "heads")[0]["z"] == figures["weights"][budget]
        for part in range(4):
            expected = [[row[part] for row in layer] for layer in figures["gate"][budget]]
            assert traces(page, f"gate-{part}")[0]["z"] == expected
    assert traces(page, "counts")[0]["z"] == [[row[part] for row in figures["counts"]] for part in range(4)]
    assert [line["y"] for line in traces(page, "bellman")] == [[point["bellman"] for point in CURVE]] * 2
    captions = page.locator("figcaption").all_text_contents()
    assert captions[:4] == [f"Perplexity {name}" for name in ("below 2", "2 to 5", "5 to 20", "from 20")]


def test_without_curves(load: Any) -> None:
    page = load(render(tables(curves=None)))
    assert page.locator("#counts").count() == 1 and page.locator("#bellman").count() == 0
