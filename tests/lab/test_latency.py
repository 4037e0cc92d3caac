from typing import Any

import pytest
import torch
from transformers import DynamicCache

from keepset.lab.latency import latency
from keepset.lab.record import FULL
from keepset.recipe import Recipe
from tests.hf.models import hooks_on, tiny


def prompt(length: int) -> torch.Tensor:
    return torch.arange(length)[None] % 150 + 10


def test_every_recipe_in_turns_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama")
    caches: list[str] = []
    forward = model.forward

    def watched(ids: Any, **options: Any) -> Any:
        if ids.shape[1] > 1:
            cache = options["past_key_values"]
            caches.append(FULL if isinstance(cache, DynamicCache) else str(cache.recipe))
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", watched)
    recipes = Recipe.parse_list("tova(keep=12), streaming_llm(keep=0.5)")
    *_, timings = latency(model, [prompt(40), prompt(80)], recipes, output_tokens=5, rounds=2)
    names = [FULL, *map(str, recipes)]
    # Two prompts, one round that does not count and two that do.
    assert caches == names * 6
    assert [(each.recipe, each.prompt_tokens) for each in timings] == [(n, t) for t in (40, 80) for n in names]
    assert all(len(each.rounds) == 2 and each.error is None for each in timings)
    # The full cache holds all but the newest token, whose successor nobody asked for.
    config = model.config
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert [each.rounds[0].kv_bytes for each in timings[::3]] == [per_token * (t + 4) for t in (40, 80)]
    figures, (first, second) = timings[0].figures(), timings[0].rounds
    assert first.first_seconds > 0
    seconds = [each.first_seconds + each.rest_seconds for each in (first, second)]
    assert figures["seconds"] == pytest.approx(sum(seconds) / 2)
    assert figures["tokens_per_second"] == pytest.approx((4 / first.rest_seconds + 4 / second.rest_seconds) / 2)


@pytest.mark.full
def test_peak_memory_is_that_of_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama")
    *_, (small, *_) = latency(model, [prompt(40)], [], output_tokens=1, rounds=1)
    if small.rounds[0].peak_bytes is None:
        pytest.skip("this system does not tell")
    forward = model.forward

    def hungry(ids: Any, **options: Any) -> Any:
        torch.ones(400, 2**20, dtype=torch.uint8)
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", hungry)
    *_, (large, *_) = latency(model, [prompt(40)], [], output_tokens=1, rounds=1)
    monkeypatch.setattr(model, "forward", forward)
    *_, (again, *_) = latency(model, [prompt(40)], [], output_tokens=1, rounds=1)
    peaks = [each.rounds[0].peak_bytes or 0 for each in (small, large, again)]
    assert peaks[1] - peaks[0] > 300 * 2**20 and peaks[1] - peaks[2] > 300 * 2**20


def test_what_cannot_run_says_why_and_nothing_stays_on_the_model() -> None:
    model = tiny("llama")

    before = hooks_on(model)
    list(latency(model, [prompt(20)], Recipe.parse_list("expected_attention(keep=16, every=2)"), 4, 1))
    assert hooks_on(model) == before
    recipes = Recipe.parse_list("qfilter(stats='nowhere', keep=8), knorm(keep=8)")
    *_, timings = latency(model, [prompt(20)], recipes, output_tokens=2, rounds=1)
    assert [bool(each.error) for each in timings] == [False, True, False]
    assert [len(each.rounds) for each in timings] == [1, 0, 1]
    assert timings[1].figures() == {} and timings[1].to_json()["error"] == timings[1].error
