"""The sentence of `keepset results` claims no more than its examples show."""

import pytest

from keepset.lab.analysis.summary import LEAST_EXAMPLES, summarize
from keepset.lab.record import FULL
from tests.lab.analysis.cells import cells

RIGHT: list[float | None] = [1.0] * 12


def found(right: int) -> list[float | None]:
    return [*[1.0] * right, *[0.0] * (12 - right)]


FOUR = [
    *cells(FULL, RIGHT),
    *cells("a(bytes=0.5)", RIGHT),
    *cells("a(bytes=0.1)", found(11)),
    *cells("b(bytes=0.25)", RIGHT),
    *cells("b(bytes=0.05)", found(2)),
]


def test_the_cheapest_of_those_that_cannot_be_told_from_the_best() -> None:
    assert summarize(FOUR).conclusion == (
        "On 12 examples of qa, 3 of 4 recipes are a tie for the best; the cheapest of them is a(bytes=0.1): 91.7% "
        "(64.6..98.5) with 10.0% of a full 16-bit cache's bytes. The full cache scores 100.0% (75.8..100.0)."
    )


@pytest.mark.parametrize(("right", "chosen"), [(9, "a(bytes=0.1)"), (7, "a(bytes=0.5)")])
def test_examples_are_compared_one_by_one(right: int, chosen: str) -> None:
    """Of 12 pairs 3 that differ may be chance, and 5 are none (Agresti & Min, by hand: -0.04..0.47 and 0.07..0.64)."""
    made = [*cells(FULL, RIGHT), *cells("a(bytes=0.5)", RIGHT), *cells("a(bytes=0.1)", found(right))]
    assert chosen in summarize([*made, *cells("b(bytes=0.05)", found(0))]).conclusion


def test_nothing_is_concluded_from_few_examples_or_an_unfinished_sweep() -> None:
    few = [each for each in FOUR if int(each.example) < LEAST_EXAMPLES - 1]
    assert summarize(few).conclusion == "Nothing can be concluded from 9 examples: at least 10 are needed."
    assert summarize(FOUR[:-1]).conclusion.startswith("Nothing is concluded yet")
    assert summarize(cells(FULL, RIGHT)).conclusion == "No recipe has a score on all tasks yet."


def test_recipes_are_compared_on_all_tasks() -> None:
    other = [*cells(FULL, RIGHT, task="other"), *cells("a(bytes=0.1)", found(0), task="other")]
    other += cells("b(bytes=0.25)", RIGHT, task="other")
    said = summarize([*FOUR, *other]).conclusion
    assert said.startswith("On 24 examples of 2 tasks, b(bytes=0.25) scores best of 2 recipes: 100.0% (")
