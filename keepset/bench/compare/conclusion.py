"""The conclusion of a comparison in a sentence, and its records in the order that shows it."""

from collections.abc import Sequence
from itertools import groupby

from keepset.bench.compare.comparison import Comparison
from keepset.bench.record import Record

_NAMED = 3
"""Most methods that a sentence names as having lost the fact."""


def by_budget(comparison: Comparison) -> list[list[Record]]:
    """Return the records with figures, budget by budget from the largest, and the best first under each.

    A record that answers as the full cache does is better than one that does not; then the lower KL is better.
    """
    rows = [row for row in comparison.rows if row.error is None]
    asked = bool(comparison.full.get("needle_found"))

    def worth(row: Record) -> tuple[bool, float]:
        return asked and not row.figures["needle_found"], row.figures["kl"]

    def budget(row: Record) -> tuple[bool, int | float]:
        return isinstance(row.requested, int), -(row.requested or 0)

    groups = groupby(sorted(rows, key=budget), key=budget)
    return [sorted(group, key=worth) for _, group in groups]


def conclusion(comparison: Comparison) -> str:
    """Return one sentence for readers who skip the table."""
    groups = by_budget(comparison)
    if not groups:
        return "No recipe could be measured."
    if comparison.full.get("needle_found"):
        for rows in sorted(groups, key=_share):
            if rows[0].figures["needle_found"]:
                best, lost = rows[0], [row.method for row in rows if not row.figures["needle_found"]]
                return (
                    f"With {_share(rows):.0%} of the memory {best.method} answers as the full cache does{_but(lost)}."
                )
        return "Under none of these budgets does a recipe answer as the full cache does: try larger ones."
    rows = min(groups, key=_share)
    best = rows[0]
    rest = f", {rows[-1].method} furthest (KL {rows[-1].figures['kl']:.3f})" if len(rows) > 1 else ""
    fidelity = f"KL {best.figures['kl']:.3f}, the same next token in {best.figures['top1']:.0%} of places"
    return f"With {_share(rows):.0%} of the memory {best.method} is nearest to the full cache ({fidelity}){rest}."


def _share(rows: Sequence[Record]) -> float:
    """Return the bytes of the best row, divided by the full cache's."""
    return rows[0].ratio("kv_bytes") or 0.0


def _but(lost: Sequence[str]) -> str:
    if not lost:
        return ", and so do all others"
    *others, last = [*lost[:_NAMED], *([f"{len(lost) - _NAMED} more"] if len(lost) > _NAMED else [])]
    named = f"{', '.join(others)} and {last}" if others else last
    return f"; {named} {'has' if len(lost) == 1 else 'have'} lost the fact"
