"""Prompts with images: the model's own tokens, a masked reference, and images that always stay."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import keepset
from keepset.core.features.attention import SecondPass
from keepset.core.statistics import save
from keepset.hf.batch import go_together
from keepset.hf.prompt_session import PromptSession
from keepset.kernels.columns import ColumnStatistic
from keepset.recipe import Recipe
from tests.hf.contract.check import masked
from tests.hf.looking import looking, shown
from tests.hf.models import GREEDY, kept_of, prompt, refusal, tiny, with_networks
from tests.hf.pictures import KINDS, M_ROPE, Layout, inputs, places, seeing
from tests.tiers import FULL

WORDS, WINDOW, NEW = 20, 8, 5
LAYOUT: Layout = (6, None, WORDS, None, 9)
NEEDS = (
    f"snapkv(window={WINDOW}, keep=14)",
    "expected_attention(future=8, keep=14)",
    "prompt_queries(keep=14)",
    "reread(keep=14)",
    "gvote(p_nuc=1.0, future=8, keep=14)",
    "knorm(keep=14, every=3)",
)
"""A recipe of each kind of thing that methods look at; the first event drops words and, of most, parts of images."""
CHANGING = ("match(snapkv(window=8), keep=14)", "quantized(knorm, keep=14)", "quantized(knorm, bits=4, keep=14)")
"""Recipes that change the entries that stay."""


def said(kind: str, past: Any, arguments: dict[str, Tensor], new: int = NEW) -> Any:
    with torch.no_grad():
        return seeing(kind).generate(**arguments, past_key_values=past, max_new_tokens=new, **GREEDY)


def own(kind: str) -> DynamicCache:
    seeing(kind).set_attn_implementation("sdpa")
    return DynamicCache(config=seeing(kind).config.get_text_config(decoder=True))


def reference(kind: str, past: keepset.Cache, arguments: dict[str, Tensor], output: Any) -> Tensor:
    """The logits of the model that sees the image, and is masked where entries were dropped."""
    extra = {name: value for name, value in arguments.items() if name not in ("input_ids", "attention_mask")}
    longer = output.sequences.shape[1] - 1
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in extra:
            extra[name] = torch.nn.functional.pad(extra[name], (0, longer - extra[name].shape[1]))
    return masked(seeing(kind), past, output, **extra)


def close(gap: Tensor, logits: Tensor) -> bool:
    return bool(gap.abs().max() < 2e-3 * max(float(logits.std()), 1.0))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_changes_nothing_of_what_holds_of_a_text(kind: str) -> None:
    arguments = inputs(kind, LAYOUT)
    expected = said(kind, own(kind), arguments)
    changed = said(kind, own(kind), {**arguments, "pixel_values": -arguments["pixel_values"]})
    assert (expected.logits[0] - changed.logits[0]).abs().max() > 0.01  # the image matters
    assert torch.equal(
        said(kind, keepset.Cache(seeing(kind), "knorm(keep=1.0)"), arguments).sequences, expected.sequences
    )
    index, of_kind = list(KINDS).index(kind), 1 if FULL else 3  # the fast tier has every recipe on some kinds
    for recipe in NEEDS[index % of_kind :: of_kind]:
        if kind == "qwen3_vl" and recipe.startswith("reread"):
            continue
        past = keepset.Cache(seeing(kind), recipe, history=True)
        output = said(kind, past, arguments)
        logits = torch.stack(output.logits, 1)
        counts = past.events[0].keep_set.counts
        assert counts.sum() == 14 * counts.numel(), recipe
        assert close(logits - reference(kind, past, arguments, output), logits), recipe
    for recipe in CHANGING[index % of_kind :: of_kind]:
        past = keepset.Cache(seeing(kind), recipe)
        assert torch.stack(said(kind, past, arguments).logits).isfinite().all()
        assert past.keep_set.counts.unique().tolist() == [14]


@pytest.mark.few(3)
@pytest.mark.cross
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protected", ["image", "text"])
def test_what_is_protected_stays(kind: str, protected: str) -> None:
    arguments, images = inputs(kind, LAYOUT), places(kind, LAYOUT)
    length = arguments["input_ids"].shape[1]
    always = images if protected == "image" else [at for at in range(length) if at not in images]
    for extra in (0, 3):
        past = keepset.Cache(seeing(kind), f"streaming_llm(keep={len(always) + extra}, sinks=0, protect={protected!r})")
        output = said(kind, past, arguments)
        newest = [at for at in range(length) if at not in always][-extra:] if extra else []
        for heads in kept_of(past.keep_set).values():
            assert heads == [sorted([*always, *newest])] * len(heads)
    logits = torch.stack(output.logits, 1)
    assert close(logits - reference(kind, past, arguments, output), logits)


@pytest.mark.parametrize(
    "recipe", ["snapkv(window=4, keep=14, {})", "adakv(tova, keep=14, every=3, {})", "knorm(keep=0.3, {})"]
)
def test_images_in_different_places_of_a_padded_batch(recipe: str) -> None:
    """Every request keeps what it keeps alone: its images, and of the rest what the method prefers."""
    kind, layouts = "qwen2_vl", ((6, None, 20), (3, None, 4, None, 11), (12,))
    recipe = recipe.format("protect='image'")
    batched = keepset.Cache(seeing(kind), recipe)
    arguments = inputs(kind, *layouts)
    together = said(kind, batched, arguments)
    at = 0
    for row, layout in enumerate(layouts):
        rows, patches = places(kind, layout), 16 * layout.count(None)
        real = arguments["attention_mask"][row].bool()
        alone = {
            name: value[row : row + 1, real]
            for name, value in arguments.items()
            if value.shape == real[None].expand(len(layouts), -1).shape
        }
        if patches:
            alone["pixel_values"] = arguments["pixel_values"][at : at + patches]
            alone["image_grid_thw"] = arguments["image_grid_thw"][: layout.count(None)]
        at += patches
        past = keepset.Cache(seeing(kind), recipe)
        output = said(kind, past, alone)
        assert torch.equal(together.sequences[row, -NEW:], output.sequences[0, -NEW:])
        assert kept_of(batched.keep_set, row) == kept_of(past.keep_set)
        assert all(set(rows) <= set(head) for heads in kept_of(past.keep_set).values() for head in heads)


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_beams_of_requests_with_images(kind: str) -> None:
    layouts: tuple[Layout, ...] = ((6, None, 20), (3, None, 4, None, 11))
    arguments, beams = inputs(kind, *layouts), dict(max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=2)
    expected = seeing(kind).generate(**arguments, **beams)
    past = keepset.Cache(seeing(kind), "knorm(keep=1.0)")
    assert torch.equal(seeing(kind).generate(**arguments, past_key_values=past, **beams), expected)
    past = keepset.Cache(seeing(kind), "snapkv(window=8, keep=50, every=2, protect='image')")
    seeing(kind).generate(**arguments, past_key_values=past, **beams)
    for row in range(6):
        assert {*places(kind, layouts[row // 3])} <= {*kept_of(past.keep_set, row)[0][1]} and len(past.events) == 3


def test_protected_images_beside_ranges_and_more_than_the_budget() -> None:
    kind, images = "llava", places("llava", LAYOUT)
    past = keepset.Cache(seeing(kind), "streaming_llm(keep=4, sinks=0, protect=['image', [0, 3]])")
    said(kind, past, inputs(kind, LAYOUT))
    assert past.keep_set.positions(0, 0, 1).tolist() == [0, 1, 2, *images]
    text = prompt(1, 30)
    past = keepset.Cache(seeing(kind), "streaming_llm(keep=4, sinks=0, protect='image')")
    said(kind, past, {"input_ids": text, "attention_mask": torch.ones_like(text)}, 2)
    assert past.keep_set.positions(0, 0, 1).tolist() == [26, 27, 28, 29]


def test_images_of_later_turns_and_of_tokens_taken_back() -> None:
    kind = "llava"
    first, second = inputs(kind, (6, None, 5)), inputs(kind, (3, None, 12), seed=1)
    past = keepset.Cache(seeing(kind), "streaming_llm(keep=40, sinks=0, every=20, protect='image')")
    seeing(kind)(**first, past_key_values=past)
    later_arguments = {name: second[name] for name in ("input_ids", "pixel_values")}
    seeing(kind)(**later_arguments, past_key_values=past)
    begins = first["input_ids"].shape[1]
    later = [begins + at for at in places(kind, (3, None, 12))]
    assert past.progress.images == (((6, 22), (later[0], later[-1] + 1)),)
    images = {*places(kind, (6, None, 5)), *later}
    assert past.events[-1].length == begins + 20  # among the later tokens
    assert images & {*kept_of(past.keep_set)[0][0]} == {at for at in images if at < begins + 20}
    past.crop(-5)
    assert past.progress.images == (((6, 22), (later[0], later[-1] + 1)),)


def test_one_prefill_serves_recipes_that_protect_images() -> None:
    kind, arguments = "idefics3", inputs("idefics3", LAYOUT)
    recipes = [Recipe.parse(f"knorm(keep=12, protect={kind!r})") for kind in ("image", "text")]
    ids, images = arguments["input_ids"], {"pixel_values": arguments["pixel_values"]}
    session = PromptSession(seeing(kind), ids, recipes, images=images)
    for recipe in recipes:
        past = keepset.Cache(seeing(kind), recipe)
        seeing(kind)(**arguments, past_key_values=past)
        shared = session.compress(recipe).cache.keep_set
        assert kept_of(shared) == kept_of(past.keep_set)


def test_images_that_cannot_be_found_are_refused() -> None:
    with refusal("^protect='image' needs a model that puts images in the places of a token, and the config"):
        keepset.Cache(tiny("llama"), "knorm(keep=9, protect='image')")
    model = seeing("llava")
    embedded = model.get_input_embeddings()(inputs("llava", LAYOUT)["input_ids"])
    past = keepset.Cache(model, "knorm(keep=9, protect='text')")
    with refusal("^protect='text' takes the token ids of the text"):
        model(inputs_embeds=embedded, past_key_values=past)


@pytest.mark.parametrize("method", ["distilled", "triattention", "expected_attention"])
def test_frequencies_measured_on_texts_do_not_rotate_images(method: str, tmp_path: Path) -> None:
    model, path = seeing("qwen2_vl"), tmp_path / "statistics.safetensors"
    save(with_networks(model), path)
    recipe = f"{method}(stats={str(path)!r}, keep=20)"
    model(prompt(1, 30), past_key_values=(past := keepset.Cache(model, recipe)))
    assert past.keep_set.counts.unique().tolist() == [20]
    with refusal("^This method rotates by one position for each token, and Qwen2VLForConditionalGeneration"):
        model(**inputs("qwen2_vl", LAYOUT), past_key_values=keepset.Cache(model, recipe))


def test_a_saved_context_protects_its_images_further(tmp_path: Path) -> None:
    kind, arguments = "llava", inputs("llava", (6, None, 9), (3, None, None, 4))
    recipe = "streaming_llm(keep=20, sinks=0, every=4, protect='image')"
    with torch.no_grad():
        seeing(kind)(**arguments, past_key_values=(past := keepset.Cache(seeing(kind), recipe)))
        past.save(tmp_path / "context")
        loaded = keepset.Cache.load(tmp_path / "context", seeing(kind))
        for cache in (past, loaded):
            seeing(kind).generate(**cache.ask(prompt(2, 3)), max_new_tokens=6, **GREEDY)
            longer_mask = torch.cat([arguments["attention_mask"], torch.ones(2, 9).long()], 1)
            seeing(kind)(prompt(2, 9), attention_mask=longer_mask, past_key_values=cache)
    for row, layout in enumerate([(6, None, 9), (3, None, None, 4)]):
        assert kept_of(loaded.keep_set, row) == kept_of(past.keep_set, row)
        assert {*places(kind, layout)} <= {*kept_of(loaded.keep_set, row)[0][1]}
    assert len(loaded.events) == 2 and loaded.progress.images == past.progress.images


# --- models with axes of positions


@pytest.mark.parametrize("kind", sorted({*M_ROPE} - {"qwen3_vl"}))
def test_a_second_pass_gives_an_image_its_axes(kind: str) -> None:
    """It is the prompt twice, images and all, as the model itself reads that."""
    arguments, which = inputs(kind, LAYOUT), SecondPass(frozenset({ColumnStatistic.SUM}))
    twice = {
        name: torch.cat([value] * 2, int(value.ndim == 2 and name.endswith(("ids", "mask"))))
        for name, value in arguments.items()
    }
    eager = copy.deepcopy(seeing(kind))
    eager.set_attn_implementation("eager")
    length = arguments["input_ids"].shape[1]
    with torch.no_grad(), shown() as observations:
        layers = eager(**twice, use_cache=False, output_attentions=True).attentions
        seeing(kind)(**arguments, past_key_values=keepset.Cache(seeing(kind), looking(which)))
    for layer, observation in observations.items():
        expected = layers[layer][0, :, length:, :length].sum(1)
        assert torch.allclose(observation[which].statistics[ColumnStatistic.SUM][0], expected, atol=1e-4)


def test_a_second_pass_cannot_show_images_that_are_added_to_later_layers() -> None:
    model, arguments = seeing("qwen3_vl"), inputs("qwen3_vl", LAYOUT)
    with refusal("^A second pass over this prompt cannot show its images"):
        model(**arguments, past_key_values=keepset.Cache(model, "reread(keep=14)"))
    past = keepset.Cache(model, "reread(keep=14)", task_tokens=prompt(1, 6))
    model(**arguments, past_key_values=past)
    assert past.keep_set.counts.sum() == 14 * past.keep_set.counts.numel()


@pytest.mark.parametrize("kind", M_ROPE)
def test_a_cache_goes_on_where_its_own_image_ends(kind: str, tmp_path: Path) -> None:
    """The model remembers positions of its newest prompt alone, and the cache those of its own."""
    question = prompt(1, 6, 3)
    arguments, another = inputs(kind, LAYOUT), inputs(kind, (4, None, 3, None, 5, None, 3), seed=2)
    with_question = {
        name: torch.cat(
            [value, question if name == "input_ids" else torch.full_like(question, name == "attention_mask")], 1
        )
        if value.shape == arguments["input_ids"].shape
        else value
        for name, value in arguments.items()
    }
    expected = said(kind, own(kind), with_question)
    past = keepset.Cache(seeing(kind), "knorm(keep=1.0)")
    with torch.no_grad():
        seeing(kind)(**arguments, past_key_values=past)
        seeing(kind)(**another, past_key_values=(second_past := keepset.Cache(seeing(kind), "knorm(keep=1.0)")))
        answer = seeing(kind).generate(**past.ask(question), max_new_tokens=NEW, **GREEDY)
        assert torch.equal(answer.sequences[0, -NEW:], expected.sequences[0, -NEW:])
        logits = seeing(kind)(question, past_key_values=past.fork()).logits[:, -1]
        assert torch.allclose(logits, expected.logits[0], atol=1e-3)
        past.save(tmp_path / "context")
        loaded = keepset.Cache.load(tmp_path / "context", seeing(kind))
        assert loaded.progress.images == past.progress.images
        answer = seeing(kind).generate(**loaded.ask(question), max_new_tokens=NEW, **GREEDY)
        assert torch.equal(answer.sequences[0, -NEW:], expected.sequences[0, -NEW:])
        first = past.fork()
        together, errors = go_together(seeing(kind), [second_past.fork(), first], question.expand(2, -1))
        assert not errors and torch.allclose(together[1], expected.logits[0][0], atol=1e-3)
        past.reset()
        text = prompt(1, 20)
        logits = seeing(kind)(text, past_key_values=past).logits
        assert torch.allclose(logits, seeing(kind)(text).logits, atol=1e-3)
        later = seeing(kind)(question, past_key_values=past).logits
        assert torch.allclose(later, seeing(kind)(torch.cat([text, question], 1)).logits[:, 20:], atol=1e-3)
