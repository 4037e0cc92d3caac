import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from keepset.lab.analysis.intervals import Figure
from keepset.lab.analysis.summary import summarize
from keepset.lab.cli.results import to_csv
from keepset.lab.record import FULL, Record
from keepset.lab.report.results import interval
from keepset.lab.sweep.store import Store
from tests.lab.analysis.cells import cell, cells
from tests.lab.cli.conftest import Run, check_refused

EVIL = "\x1b[31m[red]evil[/red]"
SWEEP = [
    *(each for task in ("ruler_vt@64", "ruler_cwe@64") for each in cells(FULL, [1.0, 1.0, 1.0, 0.0], task=task)),
    *cells("snapkv(keep=0.5)", [1.0, 1.0, 0.0, 0.0], task="ruler_vt@64"),
    *cells("snapkv(keep=0.5)", [1.0, 1.0, 1.0, 0.0], task="ruler_cwe@64"),
    *cells("snapkv(keep=0.25)", [1.0, 0.0], task="ruler_vt@64"),
    *cells("random(keep=0.5)", [0.0, None, 0.0, 0.0], task="ruler_vt@64"),
    *cells("h2o(keep=0.5)", [None] * 4, task="ruler_vt@64"),
]


def write(made: Sequence[Record], path: Path) -> None:
    """What `keepset eval` would leave."""
    examples: dict[tuple[str, int], dict[str, None]] = {}
    for each in made:
        examples.setdefault((each.task, each.seed), {})[each.example] = None
    with Store.begin(path, f"model {EVIL}", {"--mode": "agnostic", "--limit": None}) as store:
        for (task, seed), ids in examples.items():
            store.register(task, seed, list(ids), "digest")
        assert all(map(store.save, made))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.jsonl"
    write(SWEEP, path)
    return path


def test_by_a_fact_and_with_a_baseline(run: Run, tmp_path: Path, sweep: Path) -> None:
    levels = {"0": 1, "1": 5, "2": 5}
    made = [replace(each, facts={"level": levels[each.example]}) for each in cells(FULL, [1.0, 0.0, 1.0])]
    write([*made, cell(task="other")], tmp_path / "x.jsonl")
    done = run("results", str(tmp_path / "x.jsonl"), "--by", "level", "--json", "-")
    rows = [(row["task"], row["score"]["value"], row["examples"]) for row in json.loads(done.out)["rows"]]
    assert rows == [("qa, level 1", 1.0, 1), ("qa, level 5", 0.5, 2)]
    because = "No example has the fact subject, so nothing can be split by it; there are: level."
    check_refused(run, "results", str(tmp_path / "x.jsonl"), "--by", "subject", because=because)
    check_refused(run, "results", str(sweep), "--baseline", "tova", because="'tova' is not in the sweep")
    check_refused(run, "results", str(sweep), "--baseline", "tova(", because="'tova(' is not a recipe")
    done = run("results", str(sweep), "--baseline", "snapkv", "--json", "-")
    rows = {(row["task"], row["recipe"]): row for row in json.loads(done.out)["rows"]}
    assert rows["ruler_vt@64", "random(keep=0.5)"]["difference"]["value"] == -0.5
    assert rows["ruler_vt@64", "snapkv(keep=0.25)"]["difference"] is None


def test_table(run: Run, sweep: Path) -> None:
    """`report/test_commands.py` has the tables themselves, which the page shows too."""
    done = run("results", str(sweep))
    assert (done.code, done.err) == (0, "") and "Differences are to full cache." in done.out
    lines = [line.split() for line in done.out.splitlines()]
    start = lines.index(["ruler_vt@64"])
    assert lines[start + 1] == ["full", "cache", "75.0", "(30.1..95.4)", "100.0%", "100.0%", "4"]
    row = lines[start + 2]
    assert row[:4] == ["snapkv(keep=0.5)", "50.0", "(15.0..85.0)", "-25.0"] and row[-3:] == [
        "50.0%",
        "50.0%",
        "4",
    ]
    assert "failed on 1 of 4: random(keep=0.5) cannot do that." in done.out
    group = lines.index(["ruler@64,", "mean", "of", "2", "tasks"])
    assert start < group and lines[group + 2][:2] == ["snapkv(keep=0.5)", "62.5"] and lines[group + 2][-1] == "8"
    trades = next(i for i, line in enumerate(lines) if "area" in line)
    # Of the two examples that have all budgets: means 1, 1, 0.5.
    assert lines[trades + 2][:2] == ["snapkv", "91.7"] and lines[trades + 2][3:5] == ["25.0%", "55.0"]


def test_files(run: Run, sweep: Path) -> None:
    done = run("results", str(sweep), "--html", "a.html", "--csv", "a.csv", "--json", "-")
    assert done.code == 0 and done.err == "written: a.html, a.csv\n"
    with Store.open(sweep) as store:
        assert json.loads(done.out) == summarize(store.cells()).to_json()
    page = Path("a.html").read_text(encoding="utf-8")
    assert "snapkv(keep=0.25)" in page and "--limit" not in page.partition("plotly")[0]
    assert csv_rows(Path("a.csv").read_text(encoding="utf-8"))[0]["recipe"] == FULL


def test_text_steers_no_terminal_and_what_rounds_to_zero_has_no_sign(run: Run, tmp_path: Path) -> None:
    failed = replace(cell(FULL, None), error=EVIL, recipe=EVIL, method=EVIL, task=EVIL)
    write([cell(FULL, 1.0), failed], tmp_path / "evil.jsonl")
    done = run("results", "evil.jsonl")
    assert done.code == 0 and "\x1b" not in done.out
    assert "[red]evil[/red]" in done.out
    assert interval(Figure(-0.0001, -0.0004, 0.0004), "+") == "+0.0 (+0.0..+0.0)"
    assert interval(Figure(-0.001)) == "-0.1"


# --- CSV, read back


def csv_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_has_every_row() -> None:
    summary = summarize([*SWEEP, *cells("gvote", [1.0, 1.0, 0.0], task="ruler_vt@64")])
    rows, lines = [*summary.rows, *summary.averages], csv_rows(to_csv(summary))
    for row, line in zip(rows, lines, strict=True):
        assert (line["task"], line["recipe"], line["error"]) == (row.task, row.recipe, row.error or "")
        counts = ("examples", "examples_of", "failed", "share")
        assert [line[name] for name in counts] == [
            str(value) if (value := row.to_json()[name]) is not None else "" for name in counts
        ]
        for name, figure in (("score", row.score), ("difference", row.difference)):
            told = [line[f"{name}{end}"] for end in ("", "_low", "_high")]
            expected = (None,) * 3 if figure is None else (figure.value, figure.low, figure.high)
            # A number below zero stays a number.
            assert [float(end) if end else None for end in told] == list(expected)
    assert any(line["difference"].startswith("-") for line in lines)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff20"])
def test_no_text_is_a_formula(start: str) -> None:
    evil = f'{start}HYPERLINK("http://x","y")'
    made = replace(cell(FULL, None), task=evil, error=evil, recipe=evil, metric=evil)
    (line,) = csv_rows(to_csv(summarize([made])))
    assert line["task"] == line["error"] == line["recipe"] == line["metric"] == f"'{evil}"
