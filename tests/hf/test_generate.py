"""Every way to generate that transformers offers, on a cache that compresses."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    pipeline,
)

import keepset
from keepset.core.features.runtime_features import Perplexity
from tests.hf.looking import looking
from tests.hf.models import (
    LAYOUTS,
    Oracle,
    extended,
    full,
    generate,
    hooks_on,
    oracle_gap,
    padded_or_not,
    padded_prompt,
    prompt,
    refusal,
    same_keep_set,
    tiny,
)
from tests.lab.cli.conftest import tiny_model
from tests.tiers import TYPECHECK

LENGTH = 40
ADAKV = LAYOUTS["head-ragged"].format(keep=12)
SNAPKV = LAYOUTS["dense"].format(keep=12)
PYRAMID = LAYOUTS["layer-ragged"].format(keep=12)
MOMENTS, DECODING = "expected_attention(future=16, keep=12)", "expected_attention(skip=2, buffer=11, keep=11, every=4)"
by_recipe = pytest.mark.parametrize("recipe", [SNAPKV, PYRAMID, ADAKV], ids=list(LAYOUTS))
# --- sampling and beams


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options", [dict(do_sample=True, temperature=0.8, top_k=50), dict(num_beams=3)], ids=["samples", "beams"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_those_of_the_full_cache_when_all_is_kept(layout: str, options: dict[str, Any]) -> None:
    model, (ids, mask) = tiny("llama"), padded_prompt([0, 7], LENGTH)
    sequences = []
    for past in (None, keepset.Cache(model, LAYOUTS[layout].format(keep=1.0))):
        torch.manual_seed(3)
        model.set_attn_implementation("sdpa" if past is None else "keepset")
        sequences.append(generate(model, ids, past, mask, max_new_tokens=8, **options).sequences)
    assert torch.equal(*sequences)


@pytest.mark.cross
@by_recipe
@padded_or_not
def test_scores_of_beams_are_the_oracles(recipe: str, padding: list[int]) -> None:
    model = tiny("llama")
    ids, mask = padded_prompt(padding, LENGTH)
    past = keepset.Cache(model, recipe)
    beams: dict[str, Any] = dict(num_beams=3, num_return_sequences=3, length_penalty=0.0, output_scores=True)
    output = generate(model, ids, past, mask, max_new_tokens=8, **beams)
    masks = extended(mask.repeat_interleave(3, 0), output.sequences.shape[1])
    logits = Oracle(past, masks).logits(model, output.sequences)[:, LENGTH - 1 : -1]
    tokens = output.sequences[:, LENGTH:, None]
    expected = logits.log_softmax(-1).gather(-1, tokens).sum((1, 2))
    assert torch.allclose(output.sequences_scores, expected, atol=1e-4)
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6


# --- a batch of requests, in transformers' own cache of pages


def test_a_model_with_keepsets_attention_serves_a_batch() -> None:
    """transformers refuses implementations whose names it does not know."""
    model, ids = copy.deepcopy(tiny("llama")), prompt(2, 12)
    past = keepset.Cache(model, "knorm(keep=1.0)")
    generate(model, ids, past, max_new_tokens=2)
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, block_size=32, max_batch_tokens=64)
    batch = model.generate_batch(ids.tolist(), config, continuous_batching_config=small, progress_bar=False)
    said = torch.tensor([output.generated_tokens for output in batch.values()])
    expected = full(tiny("llama"), ids, max_new_tokens=4).sequences
    assert torch.equal(said, expected[:, 12:])
    assert torch.equal(generate(model, expected[:, :14], past, max_new_tokens=2).sequences, expected)  # it goes on


# --- several turns


# --- assisted generation


@cache
def assistant(noise: float) -> Any:
    """The model itself, or one that is right now and then, or one that never is."""
    model = AutoModelForCausalLM.from_config(tiny("llama").config, attn_implementation="sdpa").eval()
    model.load_state_dict(tiny("llama").state_dict())
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return model


LOOKUP: dict[str, Any] = dict(prompt_lookup_num_tokens=4)
ASSISTED = [("llama", recipe, LOOKUP) for recipe in (SNAPKV, PYRAMID, ADAKV)] + [("gemma3", ADAKV, LOOKUP)]
MORE_ASSISTED = [
    pytest.param("llama", recipe, noise, marks=pytest.mark.full)
    for recipe in (SNAPKV, ADAKV, "expected_attention(future=16, keep=12)", "h2o(keep=12)")
    for noise in (0.0, 0.01, 1.0)
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("architecture", "recipe", "drafts"), [*ASSISTED, *MORE_ASSISTED])
def test_drafts_change_nothing(architecture: str, recipe: str, drafts: Any) -> None:
    """Looked up in the prompt, or by an assistant with so much noise in its weights."""
    model, ids = tiny(architecture), prompt(1, 8, 3).repeat(1, 5)
    options = drafts if isinstance(drafts, dict) else dict(assistant_model=assistant(drafts))
    alone, assisted = keepset.Cache(model, recipe), keepset.Cache(model, recipe, prompt_length=LENGTH)
    expected = generate(model, ids, alone, max_new_tokens=20)
    output = generate(model, ids, assisted, max_new_tokens=20, **options)
    assert same_keep_set(assisted.keep_set, alone.keep_set)
    assert torch.equal(output.sequences, expected.sequences)
    assert oracle_gap(model, assisted, output, torch.ones_like(ids)) < 5e-5
    index, kept = next(iter(assisted.managed_layers.items()))
    grown = kept.store.counts[0] - int(alone.keep_set.layer(index).counts[0, 0])
    assert grown == assisted.get_seq_length() - LENGTH


# --- chunked prefill


# --- small and odd calls


# --- what keepset leaves alone


@pytest.mark.few(2)
@padded_or_not
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_other_caches_behave_as_under_sdpa(architecture: str, padding: list[int]) -> None:
    model = tiny(architecture)
    ids, mask = padded_prompt(padding, LENGTH)
    expected = full(model, ids, mask, max_new_tokens=6).sequences
    keepset.Cache(model, "expected_attention(keep=12)")
    assert model.config._attn_implementation == "keepset"
    assert torch.equal(generate(model, ids, None, mask, max_new_tokens=6).sequences, expected)
    for past in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH + 8)):
        assert torch.equal(generate(model, ids, past, mask, max_new_tokens=6).sequences, expected)
    static = generate(model, ids, None, mask, max_new_tokens=6, cache_implementation="static")
    assert torch.equal(static.sequences, expected)


def test_training_is_untouched_and_gradients_pass_through_a_compressed_cache() -> None:
    model, (ids, mask), results = copy.deepcopy(tiny("llama")), padded_prompt([0, 7], LENGTH), []
    projection = model.model.layers[0].self_attn.q_proj
    for implementation in ("sdpa", "keepset"):
        model.set_attn_implementation(implementation)
        output = model.train()(ids, attention_mask=mask, labels=ids, use_cache=False)
        output.loss.backward()
        results.append((output.logits.detach(), projection.weight.grad.clone()))
        model.zero_grad()
    assert all(map(torch.equal, *results))
    for recipe in (ADAKV, "h2o(keep=12)"):
        past = keepset.Cache(model.eval(), recipe)
        model(prompt(2, LENGTH), past_key_values=past)
        model(prompt(2, 3), past_key_values=past).logits.sum().backward()
        assert projection.weight.grad.abs().sum() > 0
        model.zero_grad()


OBSERVED = [
    "expected_attention(future=16, buffer=8, keep=14, every=8)",
    "ams(tova, window=5, min_segment=2, max_segment=6, recent=4, keep=14, every=8)",
    "pool(distilled, keep=14, every=8)",
    "quantized(match(snapkv(window=5), window=5), keep=14)",
    "reread(recent=4, keep=0.5)",
]


def said(recipe: str) -> tuple[Tensor, keepset.Cache]:
    past = keepset.Cache(tiny("llama"), recipe)
    steps = [prompt(1, 40), *prompt(1, 8, seed=1).T[:, None]]
    return torch.cat([tiny("llama")(ids, past_key_values=past).logits[0] for ids in steps]), past


@pytest.mark.parametrize("recipe", OBSERVED)
def test_gradients_change_nothing_and_an_event_lets_go_of_them(recipe: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        logits, past = said(recipe)
    with torch.no_grad():
        expected, without_gradients = said(recipe)
    assert logits.requires_grad and torch.equal(logits, expected)
    assert past.keep_set is not None and without_gradients.keep_set is not None
    assert same_keep_set(past.keep_set, without_gradients.keep_set)
    if "every" in recipe:  # the last token was an event
        stores = [layer.store for layer in past.managed_layers.values() if layer.store is not None]
        assert stores and not any(
            store.heads.keys.requires_grad or store.heads.values.requires_grad for store in stores
        )


@pytest.mark.parametrize(
    ("recipe", "stays"),
    [(MOMENTS, False), ("reread(keep=12)", False), (looking(Perplexity(8)), False), (DECODING, True)],
)
def test_hooks_go_with_the_prompt_or_with_the_cache(recipe: Any, stays: bool) -> None:
    """Where events follow they stay as long as the cache, and its forks have their own."""
    model = copy.deepcopy(tiny("llama"))
    before, past = hooks_on(model), keepset.Cache(model, recipe)
    installed = hooks_on(model) - before
    assert installed > 0
    twins = [past.fork(), copy.deepcopy(past)]
    assert hooks_on(model) == before + 3 * installed
    del twins
    expected = generate(model, prompt(1, LENGTH), past, max_new_tokens=3).sequences
    assert hooks_on(model) == before + installed * stays
    past.reset()
    assert torch.equal(generate(model, prompt(1, LENGTH), past, max_new_tokens=3).sequences, expected)
    unused = keepset.Cache(model, recipe)
    # Another cache's call is not its own.
    assert torch.equal(full(model, prompt(1, LENGTH), max_new_tokens=1).sequences, expected[:, :-2])
    del past, unused
    gc.collect()
    assert hooks_on(model) == before
    for text in ("snapkv(window=4, keep=12)", "knorm(keep=12, every=4)"):
        keepset.Cache(model, text)
        assert hooks_on(model) == before


@torch.no_grad()
def test_a_collection_of_garbage_removes_no_hook() -> None:
    """It may begin while PyTorch goes through a module's hooks. The next cache removes them."""
    model = copy.deepcopy(tiny("llama"))
    before, past = hooks_on(model), keepset.Cache(model, "expected_attention(future=16, keep=12)")
    installed, cycle = hooks_on(model) - before, [past]
    cycle.append(cycle)
    reference = weakref.ref(past)
    del past, cycle
    gc.collect()
    assert reference() is None and hooks_on(model) == before + installed > before
    past = keepset.Cache(model, "expected_attention(future=16, keep=12)")
    assert hooks_on(model) == before + installed
    generate(model, prompt(1, LENGTH), past, max_new_tokens=2)


