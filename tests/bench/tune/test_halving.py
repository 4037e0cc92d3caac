"""Successive halving on figures that are made up, so that the best recipe is known."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset.bench.analysis.intervals import Figure
from keepset.bench.record import Record
from keepset.bench.tune.halving import PREFILL, ROUNDS, Halving, TunedRecipe, ranked, tied
from keepset.recipe import Recipe

PIECES = ROUNDS[-1]


def recipes(count: int) -> list[Recipe]:
    return [Recipe.parse(f"random(seed={number}, keep=0.25)") for number in range(count)]


def number_of(entry: TunedRecipe) -> int:
    return entry.recipe.method.seed  # type: ignore[attr-defined, no-any-return]


def figures(kl: float, found: Sequence[bool] = ()) -> Record:
    facts = {"facts": len(found), "facts_found": sum(found)} if found else {}
    costs = {"keep": 0.25, "kv_bytes": 25, "kv_bytes_full": 100, "prefill_seconds": 1.0, "prefill_seconds_full": 1.0}
    return Record("", "", figures={"kl": kl, "top1": 0.9, **costs, **facts})


def entry(number: int, kls: Sequence[float], found: Sequence[Sequence[bool]] = ()) -> TunedRecipe:
    facts = list(found) or [()] * len(kls)
    return TunedRecipe(recipes(number + 1)[number], list(map(figures, kls, facts)))


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


def run(formula: Callable[[int, int], Record | str], count: int, pieces: int = PIECES, **options: Any) -> Halving:
    race = Halving(Made(formula), recipes(count), pieces, **options)
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
    assert number_of(race.ranked()[0]) == best and list(map(number_of, race.tied())) == [best]
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
    """Recipe 0 looks best on two pieces, and is not."""
    race = run(lambda number, piece: figures(0.5 if number == 0 and piece < 2 else 1.0 + (number != 1)), 6)
    assert number_of(race.ranked()[0]) == 1


def test_recipes_are_compared_on_the_same_pieces() -> None:
    """Later pieces are harder: who has seen more of them is not the worse for it."""
    hard, easy = entry(0, [1.0, 1.0, 50.0]), entry(1, [2.0, 2.0])
    assert ranked([easy, hard], by_found=False) == [hard, easy]


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
    assert nothing.alive == nothing.ranked() == nothing.tied() == []
    assert [e.error for e in nothing.entries] == ["no"] * 3


def test_more_recipes_join_after_the_first_round_and_catch_up() -> None:
    told: list[list[int]] = []

    def grow(best: Sequence[Recipe]) -> list[Recipe]:
        told.append([recipe.method.seed for recipe in best])  # type: ignore[attr-defined]
        return [recipes(30)[20], recipes(30)[25], recipes(1)[0]]

    made = Made(noisy(25, 3))
    race = Halving(made, recipes(8), PIECES, grow=grow, grown=5)
    before = race.planned
    race.run()
    assert told == [[7, 6, 5, 4, 3, 2, 1, 0]]
    assert made.asked[0] == 2 and made.asked[25] == PIECES
    assert list(map(number_of, race.tied())) == [25]
    assert race.done == race.planned and race.done < before


def test_stopped_halfway_it_knows_what_it_has_measured() -> None:
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
    assert sorted(map(number_of, race.tied())) == [1, 2, 3]


# --- order and ties


@given(st.lists(st.lists(st.floats(0, 9), min_size=8, max_size=8), min_size=1, max_size=8))
def test_order_is_that_of_mean_kl(kls: list[list[float]]) -> None:
    entries = [entry(number, row) for number, row in enumerate(kls)]
    order = [math.fsum(e.values("kl")) for e in ranked(entries, by_found=False)]
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
    assert list(map(number_of, tied(entries, by_found=False))) == expected
    if not all(map(math.isfinite, kls[-1])):
        assert ranked(entries[::-1], by_found=False)[0] is entries[0]


def facts(right: int) -> list[tuple[bool, ...]]:
    """Of 8 pieces with 4 facts, so many are found, spread over all pieces."""
    return [tuple(number < right for number in range(piece, 32, 8)) for piece in range(8)]


def test_facts_come_first_where_they_differ_beyond_their_intervals() -> None:
    sharp, finds = entry(0, [0.1] * 8, facts(2)), entry(1, [0.3] * 8, facts(30))
    finds_too, some = entry(2, [0.2] * 8, facts(29)), entry(3, [0.01] * 8, facts(12))
    entries = [sharp, finds, finds_too, some]
    # The two that find most cannot be told apart, so KL says which is better; of the others, what they find.
    assert ranked(entries, by_found=True) == [finds_too, finds, some, sharp]
    assert tied(ranked(entries, by_found=True), by_found=True) == [finds_too]
    assert ranked(entries, by_found=False) == [some, sharp, finds_too, finds]


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        # What all have lost leaves the order to KL.
        ([(0.2, facts(0)), (0.1, facts(0))], [1, 0]),
        # On two pieces facts count one by one: seven of eight facts more are not chance, and one of eight is.
        ([(0.1, [(0,) * 4, (1, 0, 0, 0)]), (0.9, [(1,) * 4] * 2), (0.5, [(1,) * 4, (1, 1, 1, 0)])], [2, 1, 0]),
        # On one piece a recipe that finds little is never above one that finds all.
        ([(0.1, [(1, 0, 0, 0)]), (0.9, [(1,) * 4]), (0.5, [(1, 1, 1, 0)])], [2, 1, 0]),
    ],
)
def test_few_facts_are_weighed_by_their_number(rows: Sequence[tuple[float, Any]], order: list[int]) -> None:
    entries = [entry(number, [kl] * len(found), found) for number, (kl, found) in enumerate(rows)]
    assert list(map(number_of, ranked(entries, by_found=True))) == order


@pytest.mark.parametrize("stop", [None, 0, 1], ids=["finished", "joined", "measured_once"])
def test_rows_stand_by_the_facts_that_they_show(stop: int | None) -> None:
    """In the race and out of it, also where recipes had just joined, or some have seen a harder piece already."""

    def formula(number: int, piece: int) -> Record:
        if number == 9 and piece == stop:
            raise KeyboardInterrupt
        right = (1, 4, 0, 2, 3)[number % 5] if piece < 1 else 0
        return figures(0.1 * (1 + number), [fact < right for fact in range(4)])

    race = Halving(Made(formula), recipes(8), 4, grow=lambda _: recipes(10)[8:], grown=2, by_found=lambda: True)
    with nullcontext() if stop is None else pytest.raises(KeyboardInterrupt):
        race.run()
    rows = race.standing()
    for alive in (True, False):
        shown = [(len(row.figures), row.found.value if row.found else 0) for row, running in rows if running is alive]
        assert alive or shown == sorted(shown, key=lambda row: -row[0])
        for (pieces, above), (same, below) in pairwise(shown):
            assert pieces != same or above * 4 * pieces >= below * 4 * pieces - 1
    assert {number_of(row) for row, _ in rows} == set(range(10)) - ({9} if stop == 0 else set())
    assert {running for _, running in rows} == ({True, False} if stop is None else {True})


def test_figures_of_an_entry() -> None:
    one = entry(0, [1.0, 2.0, 3.0], [(True, False), (True, True), (False, False)])
    assert one.kl is not None and one.kl.value == 2.0 and one.mean("keep") == 0.25
    assert one.found is not None and one.found.value == 0.5
    assert 0 <= (one.found.low or 0) < 0.5 < (one.found.high or 0) <= 1
    assert entry(0, [1.0]).found is None and entry(0, [1.0]).kl == Figure(1.0)
