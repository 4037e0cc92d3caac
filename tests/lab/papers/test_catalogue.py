"""Entries from YAML: what they name exists, the papers' figures have their place."""

import re
from statistics import fmean

import pytest

from keepset.errors import KeepsetError
from keepset.lab.papers.catalogue import entries, entry_of, read_entries
from keepset.lab.papers.entry import AVERAGE, SCORE, SECONDS, Entry, FigureKey, PaperOptions, grid_of
from keepset.lab.papers.figures import CURVES, FRACTIONS
from keepset.lab.record import FIGURES
from tests.methods.naive import Shape, observe


@pytest.mark.parametrize("entry", entries().values(), ids=list(entries()))
def test_what_an_entry_names_exists_and_the_papers_figures_have_their_place(entry: Entry) -> None:
    assert re.fullmatch(r"(ams|gvote|kvcompose|compilerkv)-((table|figure)-[a-z]?\d+|appendix-[a-z]\d?)", entry.name)
    paper, place = entry.source.split(", ")
    assert entry.name == f"{paper} {place}".lower().replace(" ", "-")
    assert len({sweep.name for sweep in entry.sweeps}) == len(entry.sweeps)
    assert (entry.measure is None) == bool(entry.sweeps) == (not entry.takes)
    places: set[FigureKey] = set()
    for sweep in entry.sweeps:
        grid, lines = grid_of(sweep, PaperOptions()), sweep.lines({})
        assert grid.tasks and all(grid.candidates[task.name] for task in grid.tasks)
        assert [line.candidate.error for line in lines if line.candidate.error is not None] == []
        assert set(sweep.metrics) <= {SCORE, SECONDS, *FIGURES, *CURVES}
        places |= {
            FigureKey(task + sweep.suffix, line.method, None if metric in CURVES else line.keep, metric)
            for task in (*(task.name for task in grid.tasks), *filter(None, [sweep.average]))
            for line in lines
            for metric in sweep.metrics
        }
        assert {each for pair in sweep.differences.values() for each in pair} <= set(sweep.methods)
        assert {sweep.solved_by, sweep.missed_by} - {""} <= set(sweep.methods)
        places |= {
            key._replace(method=name)
            for name, (more, _) in sweep.differences.items()
            for key in places
            if key.method == more
        }
    places |= {key._replace(task=key.task.partition(", ")[0]) for key in places if AVERAGE in entry.published}
    facts = [fact for sweep in entry.sweeps for fact in sweep.by]
    for model, figures in entry.published.items():
        assert model in (*entry.models, AVERAGE) and figures
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
    table, figure = read_entries(PAPER)
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


def test_table_14s_differences_are_those_of_its_columns() -> None:
    with pytest.raises(KeepsetError, match="did you mean 'ams-table-2'"):
        entry_of("ams-tabel-2")
    (figures,) = entry_of("ams-table-14").published.values()
    differences = {key: value for key, value in figures.items() if key.method == "Δ"}
    assert len(differences) == 8
    for key, value in differences.items():
        gain = figures[key._replace(method="AMS-TOVA")] - figures[key._replace(method="TOVA")]
        assert value == pytest.approx(gain, abs=0.0011)


@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
def test_a_budget_for_the_history_does_not_count_the_window() -> None:
    """CompilerKV, section 5.1: at 64 entries the methods of Figure 2 keep the newest 64 and 64 others, none alike."""
    (sweep,) = entry_of("compilerkv-figure-2").sweeps
    shape, layers = Shape((400,), 2, 2, 4, 5), 3
    seen = [observe(shape, window=64, layer=i, layers=range(layers), seed=i) for i in range(layers)]
    kept = {}
    for line in sweep.lines({}):
        if line.keep != 64:
            continue
        recipe = line.candidate.recipe
        assert recipe is not None
        keep_set = recipe.method.select_all(seen, recipe.budget)
        sets = [set(keep_set.positions(layer, 0, head).tolist()) for layer in range(layers) for head in range(2)]
        if "newer program" in line.method:  # whose budget is all that a layer keeps
            assert all(len(each) <= 64 for each in sets)
        else:
            assert all(each >= set(range(336, 400)) for each in sets)
            counts = [len(each) for each in sets]
            assert max(counts) <= 128 if "equation 15" in line.method else sum(counts) == 128 * len(sets), line.method
            if line.method == "CompilerKV":
                assert counts == [128] * len(sets)
        kept[line.method] = str(sets)
    assert len(kept) == 8 == len(set(kept.values()))


@pytest.mark.parametrize("name", ["kvcompose-table-2", "kvcompose-table-3", "kvcompose-table-4"])
def test_kvcomposes_averages_are_means_of_its_columns(name: str) -> None:
    """But for PyramidKV at 20 %, whose mean is 41.63 and which the paper has as 41.7."""
    published = dict(entry_of(name).published)
    averages = published.pop(AVERAGE)
    for key, average in averages.items():
        rows = [(each, value) for figures in published.values() for each, value in figures.items()]
        values = [value for each, value in rows if (each.method, each.metric) == (key.method, key.metric)]
        assert len(values) == 3 * (1 if name == "kvcompose-table-4" else 2)
        assert abs(fmean(values) - average) < 0.00101, key
