"""Saved contexts: what goes on from a file is what goes on in memory, and whatever else is refused in one sentence."""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

import keepset
from keepset import KeepsetError, registry
from keepset.core.method import parameter
from keepset.hf import saved
from keepset.hf.fingerprint import fingerprint
from keepset.methods.expected_attention import ExpectedAttention
from keepset.recipe import in_full, in_short
from tests.hf.models import (
    GREEDY,
    LAYOUTS,
    extended,
    feed,
    full,
    generate,
    left_padded,
    padded_prompt,
    prompt,
    same_keep_set,
    tiny,
)
from tests.tiers import examples

RECIPES = {
    **{name: recipe.format(keep=12) for name, recipe in LAYOUTS.items()},
    "columns": "h2o(keep=12)",
    "moments": "expected_attention(future=16, keep=12)",
    "regions": "ams(snapkv(window=4), window=5, kernel=3, sinks=2, recent=4, keep=12)",
    "statistics": "qfilter(keep=12)",
    "chance": "random(keep=12)",
    "second pass": "second_pass(keep=12)",
    "all layers at once": "kvcompose(keep=0.5)",
    "no budget": "gvote(samples=2, future=8)",
}
AGAIN = {
    "dense": "snapkv(window=5, kernel=3, keep=12, every=4)",
    "layer-ragged": "pyramid(snapkv(window=4), keep=12, every=3)",
    "head-ragged": "adakv(snapkv(window=4), keep=12, every=5)",
    "moments": "expected_attention(future=16, buffer=6, keep=12, every=4)",
    "later": "tova(keep=8, prefill=False, every=6)",
    "protected": "snapkv(window=4, keep=20, every=3, protect_prompt=True)",
    "regions": "ams(snapkv(window=4), window=5, kernel=3, sinks=2, recent=4, keep=12, every=4)",
}


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
    return [column for layer in past.kept_layers.values() for _, column in sorted(layer.store.packed.items())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(ours, theirs, strict=True)
    )


def check_grown(past: keepset.Cache, loaded: keepset.Cache) -> None:
    """Compare entries to the bit; sums of queries up to rounding, which a store's free places can alter."""
    for kept, other in zip(past.kept_layers.values(), loaded.kept_layers.values(), strict=True):
        ours, theirs = kept.store.packed, other.store.packed
        names = sorted(ours)
        assert names == sorted(theirs)
        entries = {"keys", "values", "positions"}
        assert same(*([columns[name] for name in names if name in entries] for columns in (ours, theirs)))
        for name in set(names) - entries:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7, equal_nan=True)


# --- what goes on from a file


@examples(40, derandomize=False, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_loaded_context_goes_on_as_the_one_in_memory(tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["llama", "llama_mqa", "llama_mha", "llama_odd_head", "gemma3", "gpt2"]))
    recipe = data.draw(st.sampled_from([*RECIPES.values(), *AGAIN.values()]))
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(14, 40))
    if "statistics" in recipe or name == "gpt2":
        recipe = LAYOUTS["head-ragged"].format(keep=0.5)
    model = tiny(name)
    ids, mask = left_padded(
        prompt(batch, length, 1), data.draw(st.lists(st.integers(0, 6), min_size=batch, max_size=batch))
    )
    past = context(model, recipe, ids, mask)
    for said in data.draw(st.lists(st.integers(1, 5), max_size=3)):  # what is said before it is saved
        turn, turn_mask = left_padded(
            prompt(batch, said, said), data.draw(st.lists(st.integers(0, said - 1), min_size=batch, max_size=batch))
        )
        mask = torch.cat([mask, turn_mask], 1)
        feed(model, past, turn, mask)
    loaded = again(past, model, tmp_path)

    assert str(loaded.recipe) == str(past.recipe) == str(keepset.Recipe.parse(recipe))
    assert loaded.get_seq_length() == past.get_seq_length() == mask.shape[1]
    assert same(contents(past), contents(loaded))
    if name != "gemma3":  # in memory a sliding window is a view of all that has passed
        assert loaded.nbytes == past.fork().nbytes
    for ours, theirs in zip(past.events[-1:], loaded.events, strict=True):
        assert (ours.length, ours.entries, ours.kept) == (theirs.length, theirs.entries, theirs.kept)
        assert same_keep_set(ours.keep_set, theirs.keep_set)
    asked = prompt(batch, 3, 2)
    for each in (past, loaded):
        assert torch.equal(each.ask(asked)["attention_mask"], extended(mask, mask.shape[1] + 3))
    for said in (1, 7, 1, 1, 4):
        turn = prompt(batch, said, 9)
        mask = extended(mask, mask.shape[1] + said)
        assert torch.equal(feed(model, past, turn, mask), feed(model, loaded, turn, mask))
    check_grown(past, loaded)
    assert [event.length for event in past.events][-len(loaded.events) :] == [event.length for event in loaded.events]


