"""Entries from YAML: what they name exists, the papers' figures have their place, and bad files are one sentence."""

from __future__ import annotations

import re

import pytest

from keepset.bench.papers.catalogue import entries, entry_of, read_entries
from keepset.bench.papers.entry import SCORE, SECONDS, Entry, FigureKey, Options, grid_of
from keepset.bench.papers.figures import CURVES, FRACTIONS
from keepset.bench.record import FIGURES
from keepset.errors import KeepsetError


@pytest.mark.parametrize("entry", entries().values(), ids=list(entries()))
def test_what_an_entry_names_exists_and_the_papers_figures_have_their_place(entry: Entry) -> None:
    assert re.fullmatch(r"(ams|gvote|kvcompose|compilerkv)-(table|figure)-[a-z]?\d+[a-z]?", entry.name)
    paper, place = entry.source.split(", ")
    assert entry.name == f"{paper} {place}".lower().replace(" ", "-")
    assert len({sweep.name for sweep in entry.sweeps}) == len(entry.sweeps)
    assert (entry.measure is None) == bool(entry.sweeps) == (not entry.takes)
    places: set[FigureKey] = set()
    for sweep in entry.sweeps:
        grid, lines = grid_of(sweep, Options()), sweep.lines({})
        assert grid.tasks and all(grid.candidates[task.name] for task in grid.tasks)
        assert [line.candidate.error for line in lines if line.candidate.error is not None] == []
        assert set(sweep.metrics) <= {SCORE, SECONDS, *FIGURES, *CURVES}
        places |= {
            FigureKey(task + sweep.suffix, line.method, None if metric in CURVES else line.keep, metric)
            for task in (*(task.name for task in grid.tasks), *filter(None, [sweep.average]))
            for line in lines
            for metric in sweep.metrics
        }
    facts = [fact for sweep in entry.sweeps for fact in sweep.by]
    for model, figures in entry.published.items():
        assert model in entry.models and figures
        for key, figure in figures.items():
            assert 0 <= figure <= (1 if key.metric in FRACTIONS else 1e11), key
            whole, part = re.fullmatch(r"(.+?)(?:, (\w+) [\w ]+)?", key.task).groups()  # type: ignore[union-attr]
            assert key in places or (part in facts and key._replace(task=whole) in places) or not entry.sweeps, key


PAPER = """
paper: Kept
models: [owner/model-7B]
recipes: {Snap: snapkv, Stream: streaming_llm}
settings: {keeps: [0.5, 8], full: ""}
entries:
  kept-table-a1:
    title: Some
    note: [One., Two.]
    sweeps:
      - {tasks: [needle], methods: [Stream], modes: [agnostic, task], metrics: [score, tokens], always: [5, 2]}
      - {tasks: [needle], methods: {Own: tova}, keeps: [9], schedule: {prefill: false, every: 4}, name: own}
    published:
      - tasks: [needle@64, needle]
        metrics: {score: 100, tokens: 1}
        keeps: [0.5, 8]
        full: {Full: [50, 7, null, 6]}
        values: {Snap: [10, 20, 1, 2, null, 30, 4, 5]}
  kept-figure-2:
    title: Other
    models: [owner/model-1B, owner/model-3B]
    measure: {function: hidden_states, takes: nothing, length: 5}
    published:
      - tasks: [all layers]
        metrics: {skewness: 2}
        values: {GVote: [1, 4]}
"""


def test_a_file_is_read_as_a_person_reads_it() -> None:
    table, figure = read_entries(PAPER, "kept.yaml")
    told = (table.name, table.source, table.title, table.note)
    assert told == ("kept-table-a1", "Kept, Table A1", "Some", "One. Two.")
    assert table.models == ("owner/model-7B",) and table.state == "needs a model of 7B"
    agnostic, aware, own = table.sweeps
    modes = [("agnostic", "agnostic", ", agnostic"), ("task", "task", ", task"), ("prompt", "own", "")]
    assert [(each.mode, each.name, each.suffix) for each in table.sweeps] == modes
    assert agnostic.methods == aware.methods == {"Stream": "streaming_llm"} and agnostic.metrics == ("score", "tokens")
    recipes = [f"streaming_llm(keep={keep}, sinks=5, recent=2)" for keep in (0.5, 8)]
    assert [line.candidate.text for line in agnostic.lines({})] == recipes
    assert [line.candidate.text for line in own.lines({})] == ["tova(keep=9, prefill=False, every=4)"]
    expected = {
        ("needle@64", "Full", None, "score"): 0.5,
        ("needle@64", "Snap", 0.5, "score"): 0.1,
        ("needle@64", "Snap", 8, "score"): 0.2,
        ("needle@64", "Full", None, "tokens"): 7,
        ("needle@64", "Snap", 0.5, "tokens"): 1,
        ("needle@64", "Snap", 8, "tokens"): 2,
        ("needle", "Snap", 8, "score"): 0.3,
        ("needle", "Full", None, "tokens"): 6,
        ("needle", "Snap", 0.5, "tokens"): 4,
        ("needle", "Snap", 8, "tokens"): 5,
    }
    assert table.published == {"owner/model-7B": expected}
    assert list(table.published["owner/model-7B"]) == list(expected)
    assert figure.sweeps == () and figure.measure is not None and figure.takes == "nothing"
    skewness = ("all layers", "GVote", None, "skewness")
    assert figure.published == {"owner/model-1B": {skewness: 0.5}, "owner/model-3B": {skewness: 2.0}}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("paper: Kept", "paper: [", "kept.yaml is not YAML: "),
        (PAPER, "[]", "kept.yaml must have fields: paper, models, recipes, settings, entries"),
        ("paper: Kept", "", "kept.yaml lacks the field 'paper'"),
        ("title: Other", "tilte: Other", "kept-figure-2 has an unknown field 'tilte': use title, models"),
        ("    title: Other\n", "", "kept-figure-2 lacks the field 'title'"),
        ("kept-figure-2", "other-figure-2", "other-figure-2 must have an id that begins with 'kept-'"),
        ("    sweeps:", "    measure: {function: thresholds}\n    sweeps:", "and either 'sweeps' or 'measure'"),
        ("always: [5, 2]", "always: 1", "kept-table-a1, sweep 1 has always=1, which must be a list"),
        ("keeps: [9]", "limit: few", "sweep 2 has limit='few', which must be a whole number"),
        ("every: 4", "each: 4", "sweep 2, schedule has an unknown field 'each': use prefill, every"),
        ("methods: [Stream]", "methods: [Tova]", "sweep 1 names 'Tova', which is not among the file's recipes"),
        ("hidden_states", "states", "there is no function 'states'; use one of hidden_states, "),
        ("length: 5", "size: 5", "the settings do not suit 'hidden_states'"),
        ("4, 5]", "4]", "kept-table-a1, published 1: 'Snap' has 7 figures for 8"),
    ],
)
def test_a_bad_file_is_one_sentence(old: str, new: str, sentence: str) -> None:
    assert old in PAPER
    with pytest.raises(KeepsetError) as caught:
        read_entries(PAPER.replace(old, new, 1), "kept.yaml")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_id_is_told_the_nearest() -> None:
    with pytest.raises(KeepsetError, match="did you mean 'ams-table-2'"):
        entry_of("ams-tabel-2")
