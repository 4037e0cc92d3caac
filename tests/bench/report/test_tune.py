"""The page of `keepset tune`."""

from __future__ import annotations

from typing import Any

import pytest

from keepset.bench.report.tune import render
from tests.bench.report.pages import EVIL, TUNED, lines, traces, tune_row, tuned


def test_plots_show_costs_and_intervals(load: Any) -> None:
    page = load(render(tuned(*TUNED)))
    used, tied, last, out = traces(page, "kl")
    assert (used["name"], used["x"], used["y"]) == ("tova(keep=0.25)", [1.5], [0.2])
    assert used["down"] == pytest.approx([0.1]) and used["up"] == pytest.approx([0.2])
    assert (tied["name"], tied["y"], last["name"], last["y"]) == ("cannot be told from it", [0.1], "last round", [0.4])
    assert (out["name"], out["x"], out["y"], out["down"], out["up"]) == ("out before", [1.5], [0.8], None, None)
    assert [trace["y"] for trace in traces(page, "found")] == [[0.5], [0.5], [0], [0.5]]


def test_what_is_said_and_the_figures(load: Any) -> None:
    page = load(render(tuned(*TUNED)))
    legend = page.locator(".methods button").all_text_contents()
    assert legend == ["★tova(keep=0.25)", "◆cannot be told from it", "●last round", "○out before"]
    assert page.locator("#facts dd").all_text_contents() == ["keep=0.25", "4", "100.0 MB", "75% (50%..100%)"]
    _, first, second, _, last, dropped = lines(page)
    assert first[1:] == ["16", "30.0", "30.0%", "0.2000", "0.1000..0.4000", "90%", "x1.50", "50%", "25%..75%"]
    assert first[0].startswith("★") and second[0].startswith("◆") and second[0].endswith(EVIL)
    assert last[4:6] == ["0.8000", ""] and dropped == ["gvote", EVIL]


def test_without_facts_nothing_is_shown_of_them(load: Any) -> None:
    rows = [tune_row("tova", 0.2, found=None), tune_row("h2o", 0.4, found=None)]
    page = load(render({**tuned(*rows, facts=0), "recipe": None, "tied": []}))
    assert page.locator("#found").count() == 0
    assert page.locator("#rows thead th").count() == 8 and page.locator("#facts dd").count() == 3
    assert [trace["name"] for trace in traces(page, "kl")] == ["last round"]
