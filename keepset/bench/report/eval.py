"""The HTML report of a sweep of benchmarks."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from keepset.bench.cell import FULL
from keepset.bench.report.page import assemble


def render(model: str, configuration: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The report as one self-contained HTML page of what `keepset results --json` prints.

    The configuration is what all cells have in common, by names that a person understands.
    """
    common = {name: str(value) for name, value in configuration.items() if value is not None}
    data = {"model": model, "configuration": common, "summary": summary}
    return assemble("eval", "keepset results", data, _conclusion(summary["rows"]))


def _conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which recipe does best on the mean over the tasks that all were run on, and what the full cache does there."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row["score"] is not None:
            scores.setdefault(row["recipe"], []).append(row["score"]["value"])
    tasks = len({row["task"] for row in rows})
    means = {recipe: fmean(each) for recipe, each in scores.items() if len(each) == tasks}
    full = means.pop(FULL, None)
    if not means:
        return "No recipe has a score on all tasks yet."
    best = max(means, key=means.__getitem__)
    share = fmean(row["share"] for row in rows if row["recipe"] == best)
    beside = "" if full is None else f"; the full cache scores {full:.1%}"
    where = "" if tasks == 1 else f", the mean of {tasks} tasks"
    return (
        f"Of {len(means)} recipes {best} scores best, {means[best]:.1%}{where}, with {share:.1%} of the bytes{beside}."
    )
