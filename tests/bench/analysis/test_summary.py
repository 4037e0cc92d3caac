from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset.bench.analysis import intervals
from keepset.bench.analysis.rows import Row
from keepset.bench.analysis.summary import Summary, groups_of, summarize
from keepset.bench.record import FULL, Record
from keepset.bench.tasks import longbench
from keepset.errors import KeepsetError
from tests.bench.analysis.cells import FULL_BYTES, cell, cells


def by_name(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.task, row.recipe): row for row in rows}


def test_a_row_says_what_its_cells_come_to() -> None:
    half = "snapkv(keep=0.5)"
    scores: list[float | None] = [1.0, 0.25, 0.0, 0.5]
    made = [*cells(FULL, [1.0, 1.0, 0.5, 0.5]), *cells(half, scores, decode_seconds=2.0, finished=0.5, repetition=0.1)]
    full, snapkv = summarize(made).rows
    assert (full.recipe, full.requested, full.difference, full.means["share"]) == (FULL, 1.0, None, 1.0)
    assert (snapkv.task, snapkv.recipe, snapkv.method, snapkv.requested) == ("qa", half, "snapkv", 0.5)
    assert (snapkv.metric, snapkv.examples, snapkv.examples_of, snapkv.failed) == ("match", 4, 4, 0)
    assert snapkv.score is not None and snapkv.score.value == 0.4375
    assert (snapkv.score.low, snapkv.score.high) == intervals.of_score([1.0, 0.25, 0.0, 0.5])
    assert snapkv.difference is not None and snapkv.difference.value == pytest.approx(-0.3125)
    assert (snapkv.difference.low, snapkv.difference.high) == intervals.of_difference([0.0, -0.75, -0.5, 0.0])
    assert (snapkv.pairs, snapkv.means["keep"], snapkv.means["kv_bytes"], snapkv.means["kv_bytes_full"]) == (
        4,
        0.5,
        500,
        FULL_BYTES,
    )
    assert (snapkv.means["share"], snapkv.means["tokens"], snapkv.means["decode_seconds"]) == (0.5, 8.0, 2.0)
    assert (snapkv.means["finished"], snapkv.means["repetition"]) == (0.5, 0.1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1))
def test_an_example_counts_once_whatever_its_seeds(drawn: list[tuple[int, int, float]]) -> None:
    """A naive mean of means, and the interval of as many numbers as there are examples."""
    scores = {(example, seed): score for example, seed, score in drawn}
    made = [cell(FULL, score, str(example), seed=seed) for (example, seed), score in scores.items()]
    (row,) = summarize(made).rows
    examples = list(dict.fromkeys(example for example, _ in scores))
    means = [fmean(score for (example, _), score in scores.items() if example == each) for each in examples]
    assert row.examples == len(examples)
    assert row.score is not None and row.score.value == pytest.approx(fmean(means))
    assert (row.score.low, row.score.high) == intervals.of_score(means)


def test_a_second_seed_with_the_same_answers_narrows_nothing() -> None:
    once = [cell(FULL, float(i < 5), str(i)) for i in range(8)]
    twice = [*once, *(replace(each, seed=1) for each in once)]
    assert summarize(twice).rows[0].score == summarize(once).rows[0].score


def test_differences_are_of_examples_that_both_have() -> None:
    """The baseline has the examples that are hard, the recipe those that are easy, and they share one."""
    made = [
        *(cell(FULL, score, str(i)) for i, score in enumerate([0.0, 0.0, 0.5])),
        *(cell("snapkv(keep=0.5)", score, str(i)) for i, score in ((2, 0.25), (3, 1.0), (4, 1.0))),
    ]
    row = summarize(made).rows[1]
    assert (row.examples, row.examples_of, row.pairs) == (3, 5, 1)
    assert row.difference is not None and row.difference.value == -0.25
    # Another seed of the same example is no pair.
    alone = summarize([cell(FULL, 1.0, "0", seed=0), cell("snapkv(keep=0.5)", 0.0, "0", seed=1)]).rows[1]
    assert (alone.pairs, alone.difference) == (0, None)