@pytest.mark.parametrize("recipe", AGAIN.values(), ids=AGAIN)
def test_compression_goes_on(tmp_path: Path, recipe: str) -> None:
    model, mask = tiny("llama"), torch.ones(2, 20, dtype=torch.long)
    past = context(model, recipe, prompt(2, 20))
    mask = extended(mask, 27)
    feed(model, past, prompt(2, 7, 1), mask)
    loaded, events = again(past, model, tmp_path), len(past.events)
    for turn in range(14):
        mask = extended(mask, mask.shape[1] + 1)
        logits = [feed(model, each, prompt(2, 1, turn), mask) for each in (past, loaded)]
        assert torch.equal(*logits)
    assert len(past.events) > events
    assert [event.length for event in loaded.events[-2:]] == [event.length for event in past.events[-2:]]
    assert same(contents(past), contents(loaded))


@pytest.mark.parametrize("after", [1, 2, 4, 5])
def test_layers_that_have_added_up_more_queries_than_others(tmp_path: Path, after: int) -> None:
    """A layer with more entries lets more queries wait, so a file knows of each layer how far it has come."""
    model, mask = tiny("llama_mha"), torch.ones(1, 18, dtype=torch.long)
    past = context(model, "pyramid(snapkv(window=4), keep=12, every=3)", prompt(1, 18))
    for turn in range(after):
        mask = extended(mask, mask.shape[1] + 1)
        feed(model, past, prompt(1, 1, turn), mask)
    loaded = again(past, model, tmp_path)
    for turn in range(8):
        mask = extended(mask, mask.shape[1] + 1)
        assert torch.equal(*(feed(model, each, prompt(1, 1, 20 + turn), mask) for each in (past, loaded)))
    assert same(contents(past), contents(loaded)) and len(past.events) > 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_half_precision_too(tmp_path: Path, layout: str) -> None:
    model = copy.deepcopy(tiny("llama")).bfloat16()
    past = context(model, RECIPES[layout], prompt(2, 30))
    loaded = again(past, model, tmp_path)
    assert contents(loaded)[0].dtype == torch.bfloat16
    assert torch.equal(answer(model, past, prompt(2, 5)).sequences, answer(model, loaded, prompt(2, 5)).sequences)


def test_a_context_of_one_token(tmp_path: Path) -> None:
    model = tiny("llama")
    past = context(model, "knorm(keep=0.5)", prompt(1, 1))
    loaded = again(past, model, tmp_path)
    assert torch.equal(answer(model, past, prompt(1, 1)).sequences, answer(model, loaded, prompt(1, 1)).sequences)


def test_not_a_number_stays_one(tmp_path: Path) -> None:
    model = tiny("llama")
    past = context(model, "knorm(keep=12)", prompt(1, 20))
    past.kept_layers[1].store.packed["values"][3] = torch.nan
    loaded = again(past, model, tmp_path)
    assert loaded.kept_layers[1].store.packed["values"][3].isnan().all()


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


@pytest.mark.spread
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("padding", [[0, 0], [0, 9]], ids=["whole", "padded"])
def test_asking_is_generating_from_context_and_question(name: str, padding: list[int]) -> None:
    model = tiny(name)
    if name == "lfm2" and any(padding):
        pytest.skip("its convolutions see padding")
    ids, mask = padded_prompt(padding, 40)
    question, question_mask = padded_prompt([0, 2], 7, 3)
    past = context(model, RECIPES["head-ragged"], ids, mask)
    usual = generate(
        model, torch.cat([ids, question], 1), past.fork(), torch.cat([mask, question_mask], 1), max_new_tokens=8
    )
    asked = answer(model, past, question, question_mask)
    assert torch.equal(asked.sequences, usual.sequences[:, 40:])
    assert torch.equal(torch.stack(asked.logits), torch.stack(usual.logits))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_context_that_keeps_all_answers_as_the_model(tmp_path: Path, layout: str) -> None:
    model = tiny("qwen3")
    ids, question = prompt(1, 40), prompt(1, 6, 2)
    expected = full(model, torch.cat([ids, question], 1), max_new_tokens=8).sequences[:, 40:]
    loaded = again(context(model, LAYOUTS[layout].format(keep=1.0), ids), model, tmp_path)
    assert torch.equal(answer(model, loaded, question).sequences, expected)


