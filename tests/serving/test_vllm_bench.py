"""A load of `vllm bench serve` on a small server, and its end."""

from __future__ import annotations

import pytest

from keepset.embedded import embedded_folder
from keepset.serving import vllm_bench
from keepset.serving.figures import summary
from keepset.serving.load import Load, ServedModel
from keepset.serving.prompts import LoadPrompts
from keepset.serving.server import ServerError
from keepset.serving.vllm_bench import Measured, measure
from tests.serving.fake_vllm import Fake
from tests.vllm.serve import forked

LOAD = Load(requests=6, prompt_tokens=4, output_tokens=4, concurrency=2)
PROMPTS = LoadPrompts("warm up", [], [f"number {index}" for index in range(6)])


def put(fake: Fake, seconds: float = 300.0) -> tuple[Measured, list[int]]:
    told: list[int] = []
    model = ServedModel("fake", None, None)
    return measure(fake.url, model, str(embedded_folder()), LOAD, PROMPTS, told.append, seconds), told


def check(fake: Fake, measured: Measured, told: list[int]) -> None:
    warm_up, *asked = fake.asked
    assert (warm_up["prompt"], warm_up["max_tokens"]) == ("warm up", 4)
    assert sorted(each["prompt"] for each in asked) == PROMPTS.texts and {each["max_tokens"] for each in asked} == {4}
    assert {each["model"] for each in asked} == {"fake"} and fake.most == 2
    figures = summary(measured)
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (6, 0, 24)
    assert figures["prompt_tokens"] == sum(map(len, PROMPTS.texts))
    assert measured.samples[-1].time > measured.report["duration"] and sum(told) <= 6
    assert sum(sample.time < 0 for sample in measured.samples) <= 1


@pytest.mark.usefixtures("bench")
def test_a_load_is_measured(fake: Fake) -> None:
    fake.first = 0.2
    check(fake, *put(fake))


@pytest.mark.full
def test_vllms_own_program_takes_these_options_and_writes_these_names(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    command = vllm_bench._command
    monkeypatch.setattr(vllm_bench, "_command", lambda *args: forked(command(*args)))
    fake.first = 0.5
    check(fake, *put(fake))
    assert all(each["ignore_eos"] and each["temperature"] == 0 and each["stream"] for each in fake.asked[1:])


@pytest.mark.usefixtures("bench")
def test_a_request_that_fails_is_a_figure(fake: Fake) -> None:
    fake.trouble = {2: "refused", 3: "short"}
    figures = summary(put(fake)[0])
    assert figures["failed"] == 2 and "3 tokens came instead of 4" in figures["errors"]
    assert any("503" in error for error in figures["errors"])


@pytest.mark.full
@pytest.mark.usefixtures("bench")
def test_a_load_that_takes_too_long_is_ended(fake: Fake) -> None:
    fake.first = 5.0
    with pytest.raises(ServerError, match=r"The load took longer than 0\.5 s"):
        put(fake, seconds=0.5)


def test_a_program_that_fails_says_why(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_bench, "_PROGRAM", "raise ValueError('no such option')")
    with pytest.raises(ServerError, match="vllm bench serve stopped with exit code 1: ValueError: no such option"):
        put(fake)
