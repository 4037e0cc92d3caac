"""The page of `keepset results`, in Chromium, against the summary that it was made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepset.bench.analysis.summary import summarize
from keepset.bench.record import FULL
from tests.bench.analysis.cells import cell, cells
from tests.bench.report.pages import EVIL, lines, results_page, sweep, traces

BUDGETS = [*cells(FULL, [1.0]), *cells("snapkv(keep=0.5)", [1.0]), *cells("snapkv(keep=0.25)", [1.0])]


@pytest.fixture
def page(load: Any) -> Any:
    return load(results_page())


def column(page: Any, table: str, name: str) -> list[str]:
    titles, *rows = lines(page, table)
    index = next(i for i, title in enumerate(titles) if title.startswith(name))
    return [row[index] if index < len(row) else "" for row in rows]


def test_plot_shows_scores_with_their_intervals(page: Any) -> None:
    def drawn() -> dict[str, Any]:
        return {trace["name"]: trace for trace in traces(page, "plot")}

    options = page.locator("#task option").all_text_contents()
    assert options == ["ruler@64", "ruler_vt@64", "ruler_cwe@64", EVIL, "needle@128", "needle@64"]
    # Of the group, both recipes that were run on both tasks.
    averages = drawn()
    assert averages[FULL]["y"] == [0.75] and averages["snapkv"]["y"] == [0.375] and averages["gvote"]["y"] == []
    page.select_option("#task", label="ruler_vt@64")
    shown = drawn()
    rows = {row.recipe: row for row in summarize(sweep()).rows if row.task == "ruler_vt@64"}
    assert shown["snapkv"]["x"] == [0.25, 0.5] and shown["snapkv"]["y"] == [0.25, 0.5]
    for i, recipe in enumerate(("snapkv(keep=0.25)", "snapkv(keep=0.5)")):
        score = rows[recipe].score
        assert score is not None and score.low is not None and score.high is not None
        assert shown["snapkv"]["y"][i] - shown["snapkv"]["down"][i] == pytest.approx(score.low)
        assert shown["snapkv"]["y"][i] + shown["snapkv"]["up"][i] == pytest.approx(score.high)
    assert shown["gvote"]["x"] == [0.31]
    assert shown["tova"]["symbol"][0].endswith("-open") and shown["h2o"]["y"] == []
    assert "Hollow" in page.locator("main").text_content()
    page.get_by_label("Entries").check(force=True)
    assert drawn()["gvote"]["x"] == [0.3]
    page.locator(".methods button", has_text="snapkv").click()
    assert [trace["visible"] for trace in traces(page, "plot")].count(False) == 1


def test_table_of_a_task(page: Any) -> None:
    page.select_option("#task", label="ruler_vt@64")
    recipes = [line[0] for line in lines(page)[1:]]
    assert recipes[0] == FULL and recipes[2].startswith("snapkv(keep=0.5)")
    assert column(page, "rows", "score")[2].startswith("50.0 (")
    assert column(page, "rows", "difference")[2].startswith("-25.0 (") and column(page, "rows", "difference")[0] == ""
    assert column(page, "rows", "examples") == ["4", "3 of 4", "4", "4", "4", "4"]
    failed = page.locator("#rows .failed").all_text_contents()
    assert failed == [
        f"failed on {n}: {name} cannot do that."
        for n, name in (("1 of 3", "tova(keep=0.5)"), ("4 of 4", "h2o(keep=0.5)"))
    ]
    page.locator("#rows thead button", has_text="score").click()
    scores = [score.split(" ")[0] for score in column(page, "rows", "score")]
    assert scores == ["25.0", "50.0", "66.7", "75.0", "100.0", ""]


def test_peaks_of_memory_where_a_device_tells_them(load: Any, page: Any) -> None:
    assert page.locator("#peaks").count() == 0
    made = [*cells(FULL, [1.0], peak_bytes=9_400_000, batch=8.0), *cells("tova(keep=0.5)", [1.0])]
    page = load(results_page(made))
    assert lines(page, "peaks")[1:] == [[FULL, "9 MB", "8.0"]]


def test_a_group_that_lacks_a_task_says_so(page: Any) -> None:
    assert (
        page.locator("#rows tbody tr", has_text="gvote").locator(".failed").text_content() == "a score on 1 of 2 tasks"
    )


def test_areas_and_what_can_go(page: Any) -> None:
    assert page.locator("#trades").count() == 0  # of the group, which has one budget
    page.select_option("#task", label="ruler_vt@64")
    # Means 0.75, 0.5, 0.25 at 1, 0.5, 0.25.
    assert column(page, "trades", "area")[0].startswith("54.2")
    assert column(page, "trades", "can go, loss 10%")[0].startswith("15.0")
    assert column(page, "trades", "can go, loss 20%")[0].startswith("30.0")


def test_what_can_go_beyond_the_smallest_budget_and_failures(load: Any) -> None:
    lost = [*cells(FULL, [1.0], task="lost"), *cells("snapkv(keep=0.5)", [1.0], task="lost")]
    lost += [*cells("snapkv(keep=16)", [1.0, None], task="lost")]
    page = load(results_page([*BUDGETS, *lost]))
    assert column(page, "trades", "can go, loss 10%") == [">= 75.0"]
    page.select_option("#task", label="lost")
    assert "failures, counted as not answered: 1" in page.locator("#trades").inner_text()


def test_what_events_do_to_a_text(load: Any) -> None:
    page = load(
        results_page([*cells(FULL, [1.0]), *cells("tova(keep=0.5)", [0.0], wipeout=0.113, middle=0.25, iou=0.219)])
    )
    assert lines(page, "events")[2][-3:] == ["11.3%", "25.0%", "21.9%"]


def test_cut_contexts_are_said(load: Any) -> None:
    page = load(results_page([cell(FULL, 1.0), replace(cell(FULL, 1.0, "1"), facts={"cut": 7})]))
    assert "Of 1 examples the context was cut in its middle" in page.locator("main").text_content()


def test_needles(page: Any) -> None:
    maps = page.locator(".maps figure")
    assert maps.locator("figcaption").all_text_contents() == [FULL, "snapkv(keep=0.5)"]
    assert maps.nth(1).locator("th").all_text_contents() == ["depth", "64", "128", "0 to 10 %", "90 to 100 %"]
    assert maps.nth(1).locator("td").all_text_contents() == ["0", "100", "", "0"]
    shares = maps.nth(1).locator("td").evaluate_all("cells => cells.map(c => c.style.getPropertyValue('--share'))")
    assert shares == ["0", "1", "", "0"]


def test_settings_and_a_method_as_baseline(load: Any) -> None:
    page = load(results_page(baseline="snapkv"))
    assert EVIL in page.locator("#origin dd").all_text_contents()
    assert "Compared withsnapkv" in page.locator("#facts").text_content()
    assert "Differences are to snapkv with the same budget" in page.locator("main").text_content()


def test_a_sweep_without_records(load: Any) -> None:
    page = load(results_page([]))
    assert page.locator("table").count() == 0 and "No recipe has a score" in page.locator("#conclusion").text_content()
