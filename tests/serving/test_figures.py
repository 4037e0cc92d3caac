"""The figures of a load, from a report of `vllm bench serve` and samples of the metrics."""

from __future__ import annotations

import pytest

from keepset.serving.figures import NONE, figures, first_tokens, ratio, rounded, summary, table_rows
from keepset.serving.load import Load
from keepset.serving.metrics import Sample
from keepset.serving.vllm_bench import Measured

LOAD = Load(requests=2, prompt_tokens=10, output_tokens=3, concurrency=2, rounds=2)
REPORT = {
    "duration": 4.0,
    "start_times": [100.5, 100.0, 102.0, 103.0],
    "ttfts": [1.0, 0.5, 0.25, 0.0],
    "itls": [[0.5, 1.5], [0.25, 0.25], [0.5], []],
    "latencies": [3.0, 1.0, 0.75, 0.0],
    "input_lens": [10, 10, 10, 10],
    "output_lens": [3, 3, 2, 0],
    "errors": ["", "", "", "Traceback\n  in a file\nValueError: gone\n"],
    **{f"{p}_{name}_ms": 1000.0 * value for p, value in (("p50", 1), ("p99", 2)) for name in ("ttft", "tpot", "e2el")},
}
SAMPLES = [
    Sample(-0.5, running=9, preemptions=5, counters={"events": 7}),
    Sample(1.0, running=2, waiting=1, preemptions=6, kv_usage=0.5, counters={"events": 9}),
    Sample(4.0, running=1, waiting=0, preemptions=8, kv_usage=0.25, counters={"events": 9, "late": 2.0}),
    Sample(4.5, running=0, waiting=0, preemptions=9, kv_usage=0.0, counters={"events": 10, "late": 2.0}),
]


def test_requests_have_times_since_the_start_and_an_error_where_an_answer_is_not_whole() -> None:
    first, second, short, gone = Measured(LOAD, REPORT, []).requests
    assert [each["start"] for each in (first, second, short, gone)] == [0.5, 0.0, 2.0, 3.0]
    assert first["chunks"] == [1.5, 2.0, 3.5] and first["seconds_per_token"] == 1.0 and first["seconds"] == 3.0
    assert (first["error"], second["error"]) == (None, None)
    assert short["error"] == "2 tokens came instead of 3"
    assert (gone["error"], gone["first_token_seconds"], gone["chunks"]) == ("ValueError: gone", None, [])


def test_a_summary_is_of_whole_answers_and_of_metrics_while_requests_were_open() -> None:
    result = summary(Measured(LOAD, REPORT, SAMPLES))
    assert (result["requests"], result["failed"]) == (4, 2)
    assert result["errors"] == ["2 tokens came instead of 3", "ValueError: gone"]
    assert (result["seconds"], result["prompt_tokens"], result["output_tokens"]) == (4.0, 20, 6)
    assert result["output_tokens_per_second"] == 1.5
    assert result["first_token_seconds"] == result["request_seconds"] == {"p50": 1.0, "p99": 2.0}
    assert result["running"] == {"mean": 1.5, "max": 2} and result["waiting"] == {"mean": 0.5, "max": 1}
    assert result["kv_usage"] == {"mean": 0.375, "max": 0.5}
    assert result["preemptions"] == 4 and result["keepset"] == {"events": 3, "late": 2.0}
    assert figures(Measured(LOAD, REPORT, SAMPLES))["samples"][0]["running"] == 9
    assert first_tokens(Measured(LOAD, REPORT, [])) == {"first": {"p50": 0.75}, "later": {"p50": None}}


def test_what_is_not_known_is_none() -> None:
    failed = {**REPORT, "errors": ["gone"] * 4}
    result = summary(Measured(LOAD, failed, []))
    assert (result["failed"], result["output_tokens_per_second"], result["preemptions"]) == (4, None, None)
    assert result["first_token_seconds"] == {"p50": None, "p99": None} and result["running"]["max"] is None
    # An answer of one token has no time between tokens.
    short = summary(Measured(Load(4, 10, 1, 4), {**REPORT, "output_lens": [1] * 4, "errors": [""] * 4}, []))
    assert short["seconds_per_token"] == {"p50": None, "p99": None} and short["failed"] == 0


def test_ratio() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert (ratio(None, 1.0), ratio(1.0, None), ratio(1.0, 0.0)) == (None,) * 3
    assert [rounded(times) for times in (106.224, 1.0, 0.1, 0.0286, 0.0, 0.00012)] == [
        "106.22", "1.00", "0.10", "0.029", "0.00", "0.00012"
    ]  # fmt: skip


def test_a_table_has_a_cell_for_each_server_and_their_ratio() -> None:
    plain = summary(Measured(LOAD, REPORT, []))
    recipe = summary(Measured(LOAD, {**REPORT, "duration": 2.0}, SAMPLES))
    rows = {name: cells for name, *cells in table_rows([{"summary": plain}, {"summary": recipe}])}
    assert rows["time for all, s"] == ["4.00", "2.00", "x0.50 better"]
    assert rows["output tokens/s"] == ["1.5", "3.0", "x2.00 better"]
    assert rows["requests failed"] == ["2", "2", "x1.00"]
    assert rows["running, mean"] == [NONE, "2.0", NONE]
    assert rows["keepset: events"] == [NONE, "3", NONE]
    assert "documents that the pool holds" not in rows
    assert all(len(row) == 2 for row in table_rows([{"summary": plain}]))


@pytest.mark.parametrize(("held", "said"), [((4, 20), "x5.00 better"), ((20, 4), "x0.20 worse"), ((None, 4), NONE)])
def test_more_documents_are_better(held: tuple[int | None, int], said: str) -> None:
    loaded = summary(Measured(LOAD, REPORT, []))
    documents = [{"held": count, "first_token_seconds": {"first": {}, "later": {}}} for count in held]
    servers = [{"summary": loaded, "documents": each} for each in documents]
    assert {name: cells for name, *cells in table_rows(servers)}["documents that the pool holds"][-1] == said
