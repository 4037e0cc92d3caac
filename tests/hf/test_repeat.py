"""KVzip's passes: scores against a softmax written out over what the model's own queries and keys are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoTokenizer

import keepset
from keepset import Observation, models
from keepset.hf.repeat import Repeat
from keepset.kernels.columns import ColumnStatistic
from keepset.kernels.second_pass import PackedSequence, SoftmaxScope, second_pass_attention
from tests.hf.models import generate, left_padded, padded_prompt, prompt, tiny, tokenizer
from tests.methods.naive import softmax

LENGTH, PADDING = 36, [0, 7]
WHOLE = "\n\nRepeat the previous context exactly."
PART = "\n\nRepeat the part of the previous context exactly, starting with "
TURN, OPENING = ".A:", "U:"
"""Of the tiny models' chat template."""

watched: dict[int, tuple[Tensor, Tensor, float]] = {}
"""Queries, keys and scaling of every layer of the newest forward."""


def _watching(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Plain causal attention, in a sliding window where there is one, that remembers what it looked at."""
    group, n = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    watched[module.layer_idx] = query[0].double(), key[0].double(), scaling
    at = torch.arange(n)
    distance = at[:, None] - at
    visible = (distance >= 0) & (distance < (kwargs.get("sliding_window") or n))
    weights = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("watching", _watching)


def letters(model: Any, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(model.config.name_or_path).encode(text, add_special_tokens=False)


def passes(model: Any, context: list[int], chunk: int, opening: int, turn: str) -> Iterator[tuple[list[int], range]]:
    """The tokens after the context, and the entries that they are asked about."""
    for start in range(opening, len(context), chunk):
        stop = min(start + chunk, len(context))
        words = letters(model, WHOLE)
        if start > opening:
            words = letters(model, PART) + context[max(start - 8, start - chunk) : start]
        yield words + letters(model, turn) + context[start:stop], range(start, stop)


@torch.no_grad()
def received(
    model: Any, context: list[int], chunk: int, opening: int = 0, turn: str = TURN
) -> dict[int, list[dict[int, list[float]]]]:
    """All that each entry receives, by layer and query head."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("watching")
    told: dict[int, list[dict[int, list[float]]]] = {}
    for tokens, entries in passes(model, context, chunk, opening, turn):
        watched.clear()
        plain(torch.tensor([context + tokens]), use_cache=False)
        first = range(opening or min(4, entries.start))
        for layer, (queries, keys, scaling) in watched.items():
            logits = (queries @ keys.transpose(1, 2) * scaling).tolist()
            heads = told.setdefault(layer, [{} for _ in logits])
            for head, rows in zip(heads, logits, strict=True):
                for at in range(len(context), len(context) + len(tokens)):
                    seen = [*first, *entries, *range(len(context), at + 1)]
                    paid = softmax([rows[at][place] for place in seen])
                    for place, weight in zip(seen[len(first) :], paid[len(first) :], strict=True):
                        if place in entries:
                            head.setdefault(place, []).append(weight)
    return told


def observed(model: Any, recipe: str, ids: Tensor, padding: list[int]) -> tuple[dict[int, Observation], keepset.Cache]:
    """Return what the method saw of each layer, and the cache."""
    found: dict[int, Observation] = {}
    cache = keepset.Cache(model, recipe, observer=lambda seen, budget, kept: found.update({seen.layer: seen}))
    ids, mask = left_padded(ids, padding)
    generate(model, ids, cache, mask, max_new_tokens=1)
    return found, cache


def check(model: Any, recipe: str, ids: Tensor, padding: list[int], chunk: int, **options: Any) -> None:
    """Scores of every layer, request, KV head and entry."""
    found, cache = observed(model, recipe, ids, padding)
    tolerance = dict(rtol=1e-4, atol=2e-6) if model.dtype == torch.float32 else dict(rtol=0.05, atol=0.02)
    assert found
    for request, pad in enumerate(padding):
        told = received(model, ids[request, pad:].tolist(), chunk, **options)
        for layer, observation in found.items():
            scores = cache.recipe.method.score(observation)[request]
            group = len(told[layer]) // len(scores)
            for head, row in enumerate(scores):
                heads = told[layer][head * group : (head + 1) * group]
                expected = [max(max(each[entry]) for each in heads) for entry in sorted(heads[0])]
                opening = options.get("opening", 0)
                assert row[:opening].isinf().all() and sorted(heads[0])[0] == opening
                torch.testing.assert_close(row[opening : opening + len(expected)].tolist(), expected, **tolerance)


@pytest.mark.full
@pytest.mark.cross
@pytest.mark.parametrize("chunk", [5, 12, 30, 100])
@pytest.mark.parametrize("padding", [[0, 0], PADDING], ids=["whole", "padded"])
def test_scores_of_chunks(chunk: int, padding: list[int]) -> None:
    check(tiny("llama"), f"kvzip(chunk={chunk}, keep=9)", prompt(2, LENGTH), padding, chunk)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama_mha", "llama_mqa", "llama_odd_head", "qwen3", "gpt2", "gemma3"])
def test_scores_of_architectures(architecture: str) -> None:
    check(tiny(architecture), "kvzip(chunk=20, keep=9)", prompt(2, LENGTH), PADDING, 20)


def test_scores_in_bfloat16() -> None:
    check(copy.deepcopy(tiny("llama")).bfloat16(), "kvzip(chunk=20, keep=9)", prompt(2, LENGTH), PADDING, 20)


@pytest.mark.parametrize("length", [1, 2, 20])
def test_a_chunk_of_zero_is_the_whole_prompt(length: int) -> None:
    check(tiny("llama"), "kvzip(chunk=0, keep=1.0)", prompt(1, length), [0], length)


def test_a_chat_templates_opening_is_no_part_of_the_context_and_stays() -> None:
    model = tiny("llama")
    ids = prompt(2, LENGTH)
    opening = letters(model, OPENING)
    ids[:, : len(opening)] = torch.tensor(opening)
    for chunk in (12, 100):
        check(model, f"kvzip(chunk={chunk}, sinks=0, keep=4)", ids, [0, 0], chunk, opening=len(opening))
    _, cache = observed(model, "kvzip(sinks=0, keep=4)", ids, [0, 0])
    for layer in cache.keep_set.layers:
        for request in range(2):
            for head in range(2):
                assert cache.keep_set.positions(layer, request, head)[: len(opening)].tolist() == [0, 1]


def test_a_prompt_of_nothing_but_the_opening_is_repeated() -> None:
    opening = torch.tensor([letters(tiny("llama"), OPENING)])
    check(tiny("llama"), "kvzip(keep=1.0)", opening, [0], 2)


def test_without_a_chat_template_the_turn_is_said_in_words() -> None:
    model = copy.deepcopy(tiny("llama"))
    model.config.name_or_path = str(tokenizer("plain"))
    check(model, "kvzip(chunk=20, keep=9)", prompt(2, LENGTH), PADDING, 20, turn="\n\nAnswer: ")


def test_the_words_of_a_real_model() -> None:
    model = copy.copy(tiny("llama"))
    model.config = copy.copy(model.config)
    model.config.name_or_path = str(models.embedded_folder())
    model.get_input_embeddings = lambda: None
    words, spoken = Repeat.of(model), AutoTokenizer.from_pretrained(model.config.name_or_path)
    assert spoken.decode(words.whole) == WHOLE and spoken.decode(words.part) == PART
    assert spoken.decode(words.turn) == "<|im_end|>\n<|im_start|>assistant\n"
    chat = spoken.apply_chat_template([{"role": "user", "content": "A text."}])["input_ids"]
    assert spoken.decode(chat[words.prefix(torch.tensor(chat)) :]).startswith("A text.")
    assert words.prefix(torch.tensor(spoken("A text.")["input_ids"])) == 0


@pytest.mark.parametrize("statistic", ["mean", "rms"])
def test_other_statistics(statistic: str) -> None:
    recipe = f"second_pass(task='repeat', statistic='{statistic}', aggregate_group='max', chunk=12, keep=9)"
    model, ids = tiny("llama"), prompt(1, LENGTH)
    found, cache = observed(model, recipe, ids, [0])
    context = ids[0].tolist()
    told = received(model, context, 12)
    ran = sum(len(tokens) for tokens, _ in passes(model, context, 12, 0, TURN))
    for layer, observation in found.items():
        scores = cache.recipe.method.score(observation)[0]
        for head in range(2):
            for entry in range(LENGTH):
                columns = [each[entry] for each in told[layer][2 * head : 2 * head + 2]]
                mean = max(sum(column) / ran for column in columns)
                rms = max((sum(number**2 for number in column) / ran) ** 0.5 for column in columns)
                expected = mean if statistic == "mean" else rms
                torch.testing.assert_close(float(scores[head, entry]), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("padding", [[0, 0], PADDING], ids=["whole", "padded"])
def test_the_best_of_all_heads_and_layers_stay(padding: list[int]) -> None:
    model, ids = tiny("llama"), prompt(2, LENGTH)
    _, cache = observed(model, "kvzip(chunk=20, sinks=0, keep=0.3)", ids, padding)
    assert cache.nbytes < 0.5 * observed(model, "kvzip(keep=1.0)", ids, padding)[1].nbytes
    for request, pad in enumerate(padding):
        told = received(model, ids[request, pad:].tolist(), 20)
        scores = {
            (layer, head, entry): max(max(heads[2 * head + each][entry]) for each in range(2))
            for layer, heads in told.items()
            for head in range(2)
            for entry in heads[0]
        }
        best = sorted(scores, key=scores.__getitem__, reverse=True)
        wanted = int(0.3 * 4 * (LENGTH - pad))
        assert scores[best[wanted - 1]] - scores[best[wanted]] > 1e-6
        kept = {
            (layer, head, entry)
            for layer in range(2)
            for head in range(2)
            for entry in cache.keep_set.positions(layer, request, head).tolist()
        }
        assert kept == set(best[:wanted])


def test_uniform_heads_keep_the_same_number_each() -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    found, cache = observed(model, "kvzip(uniform=True, sinks=0, keep=9)", ids, [0])
    for layer, observation in found.items():
        for head, row in enumerate(cache.recipe.method.score(observation)[0].tolist()):
            best = sorted(sorted(range(LENGTH), key=lambda entry: -row[entry])[:9])
            assert cache.keep_set.positions(layer, 0, head).tolist() == best


def test_the_model_goes_on_as_if_nothing_had_run() -> None:
    model, (ids, mask) = tiny("llama"), padded_prompt(PADDING, LENGTH)
    ours = generate(model, ids, keepset.Cache(model, "kvzip(chunk=10, keep=1.0)"), mask, max_new_tokens=6)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    assert torch.equal(ours.sequences, generate(plain, ids, None, mask, max_new_tokens=6).sequences)


def test_what_is_refused(tmp_path: Path) -> None:
    model, ids = copy.deepcopy(tiny("llama")), prompt(2, LENGTH)
    with pytest.raises(keepset.KeepsetError, match="leave task_tokens out"):
        keepset.Cache(model, "kvzip(keep=9)", task_tokens=ids)
    with pytest.raises(keepset.KeepsetError, match="give token ids"), torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        model(inputs_embeds=embeds, past_key_values=keepset.Cache(model, "kvzip(keep=9)"), use_cache=True)
    for name in (str(tmp_path), ""):
        model.config.name_or_path = name
        with pytest.raises(keepset.KeepsetError, match="has none: load the model from a folder"):
            keepset.Cache(model, "kvzip(keep=9)")
    model.config.name_or_path = str(models.embedded_folder())
    with pytest.raises(keepset.KeepsetError, match="give the model its own"):
        keepset.Cache(model, "kvzip(keep=9)")


def test_entries_that_get_nothing_beside_what_is_left_out_are_no_nan() -> None:
    """All attention goes to an entry that the statistics leave out: too little of the rest to be told from nothing."""
    keys = torch.zeros(1, 6, 4)
    keys[0, 1, 0] = 400.0
    queries = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(2, 3, 4)
    own = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    sequences = [PackedSequence(3, SoftmaxScope(0, 3, 6))]
    output, statistics = second_pass_attention(queries, (keys, keys), own, 1.0, [ColumnStatistic.MAX], sequences)
    assert output[..., 0].eq(400.0).all() and statistics["max"].eq(0).all()
