"""Rows, averages, curves, needle maps and the conclusion of cells made by hand."""

import json
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset.errors import KeepsetError
from keepset.lab.analysis.intervals import Figure, of_difference, of_score
from keepset.lab.analysis.rows import Row
from keepset.lab.analysis.summary import LEAST_EXAMPLES, Summary, groups_of, split, summarize
from keepset.lab.record import FULL, Record
from keepset.lab.tasks import longbench
from tests.lab.analysis.cells import FULL_BYTES, cell, cells

HALF, QUARTER = "snapkv(keep=0.5)", "snapkv(keep=0.25)"


def check(row: Row, **expected: Any) -> None:
    """A row has these attributes, or means of these names; of figures their values."""
    for name, value in expected.items():
        told = row.means[name] if name in row.means else getattr(row, name)
        told = told.value if isinstance(told, Figure) else told
        assert told == (pytest.approx(value) if isinstance(value, float) else value), name


def test_a_row_says_what_its_cells_come_to() -> None:
    costs = {"decode_seconds": 2.0, "finished": 0.5, "repetition": 0.1}
    made = [*cells(FULL, [1.0, 1.0, 0.5, 0.5]), *cells(HALF, [1.0, 0.25, 0.0, 0.5], **costs)]
    full, snapkv = summarize(made).rows
    check(full, recipe=FULL, requested=None, difference=None, share=1.0)
    check(snapkv, task="qa", recipe=HALF, method="snapkv", requested="keep=0.5", metric="match", failed=0, **costs)
    check(snapkv, examples=4, examples_of=4, pairs=4, score=0.4375, difference=-0.3125)
    check(snapkv, keep=0.5, kv_bytes=500, kv_bytes_full=FULL_BYTES, share=0.5, tokens=8.0)
    assert snapkv.score == of_score([1.0, 0.25, 0.0, 0.5])
    assert snapkv.difference == of_difference([0.0, -0.75, -0.5, 0.0])
    # Shares are those of a 16-bit cache.
    (row,) = summarize([cell("snapkv(bytes=0.25)", share=share, example=str(share)) for share in (0.2, 0.25)]).rows
    check(row, requested="bytes=0.25", share=0.225, kv_bytes=250.0, kv_bytes_full=FULL_BYTES)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1))
def test_an_example_counts_once_whatever_its_seeds(drawn: list[tuple[int, int, float]]) -> None:
    """A naive mean of means, and the interval of as many numbers as there are examples."""
    scores = {(example, seed): score for example, seed, score in drawn}
    made = [cell(FULL, score, str(example), seed=seed) for (example, seed), score in scores.items()]
    (row,) = summarize(made).rows
    examples = list(dict.fromkeys(example for example, _ in scores))
    means = [fmean(score for (example, _), score in scores.items() if example == each) for each in examples]
    check(row, examples=len(examples), score=fmean(means))
    assert row.score == of_score(means)


def test_differences_are_of_examples_that_both_have() -> None:
    """The baseline has the examples that are hard, the recipe those that are easy, and they share one."""
    made = [
        *(cell(FULL, score, str(i)) for i, score in enumerate([0.0, 0.0, 0.5])),
        *(cell(HALF, score, str(i)) for i, score in ((2, 0.25), (3, 1.0), (4, 1.0))),
    ]
    check(summarize(made).rows[1], examples=3, examples_of=5, pairs=1, difference=-0.25)
    # Another seed of the same example is no pair.
    alone = summarize([cell(FULL, 1.0, "0", seed=0), cell(HALF, 0.0, "0", seed=1)]).rows[1]
    check(alone, pairs=0, difference=None)


def test_failures_are_shown_and_count_as_no_answer() -> None:
    made = [
        *cells(FULL, [1.0, 1.0, 1.0, 1.0]),
        *cells("tova(keep=0.5)", [1.0, None, 1.0, None]),
        *cells("h2o(keep=0.5)", [None] * 4),
    ]
    _, some, none = summarize(made).rows
    check(some, examples=4, failed=2, error="tova(keep=0.5) cannot do that.", score=0.5, difference=-0.5)
    check(some, share=0.5)  # of those that ran
    check(none, failed=4, error="h2o(keep=0.5) cannot do that.", score=None, difference=None, keep=None)
    # A baseline that failed is nothing to compare with.
    check(summarize(made, "h2o(keep=0.5)").rows[1], difference=None)


