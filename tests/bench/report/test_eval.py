from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from keepset.bench.analysis.summary import summarise
from keepset.bench.cell import FULL, Cell
from keepset.bench.report.eval import render
from tests.bench.analysis.cells import cell, cells

EVIL = "</script><img src=x onerror=window.pwned=1><b>&lt; %{x} $data"

MINUS, NONE = "\u2212", "\u2013"


def sweep() -> list[Cell]:
    made = [
        *(each for task in ("ruler_vt@64", "ruler_cwe@64") for each in cells(FULL, [1.0, 1.0, 1.0, 0.0], task=task)),
        *cells("snapkv(keep=0.5)", [1.0, 1.0, 0.0, 0.0], task="ruler_vt@64"),
        *cells("snapkv(keep=0.5)", [1.0, 0.0, 0.0, 0.0], task="ruler_cwe@64"),
        *cells("snapkv(keep=0.25)", [1.0, 0.0, 0.0, 0.0], task="ruler_vt@64"),
        *cells("tova(keep=0.5)", [1.0, None, 1.0], task="ruler_vt@64"),
        *cells("h2o(keep=0.5)", [None] * 4, task="ruler_vt@64"),
        *cells("gvote", [1.0, 1.0, 1.0, 1.0], task="ruler_vt@64", keep=0.3, kv_bytes=310),
        replace(cell(FULL, 0.25), task=EVIL, recipe=EVIL, method=EVIL),
    ]
    for length, depth, score in ((128, 0.05, 1.0), (64, 0.05, 0.0), (128, 0.95, None)):
        for recipe in ("snapkv(keep=0.5)", FULL):
            found = cell(recipe, score if recipe != FULL else 1.0, str(depth), f"needle@{length}")
            made.append(replace(found, facts={"length": length, "depth": depth}))
    return made


def page_of(made: list[Cell] | None = None, baseline: str | None = None) -> str:
    summary = summarise(sweep() if made is None else made, baseline)
    return render(f"model {EVIL}", {"examples": 4, "why": EVIL, "data": None}, summary.to_json())


@pytest.fixture
def page(load: Any) -> Any:
    page = load(page_of())
    page.wait_for_selector("#plot .point")
    return page


def column(page: Any, table: str, name: str) -> list[str]:
    titles = page.locator(f"#{table} thead th").evaluate_all("cells => cells.map(cell => cell.textContent)")
    index = next(i for i, title in enumerate(titles) if title.startswith(name))
    return page.locator(f"#{table} tbody tr").evaluate_all(
        "(rows, i) => rows.map(row => row.children[i]?.textContent ?? '')", index
    )


def test_text_is_only_in_the_data_block() -> None:
    page = page_of()
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block
    data = json.loads(block[1])
    assert data["model"] == f"model {EVIL}" and data["configuration"] == {"examples": "4", "why": EVIL}
    assert data["summary"]["rows"][-1]["recipe"] and "pwned" in block[1]
    assert "pwned" not in page.replace(block[1], "")
    policy = re.search(r"script-src ([^;]*);", page)
    assert policy and "unsafe" not in policy[1]


def test_plot_shows_scores_with_their_intervals(page: Any) -> None:
    def drawn() -> dict[str, Any]:
        return page.evaluate(
            """() => Object.fromEntries(document.getElementById("plot").data.map(({ name, x, y, error_y, marker }) =>
                [name, { x, y, up: error_y.array, down: error_y.arrayminus, symbol: marker.symbol }]))"""
        )

    options = page.locator("#task option").all_text_contents()
    assert options == ["ruler@64", "ruler_vt@64", "ruler_cwe@64", EVIL, "needle@128", "needle@64"]
    # Of the group, both recipes that were run on both tasks.
    averages = drawn()
    assert averages[FULL]["y"] == [0.75] and averages["snapkv"]["y"] == [0.375] and averages["gvote"]["y"] == []
    page.select_option("#task", "ruler_vt@64")
    traces = drawn()
    rows = {row.recipe: row for row in summarise(sweep()).rows if row.task == "ruler_vt@64"}
    assert traces["snapkv"]["x"] == [0.25, 0.5] and traces["snapkv"]["y"] == [0.25, 0.5]
    for i, recipe in enumerate(("snapkv(keep=0.25)", "snapkv(keep=0.5)")):
        score = rows[recipe].score
        assert score is not None and score.low is not None and score.high is not None
        assert traces["snapkv"]["y"][i] - traces["snapkv"]["down"][i] == pytest.approx(score.low)
        assert traces["snapkv"]["y"][i] + traces["snapkv"]["up"][i] == pytest.approx(score.high)
    assert traces["gvote"]["x"] == [0.31]
    assert traces["tova"]["symbol"][0].endswith("-open") and traces["h2o"]["y"] == []
    assert "Hollow" in page.locator("#plot-note").text_content()
    page.get_by_label("Entries").check(force=True)
    assert drawn()["gvote"]["x"] == [0.3]
    page.locator("#methods button", has_text="snapkv").click()
    visible = page.evaluate("document.getElementById('plot').data.map(t => t.visible)")
    assert visible.count(False) == 1


