"""Cells made by hand."""

from __future__ import annotations

from typing import Any

from keepset.bench.cell import FULL, Cell, Outcome

FULL_BYTES = 1000


def cell(
    recipe: str = FULL, score: float | None = 1.0, example: str = "0", task: str = "qa", seed: int = 0, **more: Any
) -> Cell:
    """A cell of `method(keep=...)` or of the full cache; without a score one that failed."""
    method, _, budget = recipe.partition("(keep=")
    asked = budget.rstrip(")")
    requested = 1.0 if recipe == FULL else None if not asked else float(asked) if "." in asked else int(asked)
    keep = requested if isinstance(requested, float) else 0.5
    outcome = None
    if score is not None:
        outcome = Outcome(
            {"match": score, "other": 0.123},
            ["a reply"],
            **{"keep": keep, "kv_bytes": int(keep * FULL_BYTES), "kv_bytes_full": FULL_BYTES, "tokens": 8.0, **more},
        )
    facts = {"length": 64, "depth": 0.25} if task.startswith("needle") else {}
    error = None if outcome is not None else f"{recipe} cannot do that."
    return Cell(task, seed, example, recipe, method, requested, facts, "match", outcome, error)


def cells(recipe: str, scores: list[float | None], task: str = "qa", **more: Any) -> list[Cell]:
    """One cell per example."""
    return [cell(recipe, score, str(example), task, **more) for example, score in enumerate(scores)]