BUDGETS = [
    *cells(FULL, [1.0, 1.0]),
    *cells("random(keep=0.5)", [0.5, 0.0]),
    *cells("random(keep=0.25)", [0.0, 0.0]),
    *cells(HALF, [1.0, 0.5]),
    *cells(QUARTER, [0.5, 0.0]),
    *cells("gvote", [0.75, 0.75]),
]


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        (None, [None, -0.75, -1.0, -0.25, -0.75, -0.25]),
        ("random", [None, None, None, 0.5, 0.25, None]),
        ("snapkv(keep=0.5)", [0.25, -0.5, -0.75, None, -0.5, 0.0]),
        ("snapkv( keep = 0.5 )", [0.25, -0.5, -0.75, None, -0.5, 0.0]),
        ("gvote", [0.25, -0.5, -0.75, 0.0, -0.5, None]),
    ],
)
def test_baselines(baseline: str | None, expected: list[float | None]) -> None:
    """A method stands for its recipe with the same budget, a recipe for itself."""
    rows = {row.recipe: row.difference for row in summarize(BUDGETS, baseline).rows}
    differences = [rows[recipe] for recipe in dict.fromkeys(cell.recipe for cell in BUDGETS)]
    assert [None if each is None else each.value for each in differences] == expected


@pytest.mark.parametrize(
    ("records", "baseline", "sentence"),
    [
        (BUDGETS, "tova", r"'tova' is not in the sweep.*snapkv\(keep=0.5\)"),
        (BUDGETS, "snapkw", "There is no method 'snapkw'"),
        ([], "tova", "nothing yet"),
    ],
)
def test_a_baseline_that_is_not_there_is_refused(records: list[Record], baseline: str, sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence):
        summarize(records, baseline)


def test_rows_stand_budget_by_budget_the_best_first() -> None:
    scores = {
        QUARTER: 0.5, "tova(keep=0.5)": None, "gvote": 1.0, HALF: 0.25, "random(keep=64)": 1.0,
        "random(keep=0.25)": 0.75, "h2o(keep=0.5)": 0.5, FULL: 0.0,
    }  # fmt: skip
    made = [cell(recipe, score) for recipe, score in scores.items()]
    assert [row.recipe for row in summarize(made).rows] == [
        FULL,
        *("h2o(keep=0.5)", HALF, "tova(keep=0.5)"),
        *("random(keep=0.25)", QUARTER),
        *("random(keep=64)", "gvote"),
    ]


def ruler(recipe: str, scores: list[list[float | None]]) -> list[Record]:
    names = ("niah_single_1@4096", "ruler_vt@4096", "ruler_cwe@4096")
    return [each for name, values in zip(names, scores, strict=False) for each in cells(recipe, values, task=name)]


def test_the_tasks_of_a_group_count_the_same() -> None:
    made = [
        *ruler(FULL, [[1.0] * 6, [1.0, 0.0], [0.5, 0.5]]),
        *ruler(HALF, [[1.0] * 6, [0.0, 0.0], [0.5, 0.0]]),
        *cells(FULL, [0.0], task="niah_single_1@128"),
        *cells(FULL, [0.0], task="gsm8k"),
    ]
    summary = summarize(made)
    full, snapkv = summary.averages
    assert {row.task for row in summary.averages} == {"ruler@4096"}
    check(full, score=(1 + 0.5 + 0.5) / 3)
    check(snapkv, score=(1 + 0 + 0.25) / 3, difference=(0 - 0.5 - 0.25) / 3, share=0.5)
    check(snapkv, tasks=3, tasks_of=3, examples=10, pairs=10)
    # Narrower than a task's own, and not without width where a task's answers are all right.
    single = next(row for row in summary.rows if (row.task, row.recipe) == ("niah_single_1@4096", FULL)).score
    assert single is not None and single.low is not None and full.score is not None and full.score.low is not None
    assert full.score.low < full.score.value - (1 - single.low) / 3


def test_a_group_lacks_a_score_where_a_task_does() -> None:
    made = [
        *ruler(FULL, [[1.0], [1.0], [1.0]]),
        *ruler(HALF, [[1.0], [1.0]]),
        *ruler("tova(keep=0.5)", [[1.0], [None], [1.0]]),
        *ruler("h2o(keep=0.5)", [[1.0], [1.0, None], [1.0]]),
    ]
    rows = {row.method: row for row in summarize(made).averages}
    check(rows["snapkv"], score=None, tasks=2, tasks_of=3, error=None)
    check(rows["tova"], score=None, tasks=2, failed=1, error="tova(keep=0.5) cannot do that.")
    check(rows["h2o"], score=2.5 / 3, failed=1)


def test_cut_contexts_are_counted_and_json_says_all() -> None:
    whole, *rest = ruler(FULL, [[1.0, 1.0], [1.0]])
    summary = summarize([whole, *(replace(each, facts={"cut": 7}) for each in rest)])
    assert [row.cut for row in (*summary.rows, *summary.averages)] == [1, 1, 2]
    summary = summarize([*BUDGETS, *cells(FULL, [1.0], task="needle@64")])
    data = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert list(data) == ["baseline", "conclusion", "rows", "averages", "trades", "needles"]
    assert data["baseline"] == FULL and len(data["rows"]) == 7
    assert data["rows"][3]["score"].keys() == {"value", "low", "high"} and data["rows"][3]["share"] == 0.25
    assert data["trades"][0]["reach"][0].keys() == {"tolerance", "removed", "at_least"}
    assert summarize([]) == Summary(FULL, "No recipe has a score on all tasks yet.", [], [], [], [])


