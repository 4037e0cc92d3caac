"""The papers' own figures, as their texts print them, from JSON files beside this one.

A file has a list of blocks for each entry. A block is of one `model`, `task`, `keep` and `metric`, or of several of one
of the last three: `tasks`, `keeps`, `metrics`. Its `values` have a row for each method, a figure for each of several
(null where there is none); figures are `scale` times what is measured here.
"""

import json
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

from keepset.bench.papers.entry import SCORE, Key

PAPERS = ("ams", "kvcompose", "gvote", "compilerkv")


def published(entry: str) -> dict[str, dict[Key, float]]:
    """An entry's figures by the model's name, as fractions where figures here are; empty where the text has none."""
    by_model: dict[str, dict[Key, float]] = {}
    for block in _blocks().get(entry, []):
        figures = by_model.setdefault(block["model"], {})
        columns = list(
            product(
                block.get("tasks", [block.get("task")]),
                block.get("keeps", [block.get("keep")]),
                block.get("metrics", [block.get("metric", SCORE)]),
            )
        )
        for method, values in block["values"].items():
            for (task, keep, metric), value in zip(columns, values, strict=True):
                if value is not None:
                    key = Key(task, method, keep, metric)
                    figures[key] = round(value / block.get("scale", 1), 10)  # 56.7 / 100 is 0.567...01 in binary
    return by_model


@cache
def _blocks() -> dict[str, list[dict[str, Any]]]:
    folder = files(__package__).joinpath("published")
    blocks: dict[str, list[dict[str, Any]]] = {}
    for paper in PAPERS:
        path = folder.joinpath(f"{paper}.json")
        if path.is_file():
            blocks.update(json.loads(path.read_text("utf-8")))
    return blocks
