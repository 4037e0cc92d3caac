"""Requests with images, in an engine: tokens and kept entries are the transformers runtime's, and pages are freed."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

import keepset
from keepset import Recipe
from tests.hf.models import tokenizer
from tests.hf.pictures import picture
from tests.vllm.compared import check_events
from tests.vllm.conftest import SHAPE
from tests.vllm.engine import BLOCK, Ask, Result, Scenario, run
from tests.vllm.late import Late

connector, requests = Late("keepset.vllm.connector"), Late("keepset.vllm.request_options")
settings = Late("keepset.vllm.settings")
TEXT = "the picture of a blue house beside a green hill. "
PROMPTS = ((f"{TEXT}<image>{TEXT * 3}what.", 1), (f"<image>{TEXT * 2}and<image>{TEXT}more.", 2), (TEXT * 3, 0))
"""Words, and how many images they have."""
SPECIAL = ("<global-img>", "<fake_token_around_image>", "<image>", "<end_of_utterance>")
SIDE, PATCH = 32, 8
IMAGE, PLAIN = "streaming_llm(keep=40, sinks=0, every=16, protect='image')", "snapkv(window=8, keep=40)"
ASKED = [{"protect": "image"}, {"protect": ["text", [0, 2]]}, None]
"""The options of requests to an engine whose recipe protects nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Idefics 3, which vLLM serves without further packages, with a processor and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("pictured")
    letters = PreTrainedTokenizerFast.from_pretrained(tokenizer("pictured"))
    letters.add_special_tokens({"additional_special_tokens": ["<a>", "<b>", *SPECIAL]})  # letters have the first ids
    layers = {"num_hidden_layers": 2, "initializer_range": 0.2}
    text = SHAPE | layers | {"model_type": "llama", "hidden_size": 128, "vocab_size": 64, "pad_token_id": 0}
    vision = layers | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    vision |= {"image_size": SIDE, "patch_size": PATCH}
    token = letters.convert_tokens_to_ids("<image>")
    own = {"image_token_id": token, "scale_factor": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    config = Idefics3Config(text_config=text, vision_config=vision, **own)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    side = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    Idefics3Processor(images, letters, (SIDE // PATCH) ** 2 // 4).save_pretrained(folder)
    return folder


def asks(model: Path, extra: list[Any]) -> list[Ask]:
    letters = AutoProcessor.from_pretrained(model).tokenizer
    files = [str(picture(model / f"{i}.png", i)) for i in (0, 1)]
    return [
        Ask(letters(words).input_ids, 40, extra=own and {"keepset": own}, images=files[:number])
        for (words, number), own in zip(PROMPTS, extra, strict=True)
    ]


@torch.no_grad()
def check(
    model: Any, processor: Any, recipe: Recipe, words: str, files: Any, engine: Result, index: int
) -> keepset.Cache:
    """The request's tokens and events are those of a transformers cache that is fed the same tokens."""
    images = [Image.open(file).convert("RGB") for file in files]
    given = dict(processor(text=words, images=images or None, return_tensors="pt"))
    prompt, tokens = given.pop("input_ids")[0].tolist(), engine.tokens[index] or []
    del given["attention_mask"]
    cache, best, start = keepset.Cache(model, recipe, prompt_length=len(prompt), history=True), [], 0
    ids = prompt + tokens[:-1]
    for stop in range(len(prompt), len(ids) + 1):
        seen = given if start == 0 else {}
        logits = model(torch.tensor([ids[start:stop]]), **seen, past_key_values=cache, use_cache=True).logits[0, -1]
        best.append(int(logits.argmax()))
        start = stop
    assert best == tokens
    check_events(cache, engine, index)
    return cache


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "extra"), [(IMAGE, [None] * 3), (PLAIN, ASKED)], ids=str)
def test_requests_with_images_are_those_of_transformers(recipe: str, extra: list[Any], model: Path) -> None:
    own_engine = {"model": str(model), "max_model_len": 512, "num_gpu_blocks_override": 64}
    own_engine |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}}
    own_engine |= {"kv_transfer_config": settings.CONNECTOR}
    some = asks(model, extra)
    (engine,) = run(Scenario(recipe, some, engine=own_engine))
    loaded = AutoModelForImageTextToText.from_pretrained(model).eval()
    processor, caches = AutoProcessor.from_pretrained(model), []
    for index, (ask, own) in enumerate(zip(some, extra, strict=True)):
        protect = (own or {}).get("protect", Recipe.parse(recipe).budget.protect)
        parsed = Recipe.parse(recipe)
        parsed = Recipe.of(
            parsed.method, keep=40, sinks=parsed.budget.sinks, protect=protect, every=parsed.schedule.every
        )
        cache = check(loaded, processor, parsed, PROMPTS[index][0], ask.images, engine, index)
        caches.append(cache)
        images = {at for first, end in cache.progress.images[0] for at in range(first, end)}
        assert len(images) == 4 * len(ask.images)
        if ask.images and "image" in protect:
            kept = cache.keep_set.positions(0, 0, 1).tolist()
            assert images < set(kept) and engine.events[index]
    engine.check_nothing_left()
    # A request of 40 entries and up to 16 tokens takes two blocks; the first step computes what the batch has room for.
    used = [engine.free_before - step["free"] for step in engine.steps]
    if recipe == IMAGE:
        full = sum(-(-cache.progress.prompt // BLOCK) for cache in caches)
        assert (max(used), used[4], full) == (10, 6, 18)


@pytest.mark.parametrize(
    ("recipe", "option", "model", "said"),
    [
        ("knorm(keep=9)", "image", {}, "keepset: protect has 'image', and this server's model takes no images: give"),
        ("knorm(keep=9, protect='image')", (), {"is_multimodal_model": True}, ""),
        ("triattention(stats='x', keep=9)", (), {"is_multimodal_model": True}, ""),
        (
            *("triattention(stats='x', keep=9)", (), {"is_multimodal_model": True, "uses_mrope": True}),
            "triattention rotates by one position for each token, and this model gives those of an image positions",
        ),
    ],
)
def test_requests_that_cannot_be_granted(recipe: str, option: Any, model: dict[str, bool], said: str) -> None:
    settled: list[Any] = []
    engine = SimpleNamespace(
        _recipe=Recipe.parse(recipe),
        _vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(**{"is_multimodal_model": False, "uses_mrope": False} | model)
        ),
        _settle=lambda *each: settled.append(each),
    )
    seen = torch.tensor([False, True, True, False, True])
    places = [SimpleNamespace(offset=3, length=5, is_embed=seen), SimpleNamespace(offset=20, length=2, is_embed=None)]
    features = [
        SimpleNamespace(modality=kind, mm_position=at) for kind, at in zip(("image", "video"), places, strict=True)
    ]
    request = SimpleNamespace(prompt_embeds=None, mm_features=features)
    with pytest.raises(keepset.KeepsetError, match=re.escape(said)) if said else nullcontext():
        options = requests.parse_options({"protect": option}) if option else requests.RequestOptions()
        located = connector.BlockCountConnector._compress(engine, request, options)
        assert located is bool(settled) is ("protect" in recipe)
        assert [own.budget.protect for _, own in settled] == ([((4, 6), (7, 8), (20, 22))] if located else [])