def test_failures_are_shown_and_count_as_no_answer() -> None:
    made = [
        *cells(FULL, [1.0, 1.0, 1.0, 1.0]),
        *cells("tova(keep=0.5)", [1.0, None, 1.0, None]),
        *cells("h2o(keep=0.5)", [None] * 4),
    ]
    _, some, none = summarize(made).rows
    assert (some.examples, some.failed, some.error) == (4, 2, "tova(keep=0.5) cannot do that.")
    assert some.score is not None and some.score.value == 0.5
    assert some.difference is not None and some.difference.value == -0.5
    assert some.means["share"] == 0.5  # of those that ran
    assert (none.failed, none.error) == (4, "h2o(keep=0.5) cannot do that.")
    assert none.score is None and none.difference is None and none.means["keep"] is None


def test_cut_contexts_are_counted() -> None:
    whole, *rest = ruler(FULL, [[1.0, 1.0], [1.0]])
    made = [whole, *(replace(each, facts={"cut": 7}) for each in rest)]
    summary = summarize(made)
    assert [row.cut for row in (*summary.rows, *summary.averages)] == [1, 1, 2]


def test_a_baseline_that_failed_is_nothing_to_compare_with() -> None:
    made = [*cells("h2o(keep=0.5)", [None, None]), *cells("tova(keep=0.5)", [1.0, 1.0])]
    assert summarize(made, "h2o(keep=0.5)").rows[1].difference is None


BUDGETS = [
    *cells(FULL, [1.0, 1.0]),
    *cells("random(keep=0.5)", [0.5, 0.0]),
    *cells("random(keep=0.25)", [0.0, 0.0]),
    *cells("snapkv(keep=0.5)", [1.0, 0.5]),
    *cells("snapkv(keep=0.25)", [0.5, 0.0]),
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


def test_rows_stand_budget_by_budget_the_best_first() -> None:
    made = [
        *cells("snapkv(keep=0.25)", [0.5]),
        *cells("tova(keep=0.5)", [None]),
        *cells("gvote", [1.0]),
        *cells("snapkv(keep=0.5)", [0.25]),
        *cells("random(keep=64)", [1.0]),
        *cells("random(keep=0.25)", [0.75]),
        *cells("h2o(keep=0.5)", [0.5]),
        *cells(FULL, [0.0]),
    ]
    assert [row.recipe for row in summarize(made).rows] == [
        FULL,
        *("h2o(keep=0.5)", "snapkv(keep=0.5)", "tova(keep=0.5)"),
        *("random(keep=0.25)", "snapkv(keep=0.25)"),
        *("random(keep=64)", "gvote"),
    ]


def test_a_baseline_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeepsetError, match=r"'tova' is not in the sweep.*snapkv\(keep=0.5\)"):
        summarize(BUDGETS, "tova")
    with pytest.raises(KeepsetError, match="There is no method 'snapkw'"):
        summarize(BUDGETS, "snapkw")
    with pytest.raises(KeepsetError, match="nothing yet"):
        summarize([], "tova")


def ruler(recipe: str, scores: list[list[float | None]]) -> list[Record]:
    names = ("niah_single_1@4096", "ruler_vt@4096", "ruler_cwe@4096")
    return [each for name, values in zip(names, scores, strict=False) for each in cells(recipe, values, task=name)]


