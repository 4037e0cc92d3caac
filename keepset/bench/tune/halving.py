"""Successive halving: many recipes on little text, then fewer and fewer recipes on more and more text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from keepset.bench.analysis.intervals import Figure, of_difference, of_mean, of_score
from keepset.bench.record import Record
from keepset.recipe import Recipe

ROUNDS = (2, 4, 8, 16)
"""Pieces that every recipe in the race has been measured on after each round."""
FINALISTS = 4
"""The number of recipes at which halving stops."""
LEAST = 6
"""The fewest pieces that separate recipes: five differences have the same sign by chance in 6 of 100 cases."""
PREFILL = 10
"""Cost of a piece's prefill with second passes, in measurements of a recipe."""


@dataclass(eq=False)
class TunedRecipe:
    """A recipe in the race: its records so far, piece by piece, or the reason why it is out of the race."""

    recipe: Recipe
    figures: list[Record] = field(default_factory=list)
    error: str | None = None

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the pieces."""
        return fmean(self.values(name))

    def values(self, name: str) -> list[Any]:
        """Return a figure on every piece."""
        return [record.figures[name] for record in self.figures]

    def shares_found(self) -> list[float]:
        """Return the share of its facts that was found in every piece; empty if none were hidden."""
        return [each.figures["facts_found"] / each.figures["facts"] for each in self.figures if "facts" in each.figures]

    @property
    def kl(self) -> Figure | None:
        """Mean KL over pieces; None before the first."""
        return of_mean(self.values("kl"))

    @property
    def found(self) -> Figure | None:
        """Share of the facts that was found; None if none were hidden."""
        return of_score(self.shares_found())

    def first(self, pieces: int) -> TunedRecipe:
        """Return the recipe as if it had been measured on only the first pieces."""
        return TunedRecipe(self.recipe, self.figures[:pieces], self.error)


Measure = Callable[[int, Sequence[Recipe]], Iterator[Record]]
"""Yields a record for each recipe on the piece with this number."""
Grow = Callable[[Sequence[Recipe]], Sequence[Recipe]]
"""Returns recipes that join after the first round, given those of the first round, the best first."""


class Halving:
    """A race of recipes by successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943).

    In every round the better half of the recipes goes on and the text doubles. Recipes are compared on the same pieces.
    `entries` are all recipes that have ever been in the race, in their order, and `alive` those that still are. `done`
    and `planned` are the work, in measurements of a recipe.

    Args:
        measure: measures recipes on a piece.
        recipes: the recipes of the first round.
        pieces: number of pieces.
        grow: returns recipes that join after the first round; they are measured on its pieces before any is out.
        grown: most recipes that may join.
        by_found: returns whether found facts count.
        on_step: called after each measurement.
    """

    def __init__(
        self,
        measure: Measure,
        recipes: Sequence[Recipe],
        pieces: int,
        *,
        grow: Grow = lambda best: (),
        grown: int = 0,
        by_found: Callable[[], bool] = lambda: False,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._measure, self._grow, self._by_found, self._on_step = measure, grow, by_found, on_step
        self._rounds = [count for count in ROUNDS if count < pieces] + [pieces]
        self.entries = [TunedRecipe(recipe) for recipe in recipes]
        self.alive = list(self.entries)
        self.round, self.rounds, self.done = 1, len(self._rounds), 0
        first, entries = self._rounds[0], len(self.alive)
        self.planned = _cost(first, entries) + _cost(first, grown) + self._later(1, entries + grown)

    @property
    def pieces(self) -> int:
        """Number of pieces on which every recipe in the race has been measured."""
        return min((len(entry.figures) for entry in self.alive if entry.error is None), default=0)

    def run(self) -> None:
        """Run all rounds. An interruption keeps the results so far."""
        first = self._rounds[0]
        self._run(self.alive, 0, first)
        known = {entry.recipe for entry in self.entries}
        more = [TunedRecipe(recipe) for recipe in self._grow([e.recipe for e in self.ranked()]) if recipe not in known]
        self.planned = self.done + _cost(first, len(more)) + self._later(1, len(self.alive) + len(more))
        self.entries += more
        self.alive += more
        self._run(more, 0, first)
        for before, after in pairwise(self._rounds):
            self.planned = self.done + self._later(self.round, len(self.alive))
            self.round += 1
            self.alive = self.ranked()[: _half(len(self.alive))]
            self._run(self.alive, before, after)

    def ranked(self) -> list[TunedRecipe]:
        """Return the recipes in the race that have figures, the best first."""
        return ranked([e for e in self.alive if e.figures and e.error is None], by_found=self._by_found())

    def standing(self) -> list[tuple[TunedRecipe, bool]]:
        """Return all recipes that have figures, the best first, and whether they are in the race.

        Recipes in the race come first, ordered by their figures over the pieces that all of them have; then come the
        others, from the last that left to the first.
        """
        running = self.ranked()
        pieces = min((len(entry.figures) for entry in running), default=0)
        out = [e for e in self.entries if e not in self.alive and e.figures and e.error is None]
        rounds = sorted({len(e.figures) for e in out}, reverse=True)
        groups = (ranked([e for e in out if len(e.figures) == n], by_found=self._by_found()) for n in rounds)
        return [(e.first(pieces), True) for e in running] + [(e, False) for group in groups for e in group]

    def tied(self) -> list[TunedRecipe]:
        """Return the best recipe and those that tie with it, the best first."""
        return tied(self.ranked(), by_found=self._by_found())

    def _run(self, entries: list[TunedRecipe], first: int, after: int) -> None:
        for piece in range(first, after):
            running = [entry for entry in entries if entry.error is None]
            if not running:
                break
            self.done += PREFILL
            for entry, row in zip(running, self._measure(piece, [e.recipe for e in running]), strict=True):
                if row.error is not None:
                    entry.error = row.error
                else:
                    entry.figures.append(row)
                self.done += 1
                self._on_step()
        self.alive = [entry for entry in self.alive if entry.error is None]

    def _later(self, done: int, entries: int) -> int:
        """Return the work of the rounds after `done` ones, at whose end there are this many recipes."""
        cost = 0
        for before, after in pairwise(self._rounds[done - 1 :]):
            entries = _half(entries)
            cost += _cost(after - before, entries)
        return cost


def ranked(entries: Sequence[TunedRecipe], *, by_found: bool) -> list[TunedRecipe]:
    """Return recipes from the best to the worst, by the pieces that all of them have been measured on.

    The order is by KL. If facts count, first come all recipes that tie with the one that finds most, by KL; then come
    the others, by found facts.
    """
    pieces = min((len(entry.figures) for entry in entries), default=0)
    if not pieces:
        return list(entries)
    alike = {entry: entry.first(pieces) for entry in entries}
    kls = {entry: alike[entry].mean("kl") for entry in entries}
    order = sorted(entries, key=lambda entry: kls[entry] if math.isfinite(kls[entry]) else math.inf)
    if not by_found:
        return order
    most = max(order, key=lambda entry: _found(alike[entry]))
    near = [entry for entry in order if not _finds_more(alike[most], alike[entry])]
    rest = [entry for entry in order if entry not in near]
    return near + sorted(rest, key=lambda entry: -_found(alike[entry]))


def tied(order: Sequence[TunedRecipe], *, by_found: bool) -> list[TunedRecipe]:
    """Return the first of ordered recipes, and the others that tie with it in facts and in KL."""
    if not order:
        return []
    pieces = min(len(entry.figures) for entry in order)
    best = order[0].first(pieces)
    return [
        entry
        for entry in order
        if entry is order[0]
        or not (_is_nearer(best, entry.first(pieces)) or (by_found and _finds_more(best, entry.first(pieces))))
    ]


def _is_nearer(best: TunedRecipe, other: TunedRecipe) -> bool:
    """Return whether the whole interval of the difference in KL on the same pieces is above zero."""
    if len(best.figures) < LEAST:
        return False
    differences = [theirs - ours for ours, theirs in zip(best.values("kl"), other.values("kl"), strict=True)]
    if not all(map(math.isfinite, differences)):
        return not math.isfinite(other.mean("kl"))
    return _is_above_zero(of_mean(differences))


def _finds_more(best: TunedRecipe, other: TunedRecipe) -> bool:
    """Return whether the whole interval of the difference in found facts is above zero.

    On few pieces, return whether more than one fact more is found.
    """
    if not best.shares_found():
        return False
    if len(best.figures) < LEAST:
        return sum(best.values("facts_found")) - sum(other.values("facts_found")) > 1
    differences = [ours - theirs for ours, theirs in zip(best.shares_found(), other.shares_found(), strict=True)]
    return _is_above_zero(of_difference(differences))


def _is_above_zero(figure: Figure | None) -> bool:
    return figure is not None and figure.low is not None and figure.low > 0


def _found(entry: TunedRecipe) -> float:
    return entry.found.value if entry.found is not None else 0.0


def _half(entries: int) -> int:
    return max(math.ceil(entries / 2), min(entries, FINALISTS))


def _cost(pieces: int, entries: int) -> int:
    """Return the work of measuring recipes on pieces."""
    return pieces * (PREFILL + entries) if entries else 0
