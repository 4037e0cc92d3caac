"""Every command that prints tables, in a terminal of 80 columns: no line is longer, and no name or recipe is broken."""

import io
import re
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keepset.core.tables import save
from keepset.lab.cli import console
from keepset.lab.cli.grid import Grid
from keepset.lab.record import FULL
from keepset.lab.report.table import Column, Table
from tests.core.test_tables import random_tables
from tests.lab.analysis.cells import cells
from tests.lab.cli.conftest import Run
from tests.lab.cli.test_results import write

COLUMNS = 80
LONG = "adakv(expected_attention(future=16, buffer=8), keep=0.5), streaming_llm(keep=0.25)"
DECODING = "pyramid(expected_attention(future=16, buffer=4), keep=48), streaming_llm(keep=32)"


class Printed:
    """Prints everything twice: into a terminal of 80 columns, and into more than anything needs."""

    is_terminal, width = True, COLUMNS

    def __init__(self) -> None:
        self.narrow, self.wide = (Console(width=width, file=io.StringIO()) for width in (COLUMNS, 2000))

    def print(self, *objects: Any, **options: Any) -> None:
        self.narrow.print(*objects, **options)
        self.wide.print(*objects, **options)

    def check(self) -> None:
        """Every name in the narrow text stands in the wide one."""
        narrow, wide = (each.file.getvalue() for each in (self.narrow, self.wide))  # type: ignore[attr-defined]
        assert wide.strip() and max(map(len, narrow.splitlines())) <= COLUMNS
        names, whole = (set(re.findall(r"[\w./@()=',-]*\w", text)) for text in (narrow, wide))
        # A recipe may go on in the next line, but only after a comma.
        whole |= {part.strip() for name in whole for part in name.split(",")}
        assert not {name for name in names if name not in whole and not re.fullmatch(r"[\d.,()%-]*", name)}


@pytest.fixture
def printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> Printed:
    made, text_on = Printed(), console._print
    monkeypatch.setattr(console, "stdout", lambda: made)
    # Notes too; progress bars are no text.
    monkeypatch.setattr(console, "_print", lambda _, *text: text_on(made, *text))  # type: ignore[arg-type]
    return made


@pytest.fixture
def sweep(tmp_path: Path) -> None:
    names = ("adakv(expected_attention(future=16), keep=0.5)", "streaming_llm(keep=0.25)")
    made = [*cells(FULL, [1.0, 0.0]), *(each for name in names for each in cells(name, [1.0, 0.5], wipeout=0.1))]
    write(made, tmp_path / "sweep.jsonl")


COMPARE = ("compare", "--text", "text", "--prompt-tokens")
LATENCY = ("bench", "latency", "--prompt-tokens", "20,30", "--output-tokens", "3", "--recipes")
RECIPE = ("--recipe", LONG.split(", streaming", maxsplit=1)[0])


@pytest.mark.few(5)
@pytest.mark.usefixtures("tiny", "text", "sweep")
@pytest.mark.parametrize(
    "words",
    [
        ("methods",),
        ("methods", "compilerkv"),
        ("reproduce", "list"),
        ("results", "sweep.jsonl"),
        ("compile", "--show", "tables"),
        ("generate", "Go on.", "--text", "text", *RECIPE, "--output-tokens", "3"),
        (*COMPARE, "100", "--continuation", "8", "--recipes", LONG),
        (*COMPARE, "60", "--continuation", "40", "--decode", "--every", "16", "--recipes", DECODING),
        pytest.param((*LATENCY, LONG), marks=pytest.mark.full),
        ("context", "build", "--text", "text", "--out", "saved", *RECIPE),
        ("calibrate", "--text", "text", "--out", "stats", "--tokens", "300", "--length", "100", "--gate-steps", "0"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_no_name_is_broken(run: Run, printed: Printed, words: tuple[str, ...]) -> None:
    save(random_tables(), Path("tables"))
    assert run(*words).code == 0
    if words[0] == "context":
        assert run("context", "ask", "saved", "Who?", "--output-tokens", "3", "--model", "tiny").code == 0
    printed.check()


def test_the_list_of_commands_cuts_no_sentence(run: Run) -> None:
    for words in ((), ("context",), ("bench",)):
        shown = run(*words, "--help").out
        assert not re.search(r"\w\.\.\.$", shown, re.M) and max(map(len, shown.splitlines())) <= COLUMNS


# --- tables at every width: figures stay whole, names break at spaces, columns are left out in their order

NAME = "pool(second_pass(statistic='rms'), sinks=4, recent=32)"


def grid_lines(width: int, *, fold: bool = False) -> list[str]:
    rows = {NAME: ["11.9", "25.0%", "0.012", "x3.17"], "snapkv": ["4.7", "24.9%", "0.079", "x1.01"]}
    return shown(rows, {"MB": 0, "kept": 1, "KL": 0, "prefill": 2}, width, fold)


def shown(rows: dict[str, list[str]], ranks: dict[str, int], width: int, fold: bool = False) -> list[str]:
    columns = [Column(title, itemgetter(at), rank=rank) for at, (title, rank) in enumerate(ranks.items())]
    table = Table("recipe", columns, fold=fold)
    for name, row in rows.items():
        table.add(name, row)
    out = io.StringIO()
    Console(file=out, width=width).print(Grid(table))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        *((width, ["MB", "kept", "KL", "prefill"]) for width in (200, 80)),
        (66, ["MB", "kept", "KL"]),
        *((width, ["MB", "KL"]) for width in (60, 50)),
    ],
)
def test_columns_are_left_out_and_names_break_at_spaces(width: int, titles: list[str]) -> None:
    header, *rows = grid_lines(width)
    assert header.split() == ["recipe", *titles]
    assert max(map(len, [header, *rows])) <= width
    figures = {"MB": "11.9", "kept": "25.0%", "KL": "0.012", "prefill": "x3.17"}
    assert rows[0].split()[-len(titles) :] == [figures[title] for title in titles]
    names = " ".join(rows)
    for title in titles:
        names = names.replace(figures[title], "")
    assert set(NAME.split()) <= set(names.split())
    assert any(row.split()[0] == "snapkv" and len(row.split()) == 1 + len(titles) for row in rows)


def test_a_name_that_fits_keeps_to_one_line_and_an_empty_column_is_left_out() -> None:
    assert len(grid_lines(120)) == 3 and len(grid_lines(80)) == 4
    lines = shown({"snapkv": ["4.7", ""]}, {"MB": 0, "95 %": 1}, 80)
    assert " ".join(lines).split() == ["recipe", "MB", "snapkv", "4.7"]
