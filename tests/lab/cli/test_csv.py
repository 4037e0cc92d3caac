"""CSV of a summary, read back."""

import csv
import io
from dataclasses import replace

import pytest

from keepset.lab.analysis.summary import summarize
from keepset.lab.cli.results import to_csv
from keepset.lab.record import FULL
from tests.lab.analysis.cells import cell, cells

SWEEP = [
    *cells(FULL, [1.0] * 3, task="ruler_vt@64"),
    *cells("snapkv(keep=0.5)", [1.0, 0.5, 1.0], task="ruler_vt@64"),
    *cells("snapkv(keep=0.25)", [1.0, 0.5], task="ruler_vt@64"),
    *cells("snapkv(keep=16)", [1.0, None, 0.25], task="ruler_vt@64"),
    *cells("h2o(keep=0.5)", [None] * 3, task="ruler_vt@64"),
    *cells("gvote", [1.0, 1.0, 0.0], task="ruler_vt@64"),
    *cells(FULL, [0.5], task="ruler_cwe@64"),
    *cells("snapkv(keep=0.5)", [0.5], task="ruler_cwe@64"),
]


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_has_every_row() -> None:
    summary = summarize(SWEEP)
    rows, lines = [*summary.rows, *summary.averages], read(to_csv(summary))
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
    (line,) = read(to_csv(summarize([made])))
    assert line["task"] == line["error"] == line["recipe"] == line["metric"] == f"'{evil}"
