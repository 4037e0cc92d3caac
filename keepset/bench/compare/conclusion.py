"""What a comparison comes to, in a sentence, and its rows in an order that shows it."""

from collections.abc import Sequence
from itertools import groupby

from keepset.bench.compare.comparison import Comparison, Measurement

_NAMED = 3
"""Losers that a sentence names at most."""


def by_budget(comparison: Comparison) -> list[list[Measurement]]:
    """The rows that have figures under each budget, the largest first; of those the best first.

    Best are those that answer as the full cache does, and of those the ones nearest to it.
    """
    rows = [row for row in comparison.rows if row.error is None]
    asked = bool(comparison.full.get("needle_found"))

    def worth(row: Measurement) -> tuple[bool, float]:
        return asked and not row.needle_found, row.kl or 0.0

    def budget(row: Measurement) -> tuple[bool, int | float]:
        return isinstance(row.requested, int), -(row.requested or 0)

    groups = groupby(sorted(rows, key=budget), key=budget)
    return [sorted(group, key=worth) for _, group in groups]


def conclusion(comparison: Comparison) -> str:
    """One sentence for who reads no table."""
    groups = by_budget(comparison)
    if not groups:
        return "No recipe could be measured."
    if comparison.full.get("needle_found"):
        for rows in sorted(groups, key=_share):
            if rows[0].needle_found:
                best, lost = rows[0], [row.method for row in rows if not row.needle_found]
                return (
                    f"With {_share(rows):.0%} of the memory {best.method} answers as the full cache does{_but(lost)}."
                )
        return "Under none of these budgets does a recipe answer as the full cache does: try larger ones."
    rows = min(groups, key=_share)
    best = rows[0]
    rest = f", {rows[-1].method} furthest (KL {rows[-1].kl:.3f})" if len(rows) > 1 else ""
    return (
        f"With {_share(rows):.0%} of the memory {best.method} is nearest to the full cache (KL {best.kl:.3f}, the same "
        f"next token in {best.top1:.0%} of places){rest}."
    )


def _share(rows: Sequence[Measurement]) -> float:
    """Of the full cache's bytes, those of the best row."""
    return (rows[0].kv_bytes or 0) / (rows[0].kv_bytes_full or 1)


def _but(lost: Sequence[str]) -> str:
    if not lost:
        return ", and so do all others"
    *others, last = [*lost[:_NAMED], *([f"{len(lost) - _NAMED} more"] if len(lost) > _NAMED else [])]
    named = f"{', '.join(others)} and {last}" if others else last
    return f"; {named} {'has' if len(lost) == 1 else 'have'} lost the fact"
