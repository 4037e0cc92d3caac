"""Saved contexts: what goes on from a file is what goes on in memory, and whatever else is refused in one sentence."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

import keepset
from keepset import KeepsetError, registry
from keepset.contexts import file as context_files
from keepset.contexts.fingerprint import fingerprint
from keepset.core.method import parameter
from keepset.methods.expected_attention import ExpectedAttention
from keepset.recipe import in_full, in_short
from tests.hf.damage import File
from tests.hf.models import GREEDY, LAYOUTS, extended, feed, full, prompt, refusal, tiny
from tests.tiers import FULL

RECIPES = {name: recipe.format(keep=12) for name, recipe in LAYOUTS.items()}


def context(model: Any, recipe: str, ids: Tensor, mask: Tensor | None = None) -> keepset.Cache:
    past = keepset.Cache(model, recipe)
    feed(model, past, ids, torch.ones_like(ids) if mask is None else mask)
    return past


def again(past: keepset.Cache, model: Any, folder: Path) -> keepset.Cache:
    past.save(folder / "context", force=True)
    return keepset.Cache.load(folder / "context", model)


@torch.no_grad()
def answer(model: Any, past: keepset.Cache, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    return model.generate(**past.ask(ids, mask), **{**GREEDY, "max_new_tokens": 8, **options})


def contents(past: keepset.Cache) -> list[Tensor]:
    """All tensors of the compressed layers, in a fixed order."""
    return [column for layer in past.managed_layers.values() for _, column in sorted(layer.store.packed.items())]


def same(ours: list[Tensor], right: list[Tensor]) -> bool:
    return len(ours) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(ours, right, strict=True)
    )


# --- what goes on from a file


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *((RECIPES[layout], torch.bfloat16) for layout in LAYOUTS),
        # Scales are in the model's precision, as `int8` stores them.
        *(("int8(match(knorm), keep=0.5)", dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_in_half_precision_too(tmp_path: Path, recipe: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny("llama")).to(dtype)
    past = context(model, recipe, prompt(2, 30))
    loaded = again(past, model, tmp_path)
    assert same(contents(past), contents(loaded)) and dtype in {column.dtype for column in contents(loaded)}
    assert torch.equal(answer(model, past, prompt(2, 5)).sequences, answer(model, loaded, prompt(2, 5)).sequences)


def test_one_token_and_no_number(tmp_path: Path) -> None:
    model = tiny("llama")
    past = context(model, "knorm(keep=0.5)", prompt(1, 1))
    loaded = again(past, model, tmp_path)
    assert torch.equal(answer(model, past, prompt(1, 1)).sequences, answer(model, loaded, prompt(1, 1)).sequences)
    past.managed_layers[1].store.packed["values"][0] = torch.nan
    assert again(past, model, tmp_path).managed_layers[1].store.packed["values"][0].isnan().all()


def test_the_same_file_whether_it_grew_or_not(tmp_path: Path) -> None:
    # What a store has allocated ahead of its entries is not written.
    model = tiny("llama")
    ids, mask = prompt(1, 30), torch.ones(1, 31, dtype=torch.long)
    past = context(model, RECIPES["head-ragged"], ids)
    feed(model, past, prompt(1, 1), mask)
    past.save(tmp_path / "grown")
    past.fork().save(tmp_path / "exact")
    assert (tmp_path / "grown").read_bytes() == (tmp_path / "exact").read_bytes()
    assert (tmp_path / "grown").stat().st_size < past.fork().nbytes + 20_000


# --- asking


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_context_that_keeps_all_answers_as_the_model(tmp_path: Path, layout: str) -> None:
    """With beams, too, once the cache has a request for each."""
    model, ids, question = tiny("qwen3"), prompt(1, 40), prompt(1, 6, 2)
    loaded = again(context(model, LAYOUTS[layout].format(keep=1.0), ids), model, tmp_path)
    for beams in (1, 3):
        options: dict[str, Any] = dict(max_new_tokens=8, num_beams=beams)
        expected = full(model, torch.cat([ids, question], 1), **options).sequences[:, 40:]
        model.set_attn_implementation("keepset")
        if beams > 1:
            with refusal("holds 1 requests, and the input has 3: call cache.batch_repeat_interleave"):
                answer(model, loaded, question, **options)
        inputs = loaded.ask(question)
        inputs["past_key_values"].batch_repeat_interleave(beams)
        with torch.no_grad():
            said = model.generate(**inputs, **{**GREEDY, **options})
        assert torch.equal(said.sequences, expected)


def test_rows_that_do_not_fit() -> None:
    past = context(tiny("llama"), "knorm(keep=12)", prompt(2, 20))
    for ids in (prompt(3, 4), prompt(1, 4), prompt(2, 0)):
        with refusal("and the cache 2 requests: give at least one token for each of them"):
            past.ask(ids)


# --- forks


# --- what is refused


def refused(path: Path, words: str, model: Any = None) -> None:
    """Check that a file is refused for a model or, without one, by what it says of itself."""
    with refusal(words):
        context_files.header(path) if model is None else keepset.Cache.load(path, model)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "context"
    context(tiny("llama"), RECIPES["head-ragged"], prompt(1, 30)).save(path)
    return path


def rewritten(path: Path, sealed: bool = False, **changes: Any) -> None:
    file = File.of(path.read_bytes())
    path.write_bytes(replace(file, metadata={**file.metadata, **changes}, sealed=sealed).content)


def test_what_a_file_says_of_itself(path: Path) -> None:
    header, metadata = context_files.header(path), File.of(path.read_bytes()).metadata
    name = tiny("llama").config.name_or_path
    assert (header.recipe, header.model, header.tokens) == (RECIPES["head-ragged"], name, 30)
    assert (metadata["format"], metadata["keepset"]) == (9, keepset.__version__)
    assert [entry.name for entry in path.parent.iterdir()] == ["context"]


CHANGES = [
    ("progress", {}),
    ("progress", None),
    ("layers", 9),
    ("layers", "4"),
    ("fingerprint", "x"),
    ("recipe", "knorm"),
]
FOREIGN = safetensors.torch.save({"weight": torch.zeros(3)})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((content, "is damaged or no saved context: give a file that") for content in (b"", b"words", b"\xff" * 100)),
        (FOREIGN, "is no saved context: give a file that"),
        (None, "There is no file"),
        *(({"format": version}, f"has format {version} of saved contexts, and this") for version in (8, 10)),
        *(({name: value}, "is damaged: build it again") for name, value in CHANGES),
    ],
)
def test_no_context(path: Path, content: bytes | dict[str, Any] | None, words: str) -> None:
    if content is None:
        refused(path.parent, "is a folder: give a file that", tiny("llama"))
        os.mkfifo(path.parent / "pipe")
        refused(path.parent / "pipe", "is no regular file: give a file that", tiny("llama"))
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        rewritten(path, **content)
    refused(path, words, tiny("llama"))


def test_cut_off_and_any_damaged_byte(path: Path) -> None:
    whole, draw = path.read_bytes(), random.Random(0)
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, "is damaged", tiny("llama"))
    for _ in range(80 if FULL else 10):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(KeepsetError):  # in a sentence that may quote what is damaged
            keepset.Cache.load(path, tiny("llama"))


def later(*changes: tuple[str, Any]) -> type[keepset.Method]:
    """Expected attention with other defaults than today's, or with more parameters."""
    fields = [(name, float, parameter(default)) for name, default in changes]
    return dataclasses.make_dataclass("Later", fields, bases=(ExpectedAttention,), frozen=True)


