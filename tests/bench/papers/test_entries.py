"""Every entry: what it names exists, and the paper's figures have a place in what is measured."""

from __future__ import annotations

import re

import pytest

from keepset.bench.cell import COSTS
from keepset.bench.papers.catalogue import ENTRIES, entry_of
from keepset.bench.papers.entry import SCORE, SECONDS, Entry, Key, Options
from keepset.bench.papers.measured import CURVES
from keepset.bench.papers.published import _blocks, published
from keepset.bench.papers.run import grid
from keepset.errors import KeepsetError

EVERY = pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))


@EVERY
def test_names_recipes_and_tasks(entry: Entry) -> None:
    assert re.fullmatch(r"(ams|gvote|kvcompose|compilerkv)-(table|figure)-[a-z]?\d+[a-z]?", entry.name)
    paper, place = entry.source.split(", ")
    assert entry.name == f"{paper} {place}".lower().replace(" ", "-")
    assert entry.parts
    assert len({sweep.name for sweep in entry.sweeps}) == len(entry.sweeps)
    for sweep in entry.sweeps:
        asked = grid(sweep, Options())
        assert asked.tasks and all(asked.candidates[task.name] for task in asked.tasks)
        for line in sweep.lines({}):
            assert line.candidate.error is None, line
        assert set(sweep.metrics) <= {SCORE, SECONDS, *COSTS, *CURVES}


@EVERY
def test_the_papers_figures_have_a_place_in_what_is_measured(entry: Entry) -> None:
    for model, figures in published(entry.name).items():
        assert model in entry.models
        places = keys(entry)
        facts = [fact for sweep in entry.sweeps for fact in sweep.by]
        for key in figures:
            whole, part = re.fullmatch(r"(.+?)(?:, (\w+) [\w ]+)?", key.task).groups()  # type: ignore[union-attr]
            assert key in places or (part in facts and key._replace(task=whole) in places) or not entry.sweeps, key


def keys(entry: Entry) -> set[Key]:
    places: set[Key] = set()
    for sweep in entry.sweeps:
        tasks = [task.name for task in grid(sweep, Options()).tasks]
        if sweep.average:
            tasks.append(sweep.average)
        places |= {
            Key(task + sweep.suffix, line.method, None if metric in CURVES else line.keep, metric)
            for task in tasks
            for line in sweep.lines({})
            for metric in sweep.metrics
        }
    return places


def test_published_figures_are_well_formed() -> None:
    blocks = _blocks()
    assert set(blocks) <= set(ENTRIES)
    for entry in blocks.values():
        for block in entry:
            assert set(block) <= {*("model", "task", "keep", "metric", "tasks", "keeps", "metrics"), "scale", "values"}
            (columns,) = (block[name] for name in ("tasks", "keeps", "metrics") if name in block)
            assert all(len(row) == len(columns) for row in block["values"].values())
            numbers = [number for row in block["values"].values() for number in row if number is not None]
            assert numbers and all(0 <= number <= 1e6 for number in numbers)


def test_what_no_entry_is_called() -> None:
    with pytest.raises(KeepsetError, match="did you mean 'ams-table-2'"):
        entry_of("ams-tabel-2")
