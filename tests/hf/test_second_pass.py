"""Second passes: what the prompt's entries receive, against the model's own eager attention over both texts as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.core.features.attention import SecondPass
from keepset.core.features.moments import HiddenMoments, QueryMoments
from keepset.core.observation import Observation
from keepset.hf.prompt_session import Recorder
from keepset.kernels.columns import ColumnStatistic
from tests.hf.looking import looking, shown
from tests.hf.models import (
    ARCHITECTURES,
    full,
    generate,
    padded_or_not,
    padded_prompt,
    prompt,
    refusal,
    same_keep_set,
    tiny,
)

LENGTH, PADDING = 36, [0, 7]
ALL = frozenset(ColumnStatistic)
WHOLE, CHUNKED = SecondPass(ALL), SecondPass(ALL, chunk=10)


def observed(
    model: Any, padding: list[int], *passes: SecondPass, chunk: int | None = None, **options: Any
) -> dict[int, Observation]:
    ids, mask = padded_prompt(padding, LENGTH)
    recipe = looking(*(passes or (WHOLE,)))
    cache = keepset.Cache(model, recipe, prompt_length=LENGTH if chunk else None, **options)
    with shown() as observations:
        generate(model, ids, cache, mask, max_new_tokens=1, prefill_chunk_size=chunk)
    return observations


@torch.no_grad()
def attention(model: Any, context: Tensor, task: Tensor) -> list[Tensor]:
    """Return what each task token pays to each context token, `[query_heads, task, context]` per layer."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    whole = torch.cat([context, task])[None]
    layers = eager(whole, use_cache=False, output_attentions=True).attentions
    return [layer[0, :, len(context) :, : len(context)].float() for layer in layers]


def check(
    observations: dict[int, Observation], model: Any, padding: list[int], tasks: Any, which: SecondPass = WHOLE
) -> None:
    """Every layer's statistics against the eager ones; `tasks(request, context)` gives its tokens, one run each."""
    ids = prompt(len(padding), LENGTH)
    tolerance = dict(rtol=1e-4, atol=2e-6) if model.dtype == torch.float32 else dict(rtol=0.05, atol=0.02)
    for request, pad in enumerate(padding):
        context = ids[request, pad:]
        runs = [attention(model, context, task) for task in tasks(request, context)]
        if len(runs[0]) == len(observations):  # the other layers have no attention
            runs = [dict(zip(observations, run, strict=True)) for run in runs]
        for layer, observation in observations.items():
            paid = torch.cat([run[layer] for run in runs], 1)
            columns_of_pass = observation[which]
            expected = {"sum": paid.sum(1), "max": paid.amax(1), "square": paid.square().sum(1)}
            assert set(columns_of_pass.statistics) == which.statistics
            for name, columns in columns_of_pass.statistics.items():
                torch.testing.assert_close(columns[request, :, : len(context)], expected[name], **tolerance)
                assert columns[request, :, len(context) :].abs().sum() == 0
            assert int(columns_of_pass.tokens[request]) == paid.shape[1]


def itself(request: int, context: Tensor) -> list[Tensor]:
    return [context]


SEEN = [name for name in ARCHITECTURES if name != "mistral_window"]
"""All but the one of which nothing is compressed."""


@pytest.mark.few(8)
@pytest.mark.cross
@pytest.mark.parametrize("architecture", SEEN)
@padded_or_not
def test_the_context_runs_once_more_on_its_own_cache(architecture: str, padding: list[int]) -> None:
    model = tiny(architecture)
    check(observed(model, padding), model, padding, itself)


@pytest.mark.cross
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2", "gpt2"])
@pytest.mark.parametrize("prefill", [7, 16, 35])
def test_a_prompt_in_chunks_is_seen_whole(architecture: str, prefill: int) -> None:
    model = tiny(architecture)
    for padding in ([0, 0], PADDING):
        check(observed(model, padding, chunk=prefill), model, padding, itself)


@pytest.mark.cross
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2", "smollm3"])
@pytest.mark.parametrize("padding", [[0], [0, 7, 28]], ids=str)
def test_every_chunk_follows_the_prompt_anew(architecture: str, padding: list[int]) -> None:
    model = tiny(architecture)
    observations = observed(model, padding, CHUNKED)
    check(observations, model, padding, lambda request, context: context.split(10), CHUNKED)