def test_the_tasks_of_a_group_count_the_same() -> None:
    made = [
        *ruler(FULL, [[1.0] * 6, [1.0, 0.0], [0.5, 0.5]]),
        *ruler("snapkv(keep=0.5)", [[1.0] * 6, [0.0, 0.0], [0.5, 0.0]]),
        *cells(FULL, [0.0], task="niah_single_1@128"),
        *cells(FULL, [0.0], task="gsm8k"),
    ]
    summary = summarize(made)
    full, snapkv = summary.averages
    assert {row.task for row in summary.averages} == {"ruler@4096"}
    assert full.score is not None and full.score.value == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert snapkv.score is not None and snapkv.score.value == pytest.approx((1 + 0 + 0.25) / 3)
    assert snapkv.difference is not None and snapkv.difference.value == pytest.approx((0 - 0.5 - 0.25) / 3)
    assert (snapkv.tasks, snapkv.tasks_of, snapkv.examples, snapkv.pairs) == (3, 3, 10, 10)
    assert snapkv.means["share"] == 0.5
    # Narrower than a task's own, and not without width where a task's answers are all right.
    rows = by_name(summary.rows)
    single = rows["niah_single_1@4096", FULL].score
    assert single is not None and single.low is not None and full.score.low is not None
    assert full.score.low < full.score.value - (1 - single.low) / 3


def test_a_group_lacks_a_score_where_a_task_does() -> None:
    made = [
        *ruler(FULL, [[1.0], [1.0], [1.0]]),
        *ruler("snapkv(keep=0.5)", [[1.0], [1.0]]),
        *ruler("tova(keep=0.5)", [[1.0], [None], [1.0]]),
        *ruler("h2o(keep=0.5)", [[1.0], [1.0, None], [1.0]]),
    ]
    rows = {row.method: row for row in summarize(made).averages}
    snapkv, tova, h2o = rows["snapkv"], rows["tova"], rows["h2o"]
    assert (snapkv.score, snapkv.tasks, snapkv.tasks_of, snapkv.error) == (None, 2, 3, None)
    assert (tova.score, tova.tasks, tova.failed, tova.error) == (None, 2, 1, "tova(keep=0.5) cannot do that.")
    assert h2o.score is not None and h2o.score.value == pytest.approx(2.5 / 3) and h2o.failed == 1


