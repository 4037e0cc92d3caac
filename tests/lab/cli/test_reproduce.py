import json
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keepset import models
from keepset.core.tables import save
from keepset.errors import KeepsetError
from keepset.lab.cli import console
from keepset.lab.embedded import EMBEDDED
from keepset.lab.papers.catalogue import entries
from keepset.lab.papers.entry import Entry, Sweep
from keepset.lab.sweep import engine
from keepset.lab.sweep.engine import Engine
from keepset.lab.sweep.store import Store
from tests.core.test_tables import random_tables
from tests.lab.cli.conftest import Run
from tests.lab.tasks.scaffold import write_items

ENTRIES = entries()
CHEAP = ("--model", "embedded", "--limit", "2", "--output-tokens", "12")
SHORT = {
    "ruler": ("niah_single_1", "ruler_vt"),
    "longbench": ("longbench_trec", "longbench_triviaqa"),
    "longbench2": ("longbench2_single", "longbench2_multi"),
}
LONGBENCH = Path(__file__).parents[1] / "tasks" / "longbench"


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A folder with three problems of each of the data sets about numbers, and what there is of LongBench."""
    folder = tmp_path / "data"
    shutil.copytree(LONGBENCH, folder)
    for name in ("gsm8k", "math500", "aime24", "aime25"):
        asked = [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}", "level": 5 - n} for n in range(3)]
        write_items(folder / f"{name}.jsonl", *(each | {"subject": "Algebra"} for each in asked))
    item = {"question": "Which?", "context": "A text. " * 40, "answer": "B"}
    item |= {f"choice_{letter}": f"The {letter}" for letter in "ABCD"}
    domains = [f"{domain}-Document QA" for domain in ("Single", "Multi") for _ in range(2)]
    items = [{"_id": str(n), "domain": domain, **item} for n, domain in enumerate(domains)]
    write_items(folder / "longbench2.jsonl", *items)
    return str(folder)


def test_list(run: Run) -> None:
    done = run("reproduce", "--json", "-")
    assert done.code == 0
    listed = {each["name"]: each for each in json.loads(done.out)}
    assert list(listed) == list(ENTRIES)
    assert listed["ams-table-2"]["state"] == "needs a model of 7B; data: gsm8k"
    text = run("reproduce", "list")
    assert text.code == 0 and all(name in text.out for name in ENTRIES)


def test_a_table_is_stopped_resumed_and_shown(run: Run, tiny: Any, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("reproduce", "ams-table-2", *CHEAP, "--data", data)
    path = Path("reproduced") / f"ams-table-2-{EMBEDDED}.jsonl"
    monkeypatch.setattr(engine, "Engine", Interrupted)
    stopped = run(*command)
    assert stopped.code == 130
    announced, idle, note = stopped.err.splitlines()
    assert idle == "gsm8k: its answers end before 8 of the recipes drop anything: give more --output-tokens"
    assert announced.startswith("16 cells of 2 examples: ") and "at most 192 of answers" in announced
    assert note.startswith("stopped after 3 of 16 cells")
    with Store.open(path) as store:
        first = store.cells()
    assert len(first) == 3

    monkeypatch.setattr(engine, "Engine", Engine)
    done = run(*command, "--json", "-")
    assert done.code == 0
    with Store.open(path) as store:
        cells = store.cells()
    assert len(cells) == 16 and all(cell in cells for cell in first)
    assert max(cell.figures["batch"] for cell in cells if cell.error is None) > 1
    assert done.out, done.err
    (result,) = json.loads(done.out)
    assert (result["model"], result["paper_model"]) == (EMBEDDED, "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")
    rows = {(row["method"], row["keep"]): row for row in result["rows"]}
    assert rows["AMS-Expected", 64]["paper"] == 0.567 and rows["TOVA", 128]["paper"] == 0.571
    recipe = "tova(keep=64, sinks=4, recent=32, prefill=False, every=512)"
    scores = [cell.score for cell in cells if cell.recipe == recipe]
    assert len(scores) == 2 and rows["TOVA", 64]["figure"]["value"] == sum(scores) / 2

    table = run(*command)
    assert table.code == 0 and "its scores mean nothing" in table.out
    (line,) = [line.split() for line in table.out.splitlines() if line.startswith("  AMS-Expected") and " 64 " in line]
    assert line[1:3] == ["64", "56.7"] and line[-1] == "2"


class Interrupted(Engine):
    """An engine that somebody stops before its fourth cell."""

    made = 0

    def answer(self, *args: Any) -> Any:
        for cell in super().answer(*args):
            if self.made == 3:
                raise KeyboardInterrupt
            self.made += 1
            yield cell


def shortened(entry: Entry) -> Entry:
    """With two tasks of a benchmark and two budgets, for the time that it takes."""

    def short(sweep: Sweep) -> Sweep:
        tasks = tuple(task for name in sweep.tasks for task in SHORT.get(name, (name,)))
        return replace(sweep, tasks=tasks, keeps=(*sweep.keeps[:1], *sweep.keeps[1:][-1:]))

    return replace(entry, sweeps=tuple(map(short, entry.sweeps)))


QUICK = ("ams-table-2", "gvote-figure-2", "kvcompose-figure-3", "compilerkv-figure-3")
"""One entry of each paper."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, "tiny_pair") for name in QUICK),
        *(pytest.param(name, "embedded", marks=pytest.mark.papers) for name in ENTRIES),
    ],
)
def test_entries_with_tables(
    name: str, model: str, run: Run, request: pytest.FixtureRequest, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two examples of each task, to the end: the paper's figures, those measured, and that these mean nothing."""
    monkeypatch.setitem(SHORT, "ruler", SHORT["ruler"][:1])
    monkeypatch.setitem(ENTRIES, name, shortened(ENTRIES[name]))
    loaded = request.getfixturevalue(model)
    monkeypatch.setattr(models, "load", lambda *_: loaded)
    terminal = Console(width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "stdout", lambda: terminal)
    config = loaded[0].config
    save(random_tables(layers=config.num_hidden_layers, heads=config.num_attention_heads), Path("tables.safetensors"))
    # As short as there are examples; ruler_cwe has at least 911 tokens.
    length = "1024" if any("ruler_cwe" in part.tasks for part in ENTRIES[name].sweeps) else "640"
    asked = (*CHEAP[:-1], "2", "--prompt-tokens", length, "--data", data, "--tables", "tables.safetensors")
    done = run("reproduce", name, *asked)
    assert done.code == 0, done.err
    assert "This model is far too small for these tasks: its scores mean nothing." in " ".join(done.out.split())
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    counted = any(line.startswith("  ") and line.split()[-1] in ("1", "2", "4") for line in lines)  # so many examples
    # Names and intervals of Table 19 leave no room for their column.
    assert counted or not any(line.endswith("examples") for line in lines)
    for part in ENTRIES[name].sweeps:
        # No example may be solved by one method alone.
        assert part.solved_by or all(f"  {method.split()[0]}" in done.out for method in part.methods)


def test_figures_that_were_not_measured_are_counted_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    entry = ENTRIES["ams-table-2"]
    row = {"task": "gsm8k", "method": "TOVA", "keep": 64, "metric": "score", "failed": 0, "error": None}
    measured = {**row, "figure": {"value": 0.25, "low": 0.0, "high": 0.5}, "paper": 0.489, "examples": 4}
    others = [{**row, "keep": 128, "figure": None, "paper": 0.571, "examples": 0}] * 3
    result = {"model": "a/model", "paper_model": "a/model", "rows": [measured, *others]}
    import_module("keepset.lab.cli.reproduce")._print(entry, [result])
    said = capsys.readouterr().out
    assert "48.9" in said and "57.1" not in said
    assert said.endswith("not measured, because of the data or the options: 3.\n")


def test_averages_stand_beside_the_papers(run: Run, tiny: Any, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVCompose's column "Avg.", once all models are there; `papers/test_figures.py` has what an average is."""
    monkeypatch.setitem(SHORT, "ruler", SHORT["ruler"][:1])
    entry = shortened(ENTRIES["kvcompose-table-3"])
    sweeps = tuple(replace(each, methods={"SnapKV": "snapkv"}) for each in entry.sweeps)
    monkeypatch.setitem(ENTRIES, "kvcompose-table-3", replace(entry, sweeps=sweeps, models=("one", "two")))
    load = models.load
    monkeypatch.setattr(models, "load", lambda *_: load(None))
    command = ("reproduce", "kvcompose-table-3", "--limit", "1", "--output-tokens", "2", "--prompt-tokens", "640")
    done = run(*command, "--json", "-")
    assert done.code == 0, done.err
    *of_models, average = json.loads(done.out)
    assert len(of_models) == 2 and average["model"] == average["paper_model"] == "average"
    (row,) = [row for row in average["rows"] if row["method"] == "SnapKV"]
    areas = [each for result in of_models for each in result["rows"] if each["metric"] == "area"]
    assert (row["paper"], row["examples"]) == (0.658, sum(each["examples"] for each in areas))
    values = [each["figure"]["value"] for each in areas if each["figure"]]
    assert len(values) in (0, 4) and (row["figure"] is None or row["figure"]["value"] == pytest.approx(sum(values) / 4))
    assert "Average over the models" in run(*command).out


@pytest.mark.parametrize("name", ["gvote-figure-2", "gvote-figure-3"])
def test_what_is_no_sweep(name: str, run: Run, tiny: Any) -> None:
    done = run("reproduce", name, "--model", "embedded", "--limit", "2", "--prompt-tokens", "40", "--json", "-")
    assert done.code == 0 and "first 1024 tokens, unless options say otherwise" in done.err
    assert done.out, done.err
    (result,) = json.loads(done.out)
    rows = {(row["task"], row["method"], row["keep"], row["metric"]): row for row in result["rows"]}
    assert all(row["examples"] == 2 for row in rows.values())
    assert {task for task, *_ in rows} == {"all layers", "layer 0", "layer 1"}
    paper = {key: figure for figures in ENTRIES[name].published.values() for key, figure in figures.items()}
    assert {key: row["paper"] for key, row in rows.items() if row["paper"] is not None} == paper


def test_a_missing_model_leaves_the_others(run: Run, tiny: Any, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(ENTRIES["ams-table-2"], models=("is/not-there", "tiny"))
    monkeypatch.setitem(ENTRIES, "ams-table-2", entry)
    load = models.load

    def loaded(name: str | None = None, *placed: str | None) -> Any:
        if name == "is/not-there":
            raise KeepsetError("There is no such model.")
        return load(name, *placed)

    monkeypatch.setattr(models, "load", loaded)
    done = run("reproduce", "ams-table-2", "--limit", "1", "--output-tokens", "2", "--data", data, "--json", "-")
    assert done.code == 1 and "is/not-there: There is no such model." in done.err
    assert [result["model"] for result in json.loads(done.out)] == ["tiny"]
    alone = run("reproduce", "ams-table-2", "--model", "is/not-there", "--data", data)
    assert alone.code == 2 and "There is no such model." in alone.err
