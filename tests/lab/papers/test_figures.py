"""From cells to figures, against means, trapezoids and straight lines in loops."""

import random
from dataclasses import replace
from statistics import fmean

import pytest

from keepset.lab.analysis.intervals import Figure
from keepset.lab.papers.entry import AREA, SCORE, FigureKey, MeasuredFigure, Sweep, removed_at
from keepset.lab.papers.figures import averages_over_models, figures_of
from keepset.lab.record import Record

MODES = ("agnostic", "task")
TASKS = ("niah_single_1@4096", "ruler_vt@4096")
SWEEP = Sweep(
    ("niah_single_1", "ruler_vt"),
    {"Snap": "snapkv", "TOVA": "tova"},
    (0.75, 0.5, 0.25),
    metrics=(SCORE, "tokens", AREA, removed_at(0.2)),
    average="ruler",
    suffix=", agnostic",
)


def cells(scores: dict[tuple[str, str, float], list[float]]) -> list[Record]:
    """By task, the method's name and what is kept."""
    made = []
    for (task, method, keep), values in scores.items():
        (line,) = [line for line in SWEEP.lines({}) if line.method == method and keep in (line.keep, 1.0)]
        candidate = line.candidate
        for example, score in enumerate(values):
            place = (candidate.text, candidate.method, candidate.requested, task, 0, str(example), {}, "match")
            figures = {"keep": keep, "kv_bytes": int(100 * keep), "kv_bytes_full": 100, "tokens": 10 * score}
            made.append(Record(*place, scores={"match": score}, figures=figures))
    return made


@pytest.fixture
def scores() -> dict[tuple[str, str, float], list[float]]:
    draw = random.Random(5)
    found = {}
    for task in TASKS:
        found[task, "Full KV", 1.0] = [0.8, 1.0, 1.0]
        for method in SWEEP.methods:
            for keep, level in ((0.75, 0.95), (0.5, 0.9), (0.25, 0.4)):
                found[task, method, keep] = [level * draw.uniform(0.9, 1.0) for _ in range(3)]
    return found


def figure(rows: list[MeasuredFigure], *place: object) -> float:
    (row,) = [row for row in rows if row.key == place]
    assert row.figure is not None
    return row.figure.value


def test_scores_costs_their_means_over_tasks_and_differences(scores: dict[tuple[str, str, float], list[float]]) -> None:
    rows = figures_of(SWEEP, cells(scores), {})
    for (task, method, kept), values in scores.items():
        keep = None if kept == 1.0 else kept
        assert figure(rows, f"{task}, agnostic", method, keep, SCORE) == pytest.approx(fmean(values))
        assert figure(rows, f"{task}, agnostic", method, keep, "tokens") == pytest.approx(10 * fmean(values))
        both = fmean([*scores[TASKS[0], method, kept], *scores[TASKS[1], method, kept]])
        assert figure(rows, "ruler, agnostic", method, keep, SCORE) == pytest.approx(both)
    averages = [row for row in rows if row.key.task == "ruler, agnostic" and row.key.metric == SCORE]
    assert len(averages) == 7 and all(row.examples == 6 and row.failed == 0 for row in averages)
    rows = figures_of(replace(SWEEP, differences={"Δ": ("TOVA", "Snap")}), cells(scores), {})
    for task in TASKS:
        for keep in SWEEP.keeps:
            gain = fmean(scores[task, "TOVA", keep]) - fmean(scores[task, "Snap", keep])
            assert figure(rows, f"{task}, agnostic", "Δ", keep, SCORE) == pytest.approx(gain)
            assert figure(rows, f"{task}, agnostic", "Δ", keep, "tokens") == pytest.approx(10 * gain)


