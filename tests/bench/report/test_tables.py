"""The page of CompilerKV's tables, in Chromium, against the tables that it was made of."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from keepset.bench.report.tables import render
from keepset.core.tables import Tables
from tests.core.test_tables import random_tables

EVIL = "</script><img src=x onerror=window.pwned=1><b>&lt; %{x} $data"
CURVE = [{"step": step, "bellman": 0.5 - step / 100, "conservative": step / 100} for step in range(0, 30, 10)]


def tables(**other: Any) -> Tables:
    known = {"model": {"name": EVIL}, "method": EVIL, "seed": 3, "curves": {"head": CURVE, "gate": CURVE}, **other}
    return dataclasses.replace(random_tables(), provenance=known)


def data_of(page: str) -> Any:
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block
    return json.loads(block[1])


def test_text_is_only_in_the_data_block() -> None:
    page = render(tables())
    data, made = data_of(page), random_tables()
    assert data["model"] == EVIL and ["Method", EVIL] in data["facts"] and ["Seed", "3"] in data["facts"]
    assert data["budgets"] == [8, 64] and data["counts"] == made.counts.tolist()
    for b in range(2):
        for layer in range(3):
            assert data["weights"][b][layer] == pytest.approx(made.weights[b, layer].tolist(), abs=1e-4)
            for e in range(20):
                assert data["gate"][b][layer][e] == pytest.approx(made.gate[b, layer, e].tolist(), abs=1e-4)
    assert data["curves"]["gate"] == [{name: float(x) for name, x in point.items()} for point in CURVE]
    block = json.dumps(EVIL)[1:-1].replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
    assert block in page and "pwned" not in page.replace(block, "")
    policy = re.search(r"script-src ([^;]*);", page)
    assert policy and "unsafe" not in policy[1]


@pytest.mark.parametrize("curves", [None, [1], {"head": 3}, {"head": [{"step": EVIL}]}, {"head": [{"step": 1}]}])
def test_a_strangers_curves_are_left_out(curves: Any) -> None:
    assert data_of(render(tables(curves=curves)))["curves"] == {"head": [], "gate": []}


def drawn(page: Any, name: str) -> Any:
    return page.evaluate(f"document.getElementById('{name}').data.map(trace => trace.z ?? trace.y)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_maps_and_curves_are_the_tables(load: Any, scheme: str) -> None:
    page = load(render(tables()), color_scheme=scheme)
    page.wait_for_selector("#counts .heatmaplayer")
    data = data_of(render(tables()))
    for budget in ("0", "1"):
        page.select_option("#budget", budget)
        assert drawn(page, "heads") == [data["weights"][int(budget)]]
        maps = page.evaluate("[...document.querySelectorAll('#gate .plot')].map(box => box.data[0].z)")
        assert maps == [[[row[p] for row in layer] for layer in data["gate"][int(budget)]] for p in range(4)]
    assert drawn(page, "counts") == [[[row[p] for row in data["counts"]] for p in range(4)]]
    assert drawn(page, "bellman") == [[point["bellman"] for point in CURVE]] * 2
    assert page.locator("#gate figcaption").all_text_contents() == [
        "Perplexity below 2", "Perplexity 2 to 5", "Perplexity 5 to 20", "Perplexity from 20"
    ]  # fmt: skip


def test_without_curves(load: Any) -> None:
    page = load(render(tables(curves=None)), viewport={"width": 360, "height": 700})
    page.wait_for_selector("#counts .heatmaplayer")
    assert page.locator("#curves").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
