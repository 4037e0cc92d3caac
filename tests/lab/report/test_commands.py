"""What `results` and `latency` say; `test_pages.py` has how pages are drawn."""

from dataclasses import replace
from typing import Any

import pytest

from keepset.lab.analysis.summary import summarize
from keepset.lab.cli.latency import conclusion, table
from keepset.lab.record import FULL
from tests.lab.analysis.cells import cell, cells
from tests.lab.report.pages import (
    EVIL,
    Described,
    chart,
    data_of,
    latency_row,
    lines,
    results_page,
    rows,
    sections,
    sweep,
)


def options(page: str, name: str) -> dict[str, Any]:
    """A choice's options and their sections."""
    (control,) = (section for section in sections(page) if section.get("id") == name)
    return {option["name"]: option["sections"] for option in control["options"]}


def column(described: Described, table: str, name: str) -> list[str]:
    titles, *lines = rows(described, table)
    return [line[titles.index(name)] for line in lines]


def named(traces: list[dict[str, Any]]) -> dict[str, Any]:
    return {trace["name"]: trace for trace in traces}


def notes(described: Described) -> str:
    return "\n".join(section.get("note", "") for section in sections(described))


BUDGETS = [*cells(FULL, [1.0]), *cells("snapkv(keep=0.5)", [1.0]), *cells("snapkv(keep=0.25)", [1.0])]


def test_results_show_scores_with_their_intervals() -> None:
    tasks = options(results_page(), "task")
    assert list(tasks) == ["ruler@64", "ruler_vt@64", "ruler_cwe@64", EVIL, "needle@128", "needle@64"]
    # Of the group, both recipes that were run on both tasks.
    averages = named(chart(tasks["ruler@64"], "plot"))
    assert averages[FULL]["y"] == [0.75] and averages["snapkv"]["y"] == [0.375] and averages["gvote"]["y"] == []
    drawn = named(chart(tasks["ruler_vt@64"], "plot"))
    assert drawn["snapkv"]["x"] == [0.25, 0.5] and drawn["snapkv"]["y"] == [0.25, 0.5] and drawn["gvote"]["x"] == [0.31]
    scores = {row.recipe: row.score for row in summarize(sweep()).rows if row.task == "ruler_vt@64"}
    bars = drawn["snapkv"]["error_y"]
    for i, recipe in enumerate(("snapkv(keep=0.25)", "snapkv(keep=0.5)")):
        score = scores[recipe]
        assert score is not None and score.low is not None and score.high is not None
        assert score.value - bars["arrayminus"][i] == pytest.approx(score.low)
        assert score.value + bars["array"][i] == pytest.approx(score.high)
    (symbol,) = drawn["tova"]["marker"]["symbol"]
    assert symbol.endswith("-open") and "Hollow" in notes(tasks["ruler_vt@64"]) and drawn["h2o"]["y"] == []
    assert named(chart(tasks["ruler_vt@64"], "plot", at=1))["gvote"]["x"] == [0.3]  # over entries


def test_results_have_a_table_of_every_task() -> None:
    tasks = options(results_page(), "task")
    table = {name: cells for name, *cells in rows(tasks["ruler_vt@64"])[1:]}
    assert list(table)[:3] == [FULL, "tova(keep=0.5)", "snapkv(keep=0.5)"]
    score, difference, *_, examples = table["snapkv(keep=0.5)"][:5]
    assert score.startswith("50.0 (") and difference.startswith("-25.0 (") and table[FULL][1] == ""
    assert examples == "4" and table["tova(keep=0.5)"][4] == "3 of 4" and table["h2o(keep=0.5)"][0] == ""
    errors = {line["name"]: line["error"] for line in lines(tasks["ruler_vt@64"]) if line["error"]}
    failed = {"tova(keep=0.5)": "1 of 3", "h2o(keep=0.5)": "4 of 4"}
    assert errors == {name: f"failed on {counts}: {name} cannot do that." for name, counts in failed.items()}
    (gvote,) = (line for line in lines(tasks["ruler@64"]) if line["name"] == "gvote")
    assert gvote["error"] == "a score on 1 of 2 tasks"


def test_results_say_areas_and_what_can_go() -> None:
    tasks = options(results_page(), "task")
    assert not any(section.get("id") == "trades" for section in sections(tasks["ruler@64"]))  # it has one budget
    # Means 0.75, 0.5, 0.25 at 1, 0.5, 0.25.
    for name, value in (("area (95%)", "54.2"), ("can go, loss 10%", "15.0"), ("can go, loss 20%", "30.0")):
        assert column(tasks["ruler_vt@64"], "trades", name)[0].startswith(value)
    lost = [*cells(FULL, [1.0], task="lost"), *cells("snapkv(keep=0.5)", [1.0], task="lost")]
    lost += [*cells("snapkv(keep=16)", [1.0, None], task="lost")]
    tasks = options(results_page([*BUDGETS, *lost]), "task")
    assert column(tasks["qa"], "trades", "can go, loss 10%") == [">= 75.0"]
    assert lines(tasks["lost"], "trades")[0]["error"] == "failures, counted as not answered: 1"


