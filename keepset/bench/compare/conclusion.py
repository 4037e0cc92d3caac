"""`conclusion`: the result of a comparison as a sentence that claims no more than its text allows."""

from __future__ import annotations

from collections.abc import Sequence

from keepset.bench.compare.comparison import Comparison, by_budget
from keepset.bench.record import Record

LEAST_TOKENS = 256
"""The fewest tokens of text that allow a conclusion; in a shorter text every entry matters."""
_ROUNDED = 1.01
"""A budget counts as exceeded from this multiple of its bytes on."""
_NAMED = 3
"""The most methods that a sentence lists."""


def conclusion(comparison: Comparison) -> str:
    """Return a sentence for readers who skip the table, about the smallest budget with a result.

    Recipes whose intervals of KL overlap are called a tie. A recipe that keeps more than its share of the bytes,
    because some entries always stay, is not compared with others under that budget. Nothing is concluded from a text of
    fewer than `LEAST_TOKENS` tokens.
    """
    tokens = comparison.tokens + (comparison.continuation_tokens if comparison.drift_tokens is not None else 0)
    if tokens < LEAST_TOKENS:
        return f"Nothing can be concluded from a text of {tokens} tokens: give one of at least {LEAST_TOKENS}."
    groups = sorted(([row for row in rows if _keeps_to_it(row)] or rows for rows in by_budget(comparison)), key=_share)
    if not groups:
        return "No recipe could be measured."
    if not comparison.full.get("needle_found"):
        return _nearest(groups[0], comparison.continuation_tokens)
    for rows in groups:
        if rows[0].figures["needle_found"]:
            return _answering(rows)
    return "Under none of these budgets does a recipe answer the question as the full cache does: try larger ones."


def _keeps_to_it(row: Record) -> bool:
    """Return whether a row holds no more than its budget's share of the bytes, if the budget is a share."""
    name, _, number = (row.requested or "").partition("=")
    return name != "bytes" or row.figures["share"] <= _ROUNDED * float(number)


def _answering(rows: Sequence[Record]) -> str:
    found = [row.method for row in rows if row.figures["needle_found"]]
    lost = [row.method for row in rows if not row.figures["needle_found"]]
    does = "answers" if len(found) == 1 else "answer"
    rest = f"; {_listed(lost)} {'has' if len(lost) == 1 else 'have'} lost the fact" if lost else ""
    return f"Asked one question {_within(rows)}, {_listed(found)} {does} as the full cache does{rest}."


def _nearest(rows: Sequence[Record], tokens: int) -> str:
    best, last = rows[0], rows[-1]
    tied = [row for row in rows if row.figures["kl_low"] <= best.figures["kl_high"]]
    if len(tied) == 1:
        figures = f"KL {best.figures['kl']:.3f}, the same next token in {best.figures['top1']:.0%} of {tokens} places"
        rest = f", {last.method} furthest (KL {last.figures['kl']:.3f})" if len(rows) > 1 else ""
        return f"On this text, {_within(rows)}, {best.method} is nearest to the full cache ({figures}){rest}."
    span = f"KL {best.figures['kl']:.3f} to {tied[-1].figures['kl']:.3f} over {tokens} tokens"
    if len(tied) == len(rows):
        return f"On this text, {_within(rows)}, the recipes cannot be told apart ({span})."
    return (
        f"On this text, {_within(rows)}, {_listed([row.method for row in tied])} are nearest to the full cache, a tie "
        f"({span}); {last.method} is furthest (KL {last.figures['kl']:.3f})."
    )


def _share(rows: Sequence[Record]) -> float:
    """Return the best row's share of a full 16-bit cache's bytes."""
    return rows[0].figures["share"]


def _within(rows: Sequence[Record]) -> str:
    return f"with {_share(rows):.0%} of a full 16-bit cache's bytes"


def _listed(names: Sequence[str]) -> str:
    """Return names as a list for a sentence; only the first few of many."""
    *others, last = [*names[:_NAMED], *([f"{len(names) - _NAMED} more"] if len(names) > _NAMED else [])]
    return f"{', '.join(others)} and {last}" if others else last
