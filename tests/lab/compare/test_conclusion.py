"""The sentence of `keepset compare` claims no more than one text shows."""

import math
from dataclasses import replace
from statistics import NormalDist, fmean, stdev
from typing import Any

import torch

from keepset.lab.compare.comparison import LEAST_TOKENS, Comparison, conclusion, kl_figures
from keepset.lab.record import Record


def row(method: str, kl: float, around: float = 0.0, budget: float = 0.1, found: bool | None = None) -> Record:
    figures: dict[str, Any] = {"kl": kl, "kl_low": kl - around, "kl_high": kl + around, "share": budget, "top1": 0.9}
    if found is not None:
        figures["needle_found"] = found
    return Record(f"{method}(bytes={budget})", method, f"bytes={budget}", figures=figures)


def compared(*rows: Record, tokens: int = 1024, **full: Any) -> Comparison:
    return Comparison("model", tokens, 64, full, rows=list(rows))


def test_the_nearest_is_named_where_no_interval_reaches_its_own() -> None:
    said = conclusion(compared(row("a", 0.1, 0.04), row("b", 0.2, 0.05), row("c", 0.9)))
    assert said.startswith("On this text, with 10% of a full 16-bit cache's bytes, a is nearest to the full cache (KL")
    assert "of 64 places), c furthest (KL 0.900)." in said


def test_overlapping_intervals_are_a_tie() -> None:
    a, b, c = row("a", 0.1, 0.06), row("b", 0.2, 0.05), row("c", 0.9)
    assert "a and b are nearest to the full cache, a tie (KL 0.100 to 0.200 over 64 tokens); c is" in conclusion(
        compared(c, b, a)
    )
    assert "the recipes cannot be told apart (KL 0.100 to 0.200 over 64 tokens)" in conclusion(compared(b, a))


def test_all_that_answer_are_named_under_the_smallest_budget_that_answers() -> None:
    larger = [row("a", 0.1, budget=0.25, found=True), row("b", 0.2, budget=0.25, found=True)]
    smaller = [row(name, 0.1 + at, found=name in "bc") for at, name in enumerate("abcdefg")]
    said = conclusion(compared(*larger, *smaller, needle_found=True))
    assert said == (
        "Asked one question with 10% of a full 16-bit cache's bytes, b and c answer as the full cache does; a, d, e "
        "and 2 more have lost the fact."
    )
    none = [replace(each, figures={**each.figures, "needle_found": False}) for each in smaller]
    assert conclusion(compared(*none, needle_found=True)).startswith("Under none of these budgets")


def test_who_keeps_more_than_its_budget_is_not_compared_with_those_who_do_not() -> None:
    greedy = row("a", 0.1)
    greedy = replace(greedy, figures={**greedy.figures, "share": 0.24})
    said = conclusion(compared(greedy, row("b", 0.2), row("c", 0.9)))
    assert "with 10% of a full 16-bit cache's bytes, b is nearest" in said
    assert "with 24% of a full 16-bit cache's bytes, a is nearest" in conclusion(compared(greedy))


def test_nothing_is_concluded_from_a_short_text() -> None:
    rows = row("a", 0.1), row("b", 0.9)
    assert conclusion(compared(*rows, tokens=41)) == (
        f"Nothing can be concluded from a text of 41 tokens: give one of at least {LEAST_TOKENS}."
    )
    assert "a is nearest" in conclusion(compared(*rows, tokens=LEAST_TOKENS))
    decoded = replace(compared(*rows, tokens=200), drift_tokens=256)
    assert "a is nearest" in conclusion(decoded)  # what was decoded is part of the text


def test_intervals_are_of_the_mean_over_the_tokens() -> None:
    """Compared with the normal interval, which a bootstrap of many values comes to."""
    values = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    figures = kl_figures(values)
    margin = NormalDist().inv_cdf(0.975) * stdev(values.tolist()) / math.sqrt(400)
    middle = fmean(values.tolist())
    assert abs(figures["kl"] - middle) < 1e-9
    assert abs(figures["kl_low"] - (middle - margin)) < 0.1 * margin
    assert abs(figures["kl_high"] - (middle + margin)) < 0.1 * margin
    assert kl_figures(torch.tensor([0.5, math.inf]))["kl_high"] == math.inf
