"""Successive halving: many recipes on little text, ever fewer of them on ever more of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from keepset.bench.analysis.intervals import Interval, of_difference, of_mean, of_score
from keepset.bench.record import Record
from keepset.recipe import Recipe

ROUNDS = (2, 4, 8, 16)
"""Pieces of text that those still in the race have been measured on after each round."""
FINALISTS = 4
"""So many are not halved any more."""
LEAST = 6
"""Pieces without which nothing is told apart: five differences have one sign by chance in 6 of 100 cases."""
PREFILL = 10
"""How many measurements of a recipe the prefill of a piece, second passes included, takes about as long as."""


@dataclass(eq=False)
class TunedRecipe:
    """A recipe in the race: what was measured so far, piece by piece, or why it is out of it."""

    recipe: Recipe
    figures: list[Record] = field(default_factory=list)
    error: str | None = None

    def mean(self, name: str) -> float:
        """Of one of the figures."""
        return fmean(self.values(name))

    def values(self, name: str) -> list[Any]:
        """One of the figures, of every piece."""
        return [record.figures[name] for record in self.figures]

    def shares_found(self) -> list[float]:
        """Return the share of its facts that was found in every piece; empty if none were hidden."""
        return [each.figures["facts_found"] / each.figures["facts"] for each in self.figures if "facts" in each.figures]

    @property
    def kl(self) -> tuple[float, Interval | None]:
        """Mean and interval over pieces."""
        values = self.values("kl")
        return fmean(values), of_mean(values)

    @property
    def found(self) -> tuple[float, Interval | None] | None:
        """Share of the facts and its interval over pieces; None where none were hidden."""
        values = self.shares_found()
        return (fmean(values), of_score(values)) if values else None

    def first(self, pieces: int) -> TunedRecipe:
        """The same as if it had been measured on so many pieces."""
        return TunedRecipe(self.recipe, self.figures[:pieces], self.error)


Measure = Callable[[int, Sequence[Recipe]], Iterator[Record]]
"""Of the piece with this number: each recipe's figures in turn, or why there are none."""
Grow = Callable[[Sequence[Recipe]], Sequence[Recipe]]
"""From the recipes of the first round, the best first, to more that join them."""


class Halving:
    """The race (Jamieson & Talwalkar 2016, arXiv:1502.07943).

    In every round the better half of the recipes goes on and the text doubles. Recipes are compared on the same pieces.
    After the first ones `grow` may add recipes, which are measured on these before anyone is out. `entries` are all
    that have ever been in the race, in the order in which they came; `alive` those that still are. `done` and `planned`
    are in units of work, of which a recipe on a piece is one.
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
        """On how many pieces all that are still in the race have been measured."""
        return min((len(entry.figures) for entry in self.alive if entry.error is None), default=0)

    def run(self) -> None:
        """All rounds; stopped halfway, what is known stays."""
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
        """Those in the race that have figures, the best first."""
        return ranked([e for e in self.alive if e.figures and e.error is None], by_found=self._by_found())

    def standing(self) -> list[tuple[TunedRecipe, bool]]:
        """All that have figures, the best first, and whether they are in the race; who left it last leads the others.

        Those in the race have the figures that their order is by: of the pieces that all of them were measured on.
        """
        running = self.ranked()
        pieces = min((len(entry.figures) for entry in running), default=0)
        out = [e for e in self.entries if e not in self.alive and e.figures and e.error is None]
        rounds = sorted({len(e.figures) for e in out}, reverse=True)
        groups = (ranked([e for e in out if len(e.figures) == n], by_found=self._by_found()) for n in rounds)
        return [(e.first(pieces), True) for e in running] + [(e, False) for group in groups for e in group]

    def tied(self) -> list[TunedRecipe]:
        """The best and those that cannot be told from it, the best first."""
        return tied(self.ranked(), by_found=self._by_found())

    def _run(self, entries: list[TunedRecipe], before: int, after: int) -> None:
        for piece in range(before, after):
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
        """Units of the rounds after so many, for so many recipes that there are at their end."""
        cost = 0
        for before, after in pairwise(self._rounds[done - 1 :]):
            entries = _half(entries)
            cost += _cost(after - before, entries)
        return cost


def ranked(entries: Sequence[TunedRecipe], *, by_found: bool) -> list[TunedRecipe]:
    """The best first, on the pieces that all of them have been measured on.

    By KL; where facts count, first come all that cannot be told from the one that finds most, by KL, then the others,
    by what they find.
    """
    pieces = min((len(entry.figures) for entry in entries), default=0)
    if not pieces:
        return list(entries)
    alike = {entry: entry.first(pieces) for entry in entries}
    order = sorted(entries, key=lambda entry: _or_last(alike[entry].mean("kl")))
    if not by_found:
        return order
    most = max(order, key=lambda entry: _found(alike[entry]))
    near = [entry for entry in order if not _finds_more(alike[most], alike[entry])]
    rest = [entry for entry in order if entry not in near]
    return near + sorted(rest, key=lambda entry: -_found(alike[entry]))


def tied(order: Sequence[TunedRecipe], *, by_found: bool) -> list[TunedRecipe]:
    """The first of these, and the others that neither facts nor KL tell from it."""
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
    """Whether the difference in KL on the same pieces is above zero with its whole interval."""
    if len(best.figures) < LEAST:
        return False
    differences = [theirs - ours for ours, theirs in zip(best.values("kl"), other.values("kl"), strict=True)]
    if not all(map(math.isfinite, differences)):
        return not math.isfinite(other.mean("kl"))
    interval = of_mean(differences)
    return interval is not None and interval.low > 0


def _finds_more(best: TunedRecipe, other: TunedRecipe) -> bool:
    """The same of the facts that are found; of few pieces, whether it finds more than one fact more."""
    if not best.shares_found():
        return False
    if len(best.figures) < LEAST:
        return sum(best.values("facts_found")) - sum(other.values("facts_found")) > 1
    differences = [ours - theirs for ours, theirs in zip(best.shares_found(), other.shares_found(), strict=True)]
    interval = of_difference(differences)
    return interval is not None and interval.low > 0


def _found(entry: TunedRecipe) -> float:
    return entry.found[0] if entry.found is not None else 0.0


def _or_last(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _half(entries: int) -> int:
    return max(math.ceil(entries / 2), min(entries, FINALISTS))


def _cost(pieces: int, entries: int) -> int:
    return pieces * (entries + PREFILL) if entries else 0
