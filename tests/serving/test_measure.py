from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from keepset.errors import KeepsetError
from keepset.serving import measure as module
from keepset.serving.load import Load
from keepset.serving.measure import Round, ServedModel, check_fits, measure, served_model, to_json
from keepset.serving.summary import summary
from tests.serving.conftest import Fake


def run(fake: Fake, on_reply: Callable[[], None] = lambda: None, **options: Any) -> list[Round]:
    tokens = sum(fake.tokens)
    load = Load(**{"requests": 6, "prompt_tokens": 3, "output_tokens": tokens, "concurrency": 6, **options})
    texts = [[[9, 9, 9]], *([[r, i, 0] for i in range(load.requests)] for r in range(load.rounds))]
    return measure(fake.url, "fake", load, texts, on_reply)


def test_each_prompt_is_asked_once_as_it_should_be(fake: Fake) -> None:
    replies: list[int] = []
    first, second = run(fake, lambda: replies.append(1), rounds=2)
    assert sorted(body["prompt"] for body in fake.asked[1:]) == [[r, i, 0] for r in range(2) for i in range(6)]
    assert fake.asked[0]["prompt"] == [9, 9, 9]
    assert fake.asked[1] == {
        "model": "fake",
        "prompt": fake.asked[1]["prompt"],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert len(replies) == 12
    for each in (first, second):
        assert [reply.index for reply in each.replies] == list(range(6))
        assert {reply.error for reply in each.replies} == {None}
        assert {reply.output_tokens for reply in each.replies} == {4}
        assert {reply.prompt_tokens for reply in each.replies} == {3}
        assert each.seconds == max(reply.end or 0 for reply in each.replies)


@pytest.mark.full
@pytest.mark.parametrize(("concurrency", "requests"), [(1, 4), (3, 9), (50, 5)])
def test_so_many_at_once_and_no_more(fake: Fake, concurrency: int, requests: int) -> None:
    fake.first = 0.1
    run(fake, requests=requests, concurrency=concurrency)
    assert fake.most == min(concurrency, requests)


def test_times_are_those_of_the_pieces(fake: Fake) -> None:
    fake.first, fake.gap, fake.tokens = 0.2, 0.1, [1, 3, 1]
    (each,) = run(fake, requests=2)
    for reply in each.replies:
        assert len(reply.chunks) == 3 and reply.output_tokens == 5
        assert reply.first_token is not None and reply.per_token is not None and reply.total is not None
        # Longer on a busy machine, never shorter.
        assert all(chunk - reply.start >= due for chunk, due in zip(reply.chunks, (0.2, 0.3, 0.4), strict=True))
        assert reply.first_token == reply.chunks[0] - reply.start
        assert reply.per_token == pytest.approx((reply.chunks[2] - reply.chunks[0]) / 4)
        assert reply.total >= 0.4
    figures = summary([each])
    assert figures["output_tokens"] == 10
    assert figures["output_tokens_per_second"] == pytest.approx(10 / each.seconds)


@pytest.mark.parametrize(
    ("trouble", "because"),
    [
        ("refused", 'HTTP 503: {"error": "too much"}'),
        ("cut off", "peer closed connection"),
        ("no end", "the answer was cut off"),
        ("short", "3 tokens came instead of 4"),
        ("no usage", "the server did not say how many tokens there were"),
        ("error", "out of\\nmemory"),
        ("nonsense", "the answer is not JSON: {nonsense"),
        ("stuck", "no whole answer in 0.5 s"),
    ],
)
def test_failures_are_counted_and_named(fake: Fake, trouble: str, because: str) -> None:
    fake.trouble = {2: trouble, 4: trouble}
    (each,) = run(fake, timeout=0.5)
    failed = [reply for reply in each.replies if reply.error is not None]
    assert len(failed) == 2
    assert all(because in (reply.error or "") for reply in failed)
    figures = summary([each])
    assert (figures["requests"], figures["failed"]) == (6, 2)
    assert figures["output_tokens"] == 16
    assert len(figures["errors"]) == 1


def test_a_server_that_is_gone_fails_every_request(fake: Fake) -> None:
    fake.url = "http://127.0.0.1:9"
    (each,) = run(fake)
    figures = summary([each])
    assert figures["failed"] == 6
    assert figures["output_tokens_per_second"] is None
    assert figures["first_token_seconds"] == {"p50": None, "p99": None}
    assert figures["running"] == {"mean": None, "max": None}


def test_metrics_are_sampled_while_requests_run(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_SECONDS", 0.05)
    fake.first = 0.5
    (each,) = run(fake, requests=3)
    times = [sample.time for sample in each.samples]
    assert times[0] == 0.0 and times == sorted(times)
    assert times[-1] >= each.seconds
    during = [sample for sample in each.samples if 0 < sample.time <= each.seconds]
    assert len(during) >= 3
    assert max(sample.running or 0 for sample in during) == 3
    figures = summary([each])
    assert figures["running"]["max"] == 3
    assert figures["running"]["mean"] == sum(sample.running or 0 for sample in during) / len(during)
    assert figures["waiting"] == {"mean": 3.0, "max": 3.0}
    assert figures["kv_usage"] == {"mean": 0.5, "max": 0.5}
    looks = fake.looks - 1  # The page counts how often it was looked at, a look that the end broke off among them.
    assert figures["preemptions"] == looks
    assert figures["keepset"] == {"entries_kept": looks, "events": looks}


@pytest.mark.parametrize("metrics", [None, "vllm:num_requests_running{{ broken", ""])
def test_without_metrics_the_rest_is_measured(fake: Fake, metrics: str | None) -> None:
    fake.metrics = metrics
    figures = summary(run(fake))
    assert figures["failed"] == 0 and figures["output_tokens"] == 24
    assert figures["preemptions"] is None and figures["running"] == {"mean": None, "max": None}
    assert figures["keepset"] == {}


def test_everything_is_json(fake: Fake) -> None:
    fake.trouble = {1: "refused"}
    (each,) = json.loads(json.dumps(to_json(run(fake)), allow_nan=False))
    assert len(each["requests"]) == 6 and len(each["samples"]) >= 2
    assert sum(request["error"] is not None for request in each["requests"]) == 1
    assert {len(request["chunks"]) for request in each["requests"]} == {0, 4}


def test_no_proxy_stands_between(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert summary(run(fake))["failed"] == 0
    assert served_model(fake.url).name == "fake"


def test_what_is_served(fake: Fake) -> None:
    assert served_model(fake.url) == ServedModel("fake", "here", 4096)
    fake.models = {"data": [{"id": "other"}]}
    assert served_model(fake.url) == ServedModel("other", None, None)


@pytest.mark.parametrize("models", [{}, [], {"data": []}, {"data": [3]}, None])
def test_who_serves_nothing(fake: Fake, models: Any) -> None:
    fake.models = models
    with pytest.raises(KeepsetError, match=r"There is no OpenAI-compatible server at .* \(it does not say"):
        served_model(fake.url)


def test_a_load_that_does_not_fit() -> None:
    load = Load(1, 600, 425, 1)
    check_fits(load, ServedModel("a", None, None))
    check_fits(load, ServedModel("a", None, 1025))
    with pytest.raises(KeepsetError, match="600 tokens of prompt and 425 of output do not fit the server's context"):
        check_fits(load, ServedModel("a", None, 1024))
