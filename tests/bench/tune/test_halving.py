"""Successive halving on figures that are made up, so that the best recipe is known."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset.bench.record import Record
from keepset.bench.tune.halving import FINALISTS, PREFILL, ROUNDS, Halving, TunedRecipe, ranked, tied
from keepset.recipe import Recipe

PIECES = ROUNDS[-1]


def recipes(count: int) -> list[Recipe]:
    return [Recipe.parse(f"random(seed={number}, keep=0.25)") for number in range(count)]


def figures(kl: float, found: Sequence[bool] = (), seconds: float = 1.0) -> Record:
    facts = {"facts": len(found), "facts_found": sum(found)} if found else {}
    costs = {
        "keep": 0.25,
        "kv_bytes": 25,
        "kv_bytes_full": 100,
        "prefill_seconds": seconds,
        "prefill_seconds_full": 1.0,
    }
    return Record("", "", figures={"kl": kl, "top1": 0.9, **costs, **facts})


def entry(number: int, kls: Sequence[float], found: Sequence[Sequence[bool]] = (), seconds: float = 1.0) -> TunedRecipe:
    facts = list(found) or [()] * len(kls)
    rows = [figures(kl, told, seconds) for kl, told in zip(kls, facts, strict=True)]
    return TunedRecipe(recipes(number + 1)[number], rows)


class Made:
    """Figures from a formula of the recipe's number and the piece's, and how often each recipe was asked for."""

    def __init__(self, formula: Callable[[int, int], Record | str]) -> None:
        self.formula, self.asked, self.pieces = formula, Counter[int](), Counter[int]()

    def __call__(self, piece: int, told: Sequence[Recipe]) -> Iterator[Record]:
        self.pieces[piece] += 1
        for recipe in told:
            number = recipe.method.seed
            self.asked[number] += 1
            made = self.formula(number, piece)
            yield Record("", "", error=made) if isinstance(made, str) else made


def noisy(best: int, seed: int) -> Callable[[int, int], Record]:
    """A recipe is worse the further its number is from the best's; pieces differ tenfold, and a little by chance."""

    def formula(number: int, piece: int) -> Record:
        chance = random.Random(f"{seed} {number} {piece}")
        return figures(10 ** (piece % 3 / 2 - 2) * (1 + abs(number - best)) * chance.uniform(0.9, 1.1))

    return formula