def test_many_questions_at_once(tmp_path: Path) -> None:
    model = tiny("llama")
    loaded = again(context(model, RECIPES["head-ragged"], prompt(1, 40)), model, tmp_path)
    ids, mask = padded_prompt([0, 3, 6], 7, 5)
    together = answer(model, loaded, ids, mask).sequences
    for row, padding in enumerate([0, 3, 6]):
        alone = answer(model, loaded, ids[row : row + 1, padding:]).sequences
        assert torch.equal(together[row, padding:], alone[0])


def test_beams_say_what_to_do_and_then_work(tmp_path: Path) -> None:
    model = tiny("llama")
    ids, question = prompt(1, 40), prompt(1, 6, 2)
    loaded = again(context(model, LAYOUTS["head-ragged"].format(keep=1.0), ids), model, tmp_path)
    with pytest.raises(
        KeepsetError, match=r"holds 1 requests, and the input has 3: call cache.batch_repeat_interleave"
    ):
        answer(model, loaded, question, num_beams=3)
    inputs = loaded.ask(question)
    inputs["past_key_values"].batch_repeat_interleave(3)
    expected = full(model, torch.cat([ids, question], 1), max_new_tokens=6, num_beams=3).sequences[:, 40:]
    model.set_attn_implementation("keepset")
    with torch.no_grad():
        beams = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 6, "num_beams": 3})
    assert torch.equal(beams.sequences, expected)


def test_rows_that_do_not_fit() -> None:
    model = tiny("llama")
    past = context(model, "knorm(keep=12)", prompt(2, 20))
    for ids in (prompt(3, 4), prompt(1, 4), prompt(2, 0)):
        with pytest.raises(KeepsetError, match="and the cache 2 requests: give at least one token for each of them"):
            past.ask(ids)


# --- forks


@pytest.mark.full
@pytest.mark.spread
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("recipe", [*RECIPES.values(), *AGAIN.values()])
def test_questions_do_not_disturb_each_other(name: str, recipe: str) -> None:
    if name != "llama" and recipe in (RECIPES["statistics"], RECIPES["moments"], AGAIN["moments"]):
        pytest.skip("the model's own layers are what this is about")
    model = tiny(name)
    ids = prompt(1, 40)
    past = context(model, recipe, ids)
    before = [column.clone() for column in contents(past)]
    questions = [prompt(1, n, n) for n in (6, 3, 9)]
    fresh = [generate(model, torch.cat([ids, q], 1), context(model, recipe, ids), max_new_tokens=8) for q in questions]
    forks = [past.fork() for _ in questions]
    # Token by token in turns, so that what one writes the next one would read.
    for fork, question in zip(forks, questions, strict=True):
        feed(model, fork, question[:, :-1], torch.ones(1, 40 + question.shape[1] - 1, dtype=torch.long))
    if "every" not in recipe:  # there a question in two parts may have an event between them
        for fork, question, expected in zip(forks, questions, fresh, strict=True):
            output = generate(model, torch.cat([ids, question], 1), fork, max_new_tokens=8)
            assert torch.equal(output.sequences, expected.sequences)
    for question, expected in zip(questions, fresh, strict=True):
        assert torch.equal(answer(model, past, question).sequences, expected.sequences[:, 40:])
    assert same(contents(past), before)
    assert past.get_seq_length() == 40


@pytest.mark.full
@pytest.mark.cross
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_forks_in_the_middle_of_a_prompt(name: str, recipe: str) -> None:
    if name != "llama" and recipe in ("statistics", "moments"):
        pytest.skip("the model's own layers are what this is about")
    model = tiny(name)
    ends = [prompt(2, 22, seed) for seed in (7, 8)]
    begin = prompt(2, 18)
    mask = torch.ones(2, 40, dtype=torch.long)

    def begun() -> keepset.Cache:
        past = keepset.Cache(model, RECIPES[recipe], prompt_length=40)
        feed(model, past, begin, mask[:, :18])
        return past

    alone = [begun(), begun()]
    past = begun()
    forks = [past.fork(), past]
    for first, last in ((18, 38), (38, 40)):  # in turns, so that what one records the other would look at
        for end, reference, fork in zip(ends, alone, forks, strict=True):
            for each in (reference, fork):
                feed(model, each, end[:, first - 18 : last - 18], mask[:, :last])
    for reference, fork in zip(alone, forks, strict=True):
        assert same_keep_set(reference.keep_set, fork.keep_set)
        assert same(contents(reference), contents(fork))