def test_it_means_the_same_when_a_default_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, mask = tiny("llama"), torch.ones(2, 20, dtype=torch.long)
    past = context(model, "adakv(expected_attention(future=16, buffer=6), keep=12, every=4)", prompt(2, 20))
    past.save(tmp_path / "context")
    in_full.cache_clear()
    in_short.cache_clear()
    monkeypatch.setitem(registry._methods, "expected_attention", later(("epsilon", 0.5)))
    said = "adakv(expected_attention(future=16, epsilon=0.01, buffer=6), keep=12, every=4)"
    loaded = keepset.Cache.load(tmp_path / "context", model)
    assert str(loaded.recipe) == context_files.header(tmp_path / "context").recipe == said
    mask = extended(mask, 29)
    assert torch.equal(*(feed(model, cache, prompt(2, 9, 1), mask) for cache in (past, loaded)))
    assert len(past.events) > 1 and same(contents(past), contents(loaded))
    in_full.cache_clear()
    in_short.cache_clear()


def test_it_is_refused_where_nobody_knows_what_a_new_parameter_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = context(tiny("llama"), "expected_attention(future=16, keep=12)", prompt(2, 30))
    past.save(path, force=True)
    in_short.cache_clear()
    monkeypatch.setitem(registry._methods, "expected_attention", later(("epsilon", 0.01), ("temper", 0.5)))
    said = "is of another version of keepset, build it again.*does not say temper, whose default may have been another."
    for model in (tiny("llama"), None):
        refused(path, said, model)
    in_short.cache_clear()