def test_results_say_what_events_do_memory_peaks_needles_and_baselines() -> None:
    assert not any(section.get("id") in ("events", "peaks") for section in sections(results_page()))
    events = {"wipeout": 0.113, "middle": 0.25, "iou": 0.219, "iou_early": 0.164, "iou_late": 0.244}
    cut = replace(cell(FULL, 1.0, "1", peak_bytes=9_400_000, batch=8.0), facts={"cut": 7})
    page = results_page([cut, *cells("tova(keep=0.5)", [0.0], **events)])
    assert rows(page, "events")[2][-4:] == ["11.3%", "25.0%", "21.9%", "16.4%, 24.4%"]
    assert rows(page, "peaks")[1:] == [[FULL, "9 MB", "8.0"]]
    assert "Of 1 examples the context was cut in its middle" in notes(page)
    full, snapkv = options(results_page(), "needle-task")["needle"][0]["maps"]
    assert (full["title"], snapkv["title"]) == (FULL, "snapkv(keep=0.5)") and snapkv["head"] == ["depth", "64", "128"]
    assert [[line[0], *(cell[:2] for cell in line[1:])] for line in snapkv["lines"]] == [
        ["0 to 10 %", ["0", 0], ["100", 1]],
        ["90 to 100 %", ["", None], ["0", 0]],
    ]
    page = data_of(results_page(baseline="snapkv"))
    assert ["Why", EVIL] in page["origin"] and ["Compared with", "snapkv"] in page["facts"]
    assert "Differences are to snapkv with the same budget" in notes(page["sections"])
    nothing = data_of(results_page([]))
    assert nothing["sections"] == [] and "No recipe has a score" in nothing["conclusion"]


def timed(recipe: str, *speeds: float, tokens: int = 20, nbytes: int = 10**6) -> dict[str, Any]:
    """A row of rounds that make so many of their 4 tokens in a second, after 1.1 seconds (the full cache: 1)."""
    row, first = latency_row(recipe, tokens), 1.0 if recipe == FULL else 1.1
    rounds = [{**row["rounds"][0], "first_seconds": first, "rest_seconds": 4 / speed} for speed in speeds]
    middle = sorted(speeds)[len(speeds) // 2] if speeds else None
    return {**row, "rounds": rounds, "tokens_per_second": middle, "kv_bytes": nbytes}


def concluded(*recipes: dict[str, Any], rounds: int = 3) -> str:
    full = timed(FULL, *[2.0] * rounds, nbytes=4 * 10**6)
    return conclusion([full, timed("tova(keep=0.25)", 9.0, tokens=10), *recipes])


def test_latencies_conclude_with_the_fastest_after_the_longest_prompt() -> None:
    said = concluded(timed("snapkv(keep=0.5)", 2.0, 2.0, 2.1), timed("tova(keep=0.25)", 3.2, 2.8, 3.0))
    assert said.startswith(
        "After 20 tokens tova(keep=0.25) makes 1.50 (1.40..1.60) times the full cache's tokens a second"
    )
    assert "25% of its bytes, room for later tokens included" in said and "1.10 (1.10..1.10) times as long" in said
    tie = concluded(timed("a", 3.0, 3.1, 3.2, nbytes=2 * 10**6), timed("b", 2.0, 2.9, 3.0), timed("c", 1.0, 1.0, 1.0))
    assert tie.startswith("After 20 tokens b, a tie with a, makes 1.45 (1.00..1.50) times")
    assert tie.endswith("Ranges are over 3 rounds; one that holds 1 is a tie.")
    two = concluded(timed("a", 3.0, 3.1), rounds=2)
    assert two == "Nothing can be concluded from 2 of the 3 rounds that a comparison needs."
    assert concluded(timed("a", 3.0, 3.1)) == ""  # interrupted in its last round
    made = table([latency_row(FULL, 10, None), latency_row(FULL, 20, None), latency_row(EVIL, 10, None, EVIL)])
    first, second, failed = made.lines
    assert [text for text, _ in first.cells] == ["2.00 s", "2.0", "4.00 s", "4.0", ""] and second.short == FULL
    assert (first.heading, second.heading) == ("10 tokens of prompt", "20 tokens of prompt")
    assert (failed.name, failed.error) == (f"{EVIL}, 10 tokens", EVIL)