# --- what is refused


def refusal(path: Path, model: Any = None) -> str:
    """The one sentence with which a file is refused, for a model or, without one, by what it says of itself."""
    with pytest.raises(KeepsetError) as caught:
        saved.header(path) if model is None else keepset.Cache.load(path, model)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and message.count(". ") == 0
    return message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "context"
    context(tiny("llama"), RECIPES["head-ragged"], prompt(1, 30)).save(path)
    return path


def rewritten(path: Path, **changes: Any) -> None:
    """Change metadata and leave their digest."""
    with safetensors.safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        metadata = json.loads(file.metadata()["keepset_context"])
    safetensors.torch.save_file(tensors, path, {"keepset_context": json.dumps({**metadata, **changes})})


def resealed(path: Path, tensors: dict[str, Tensor | None], **changes: Any) -> None:
    """Change tensors and metadata as somebody would who knows how to make digests; None takes a tensor out."""
    with safetensors.safe_open(path, framework="pt") as file:
        there = {name: file.get_tensor(name) for name in list(file.keys())}
        metadata = json.loads(file.metadata()["keepset_context"])
    there = {name: tensor for name, tensor in {**there, **tensors}.items() if tensor is not None}
    digests = {}
    for name, tensor in there.items():
        content = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        digests[name] = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + content).hexdigest()
    del metadata["digest"]
    metadata |= {"tensors": digests, **changes}
    metadata["digest"] = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
    safetensors.torch.save_file(there, path, {"keepset_context": json.dumps(metadata)})


def test_what_a_file_says_of_itself(path: Path) -> None:
    header = saved.header(path)
    assert (header.recipe, header.model, header.tokens) == (
        RECIPES["head-ragged"],
        tiny("llama").config.name_or_path,
        30,
    )
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["keepset_context"])
    assert (metadata["format"], metadata["keepset"]) == (5, keepset.__version__)
    assert [entry.name for entry in path.parent.iterdir()] == ["context"]


def test_no_such_file(tmp_path: Path) -> None:
    for place in (tmp_path / "absent", tmp_path):
        assert "There is no file" in refusal(place, tiny("llama"))