def test_another_model(path: Path, tmp_path: Path) -> None:
    half, tuned = copy.deepcopy(tiny("llama")).bfloat16(), copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight += 1e-3
    for model, words in (
        (tiny("qwen2"), "whose architecture differs: LlamaForCausalLM there, Qwen2ForCausalLM here"),
        (half, "whose precision differs: float32 there, bfloat16 here; load that model"),
        (tiny("llama_yarn"), "whose rotation differs"),
        (tiny("llama_mha"), "whose weights differ; load that model"),
        (tuned, "whose weights differ"),
    ):
        refused(path, words, model)
    tiny("llama").save_pretrained(tmp_path / "model")
    loaded_again = type(tiny("llama")).from_pretrained(tmp_path / "model")
    assert keepset.Cache.load(path, loaded_again).get_seq_length() == 30
    # A damaged name breaks no line and steers no terminal.
    rewritten(path, sealed=True, fingerprint={**fingerprint(tiny("llama")), "architecture": "Llama\n\x1bLM"})
    refused(path, re.escape("architecture differs: Llama\\n\\x1bLM there, LlamaForCausalLM here"), tiny("llama"))


def begun_prompt() -> keepset.Cache:
    begun = keepset.Cache(tiny("llama"), "knorm(keep=12)", prompt_length=40)
    feed(tiny("llama"), begun, prompt(1, 20), torch.ones(1, 20, dtype=torch.long))
    return begun


def broken_off() -> keepset.Cache:
    model = tiny("llama")
    past = context(model, "knorm(keep=12)", prompt(1, 20))

    def stop(*_: Any) -> None:
        raise RuntimeError

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError):
        feed(model, past, prompt(1, 4), torch.ones(1, 24, dtype=torch.long))
    handle.remove()
    return past


def with_another_layer() -> keepset.Cache:
    class Another(LinearAttentionLayer):
        pass

    past = of_model(tiny("lfm2"))
    past.layers[0].__class__ = Another
    return past


def of_model(model: Any) -> keepset.Cache:
    return context(model, "knorm(keep=12)", prompt(1, 20))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: keepset.Cache(tiny("llama"), "knorm(keep=12)"), "does not hold a whole prompt yet: run the model on"),
        (begun_prompt, "does not hold a whole prompt yet: run the model on all of it first"),
        (broken_off, "A forward with this cache ended before its last layer"),
        (with_another_layer, "has a Another among the layers of its cache, and keepset saves only those of keys and"),
        (lambda: of_model(tiny("mistral_window")), "so keepset has nothing to save"),
        (lambda: of_model(copy.deepcopy(tiny("llama"))), "The model of this cache is gone"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*compresses nothing")
def test_what_cannot_be_saved(tmp_path: Path, make: Any, words: str) -> None:
    past = make()
    gc.collect()
    with refusal(words):
        past.save(tmp_path / "context")
    if "prompt" in words or "forward" in words:
        with refusal(words):
            past.ask(prompt(1, 3))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays_unless_told_otherwise(path: Path) -> None:
    before, past = path.read_bytes(), of_model(tiny("llama"))
    with refusal("exists: save to another file, or replace it with force=True"):
        past.save(path)
    for target in (path.parent, path.parent / "absent" / "context", Path()):
        with refusal("cannot be written"):
            past.save(target)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    past.save(path, force=True)
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    ("path", "model", "sentence"),
    [
        (lambda path: path, None, "takes a model, and this is None"),
        (lambda path: path, "a/name", "takes a model, and this is 'a/name'"),
        (lambda path: tiny("llama"), "file", "was given LlamaForCausalLM as the path: give the file first"),
    ],
)
def test_arguments_of_other_kinds_are_not_called_damage(path: Any, model: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(KeepsetError, match=sentence):
        keepset.Cache.load(path(tmp_path / "no file"), model)