def test_trades_by_hand() -> None:
    made = [
        *cells(FULL, [1.0, 1.0, 0.5, 0.5]),
        *cells(QUARTER, [0.5, 0.5, 0.25, 0.25]),
        *cells(HALF, [1.0, 1.0, 0.5, 0.5]),
        *cells("tova(keep=0.5)", [1.0] * 4),
        *cells("gvote", [1.0] * 4),
        *cells("h2o(keep=0.5)", [1.0] * 4),
        *cells("h2o(keep=0.25)", [None] * 4),
    ]
    # One budget makes no curve; nor do one that failed and another.
    (trade,) = summarize(made).trades
    assert (trade.task, trade.method, trade.smallest, trade.budgets) == ("qa", "snapkv", 0.25, 2)
    assert (trade.examples, trade.failed) == (4, 0)
    assert trade.area is not None and trade.area.value == pytest.approx((0.5 * 0.75 + 0.25 * 0.5625) / 0.75)
    assert [each.tolerance for each in trade.reach] == [0.1, 0.2]
    assert [each.removed.value for each in trade.reach] == pytest.approx([0.55, 0.6])
    assert not any(each.at_least for each in trade.reach)


def test_trades_of_a_group_and_of_incomplete_sweeps() -> None:
    made = [*cells(FULL, [1.0, 0.0, 1.0]), *cells(HALF, [1.0, 1.0]), *cells(QUARTER, [1.0])]
    (trade,) = summarize(made).trades
    assert trade.examples == 1 and trade.area is not None and trade.area.value == 1.0
    assert [(each.removed.value, each.at_least) for each in trade.reach] == [(0.75, True), (0.75, True)]
    assert summarize(made[3:]).trades == []  # no full cache
    assert summarize([*made[:5], cell(QUARTER, 1.0, "9")]).trades == []  # no example that has all
    (trade,) = summarize([*made[:5], *cells(QUARTER, [None, 0.0])]).trades
    # Means 0.5, 1, 0.
    assert trade.failed == 1 and trade.area is not None
    assert trade.area.value == pytest.approx((0.5 * 0.75 + 0.25 * 0.5) / 0.75)
    made = [
        *ruler(FULL, [[1.0], [0.5], [1.0]]),
        *ruler(HALF, [[1.0], [0.5], [1.0]]),
        *ruler(QUARTER, [[1.0], [0.0], [0.4]]),
    ]
    *_, trade = summarize(made).trades
    assert (trade.task, trade.examples) == ("ruler@4096", 3) and trade.area is not None
    areas = [1.0, (0.5 * 0.5 + 0.25 * 0.25) / 0.75, (0.5 * 1.0 + 0.25 * 0.7) / 0.75]
    assert trade.area.value == pytest.approx(fmean(areas))
    # Losses 0, 100 % and 60 % at 0.25.
    assert trade.reach[0].removed.value == pytest.approx(0.5 + 0.25 * 0.1 / (1.6 / 3))


def test_needle_maps() -> None:
    def at(recipe: str, example: str, length: int, depth: float, score: float | None, seed: int = 0) -> Record:
        made = cell(recipe, score, example, f"needle@{length}", seed)
        return replace(made, facts={"length": length, "depth": depth})

    made = [
        at(HALF, "0", 128, 0.05, 1.0),
        at(HALF, "1", 128, 0.09, 0.0),
        at(HALF, "0", 64, 0.95, 1.0),
        at(HALF, "1", 64, 1.0, 0.0),
        at(HALF, "1", 64, 1.0, 1.0, seed=1),
        at(HALF, "2", 64, 0.3, None),
        at(FULL, "0", 64, 0.95, 1.0),
        at("h2o(keep=0.5)", "0", 64, 0.95, None),
        replace(at(HALF, "3", 64, 0.5, 1.0), facts={"depth": "deep", "length": 64}),
        replace(at(HALF, "4", 64, 0.5, 1.0), facts={"depth": 0.5}),
        *cells(HALF, [1.0]),
    ]
    first, second = summarize(made).needles
    assert (first.task, first.recipe, second.recipe) == ("needle", HALF, FULL)
    assert first.lengths == second.lengths == [64.0, 128.0]
    expected = {(0, 1): 0.5, (9, 0): 0.75, (3, 0): 0.0}
    assert first.scores == [[expected.get((part, column)) for column in range(2)] for part in range(10)]
    assert first.examples[9] == [2, 0] and first.examples[0] == [0, 2] and second.scores[9] == [1.0, None]