# --- other ways to call `generate`


EXAMPLES = str(Path(__file__).parents[2] / "examples")
TEXTS = ["The ferry leaves at noon and comes back before the lamps are lit.", "Rain fell on the roofs of the town."]


def test_pipelines_and_custom_generation(embedded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pipeline takes a cache, and custom generation makes one for every call: the answers are those of `generate`."""
    model, tokenizer = tiny_model(), embedded[1]
    recipe, greedy = "snapkv(window=4, keep=0.25)", dict(max_new_tokens=6, do_sample=False)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    custom: dict[str, Any] = dict(custom_generate=EXAMPLES, trust_remote_code=True, recipe=recipe)

    def new_text(ids: Tensor, answer: Tensor) -> str:
        return tokenizer.decode(answer[0, ids.shape[1] :])

    expected = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        answer = model.generate(**inputs, past_key_values=keepset.Cache(model, recipe), **greedy)
        assert not torch.equal(answer, model.generate(**inputs, **greedy))
        expected.append(new_text(inputs["input_ids"], answer))
        assert new_text(inputs["input_ids"], model.generate(**inputs, **custom, **greedy)) == expected[-1]
    pipe, cache = pipeline("text-generation", model=model, tokenizer=tokenizer), keepset.Cache(model, recipe)
    (answer,) = pipe(TEXTS[0], past_key_values=cache, return_full_text=False, **greedy)
    assert answer["generated_text"] == expected[0] and cache.events
    answers = pipe(TEXTS, return_full_text=False, **custom, **greedy)
    assert [answer["generated_text"] for (answer,) in answers] == expected


@pytest.mark.full
@pytest.mark.parametrize("text", ["adakv(snapkv(window=4), keep=9, every=4)", "second_pass(keep=9)"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_says_the_same(text: str) -> None:
    """No backend makes code of keepset's part."""
    (ids, mask), model = padded_prompt([0, 7], 20), tiny("llama_shallow")
    expected = generate(model, ids, plain := keepset.Cache(model, text), mask, max_new_tokens=8)
    compiled, graphs = copy.deepcopy(model), []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled.compile(backend=backend)
    output = generate(compiled, ids, cache := keepset.Cache(compiled, text), mask, max_new_tokens=8)
    torch._dynamo.reset()
    assert graphs and any("linear" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert torch.equal(output.sequences, expected.sequences)
    assert cache.keep_set.iou(plain.keep_set).eq(1).all() and cache.nbytes == plain.nbytes


@pytest.mark.parametrize(
    "recipe",
    [ADAKV, "expected_attention(future=16, keep=12)", "second_pass(keep=12)", "snapkv(window=4, keep=12, every=4)"],
)
@torch.no_grad()
def test_a_cache_that_nobody_holds_is_gone_at_once(recipe: str) -> None:
    model, past = tiny("llama"), keepset.Cache(tiny("llama"), recipe)
    gc.disable()
    try:
        for tokens in (LENGTH, 1):
            model(prompt(1, tokens), past_key_values=past)
        references = [weakref.ref(past), weakref.ref(past.fork()), weakref.ref(past.layers[0])]
        del past
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


# --- a cache serves one text: another one is refused, and the same with more goes on

REFUSED = "the input begins with others: make a new keepset.Cache for each text"


def more(ids: Tensor, n: int, seed: int = 9) -> Tensor:
    return torch.cat([ids, prompt(len(ids), n, seed)], 1)


@pytest.mark.filterwarnings("error:The input has other tokens")
@pytest.mark.parametrize("options", [{}, dict(num_beams=2), dict(num_return_sequences=2, do_sample=True)])
def test_another_longer_prompt(options: dict[str, Any]) -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    cache = keepset.Cache(model, "snapkv(window=5, kernel=3, keep=12)")
    generate(model, ids, cache, max_new_tokens=4, **options)
    longer = more(ids, 20)
    longer[0, 7] += 1
    for copied in (cache, cache.fork(), copy.deepcopy(cache)):
        with refusal(REFUSED):
            generate(model, longer, copied, max_new_tokens=2, **options)
        assert copied.get_seq_length() == LENGTH + 3


@pytest.mark.filterwarnings("error:The input has other tokens")
def test_the_text_is_that_of_the_rows_in_their_order_without_what_was_taken_back() -> None:
    """Turns of a chat go on, whatever token padding is."""
    model, (ids, mask) = tiny("llama"), padded_prompt([0, 7], LENGTH)
    cache = keepset.Cache(model, "knorm(keep=1.0)")
    for turn in range(3):
        answer = generate(model, ids, cache, mask, max_new_tokens=4).sequences
        assert torch.equal(answer, full(model, ids, mask, max_new_tokens=4).sequences)
        model.set_attn_implementation("keepset")
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([1, 0]))
        ids, mask = more(answer[:, :-3].flip(0), 5, turn), mask.flip(0)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        ids = ids.where(mask.bool(), 5 + turn)
        with refusal(REFUSED):
            generate(model, ids.flip(0), cache, mask.flip(0), max_new_tokens=4)
    cache.reset()
    generate(model, prompt(1, LENGTH, 5), cache, max_new_tokens=2)


def test_an_answer_in_other_tokens_is_warned_of() -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    cache = keepset.Cache(model, "knorm(keep=12)")
    answer = generate(model, ids, cache, max_new_tokens=6).sequences
    again = more(answer, 5)
    again[0, LENGTH + 1] += 1
    with pytest.warns(UserWarning, match="in the place of those that were generated before") as caught:
        generate(model, again, cache.fork(), max_new_tokens=2)
    assert TYPECHECK or caught[0].filename.endswith("models.py")  # where generate is called
    with pytest.warns(UserWarning, match="in the place of"):
        generate(model, more(ids, 20), cache.fork(), max_new_tokens=2)
    generate(model, more(answer, 5), cache, max_new_tokens=2)


def test_a_saved_text_is_known_by_its_digest(tmp_path: Path) -> None:
    model, ids, path = tiny("llama"), prompt(1, LENGTH), tmp_path / "context"
    cache = keepset.Cache(model, "knorm(keep=12)")
    generate(model, ids, cache, max_new_tokens=1)
    cache.save(path, token_ids=ids[0].tolist())
    expected = generate(model, more(ids, 5), cache, max_new_tokens=3).sequences
    assert torch.equal(
        generate(model, more(ids, 5), keepset.Cache.load(path, model), max_new_tokens=3).sequences, expected
    )
    with refusal(REFUSED):
        generate(model, prompt(1, LENGTH + 5, 3), keepset.Cache.load(path, model), max_new_tokens=3)


def test_a_pipeline_with_three_texts_and_one_cache(embedded: Any) -> None:
    model = tiny_model()
    pipe = pipeline("text-generation", model=model, tokenizer=embedded[1])
    texts = [
        "The ferry leaves.",
        "Rain fell on all the roofs of the town.",
        "A lamp was lit before anybody came to the pier.",
    ]
    with refusal(REFUSED):
        pipe(texts, past_key_values=keepset.Cache(model, "knorm(keep=0.5)"), max_new_tokens=2, do_sample=False)
    alone = pipe(texts[1], past_key_values=keepset.Cache(model, "knorm(keep=0.5)"), max_new_tokens=2, do_sample=False)
    assert alone[0]["generated_text"].startswith(texts[1])


def test_other_caches_are_asked_nothing() -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        past = generate(model, ids, None, max_new_tokens=3).past_key_values
        generate(model, more(prompt(1, LENGTH, 3), 9), past, max_new_tokens=2)