def test_areas_and_what_can_go_which_need_every_task(scores: dict[tuple[str, str, float], list[float]]) -> None:
    rows = figures_of(SWEEP, cells(scores), {})
    for method in SWEEP.methods:
        keeps = [1.0, 0.75, 0.5, 0.25]
        means = [[fmean(scores[task, method if keep < 1 else "Full KV", keep]) for keep in keeps] for task in TASKS]
        area = sum(
            (keeps[i] - keeps[i + 1]) * (mean[i] + mean[i + 1]) / 2 / 0.75 / 2 for mean in means for i in range(3)
        )
        assert figure(rows, "ruler, agnostic", method, None, AREA) == pytest.approx(area)
        losses = [fmean(1 - mean[i] / mean[0] for mean in means) for i in range(4)]
        assert losses[2] < 0.2 < losses[3]
        reach = 0.5 + 0.25 * (0.2 - losses[2]) / (losses[3] - losses[2])
        assert figure(rows, "ruler, agnostic", method, None, removed_at(0.2)) == pytest.approx(reach)
    made = cells(scores)
    lost = [
        replace(cell, error="no") if cell.task == TASKS[1] and cell.recipe.startswith("tova") else cell for cell in made
    ]
    rows = {row.key: row for row in figures_of(SWEEP, lost, {}) if row.key.task == "ruler, agnostic"}
    place = next(key for key in rows if key.method == "TOVA" and key.metric == SCORE)
    assert rows[place].figure is None and rows[place].failed == 3 and rows[place].error == "no"
    assert not any(key.method == "TOVA" and key.metric == AREA for key in rows)


def test_parts_by_a_fact_seconds_and_what_is_not_known() -> None:
    sweep = Sweep(("math500",), {"TOVA": "tova"}, (64,), metrics=("seconds", "tokens"), by=("level",), full="")
    (line,) = sweep.lines({})
    candidate = line.candidate
    place = {"recipe": candidate.text, "method": candidate.method, "requested": "keep=64", "task": "math500"}
    seconds = {"prefill_seconds": 0.5, "select_seconds": 0.25}
    made = [
        Record(
            **{**place, "example": str(level), "facts": {"level": level} if level else {}, "metric": "accuracy"},
            scores={"accuracy": 1.0},
            figures={"tokens": level, **seconds, "decode_seconds": float(level)},
        )
        for level in (0, 2, 4)
    ]
    rows = figures_of(sweep, made, {})
    assert figure(rows, "math500", "TOVA", 64, "seconds") == pytest.approx(0.75 + 2)
    assert figure(rows, "math500, level 4", "TOVA", 64, "seconds") == pytest.approx(0.75 + 4)
    assert figure(rows, "math500, level 2", "TOVA", 64, "tokens") == 2
    assert len(rows) == 6
    unsplit = figures_of(sweep, [replace(each, facts={}) for each in made], {})
    assert {row.key.task for row in unsplit} == {"math500"}


def test_examples_that_one_method_solves_and_another_misses() -> None:
    """Under each budget by itself; what either did on all other examples does not count."""
    draw = random.Random(2)
    places = [(task, method, keep) for task in TASKS for method in SWEEP.methods for keep in SWEEP.keeps]
    scores = {place: [float(draw.random() < 0.5) for _ in range(24)] for place in places}
    sweep = replace(SWEEP, full="", solved_by="Snap", missed_by="TOVA", metrics=("tokens",), average="")
    rows = figures_of(sweep, cells(scores), {})
    for task in TASKS:
        for keep in SWEEP.keeps:
            pairs = list(zip(scores[task, "Snap", keep], scores[task, "TOVA", keep], strict=True))
            assert 0 < pairs.count((1.0, 0.0)) < 24
            place = (f"{task}, agnostic", "Snap right, TOVA wrong", keep, "examples")
            assert figure(rows, *place) == pairs.count((1.0, 0.0))
            assert figure(rows, f"{task}, agnostic", "Snap", keep, "tokens") == 10
            assert figure(rows, f"{task}, agnostic", "TOVA", keep, "tokens") == 0


def test_averages_over_models_and_modes() -> None:
    """KVCompose's column "Avg." is over three models and both modes, and needs all of them."""
    values = {(model, mode): 0.1 * model + (0.05 if mode == "task" else 0) for model in range(3) for mode in MODES}
    models = [
        [
            MeasuredFigure(FigureKey(f"ruler, {mode}", "Snap", None, AREA), Figure(values[model, mode]), 4)
            for mode in MODES
        ]
        + [MeasuredFigure(FigureKey("niah@4096, task", "Snap", None, AREA), Figure(9.0), 4)]
        for model in range(3)
    ]
    published = {FigureKey("ruler", "Snap", None, AREA): 0.5}
    (row,) = averages_over_models(published, models)
    assert row.figure is not None and row.figure.value == pytest.approx(fmean(values.values())) and row.examples == 24
    models[1][0] = replace(models[1][0], figure=None)
    (row,) = averages_over_models(published, models)
    assert row.figure is None