def test_longbench_is_averaged_over_its_tasks_and_each_of_its_kinds() -> None:
    assert groups_of("ruler_cwe@128") == ["ruler aggregation@128", "ruler@128"]
    assert groups_of("ruler_vt@128") == ["ruler@128"]
    assert groups_of("longbench_qasper") == ["longbench single-document QA", "longbench"]
    assert groups_of("longbench2_code") == ["longbench2"]
    assert groups_of("gsm8k") == groups_of("needle@128") == []
    scores = {name: index / 16 for index, name in enumerate(longbench.NAMES[:-1])}
    made = [each for name, score in scores.items() for each in cells(FULL, [score], task=name)]
    averages = {row.task: row.score.value for row in summarize(made[::-1]).averages if row.score is not None}
    kinds = ["single-document QA"] * 3 + ["multi-document QA"] * 3 + ["summarization"] * 3
    kinds += ["few-shot"] * 3 + ["synthetic"] * 2 + ["code"] * 2
    expected: dict[str, list[float]] = {}
    for kind, score in zip(kinds, scores.values(), strict=True):
        expected.setdefault(f"longbench {kind}", []).append(score)
    expected["longbench"] = list(scores.values())
    assert list(averages) == list(expected)
    assert averages == pytest.approx({name: fmean(each) for name, each in expected.items()})
    # A kind that is all there is of the benchmark does not come twice; nor does one task have an average.
    assert {row.task for row in summarize(made[:3]).averages} == {"longbench"}
    assert {row.task for row in summarize([made[0], *made[12:14]]).averages} == {"longbench", "longbench synthetic"}


# --- the conclusion claims no more than its examples show

RIGHT: list[float | None] = [1.0] * 12


def found(right: int) -> list[float | None]:
    return [*[1.0] * right, *[0.0] * (12 - right)]


FOUR = [
    *cells(FULL, RIGHT),
    *cells("a(bytes=0.5)", RIGHT),
    *cells("a(bytes=0.1)", found(11)),
    *cells("b(bytes=0.25)", RIGHT),
    *cells("b(bytes=0.05)", found(2)),
]


def test_the_cheapest_of_those_that_cannot_be_told_from_the_best() -> None:
    assert summarize(FOUR).conclusion == (
        "On 12 examples of qa, 3 of 4 recipes are a tie for the best; the cheapest of them is a(bytes=0.1): 91.7% "
        "(64.6..98.5) with 10.0% of a full 16-bit cache's bytes. The full cache scores 100.0% (75.8..100.0)."
    )
    # Nothing is concluded from few examples or an unfinished sweep.
    few = [each for each in FOUR if int(each.example) < LEAST_EXAMPLES - 1]
    assert summarize(few).conclusion == "Nothing can be concluded from 9 examples: at least 10 are needed."
    assert summarize(FOUR[:-1]).conclusion.startswith("Nothing is concluded yet")
    assert summarize(cells(FULL, RIGHT)).conclusion == "No recipe has a score on all tasks yet."
    # Recipes are compared on all tasks.
    other = [*cells(FULL, RIGHT, task="other"), *cells("a(bytes=0.1)", found(0), task="other")]
    other += cells("b(bytes=0.25)", RIGHT, task="other")
    said = summarize([*FOUR, *other]).conclusion
    assert said.startswith("On 24 examples of 2 tasks, b(bytes=0.25) scores best of 2 recipes: 100.0% (")


@pytest.mark.parametrize(("right", "chosen"), [(9, "a(bytes=0.1)"), (7, "a(bytes=0.5)")])
def test_examples_are_compared_one_by_one(right: int, chosen: str) -> None:
    """Of 12 pairs 3 that differ may be chance, and 5 are none (Agresti & Min, by hand: -0.04..0.47 and 0.07..0.64)."""
    made = [*cells(FULL, RIGHT), *cells("a(bytes=0.5)", RIGHT), *cells("a(bytes=0.1)", found(right))]
    assert chosen in summarize([*made, *cells("b(bytes=0.05)", found(0))]).conclusion


def test_questions_of_one_example_are_split_by_their_scores() -> None:
    told = {"told 11 to 15": 0.5, "told 6 to 10": 1.0}
    records = [replace(each, scores={**each.scores, **told}) for each in cells(FULL, [1.0, 1.0])]
    parts = split(records, "told")
    assert [(part.task, part.score) for part in parts] == [("qa, told 6 to 10", 1.0)] * 2 + [
        ("qa, told 11 to 15", 0.5)
    ] * 2
    with pytest.raises(KeepsetError, match=r"there are: told\."):
        split(records, "depth")