# --- the race


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, 40])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_the_best_wins_and_costs_as_much_as_halving_says(count: int, place: float) -> None:
    best = round(place * (count - 1))
    made = Made(noisy(best, count))
    race = Halving(made, recipes(count), PIECES)
    race.run()
    assert race.ranked()[0].recipe == recipes(count)[best]
    assert [e.recipe.method.seed for e in race.tied()] == [best]
    # Worked out by hand: rounds of 2, 2, 4 and 8 pieces, each with the better half.
    left, cost, sizes = count, 0, []
    for pieces in (2, 2, 4, 8):
        if sizes:
            left = max((left + 1) // 2, min(left, 4))
        sizes.append(left)
        cost += pieces * left
    assert sum(made.asked.values()) == cost
    assert len(race.alive) == left and race.pieces == PIECES
    assert made.asked[best] == PIECES and set(made.pieces.values()) == {1}
    assert race.done == race.planned == cost + PREFILL * PIECES


def test_later_rounds_correct_what_the_first_pieces_say() -> None:
    """Recipe 0 looks best on two pieces, and is not."""
    made = Made(lambda number, piece: figures(0.5 if number == 0 and piece < 2 else 1.0 + (number != 1)))
    race = Halving(made, recipes(6), PIECES)
    race.run()
    assert race.ranked()[0].recipe == recipes(2)[1]


def test_recipes_are_compared_on_the_same_pieces() -> None:
    """Later pieces are harder: who has seen more of them is not the worse for it."""
    hard = entry(0, [1.0, 1.0, 50.0])
    easy = entry(1, [2.0, 2.0])
    assert ranked([easy, hard], by_found=False) == [hard, easy]


def test_runs_alike_every_time() -> None:
    orders = []
    for _ in range(2):
        race = Halving(Made(noisy(3, 7)), recipes(20), PIECES)
        race.run()
        orders.append([(str(e.recipe), e.figures) for e in race.ranked()])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("pieces", [1, 2, 3, 8, 11, 16, 20])
def test_any_number_of_pieces_is_used(pieces: int) -> None:
    made = Made(noisy(2, 1))
    race = Halving(made, recipes(9), pieces)
    race.run()
    assert made.asked[2] == pieces == race.pieces
    assert sorted(made.pieces) == list(range(pieces))
    assert race.done == race.planned


def test_what_fails_leaves_the_race_with_its_reason() -> None:
    def formula(number: int, piece: int) -> Record | str:
        if number == 1 or (number == 4 and piece == 5):
            return f"{number} cannot"
        return noisy(4, 0)(number, piece)

    made = Made(formula)
    race = Halving(made, recipes(12), PIECES)
    race.run()
    assert {e.recipe.method.seed: e.error for e in race.entries if e.error} == {1: "1 cannot", 4: "4 cannot"}
    assert made.asked[1] == 1 and made.asked[4] == 6
    assert {e.recipe.method.seed for e in race.alive} <= set(range(12)) - {1, 4}
    assert race.ranked()[0].recipe.method.seed in (3, 5)
    assert race.pieces == PIECES


def test_nothing_is_left_where_all_fail() -> None:
    race = Halving(Made(lambda number, piece: "no"), recipes(3), PIECES)
    race.run()
    assert race.alive == race.ranked() == race.tied() == []
    assert [e.error for e in race.entries] == ["no"] * 3


def test_more_recipes_join_after_the_first_round_and_catch_up() -> None:
    told: list[list[int]] = []

    def grow(best: Sequence[Recipe]) -> list[Recipe]:
        told.append([recipe.method.seed for recipe in best])
        return [recipes(30)[20], recipes(30)[25], recipes(1)[0]]

    made = Made(noisy(25, 3))
    race = Halving(made, recipes(8), PIECES, grow=grow, grown=5)
    before = race.planned
    race.run()
    assert told == [[7, 6, 5, 4, 3, 2, 1, 0]]
    assert made.asked[0] == 2 and made.asked[25] == PIECES
    assert [e.recipe.method.seed for e in race.tied()] == [25]
    assert race.done == race.planned < before


def test_stopped_halfway_it_knows_what_it_has_measured() -> None:
    def formula(number: int, piece: int) -> Record | str:
        if (number, piece) == (3, 5):
            raise KeyboardInterrupt
        return "no" if (number, piece) == (4, 4) else noisy(3, 0)(number, piece)

    race = Halving(Made(formula), recipes(5), PIECES)
    with pytest.raises(KeyboardInterrupt):
        race.run()
    assert (race.round, race.pieces) == (3, 5)
    assert race.ranked()[0].recipe.method.seed == 3
    # Five pieces are too few to tell anything apart.
    assert sorted(e.recipe.method.seed for e in race.tied()) == [1, 2, 3]


# --- order and ties


@given(st.lists(st.lists(st.floats(0, 9), min_size=8, max_size=8), min_size=1, max_size=8))
def test_order_is_that_of_mean_kl(kls: list[list[float]]) -> None:
    entries = [entry(number, row) for number, row in enumerate(kls)]
    order = [math.fsum(e.values("kl")) for e in ranked(entries, by_found=False)]
    assert all(a <= b + 1e-9 for a, b in pairwise(order))
    assert order[0] == pytest.approx(min(map(math.fsum, kls)))


def test_a_small_difference_on_every_piece_is_told_and_a_large_one_by_chance_is_not() -> None:
    texts = [0.01 * 3**number for number in range(8)]
    best = entry(0, texts)
    slightly = entry(1, [kl * 1.2 for kl in texts])
    chance = entry(2, [kl * (0.5 if number % 2 else 3.0) for number, kl in enumerate(texts)])
    assert tied([best, slightly, chance], by_found=False) == [best, chance]


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_few_pieces_tell_nothing(pieces: int) -> None:
    order = [entry(0, [0.1] * pieces), entry(1, [9.0] * pieces)]
    assert tied(order, by_found=False) == order


def test_the_same_figures_are_tied() -> None:
    order = [entry(number, [0.1, 0.5] * 4) for number in range(3)]
    assert tied(order, by_found=False) == order


def test_what_is_not_a_number_comes_last() -> None:
    bad, good = entry(0, [math.nan] * 8), entry(1, [5.0] * 8)
    worse = entry(2, [math.inf] * 8)
    order = ranked([bad, worse, good], by_found=False)
    assert order[0] is good
    assert tied(order, by_found=False) == [good]


def facts(right: int) -> list[tuple[bool, ...]]:
    """Of 8 pieces with 4 facts, so many are found, spread over all pieces."""
    return [tuple(number < right for number in range(piece, 32, 8)) for piece in range(8)]


def test_facts_come_first_where_they_differ_beyond_their_intervals() -> None:
    sharp = entry(0, [0.1] * 8, facts(2))
    finds = entry(1, [0.3] * 8, facts(30))
    finds_too = entry(2, [0.2] * 8, facts(29))
    some = entry(3, [0.01] * 8, facts(12))
    entries = [sharp, finds, finds_too, some]
    # The two that find most cannot be told apart, so KL says which is better; of the others, what they find.
    assert ranked(entries, by_found=True) == [finds_too, finds, some, sharp]
    assert tied(ranked(entries, by_found=True), by_found=True) == [finds_too]
    assert ranked(entries, by_found=False) == [some, sharp, finds_too, finds]


def test_facts_that_are_all_lost_leave_the_order_to_kl() -> None:
    first, second = entry(0, [0.2] * 8, facts(0)), entry(1, [0.1] * 8, facts(0))
    assert ranked([first, second], by_found=True) == [second, first]


def test_on_two_pieces_facts_count_one_by_one() -> None:
    """Seven of eight facts more are not chance, and one of eight is."""
    most = entry(0, [0.9] * 2, [(True,) * 4] * 2)
    nearly = entry(1, [0.5] * 2, [(True,) * 4, (True, True, True, False)])
    none = entry(2, [0.1] * 2, [(False,) * 4, (True, False, False, False)])
    assert ranked([none, most, nearly], by_found=True) == [nearly, most, none]


def test_on_one_piece_a_recipe_that_finds_little_is_never_above_one_that_finds_all() -> None:
    most, nearly, little = (
        entry(number, [kl], [tuple(fact < right for fact in range(4))])
        for number, (kl, right) in enumerate([(0.9, 4), (0.5, 3), (0.1, 1)])
    )
    assert ranked([little, most, nearly], by_found=True) == [nearly, most, little]


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
        shown = [(len(row.figures), *(row.found or (0, 0))[:1]) for row, running in rows if running is alive]
        assert alive or shown == sorted(shown, key=lambda row: -row[0])
        for (pieces, above), (same, below) in pairwise(shown):
            assert pieces != same or above * 4 * pieces >= below * 4 * pieces - 1
    assert {row.recipe.method.seed for row, _ in rows} == set(range(10)) - ({9} if stop == 0 else set())
    assert {running for _, running in rows} == ({True, False} if stop is None else {True})


def test_figures_of_an_entry() -> None:
    one = entry(0, [1.0, 2.0, 3.0], [(True, False), (True, True), (False, False)])
    assert one.kl[0] == 2.0 and one.mean("keep") == 0.25
    assert one.found is not None and one.found[0] == 0.5
    low, high = one.found[1] or (0, 0)
    assert 0 <= low < 0.5 < high <= 1
    assert entry(0, [1.0]).found is None and entry(0, [1.0]).kl == (1.0, None)
    assert FINALISTS == 4
