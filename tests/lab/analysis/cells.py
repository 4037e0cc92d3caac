"""Cells made by hand."""

import re
from dataclasses import replace
from typing import Any

from keepset.lab.record import FULL, Record

FULL_BYTES = 1000


def cell(
    recipe: str = FULL, score: float | None = 1.0, example: str = "0", task: str = "qa", seed: int = 0, **more: Any
) -> Record:
    """A cell of `method(keep=...)` or of the full cache; without a score one that failed."""
    budget = re.search(r"\b(?:keep|bytes)=([\d.]+)", recipe)
    method = recipe if budget is None else recipe[: budget.start()].rstrip("(, ")
    requested = None if budget is None else budget[0]
    keep = 1.0 if recipe == FULL else float(budget[1]) if budget is not None and "." in budget[1] else 0.5
    facts = {"length": 64, "depth": 0.25} if task.startswith("needle") else {}
    made = Record(recipe, method, requested, task, seed, example, facts, "match")
    if score is None:
        return replace(made, error=f"{recipe} cannot do that.")
    figures = {"keep": keep, "share": keep, "kv_bytes": int(keep * FULL_BYTES), "kv_bytes_full": FULL_BYTES}
    costs = {"tokens": 8.0, "finished": 1.0, "repetition": 0.0, "batch": 1.0, **figures, **more}
    return replace(made, scores={"match": score, "other": 0.123}, replies=["a reply"], figures=costs)


def cells(recipe: str, scores: list[float | None], task: str = "qa", **more: Any) -> list[Record]:
    """One cell per example."""
    return [cell(recipe, score, str(example), task, **more) for example, score in enumerate(scores)]
