"""KVzip's passes: scores against a softmax written out over what the model's own queries and keys are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import keepset
from keepset import Observation
from keepset.hf.second_pass import Repeat
from keepset.kernels.columns import ColumnStatistic
from keepset.kernels.second_pass import PackedSequence, SoftmaxScope, second_pass_attention
from keepset.kernels.softmax import Softmax
from keepset.lab.embedded import embedded_folder
from tests.hf.models import PLAIN, generate, left_padded, padded_or_not, prompt, refusal, tiny, tokenizer
from tests.methods.naive import softmax

LENGTH, PADDING = 36, [0, 7]
WHOLE = "\n\nRepeat the previous context exactly."
PART = "\n\nRepeat the part of the previous context exactly, starting with "
TURN, OPENING = ".A:", "U:"
"""Of the tiny models' chat template."""


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
    plain.set_attn_implementation("plain")
    by_layer: dict[int, list[dict[int, list[float]]]] = {}
    for tokens, entries in passes(model, context, chunk, opening, turn):
        PLAIN.clear()
        plain(torch.tensor([context + tokens]), use_cache=False)
        first = range(opening or min(4, entries.start))
        for layer, (queries, keys, scaling) in PLAIN.items():
            every = keys.repeat_interleave(len(queries) // len(keys), 0).double()
            logits = (queries.double() @ every.transpose(1, 2) * scaling).tolist()
            heads = by_layer.setdefault(layer, [{} for _ in logits])
            for head, rows in zip(heads, logits, strict=True):
                for at in range(len(context), len(context) + len(tokens)):
                    visible = [*first, *entries, *range(len(context), at + 1)]
                    paid = softmax([rows[at][index] for index in visible])
                    for index, weight in zip(visible[len(first) :], paid[len(first) :], strict=True):
                        if index in entries:
                            head.setdefault(index, []).append(weight)
    return by_layer


def observed(model: Any, recipe: str, ids: Tensor, padding: list[int]) -> tuple[dict[int, Observation], keepset.Cache]:
    found: dict[int, Observation] = {}
    cache = keepset.Cache(
        model, recipe, observer=lambda observation, budget, kept: found.update({observation.layer: observation})
    )
    ids, mask = left_padded(ids, padding)
    generate(model, ids, cache, mask, max_new_tokens=1)
    return found, cache


def worth(statistic: str, column: list[float], ran: int) -> float:
    power = 2 if statistic == "rms" else 1
    return max(column) if statistic == "max" else (sum(number**power for number in column) / ran) ** (1 / power)


def check(
    model: Any, recipe: str, ids: Tensor, padding: list[int], chunk: int, statistic: str = "max", **options: Any
) -> None:
    """Scores of every layer, request, KV head and entry."""
    found, cache = observed(model, recipe, ids, padding)
    tolerance = dict(rtol=1e-4, atol=2e-6) if model.dtype == torch.float32 else dict(rtol=0.05, atol=0.02)
    assert found
    for request, pad in enumerate(padding):
        context, opening = ids[request, pad:].tolist(), options.get("opening", 0)
        by_layer = received(model, context, chunk, **options)
        ran = sum(len(tokens) for tokens, _ in passes(model, context, chunk, opening, options.get("turn", TURN)))
        for layer, observation in found.items():
            scores = cache.recipe.method.score(observation)[request]
            group = len(by_layer[layer]) // len(scores)
            for head, row in enumerate(scores):
                heads = by_layer[layer][head * group : (head + 1) * group]
                expected = [max(worth(statistic, member[entry], ran) for member in heads) for entry in sorted(heads[0])]
                assert row[:opening].isinf().all() and sorted(heads[0])[0] == opening
                torch.testing.assert_close(row[opening : opening + len(expected)].tolist(), expected, **tolerance)


@pytest.mark.full
@pytest.mark.cross
@pytest.mark.parametrize("chunk", [5, 12, 30, 100])
@padded_or_not
def test_scores_of_chunks(chunk: int, padding: list[int]) -> None:
    check(tiny("llama"), f"kvzip(chunk={chunk}, keep=9)", prompt(2, LENGTH), padding, chunk)


@pytest.mark.parametrize(
    "architecture",
    ["bfloat16", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama_mha", "llama_mqa", "gemma3"))],
)
def test_scores_of_architectures(architecture: str) -> None:
    model = copy.deepcopy(tiny("llama")).bfloat16() if architecture == "bfloat16" else tiny(architecture)
    check(model, "kvzip(chunk=20, keep=9)", prompt(2, LENGTH), PADDING, 20)


@pytest.mark.parametrize("statistic", ["mean", "rms"])
def test_other_statistics(statistic: str) -> None:
    recipe = f"second_pass(task='repeat', statistic='{statistic}', aggregate_group='max', chunk=12, keep=9)"
    check(tiny("llama"), recipe, prompt(1, LENGTH), [0], 12, statistic)


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
    for layer, request, head in itertools.product(range(2), repeat=3):
        assert cache.keep_set.positions(layer, request, head)[: len(opening)].tolist() == [0, 1]
    check(model, "kvzip(keep=1.0)", torch.tensor([opening]), [0], 2)  # which is repeated if nothing follows it


def test_without_a_chat_template_the_turn_is_said_in_words() -> None:
    model = copy.deepcopy(tiny("llama"))
    model.config.name_or_path = str(tokenizer("plain"))
    check(model, "kvzip(chunk=20, keep=9)", prompt(2, LENGTH), PADDING, 20, turn="\n\nAnswer: ")


@pytest.mark.full
def test_the_words_of_a_real_model() -> None:
    model = copy.copy(tiny("llama"))
    model.config = copy.copy(model.config)
    model.config.name_or_path = str(embedded_folder())
    model.get_input_embeddings = lambda: None
    words, spoken = Repeat.of(model), AutoTokenizer.from_pretrained(model.config.name_or_path)
    assert spoken.decode(words.whole) == WHOLE and spoken.decode(words.part) == PART
    assert spoken.decode(words.turn) == "<|im_end|>\n<|im_start|>assistant\n"
    chat = spoken.apply_chat_template([{"role": "user", "content": "A text."}])["input_ids"]
    assert spoken.decode(chat[words.prefix(torch.tensor(chat)) :]).startswith("A text.")
    assert words.prefix(torch.tensor(spoken("A text.")["input_ids"])) == 0


@padded_or_not
def test_the_best_of_all_heads_and_layers_stay(padding: list[int]) -> None:
    model, ids = tiny("llama"), prompt(2, LENGTH)
    _, cache = observed(model, "kvzip(chunk=20, sinks=0, keep=0.3)", ids, padding)
    assert cache.nbytes < 0.5 * observed(model, "kvzip(keep=1.0)", ids, padding)[1].nbytes
    for request, pad in enumerate(padding):
        by_layer = received(model, ids[request, pad:].tolist(), 20)
        scores = {
            (layer, head, entry): max(max(heads[2 * head + member][entry]) for member in range(2))
            for layer, heads in by_layer.items()
            for head in range(2)
            for entry in heads[0]
        }
        best = sorted(scores, key=scores.__getitem__, reverse=True)
        count = int(0.3 * 4 * (LENGTH - pad))
        assert scores[best[count - 1]] - scores[best[count]] > 1e-6
        kept = cache.keep_set
        pairs = itertools.product(range(2), repeat=2)
        assert {(*at, p) for at in pairs for p in kept.positions(at[0], request, at[1]).tolist()} == set(best[:count])
    found, cache = observed(model, "kvzip(uniform=True, sinks=0, keep=9)", ids, padding)
    for layer, observation in found.items():
        for head, row in enumerate(cache.recipe.method.score(observation)[0].tolist()):
            best_of_head = sorted(sorted(range(LENGTH), key=lambda entry, row=row: -row[entry])[:9])
            assert cache.keep_set.positions(layer, 0, head).tolist() == best_of_head


def test_what_is_refused(tmp_path: Path) -> None:
    model, ids = copy.deepcopy(tiny("llama")), prompt(2, LENGTH)
    with refusal("leave task_tokens out"):
        keepset.Cache(model, "kvzip(keep=9)", task_tokens=ids)
    with refusal("give token ids"), torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        model(inputs_embeds=embeds, past_key_values=keepset.Cache(model, "kvzip(keep=9)"), use_cache=True)
    for name in (str(tmp_path), ""):
        model.config.name_or_path = name
        with refusal("has none: load the model from a folder"):
            keepset.Cache(model, "kvzip(keep=9)")
    model.config.name_or_path = str(embedded_folder())
    with refusal("give the model its own"):
        keepset.Cache(model, "kvzip(keep=9)")


def test_entries_that_get_nothing_beside_what_is_left_out_are_no_nan() -> None:
    """All attention goes to an entry that the statistics leave out: too little of the rest to be told from nothing."""
    keys = torch.zeros(1, 6, 4)
    keys[0, 1, 0] = 400.0
    queries = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(2, 3, 4)
    new = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    sequences = [PackedSequence(3, SoftmaxScope(0, 3, 6))]
    output, statistics = second_pass_attention(
        queries, (keys, keys), new, Softmax(1.0), [ColumnStatistic.MAX], sequences
    )
    assert output[..., 0].eq(400.0).all() and statistics["max"].eq(0).all()