@pytest.mark.parametrize("content", [b"", b"words", b"\xff" * 100], ids=["empty", "words", "noise"])
def test_no_safetensors(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert "is damaged or no saved context: give a file that" in refusal(path, tiny("llama"))


def test_safetensors_of_something_else(path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path)
    assert "is no saved context: give a file that" in refusal(path, tiny("llama"))


@pytest.mark.parametrize("version", [1, 4, 6])
def test_another_format(path: Path, version: int) -> None:
    rewritten(path, format=version)
    assert f"has format {version} of saved contexts, and this keepset reads format 5" in refusal(path, tiny("llama"))


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
    assert str(loaded.recipe) == saved.header(tmp_path / "context").recipe == said
    mask = extended(mask, 29)
    assert torch.equal(*(feed(model, each, prompt(2, 9, 1), mask) for each in (past, loaded)))
    assert len(past.events) > 1 and same(contents(past), contents(loaded))
    in_full.cache_clear()
    in_short.cache_clear()


def test_it_is_refused_where_nobody_knows_what_a_new_parameter_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = context(tiny("llama"), "expected_attention(future=16, keep=12)", prompt(2, 30))
    past.save(path, force=True)
    in_short.cache_clear()
    monkeypatch.setitem(registry._methods, "expected_attention", later(("epsilon", 0.01), ("temper", 0.5)))
    said = "is of another version of keepset, build it again"
    for sentence in (refusal(path, tiny("llama")), refusal(path)):
        assert said in sentence and "does not say temper, whose default may have been another." in sentence
    in_short.cache_clear()


@pytest.mark.parametrize(
    "changes",
    [{"progress": {}}, {"progress": None}, {"layers": 9}, {"layers": "4"}, {"fingerprint": "x"}, {"recipe": "knorm"}],
)
def test_metadata_that_was_changed(path: Path, changes: dict[str, Any]) -> None:
    rewritten(path, **changes)
    assert "is damaged: build it again" in refusal(path, tiny("llama"))


def test_cut_off(path: Path) -> None:
    whole = path.read_bytes()
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "is damaged" in refusal(path, tiny("llama"))


@examples(80, derandomize=False, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_byte_is_noticed(path: Path, data: st.DataObject) -> None:
    whole = path.read_bytes()
    place, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[place] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        with pytest.raises(KeepsetError):  # in a sentence that may quote what is damaged
            keepset.Cache.load(path, tiny("llama"))
    finally:
        path.write_bytes(whole)


def test_a_damaged_name_breaks_no_line(path: Path) -> None:
    resealed(path, {}, fingerprint={**fingerprint(tiny("llama")), "architecture": "Llama\n\x1bLM"})
    assert r"architecture differs: Llama\n\x1bLM there, LlamaForCausalLM here" in refusal(path, tiny("llama"))


def test_another_model(path: Path) -> None:
    assert "whose architecture differs: LlamaForCausalLM there, Qwen2ForCausalLM here" in refusal(path, tiny("qwen2"))
    half = copy.deepcopy(tiny("llama")).bfloat16()
    assert "whose precision differs: float32 there, bfloat16 here; load that model" in refusal(path, half)
    assert "whose rotation differs" in refusal(path, tiny("llama_yarn"))
    assert "whose weights differ; load that model" in refusal(path, tiny("llama_mha"))
    tuned = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight += 1e-3
    assert "whose weights differ" in refusal(path, tuned)


def test_a_model_that_was_loaded_again_is_the_same(path: Path, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    model = type(tiny("llama")).from_pretrained(tmp_path / "model")
    assert keepset.Cache.load(path, model).get_seq_length() == 30


def test_a_prompt_that_is_not_whole(tmp_path: Path) -> None:
    model = tiny("llama")
    empty, begun = keepset.Cache(model, "knorm(keep=12)"), keepset.Cache(model, "knorm(keep=12)", prompt_length=40)
    feed(model, begun, prompt(1, 20), torch.ones(1, 20, dtype=torch.long))
    for past in (empty, begun):
        for refused in (lambda past=past: past.save(tmp_path / "context"), lambda past=past: past.ask(prompt(1, 3))):
            with pytest.raises(
                KeepsetError, match="does not hold a whole prompt yet: run the model on all of it first"
            ):
                refused()
    assert list(tmp_path.iterdir()) == []


def test_a_forward_that_broke_off_is_not_saved(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("llama"))
    past = context(model, "knorm(keep=12)", prompt(1, 20))

    def stop(*_: Any) -> None:
        raise RuntimeError

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError):
        feed(model, past, prompt(1, 4), torch.ones(1, 24, dtype=torch.long))
    handle.remove()
    with pytest.raises(KeepsetError, match="does not hold a whole prompt"):
        past.save(tmp_path / "context")


def test_layers_of_another_kind(tmp_path: Path) -> None:
    past = context(tiny("lfm2"), "knorm(keep=12)", prompt(1, 20))
    with pytest.raises(KeepsetError, match="has a LinearAttentionLayer among the layers of its cache"):
        past.save(tmp_path / "context")
    with pytest.warns(UserWarning, match="compresses nothing"):
        past = context(tiny("mistral_window"), "knorm(keep=12)", prompt(1, 20))
    with pytest.raises(KeepsetError, match="so keepset has nothing to save"):
        past.save(tmp_path / "context")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_gone(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("llama"))
    past = context(model, "knorm(keep=12)", prompt(1, 20))
    del model
    gc.collect()
    with pytest.raises(KeepsetError, match="The model of this cache is gone"):
        past.save(tmp_path / "context")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_full_disk_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def half(tensors: Any, name: Path, metadata: Any) -> None:
        name.write_bytes(b"half")
        raise error

    before, past = path.read_bytes(), context(tiny("llama"), "knorm(keep=12)", prompt(1, 20))
    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises((KeyboardInterrupt, KeepsetError)) as caught:
        past.save(path, force=True)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    if caught.type is KeepsetError:
        assert "cannot be written (No space left on device): name another file" in str(caught.value)


def test_a_file_that_is_there_stays_unless_told_otherwise(path: Path) -> None:
    before, past = path.read_bytes(), context(tiny("llama"), "knorm(keep=12)", prompt(1, 20))
    with pytest.raises(KeepsetError, match="exists: save to another file, or replace it with force=True"):
        past.save(path)
    assert path.read_bytes() == before
    past.save(path, force=True)
    assert path.read_bytes() != before


def test_no_place_for_a_file(tmp_path: Path) -> None:
    past = context(tiny("llama"), "knorm(keep=12)", prompt(1, 20))
    for place in (tmp_path, tmp_path / "absent" / "context", Path()):
        with pytest.raises(KeepsetError, match="cannot be written"):
            past.save(place)
    assert list(tmp_path.iterdir()) == []