def test_trades_by_hand() -> None:
    made = [
        *cells(FULL, [1.0, 1.0, 0.5, 0.5]),
        *cells("snapkv(keep=0.25)", [0.5, 0.5, 0.25, 0.25]),
        *cells("snapkv(keep=0.5)", [1.0, 1.0, 0.5, 0.5]),
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


def test_trades_of_incomplete_sweeps_are_of_examples_that_have_all_budgets() -> None:
    made = [
        *cells(FULL, [1.0, 0.0, 1.0]),
        *cells("snapkv(keep=0.5)", [1.0, 1.0]),
        *cells("snapkv(keep=0.25)", [1.0]),
    ]
    (trade,) = summarize(made).trades
    assert trade.examples == 1 and trade.area is not None and trade.area.value == 1.0
    assert [(each.removed.value, each.at_least) for each in trade.reach] == [(0.75, True), (0.75, True)]
    assert summarize(made[3:]).trades == []  # no full cache
    elsewhere = cell("snapkv(keep=0.25)", 1.0, "9")
    assert summarize([*made[:5], elsewhere]).trades == []  # no example that has all


def test_trades_say_how_often_a_method_failed() -> None:
    made = [
        *cells(FULL, [1.0, 1.0]),
        *cells("snapkv(keep=0.5)", [1.0, None]),
        *cells("snapkv(keep=0.25)", [None, 0.0]),
    ]
    (trade,) = summarize(made).trades
    assert trade.failed == 2
    # Means 1, 0.5, 0.
    assert trade.area is not None and trade.area.value == pytest.approx((0.5 * 0.75 + 0.25 * 0.25) / 0.75)


def test_trades_of_a_group() -> None:
    made = [
        *ruler(FULL, [[1.0], [0.5], [1.0]]),
        *ruler("snapkv(keep=0.5)", [[1.0], [0.5], [1.0]]),
        *ruler("snapkv(keep=0.25)", [[1.0], [0.0], [0.4]]),
    ]
    *_, trade = summarize(made).trades
    assert (trade.task, trade.examples) == ("ruler@4096", 3)
    assert trade.area is not None
    areas = [1.0, (0.5 * 0.5 + 0.25 * 0.25) / 0.75, (0.5 * 1.0 + 0.25 * 0.7) / 0.75]
    assert trade.area.value == pytest.approx(fmean(areas))
    # Losses 0, 100 % and 60 % at 0.25.
    assert trade.reach[0].removed.value == pytest.approx(0.5 + 0.25 * 0.1 / (1.6 / 3))


def test_needle_maps() -> None:
    half = "snapkv(keep=0.5)"

    def at(recipe: str, example: str, length: int, depth: float, score: float | None, seed: int = 0) -> Record:
        made = cell(recipe, score, example, f"needle@{length}", seed)
        return replace(made, facts={"length": length, "depth": depth})

    made = [
        at(half, "0", 128, 0.05, 1.0),
        at(half, "1", 128, 0.09, 0.0),
        at(half, "0", 64, 0.95, 1.0),
        at(half, "1", 64, 1.0, 0.0),
        at(half, "1", 64, 1.0, 1.0, seed=1),
        at(half, "2", 64, 0.3, None),
        at(FULL, "0", 64, 0.95, 1.0),
        at("h2o(keep=0.5)", "0", 64, 0.95, None),
        replace(at(half, "3", 64, 0.5, 1.0), facts={"depth": "deep", "length": 64}),
        replace(at(half, "4", 64, 0.5, 1.0), facts={"depth": 0.5}),
        *cells(half, [1.0]),
    ]
    first, second = summarize(made).needles
    assert (first.task, first.recipe, second.recipe) == ("needle", half, FULL)
    assert first.lengths == second.lengths == [64.0, 128.0]
    expected = {(0, 1): 0.5, (9, 0): 0.75, (3, 0): 0.0}
    for part in range(10):
        for column in range(2):
            assert first.scores[part][column] == expected.get((part, column))
    assert first.examples[9] == [2, 0] and first.examples[0] == [0, 2]
    assert second.scores[9] == [1.0, None]


def test_json_says_all_of_it() -> None:
    summary = summarize([*BUDGETS, *cells(FULL, [1.0], task="needle@64")])
    data = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert list(data) == ["baseline", "rows", "averages", "trades", "needles"]
    assert data["baseline"] == FULL and len(data["rows"]) == 7
    assert data["rows"][3]["score"].keys() == {"value", "low", "high"}
    assert data["trades"][0]["reach"][0].keys() == {"tolerance", "removed", "at_least"}


def test_an_empty_sweep() -> None:
    assert summarize([]) == Summary(FULL, [], [], [], [])


def test_groups() -> None:
    assert groups_of("ruler_cwe@128") == ["ruler aggregation@128", "ruler@128"]
    assert groups_of("ruler_vt@128") == ["ruler@128"]
    assert groups_of("longbench_qasper") == ["longbench single-document QA", "longbench"]
    assert groups_of("longbench2_code") == ["longbench2"]
    assert groups_of("gsm8k") == groups_of("needle@128") == []


def test_longbench_is_averaged_over_its_tasks_and_each_of_its_kinds() -> None:
    scores = {name: index / 16 for index, name in enumerate(longbench.NAMES[:-1])}
    made = [each for name, score in scores.items() for each in cells(FULL, [score], task=name)]
    averages = {row.task: row.score.value for row in summarize(made[::-1]).averages if row.score is not None}
    kinds = {
        "single-document QA": 3,
        "multi-document QA": 3,
        "summarization": 3,
        "few-shot": 3,
        "synthetic": 2,
        "code": 2,
    }
    assert list(averages) == [*(f"longbench {kind}" for kind in kinds), "longbench"]
    first = 0
    for kind, count in kinds.items():
        assert averages[f"longbench {kind}"] == pytest.approx(sum(range(first, first + count)) / count / 16)
        first += count
    assert averages["longbench"] == pytest.approx(fmean(scores.values()))
    # A kind that is all there is of the benchmark does not come twice; nor does one task have an average.
    assert {row.task for row in summarize(made[:3]).averages} == {"longbench"}
    assert {row.task for row in summarize([made[0], *made[12:14]]).averages} == {"longbench", "longbench synthetic"}
