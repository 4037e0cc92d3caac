"""docs/papers: every formula of the papers has its place there, and the tests that the pages name exist."""

import re
from functools import cache
from pathlib import Path

import pytest

from keepset.lab.papers.catalogue import PAPERS

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGES = ROOT / "docs" / "papers"
TEST = re.compile(r"`(test_\w+)`")

# Equations that a paper numbers; and the lines of its algorithm, all of which do something.
EQUATIONS = {
    "ams": {*range(1, 4)},
    "kvcompose": {3, *range(6, 11), *range(12, 28)},
    "gvote": {1},
    "compilerkv": {*range(1, 19)},
}
LINES = {"ams": {*range(2, 46)} - {24, 42}, "gvote": {*range(1, 13)}}


@cache
def existing() -> frozenset[str]:
    """Names of all test functions."""
    texts = (path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^\s*(?:async )?def (test_\w+)", text, re.M))


def page(paper: str) -> str:
    return (PAGES / f"{paper}.md").read_text("utf-8")


def places(paper: str) -> list[tuple[str, str]]:
    """What stands in the table of the method and in the list without differences: where in the paper, and the rest."""
    sections = dict(re.findall(r"^## (.+)\n([^\0]*?)(?=^## |\Z)", page(paper), re.M))
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in sections["The method"].splitlines() if line[:2] == "| "]
    assert [cell.strip() for cell in rows[0]] == ["where", "the paper", "keepset, and why", "test"]
    assert all(len(cells) == 4 for cells in rows)
    same = re.findall(r"^- (.*): (`test_.*)$", sections["As in the paper"], re.M)
    assert len(same) == sections["As in the paper"].count("\n- ")
    return [(cells[0], cells[3]) for cells in rows[2:]] + same


def numbers(places: list[tuple[str, str]], word: str) -> set[int]:
    """The numbers that follow this word, such as in "eq. 1, 3 to 5", over all places."""
    found: set[int] = set()
    for where, _ in places:
        for listed in re.findall(rf"{word} (\d+(?:(?:, | to )\d+)*)", where):
            for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed):
                found |= {*range(int(first), int(last or first) + 1)}
    return found


def test_there_is_a_page_for_each_paper() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*PAPERS, "index"}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_equation_and_line_has_its_place_and_a_test(paper: str) -> None:
    assert numbers(places(paper), "eq.") == EQUATIONS[paper]
    assert not LINES.get(paper, set()) - numbers(places(paper), "lines?")
    assert all(TEST.findall(named) for _, named in places(paper))


@pytest.mark.parametrize("name", [*PAPERS, "index"])
def test_tests_that_are_named_exist(name: str) -> None:
    named = set(TEST.findall(page(name)))
    assert named and not named - existing(), named - existing()