def test_table_of_a_task(page: Any) -> None:
    page.select_option("#task", "ruler_vt@64")
    recipes = column(page, "rows", "Recipe")
    assert recipes[0] == FULL and recipes[2] == "●snapkv(keep=0.5)"
    assert column(page, "rows", "Score")[2].startswith("50.0 %")
    assert (
        column(page, "rows", "Difference")[2].startswith(f"{MINUS}25.0 %")
        and column(page, "rows", "Difference")[0] == NONE
    )
    assert column(page, "rows", "Examples") == ["4", "3 of 4", "4", "", "4", "4"]
    assert column(page, "rows", "KV cachebytes")[2] == "500 B"
    failed = page.locator("#rows .failed").all_text_contents()
    assert failed == [
        "failed on 1 of 3 examples: tova(keep=0.5) cannot do that.",
        "failed on all 4 examples: h2o(keep=0.5) cannot do that.",
    ]
    page.locator("#rows thead button", has_text="Score").click()
    scores = column(page, "rows", "Score")
    assert [score[:4] for score in scores[:5]] == ["25.0", "50.0", "66.7", "75.0", "100."]
    assert scores[-1].startswith("failed on all")


def test_peaks_of_memory_where_a_device_tells_them(load: Any, page: Any) -> None:
    titles = page.locator("#rows thead th").all_text_contents()
    assert not any(title.startswith(("Peak", "Side by")) for title in titles)
    made = [*cells(FULL, [1.0], peak_bytes=9_400_000, batch=8.0), *cells("tova(keep=0.5)", [1.0])]
    page = load(page_of(made))
    page.wait_for_selector("#plot .point")
    assert column(page, "rows", "Peakbytes") == ["9.4 MB", NONE]
    assert column(page, "rows", "Side byside") == ["8.0", "1.0"]


def test_a_group_that_lacks_a_task_says_so(page: Any) -> None:
    assert page.locator("#rows tbody tr", has_text="gvote").locator(".failed").text_content() == (
        "has a score on 1 of 2 tasks"
    )


def test_areas_and_what_can_go(page: Any) -> None:
    assert page.locator("#trades-section").is_hidden()  # of the group, which has one budget
    page.select_option("#task", "ruler_vt@64")
    assert column(page, "trades", "Method") == ["●snapkv"]
    # Means 0.75, 0.5, 0.25 at 1, 0.5, 0.25.
    assert column(page, "trades", "Area")[0].startswith("54.2 %")
    assert column(page, "trades", "Can goat a loss of 10 %")[0].startswith("15.0 %")
    assert column(page, "trades", "Can goat a loss of 20 %")[0].startswith("30.0 %")


def test_what_can_go_beyond_the_smallest_budget(load: Any) -> None:
    made = [*cells(FULL, [1.0]), *cells("snapkv(keep=0.5)", [1.0]), *cells("snapkv(keep=0.25)", [1.0])]
    page = load(page_of(made))
    assert column(page, "trades", "Can goat a loss of 10 %") == ["≥ 75.0 %"]


def test_areas_say_how_often_a_method_failed(load: Any) -> None:
    made = [*cells(FULL, [1.0]), *cells("snapkv(keep=0.5)", [1.0]), *cells("snapkv(keep=0.25)", [1.0])]
    lost = [*cells(FULL, [1.0], task="lost"), *cells("snapkv(keep=0.5)", [1.0], task="lost")]
    lost += [*cells("snapkv(keep=16)", [1.0, None], task="lost")]
    page = load(page_of([*made, *lost]))
    assert column(page, "trades", "Method") == ["●snapkv"]
    page.select_option("#task", "lost")
    assert column(page, "trades", "Method") == ["●snapkvfailures, counted as not answered: 1"]


def test_cut_contexts_are_said(load: Any) -> None:
    page = load(page_of([cell(FULL, 1.0), replace(cell(FULL, 1.0, "1"), facts={"cut": 7})]))
    assert page.locator("#rows-note").text_content().startswith("Of 1 examples the context was cut in its middle")


def test_needles(page: Any) -> None:
    maps = page.locator("#maps figure")
    assert maps.locator("figcaption").all_text_contents() == [FULL, "snapkv(keep=0.5)"]
    assert maps.nth(1).locator("th").all_text_contents() == ["depth", "64", "128", f"0{NONE}10 %", f"90{NONE}100 %"]
    assert maps.nth(1).locator("td").all_text_contents() == ["0", "100", NONE, "0"]
    shares = maps.nth(1).locator("td").evaluate_all("cells => cells.map(c => c.style.getPropertyValue('--share'))")
    assert shares == ["0", "1", "", "0"]


def test_text_stays_text(page: Any) -> None:
    assert page.locator("h1").text_content() == f"model {EVIL}"
    assert EVIL in page.locator("#origin dd").all_text_contents()
    page.select_option("#task", EVIL)
    assert column(page, "rows", "Recipe") == [f"▼{EVIL}"]
    assert page.locator("main img").count() == 0


def test_a_method_as_baseline(load: Any) -> None:
    page = load(page_of(baseline="snapkv"))
    assert "Compared withsnapkv" in page.locator("#facts").text_content()
    assert "Differences are to snapkv with the same budget" in page.locator("#rows-note").text_content()


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows_the_page(load: Any, width: int) -> None:
    page = load(page_of(), viewport={"width": width, "height": 800})
    page.wait_for_selector("#plot .point")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_sweep_without_cells(load: Any) -> None:
    page = load(page_of([]))
    assert page.locator("#rows tbody tr").count() == 0 and page.locator("#needles-section").is_hidden()
