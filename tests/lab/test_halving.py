"""Successive halving on figures that are made up, so that the best recipe is known."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset.lab.halving import PREFILL, ROUNDS, Halving, TunedRecipe, ranked, tied
from keepset.lab.record import Record
from keepset.recipe import Recipe

PIECES = ROUNDS[-1]


def recipes(count: int) -> list[Recipe]:
    return [Recipe.parse(f"random(seed={number}, keep=0.25)") for number in range(count)]


def number_of(entry: TunedRecipe) -> int:
    return entry.recipe.method.seed  # type: ignore[attr-defined, no-any-return]


def figures(kl: float) -> Record:
    return Record("", "", figures={"kl": kl, "keep": 0.25})


def entry(number: int, kls: Sequence[float]) -> TunedRecipe:
    return TunedRecipe(recipes(number + 1)[number], list(map(figures, kls)))


class Made:
    """Figures from a formula of the recipe's number and the piece's, and how often each recipe was asked for."""

    def __init__(self, formula: Callable[[int, int], Record | str]) -> None:
        self.formula, self.asked, self.pieces = formula, Counter[int](), Counter[int]()

    def __call__(self, piece: int, told: Sequence[Recipe]) -> Iterator[Record]:
        self.pieces[piece] += 1
        for recipe in told:
            number = recipe.method.seed  # type: ignore[attr-defined]
            self.asked[number] += 1
            made = self.formula(number, piece)
            yield Record("", "", error=made) if isinstance(made, str) else made


def noisy(best: int, seed: int) -> Callable[[int, int], Record]:
    """A recipe is worse the further its number is from the best's; pieces differ tenfold, and a little by chance."""

    def formula(number: int, piece: int) -> Record:
        chance = random.Random(f"{seed} {number} {piece}")
        return figures(10 ** (piece % 3 / 2 - 2) * (1 + abs(number - best)) * chance.uniform(0.9, 1.1))

    return formula


def run(formula: Callable[[int, int], Record | str], count: int, pieces: int = PIECES) -> Halving:
    race = Halving(Made(formula), recipes(count), pieces)
    race.run()
    return race