@padded_or_not
def test_known_questions_run_instead_each_by_itself(padding: list[int]) -> None:
    model = tiny("llama")
    questions = [prompt(2, 5, seed=1), prompt(2, 3, seed=2)]
    for tasks in (questions, questions[:1]):
        task_tokens = tasks if len(tasks) > 1 else tasks[0]
        for which in (WHOLE, CHUNKED):
            observations = observed(model, padding, which, task_tokens=task_tokens)
            check(
                observations, model, padding, lambda request, _, tasks=tasks: [task[request] for task in tasks], which
            )


def test_one_question_serves_the_whole_batch_and_beams_repeat_theirs() -> None:
    model, question, two = tiny("llama"), prompt(1, 5, seed=1), prompt(2, 5, seed=2)
    check(observed(model, PADDING, task_tokens=question), model, PADDING, lambda request, _: [question[0]])
    cache = keepset.Cache(model, looking(WHOLE), task_tokens=two)
    with shown() as observations:
        generate(model, prompt(2, LENGTH), cache, max_new_tokens=2, num_beams=3, output_logits=False)
    rows = observations[0][WHOLE].statistics["sum"]
    assert rows.shape[0] == 6
    for request in range(2):
        (paid,) = attention(model, prompt(2, LENGTH)[request], two[request])[:1]
        for beam in range(3):
            torch.testing.assert_close(rows[3 * request + beam], paid.sum(1), rtol=1e-4, atol=2e-6)


def test_several_passes_in_one_prefill_are_as_each_alone() -> None:
    fewer = SecondPass(frozenset({ColumnStatistic.MAX}), chunk=10)
    together = observed(tiny("llama"), PADDING, WHOLE, CHUNKED, fewer)
    for which in (WHOLE, CHUNKED, fewer):
        for layer, observation in observed(tiny("llama"), PADDING, which).items():
            columns, alone = together[layer][which], observation[which]
            assert set(columns.statistics) == which.statistics
            assert all(torch.equal(columns.statistics[name], alone.statistics[name]) for name in which.statistics)


def test_bfloat16_and_a_prompt_of_one_token() -> None:
    half, model = copy.deepcopy(tiny("llama")).bfloat16(), tiny("llama")
    check(observed(half, PADDING), half, PADDING, itself)
    with shown() as observations:
        generate(model, prompt(1, 1), keepset.Cache(model, looking(WHOLE, keep=1)), max_new_tokens=1)
    (paid, *_) = attention(model, prompt(1, 1)[0], prompt(1, 1)[0])
    torch.testing.assert_close(observations[0][WHOLE].statistics["max"][0], paid[:, 0])


def test_embeddings_instead_of_ids() -> None:
    model = tiny("llama")
    embeds = model.get_input_embeddings()(prompt(2, LENGTH))
    with torch.no_grad(), shown() as observations:
        model(inputs_embeds=embeds, past_key_values=keepset.Cache(model, looking(WHOLE)), use_cache=True)
    check(observations, model, [0, 0], itself)


# --- the forward around it does not notice


@pytest.mark.cross
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2", "llama_dynamic", "qwen3_moe"])
@padded_or_not
def test_the_model_goes_on_as_if_nothing_had_run(architecture: str, padding: list[int]) -> None:
    model = dynamic() if architecture == "llama_dynamic" else tiny(architecture)
    ids, mask = padded_prompt(padding, LENGTH)
    options: dict[str, Any] = dict(max_new_tokens=6, output_hidden_states=True)
    expected = full(model, ids, mask, **options)
    output = generate(model, ids, keepset.Cache(model, looking(WHOLE, keep=1.0)), mask, **options)
    assert torch.equal(output.sequences, expected.sequences)
    if architecture == "llama":
        repeats = keepset.Cache(model, "kvzip(chunk=10, keep=1.0)")
        assert torch.equal(generate(model, ids, repeats, mask, **options).sequences, expected.sequences)
    for ours, right in zip(output.hidden_states, expected.hidden_states, strict=True):
        assert len(ours) == len(right)
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a * mask[:, -1:, None], b * mask[:, -1:, None], rtol=1e-3, atol=1e-4)


