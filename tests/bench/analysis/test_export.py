"""CSV and LaTeX of a summary, read back."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset.bench.analysis.export import escape, to_csv, to_latex
from keepset.bench.analysis.summary import summarize
from keepset.bench.record import FULL
from tests.bench.analysis.cells import cell, cells

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


def test_latex_has_methods_by_budgets() -> None:
    text = to_latex(summarize(SWEEP))
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == text.count(r"\bottomrule") == 1
    assert r"method & keep 0.5 & keep 0.25 & keep 16 & own budget \\" in text
    lines = text.splitlines()
    task = next(i for i, line in enumerate(lines) if r"ruler\_vt@64}, 3 examples" in line)
    assert r"full cache 100.0 {\scriptsize [43.9, 100.0]}" in lines[task]
    snapkv, h2o, gvote = (line.split(" & ") for line in lines[task + 1 : task + 4])
    assert snapkv[0] == r"\texttt{snapkv}"
    assert snapkv[1].startswith(r"83.3 {\scriptsize [") and snapkv[1].endswith("]}")
    assert snapkv[2].startswith("75.0 ") and snapkv[2].endswith(r"]}$^{\,2/3}$")
    assert snapkv[3].startswith("41.7 ") and snapkv[3].endswith(r"]}$^{\dagger}$")
    assert snapkv[4] == r"-- \\"
    assert h2o[:2] == [r"\texttt{h2o}", "failed"]
    assert gvote[1] == "--" and gvote[4].startswith("66.7 ")
    assert r"1 of 2 tasks" in text
    assert to_latex(summarize([])).count(r"\begin{tabular}") == 1


@pytest.mark.full
@given(st.text())
def test_escaped_text_has_no_command_of_its_own(text: str) -> None:
    escaped = escape(text)
    assert "\n" not in escaped and "\r" not in escaped
    plain = re.sub(r"\\(textbackslash|textasciicircum|textasciitilde|textless|textgreater)\{\}", "", escaped)
    assert not re.search(r"(?<!\\)[{}$&#%_^~\\](?![{}$&#%_])", plain)


def test_escaped_text() -> None:
    assert escape("a_b 50% {x} \\input{/etc/passwd}\n$") == (r"a\_b 50\% \{x\} \textbackslash{}input\{/etc/passwd\}\$")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_latex_is_taken(tmp_path: Path) -> None:
    evil = r"\input{x} 100% $a_b^c$ ~#&<>{"
    made = [*SWEEP, replace(cell(FULL, 1.0), task=evil)]
    head = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    page = tmp_path / "page.tex"
    page.write_text(head + to_latex(summarize(made)) + r"\end{document}", encoding="utf-8")
    done = subprocess.run(["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page"], cwd=tmp_path, check=False)
    assert done.returncode == 0