# --- the race


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, 40])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_the_best_wins_and_costs_as_much_as_halving_says(count: int, place: float) -> None:
    best = round(place * (count - 1))
    made = Made(noisy(best, count))
    race = Halving(made, recipes(count), PIECES)
    race.run()
    assert number_of(race.ranked()[0]) == best and list(map(number_of, tied(race.ranked()))) == [best]
    # Worked out by hand: rounds of 2, 2, 4 and 8 pieces, each with the better half, but no less than four.
    left, cost = count, 2 * count
    for pieces in (2, 4, 8):
        left = max((left + 1) // 2, min(left, 4))
        cost += pieces * left
    assert sum(made.asked.values()) == cost
    assert len(race.alive) == left and race.pieces == PIECES
    assert made.asked[best] == PIECES and set(made.pieces.values()) == {1}
    assert race.done == race.planned and race.done == cost + PREFILL * PIECES


def test_later_rounds_correct_what_the_first_pieces_say() -> None:
    # Recipe 0 looks best on two pieces, and is not.
    race = run(lambda number, piece: figures(0.5 if number == 0 and piece < 2 else 1.0 + (number != 1)), 6)
    assert number_of(race.ranked()[0]) == 1
    # Later pieces are harder: who has seen more of them is not the worse for it.
    hard, easy = entry(0, [1.0, 1.0, 50.0]), entry(1, [2.0, 2.0])
    assert ranked([easy, hard]) == [hard, easy]


@pytest.mark.parametrize("pieces", [1, 2, 3, 8, 11, 16, 20])
def test_any_number_of_pieces_is_used_alike_every_time(pieces: int) -> None:
    made = Made(noisy(2, 1))
    race = Halving(made, recipes(9), pieces)
    race.run()
    assert made.asked[2] == pieces == race.pieces
    assert sorted(made.pieces) == list(range(pieces))
    assert race.done == race.planned
    again = run(noisy(2, 1), 9, pieces)
    assert [(e.recipe, e.figures) for e in race.ranked()] == [(e.recipe, e.figures) for e in again.ranked()]


def test_what_fails_leaves_the_race_with_its_reason() -> None:
    def formula(number: int, piece: int) -> Record | str:
        if number == 1 or (number == 4 and piece == 5):
            return f"{number} cannot"
        return noisy(4, 0)(number, piece)

    made = Made(formula)
    race = Halving(made, recipes(12), PIECES)
    race.run()
    assert {number_of(e): e.error for e in race.entries if e.error} == {1: "1 cannot", 4: "4 cannot"}
    assert made.asked[1] == 1 and made.asked[4] == 6
    assert not {1, 4} & set(map(number_of, race.alive))
    assert number_of(race.ranked()[0]) in (3, 5)
    assert race.pieces == PIECES
    nothing = run(lambda number, piece: "no", 3)
    assert nothing.alive == nothing.ranked() == tied(nothing.ranked()) == []
    assert [e.error for e in nothing.entries] == ["no"] * 3


# --- order and ties


@given(st.lists(st.lists(st.floats(0, 9), min_size=8, max_size=8), min_size=1, max_size=8))
def test_order_is_that_of_mean_kl(kls: list[list[float]]) -> None:
    entries = [entry(number, row) for number, row in enumerate(kls)]
    order = [math.fsum(e.values("kl")) for e in ranked(entries)]
    assert all(a <= b + 1e-9 for a, b in pairwise(order))
    assert order[0] == pytest.approx(min(map(math.fsum, kls)))


TEXTS = [0.01 * 3**number for number in range(8)]


@pytest.mark.parametrize(
    ("kls", "expected"),
    [
        # A small difference on every piece is told, and a large one by chance is not.
        ([TEXTS, [kl * 1.2 for kl in TEXTS], [kl * (0.5 if at % 2 else 3) for at, kl in enumerate(TEXTS)]], [0, 2]),
        *([[[0.1] * pieces, [9.0] * pieces], [0, 1]] for pieces in (1, 2, 5)),  # few pieces tell nothing
        ([[0.1, 0.5] * 4] * 3, [0, 1, 2]),
        ([[5.0] * 8, [math.nan] * 8, [math.inf] * 8], [0]),
    ],
)
def test_what_cannot_be_told_from_the_best_is_tied(kls: list[list[float]], expected: list[int]) -> None:
    entries = [entry(number, row) for number, row in enumerate(kls)]
    assert list(map(number_of, tied(entries))) == expected
    if not all(map(math.isfinite, kls[-1])):
        assert ranked(entries[::-1])[0] is entries[0]


def test_stopped_halfway_it_knows_what_it_has_measured() -> None:
    # In the race by KL on the pieces that all have; then those that left, the last first.
    race = run(noisy(0, 1), 10)
    rows = [(number_of(row), len(row.figures), running) for row, running in race.standing()]
    assert rows == [(0, 16, True), (1, 16, True), (2, 16, True), (3, 16, True), (4, 4, False)] + [
        (number, 2, False) for number in range(5, 10)
    ]

    def formula(number: int, piece: int) -> Record | str:
        if (number, piece) == (3, 5):
            raise KeyboardInterrupt
        return "no" if (number, piece) == (4, 4) else noisy(3, 0)(number, piece)

    race = Halving(Made(formula), recipes(5), PIECES)
    with pytest.raises(KeyboardInterrupt):
        race.run()
    assert (race.round, race.pieces) == (3, 5)
    assert number_of(race.ranked()[0]) == 3
    # Five pieces are too few to tell anything apart.
    assert sorted(map(number_of, tied(race.ranked()))) == [1, 2, 3]
