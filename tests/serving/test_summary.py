from __future__ import annotations

import random

import numpy as np
import pytest

from keepset.serving.client import Reply
from keepset.serving.measure import Round
from keepset.serving.metrics import Sample
from keepset.serving.summary import as_times, percentile, ratio, summary
from keepset.serving.table import NONE, table_rows


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 1, 50, 99, 100])
def test_percentiles_are_numpys(count: int, percent: float) -> None:
    values = [random.Random(count).uniform(-5, 5) for _ in range(count)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 50) is None


def test_ratio() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert (ratio(None, 1.0), ratio(1.0, None), ratio(1.0, 0.0)) == (None,) * 3
    assert [as_times(times) for times in (106.224, 1.0, 0.1, 0.0286, 0.0, 0.00012)] == [
        "x106.22", "x1.00", "x0.10", "x0.029", "x0.00", "x0.00012"
    ]  # fmt: skip


def good(index: int, start: float, first: float, last: float, tokens: int) -> Reply:
    return Reply(index, start, [first, last], last + 0.5, 10, tokens)


def test_rounds_add_up() -> None:
    rounds = [
        Round(
            4.0,
            [good(0, 0.0, 1.0, 3.0, 5), good(1, 1.0, 1.5, 3.5, 3), Reply(2, 0.0, [1.0], 2.0, error="gone")],
            [
                Sample(0.0, running=9, preemptions=5, counters={"events": 7}),
                Sample(1.0, running=2, waiting=1, preemptions=6, kv_usage=0.5, counters={"events": 9}),
                Sample(4.0, running=1, waiting=0, preemptions=8, kv_usage=0.25, counters={"events": 9}),
                Sample(4.1, running=0, waiting=0, preemptions=8, kv_usage=0.0, counters={"events": 10}),
            ],
        ),
        Round(
            6.0,
            [good(0, 0.0, 4.0, 5.0, 1)],
            [Sample(0.0, preemptions=8), Sample(5.0, running=3, preemptions=9, counters={"late": 2.0})],
        ),
    ]
    figures = summary(rounds)
    assert (figures["requests"], figures["failed"], figures["errors"]) == (4, 1, ["gone"])
    assert (figures["seconds"], figures["output_tokens"], figures["prompt_tokens"]) == (10.0, 9, 30)
    assert figures["output_tokens_per_second"] == 0.9
    assert figures["first_token_seconds"]["p50"] == np.percentile([1.0, 0.5, 4.0], 50)
    assert figures["first_token_seconds"]["p99"] == pytest.approx(np.percentile([1.0, 0.5, 4.0], 99))
    # An answer of one token has no time between tokens.
    assert figures["seconds_per_token"]["p50"] == np.percentile([2.0 / 4, 2.0 / 2], 50)
    assert figures["request_seconds"]["p50"] == np.percentile([3.5, 3.0, 5.5], 50)
    # Samples before the first request and after the last answer do not count.
    assert figures["running"] == {"mean": 2.0, "max": 3}
    assert figures["kv_usage"] == {"mean": 0.375, "max": 0.5}
    assert figures["preemptions"] == 3 + 1
    assert figures["keepset"] == {"events": 3, "late": 2.0}


def test_table_has_a_cell_per_server_and_their_ratio() -> None:
    plain = summary([Round(4.0, [good(0, 0.0, 1.0, 3.0, 5)], [])])
    recipe = summary([Round(2.0, [good(0, 0.0, 1.0, 3.0, 5)], [Sample(0.0), Sample(1.0, counters={"seconds": 0.25})])])
    rows = {name: cells for name, *cells in table_rows([plain, recipe])}
    assert rows["time for all, s"] == ["4.00", "2.00", "x0.50 better"]
    assert rows["output tokens/s"] == ["1.2", "2.5", "x2.00 better"]
    assert rows["requests failed"] == ["0", "0", NONE]
    assert rows["running, mean"] == [NONE, NONE, NONE]
    assert rows["keepset: seconds"] == [NONE, "0.250", NONE]
    assert all(len(row) == 2 for row in table_rows([plain]))
