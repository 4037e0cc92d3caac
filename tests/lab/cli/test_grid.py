"""Tables at every width: figures stay whole, names break at spaces, columns are left out in their order."""

import io
from operator import itemgetter

import pytest
from rich.console import Console

from keepset.lab.cli.grid import Grid
from keepset.lab.report.table import Column, Table

LONG = "pool(second_pass(statistic='rms'), sinks=4, recent=32)"
WORDS = {*LONG.split(), "snapkv"}


def printed(width: int, *, fold: bool = False) -> list[str]:
    rows = {LONG: ["11.9", "25.0%", "0.012", "x3.17"], "snapkv": ["4.7", "24.9%", "0.079", "x1.01"]}
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
        (200, ["MB", "kept", "KL", "prefill"]),
        (80, ["MB", "kept", "KL", "prefill"]),
        (66, ["MB", "kept", "KL"]),
        (60, ["MB", "KL"]),
        (50, ["MB", "KL"]),
    ],
)
def test_columns_are_left_out_and_names_break_at_spaces(width: int, titles: list[str]) -> None:
    header, *rows = printed(width)
    assert header.split() == ["recipe", *titles]
    assert max(map(len, [header, *rows])) <= width
    figures = {"MB": "11.9", "kept": "25.0%", "KL": "0.012", "prefill": "x3.17"}
    assert rows[0].split()[-len(titles) :] == [figures[title] for title in titles]
    names = " ".join(rows)
    for title in titles:
        names = names.replace(figures[title], "")
    assert set(LONG.split()) <= set(names.split())
    assert any(row.split()[0] == "snapkv" and len(row.split()) == 1 + len(titles) for row in rows)


def test_a_name_that_fits_keeps_to_one_line() -> None:
    assert len(printed(120)) == 3 and len(printed(80)) == 4


def test_an_empty_column_is_left_out() -> None:
    lines = shown({"snapkv": ["4.7", ""]}, {"MB": 0, "95 %": 1}, 80)
    assert " ".join(lines).split() == ["recipe", "MB", "snapkv", "4.7"]
