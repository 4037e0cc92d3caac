"""Successive halving: many recipes on little text, then fewer and fewer recipes on more and more text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from keepset.lab.analysis.intervals import Figure, of_mean
from keepset.lab.record import Record
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

    @property
    def kl(self) -> Figure | None:
        """Mean KL over pieces; None before the first."""
        return of_mean(self.values("kl"))

    def first(self, pieces: int) -> TunedRecipe:
        """Return the recipe as if it had been measured on only the first pieces."""
        return TunedRecipe(self.recipe, self.figures[:pieces], self.error)


Measure = Callable[[int, Sequence[Recipe]], Iterator[Record]]
"""Yields a record for each recipe on the piece with this number."""


class Halving:
    """A race of recipes by successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943).

    In every round the better half of the recipes goes on and the text doubles. Recipes are compared on the same pieces.
    `entries` are all recipes, in their order, and `alive` those that are still in the race. `done` and `planned` are
    the work, in measurements of a recipe.

    Args:
        measure: measures recipes on a piece.
        recipes: the recipes of the first round.
        pieces: number of pieces.
        on_step: called after each measurement.
    """

    def __init__(
        self, measure: Measure, recipes: Sequence[Recipe], pieces: int, on_step: Callable[[], None] = lambda: None
    ) -> None:
        self._measure, self._on_step = measure, on_step
        self._rounds = [0, *(count for count in ROUNDS if count < pieces), pieces]
        self.entries = [TunedRecipe(recipe) for recipe in recipes]
        self.alive = list(self.entries)
        self.round, self.rounds, self.done = 1, len(self._rounds) - 1, 0
        self.planned = self._later(len(self.alive))

    @property
    def pieces(self) -> int:
        """Number of pieces on which every recipe in the race has been measured."""
        return min((len(entry.figures) for entry in self.alive if entry.error is None), default=0)

    def run(self) -> None:
        """Run all rounds. An interruption keeps the results so far."""
        for number, (before, after) in enumerate(pairwise(self._rounds), 1):
            self.round = number
            if before:
                self.alive = ranked(self.alive)[: _half(len(self.alive))]
            self.planned = self.done + self._later(len(self.alive))
            for piece in range(before, after):
                self._run(piece)

    def standing(self) -> list[tuple[TunedRecipe, bool]]:
        """Return all recipes that have figures, the best first, and whether they are in the race.

        Recipes in the race come first, ordered by their figures over the pieces that all of them have; then come the
        others, from the last that left to the first.
        """
        running = self.ranked()
        pieces = min((len(entry.figures) for entry in running), default=0)
        out = [e for e in self.entries if e not in self.alive and e.figures and e.error is None]
        rounds = sorted({len(e.figures) for e in out}, reverse=True)
        groups = (ranked([e for e in out if len(e.figures) == n]) for n in rounds)
        return [(e.first(pieces), True) for e in running] + [(e, False) for group in groups for e in group]

    def ranked(self) -> list[TunedRecipe]:
        """Return the recipes in the race that have figures, the best first."""
        return ranked([entry for entry in self.alive if entry.figures and entry.error is None])

    def _run(self, piece: int) -> None:
        if not self.alive:
            return
        self.done += PREFILL
        for entry, row in zip(self.alive, self._measure(piece, [e.recipe for e in self.alive]), strict=True):
            if row.error is not None:
                entry.error = row.error
            else:
                entry.figures.append(row)
            self.done += 1
            self._on_step()
        self.alive = [entry for entry in self.alive if entry.error is None]

    def _later(self, entries: int) -> int:
        """Return the work of this round and those after it, if so many recipes are in this one."""
        cost = 0
        for before, after in pairwise(self._rounds[self.round - 1 :]):
            cost += (after - before) * (PREFILL + entries) if entries else 0
            entries = _half(entries)
        return cost


def ranked(entries: Sequence[TunedRecipe]) -> list[TunedRecipe]:
    """Return recipes by their mean KL on the pieces that all of them have been measured on, the lowest first."""
    pieces = min((len(entry.figures) for entry in entries), default=0)
    if not pieces:
        return list(entries)
    kls = {entry: entry.first(pieces).mean("kl") for entry in entries}
    return sorted(entries, key=lambda entry: kls[entry] if math.isfinite(kls[entry]) else math.inf)


def tied(order: Sequence[TunedRecipe]) -> list[TunedRecipe]:
    """Return the first of ordered recipes, and the others whose KL cannot be told from its."""
    pieces = min((len(entry.figures) for entry in order), default=0)
    return [e for e in order if e is order[0] or not _is_nearer(order[0].first(pieces), e.first(pieces))]


def _is_nearer(best: TunedRecipe, rival: TunedRecipe) -> bool:
    """Return whether the whole interval of the difference in KL on the same pieces is above zero."""
    if len(best.figures) < LEAST:
        return False
    differences = [rival_kl - best_kl for best_kl, rival_kl in zip(best.values("kl"), rival.values("kl"), strict=True)]
    if not all(map(math.isfinite, differences)):
        return not math.isfinite(rival.mean("kl"))
    difference = of_mean(differences)
    return difference is not None and difference.low is not None and difference.low > 0


def _half(entries: int) -> int:
    return max(math.ceil(entries / 2), min(entries, FINALISTS))
