"""docs/papers.md: what it names is there, so that a reader finds it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from keepset.bench.papers.catalogue import entries

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "papers.md").read_text("utf-8")
ROWS = [
    cells
    for line in TEXT.splitlines()
    if line.startswith("| ") and len(cells := re.split(r"(?<!\\)\|", line)[1:-1]) == 5 and not cells[0].startswith(" -")
]
FILE = re.compile(r"`([a-z][\w/]*/[\w/]*(?:\.py|\.yaml)?)`")
NAMED = re.compile(r"((?:`[\w.]+`(?:, | and |; )?)+) in `([\w/]+\.py)`")


@cache
def names(path: Path) -> set[str]:
    """Functions, classes, methods (`Class.method`), fields and constants that a file defines."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.update((node.name, prefix + node.name))
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{node.name}.")
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            found.update(prefix + each.id for each in targets if isinstance(each, ast.Name))

    collect(ast.parse(path.read_text("utf-8")).body, "")
    return found


def test_every_entry_is_there_with_what_it_needs() -> None:
    said = dict(re.findall(r"^\| `keepset reproduce ([\w-]+)` \| [^|]* \| ([^|]*?) \|", TEXT, re.M))
    assert said == {name: entry.state for name, entry in entries().items()}
    assert "--tables (keepset compile)" in said["compilerkv-table-a1"]


def test_there_is_a_row_for_each_formula() -> None:
    headings = [cells for cells in ROWS if cells[0].strip() == "where"]
    assert len(headings) == 4 and len(ROWS) - len(headings) > 110
    assert all(cells[4].strip() == "test" for cells in headings)


@pytest.mark.parametrize("cells", [pytest.param(cells, id=str(i)) for i, cells in enumerate(ROWS)])
def test_files_functions_and_tests_of_a_row_exist(cells: list[str]) -> None:
    place, difference, tests = cells[2], cells[3], cells[4].strip()
    for file in FILE.findall(place + difference):
        assert (ROOT / "keepset" / file.removeprefix("keepset/")).exists(), file
    for said, file in NAMED.findall(place):
        missing = set(re.findall(r"`([\w.]+)`", said)) - names(ROOT / "keepset" / file)
        assert not missing, (missing, file)
    if tests in ("test", "none"):
        return
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
    assert named and len(named) == tests.count("::")
    for file, test in named:
        assert test in names(ROOT / "tests" / file), (file, test)