def dynamic() -> Any:
    """A model whose frequencies change with the longest position that it has seen."""
    config = copy.deepcopy(tiny("llama").config)
    config.rope_parameters = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    config.max_position_embeddings = LENGTH + 10
    torch.manual_seed(0)
    model = type(tiny("llama"))(config).eval()
    model.load_state_dict(tiny("llama").state_dict())
    return model


def test_hidden_states_that_a_method_looks_at_are_those_of_the_prompt() -> None:
    model, hidden = tiny("llama"), torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))

    def ahead(*passes: SecondPass) -> list[Tensor]:
        recipe = looking(QueryMoments(0), HiddenMoments(0), *passes)
        with shown() as layers:
            generate(model, prompt(2, LENGTH), keepset.Cache(model, recipe), max_new_tokens=1)
        return [
            part
            for observation in layers.values()
            for of_hidden in [observation[HiddenMoments(0)]]
            for part in (*observation[QueryMoments(0)].ahead(5), of_hidden.mean, of_hidden.queries(hidden, 5))
        ]

    for ours, alone in zip(ahead(WHOLE), ahead(), strict=True):
        assert torch.equal(ours, alone)


def test_the_recorder_and_its_caches() -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    recipe = looking(WHOLE, CHUNKED, keep=9)
    recorder = Recorder(model, recipe.method.traits.needs)
    recorder.prefill(ids)
    shared = keepset.Cache.from_prompt(model, recipe, recorder, recorder.observations)
    alone = keepset.Cache(model, recipe)
    generate(model, ids, alone, max_new_tokens=1)
    assert torch.equal(shared.keep_set.mask(LENGTH), alone.keep_set.mask(LENGTH))
    once, twice = (
        recorder.seconds_for(looking(*passes).method.traits.needs) for passes in ((WHOLE,), (WHOLE, CHUNKED))
    )
    assert recorder.seconds < once < twice


# --- refused


def test_what_is_refused() -> None:
    model, ids = tiny("llama"), prompt(3, LENGTH)

    def refuse(sentence: str, recipe: Any = None, **options: Any) -> None:
        with refusal(sentence):
            generate(model, ids, keepset.Cache(model, recipe or looking(WHOLE), **options), max_new_tokens=1)

    refuse("leave every= out", looking(WHOLE, every=8))
    refuse("leave task_tokens out", "knorm(keep=4)", task_tokens=ids)
    refuse("has no task", task_tokens=[])
    refuse("no tensor of token ids", task_tokens=ids[0])
    refuse("no tensor of token ids", task_tokens=ids[:, :0])
    refuse("no tensor of token ids", task_tokens=[ids, ids.float()])
    refuse("from 0 to 199", task_tokens=ids + 190)
    refuse("one row, or one for every request", task_tokens=ids[:2])


def test_positions_that_a_model_has_not_learned_are_refused() -> None:
    model = copy.deepcopy(tiny("gpt2"))
    with refusal("learned only 512 positions"):
        generate(model, prompt(1, 257), keepset.Cache(model, looking(WHOLE)), max_new_tokens=1)
    generate(model, prompt(1, 257), keepset.Cache(model, looking(CHUNKED)), max_new_tokens=1)


def test_a_sliding_window_with_padding_at_the_right_is_refused() -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 30:] = 0
    cache = keepset.Cache(tiny("gemma3"), looking(WHOLE))
    with refusal("padding at the left"), torch.no_grad():
        tiny("gemma3")(prompt(2, LENGTH), attention_mask=mask, past_key_values=cache, use_cache=True)


@torch.no_grad()
def test_tokens_of_a_call_that_was_refused_run_in_no_pass() -> None:
    model, ids = tiny("llama"), prompt(1, 20)
    whole, chunked = (keepset.Cache(model, "second_pass(keep=8)", prompt_length=20) for _ in range(2))
    model(ids, past_key_values=whole)
    model(ids[:, :12], past_key_values=chunked)
    for wrong in (prompt(1, 8, seed=1).repeat(2, 1), prompt(3, 2)):
        with refusal("batch_repeat_interleave"):
            model(wrong, past_key_values=chunked)
    model(ids[:, 12:], past_key_values=chunked)
    assert same_keep_set(chunked.keep_set, whole.keep_set)
