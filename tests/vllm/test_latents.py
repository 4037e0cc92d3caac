"""Models that cache latents (DeepSeek) in engines: every token and every kept entry is the transformers runtime's."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, PreTrainedModel

import keepset
from keepset.vllm.settings import CONNECTOR
from tests.vllm.compared import IDS, answers_of, asks, check_transformers, fed, layers_of, result
from tests.vllm.conftest import SHAPE
from tests.vllm.engine import Ask, Scenario
from tests.vllm.test_tiny import ACROSS, EQUAL, FROM_DATA, LAYERS_DIFFER, RAGGED

pytestmark = pytest.mark.full

PAGE = 16
ENGINE: dict[str, Any] = {
    # vLLM's kernels for CPUs are made for latents of this size, these pages and no parts of prompts. Its own rotation
    # is wrong on a CPU for queries as these models give them.
    "attention_config": {"backend": "CPU_MLA"},
    "block_size": PAGE,
    "max_model_len": 256,
    "num_gpu_blocks_override": 160,
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
RECIPES = [
    *(EQUAL, RAGGED, LAYERS_DIFFER, FROM_DATA, ACROSS, "h2o(bytes=0.3)", "knorm(keep=40, every=12)"),
    *("expected_attention(keep=40, buffer=24, every=16)", "pool(prompt_queries, bytes=0.25)", "gvote(keep=0.4)"),
]
SOME = [*asks((90, 60), 40), Ask(IDS[900:1000], 30, add=10)]
"""The last prompt comes while others are decoded."""
ALONE = [Ask(IDS[:130], 60)]


def save_latents(folder: Path, low_rank: bool) -> Path:
    """Save a random model whose queries are made by way of a low rank, or of hidden states at once."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    kind, rank = (DeepseekV3Config, 24) if low_rank else (DeepseekV2Config, None)
    own = {"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 3, "q_lora_rank": rank}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(kind(**shape | own | LATENT)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_latents(tmp_path_factory.mktemp("latents"), low_rank=True)


@pytest.fixture(scope="module")
def model(latents: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(latents).eval()


def on(folder: Path, scenario: Scenario) -> Scenario:
    return replace(scenario, engine={"model": str(folder), **ENGINE, **scenario.engine})


def test_it_is_the_transformers_runtime(latents: Path, model: PreTrainedModel) -> None:
    """With pages of a layer's own, too; and freed pages are counted."""
    some = {recipe: on(latents, Scenario(recipe, SOME)) for recipe in RECIPES}
    answers = answers_of(some | {"alone": on(latents, Scenario(EQUAL, ALONE))})
    for recipe in RECIPES:
        engine = result(answers, recipe)
        assert engine.classes == ["CPUMLAKeepImpl"] and all(engine.events) and engine.stats["blocks_freed"] > 0
        check_transformers(model, recipe, SOME, engine)
        engine.check_nothing_left()
    alone, events = result(answers, "alone"), range(130, 190, 16)
    lengths = list(accumulate(tokens for _, tokens in alone.steps_of(0)))
    dropped = [max((at - 40 for at in events if at < length), default=0) for length in lengths]
    held = [alone.free_before - step["free"] for step in alone.steps]
    assert held == [-(-length // PAGE) - gone // PAGE for length, gone in zip(lengths, dropped, strict=True)]
    assert alone.stats["entries_kept"] == len(events) * 40 * 3  # one entry for all heads of a layer


def test_without_a_low_rank_and_with_budgets_of_requests(tmp_path: Path) -> None:
    folder = save_latents(tmp_path / "model", low_rank=False)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    (engine,) = answers_of({0: on(folder, Scenario(EQUAL, SOME, engine={"kv_transfer_config": CONNECTOR}))}).items()
    check_transformers(model, EQUAL, SOME, result(dict([engine]), 0))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_backend_for_gpus_but_for_its_kernels(graphs: bool, latents: Path, model: PreTrainedModel) -> None:
    """What kernels do plain torch does, in called steps and in replayed ones."""
    own = {"max_num_batched_tokens": 512}  # of prompts that are computed in parts other kernels gather rows
    scenario = Scenario(None, SOME, engine=own, backend="TRITON_MLA", graphs=graphs)
    some = {recipe: on(latents, replace(scenario, recipe=recipe)) for recipe in (EQUAL, ACROSS)}
    for recipe, answer in answers_of(some).items():
        engine = result({0: answer}, 0)
        assert engine.classes == ["TritonMLAKeepImpl"] and all(engine.events) and (engine.replays > 10) == graphs
        check_transformers(model, recipe, SOME, engine)
        engine.check_nothing_left()


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's other kernels need AMX")
def test_in_16_bits(latents: Path, model: PreTrainedModel) -> None:
    """Tokens depend on the program, so those of vLLM alone are what they are compared with."""
    engine: dict[str, Any] = {"dtype": "bfloat16", "attention_config": {}, "block_size": 32}
    recipes = ("knorm(keep=1.0)", "streaming_llm(keep=40, every=16)", EQUAL)
    some: dict[str | None, Scenario] = {name: on(latents, Scenario(name, ALONE, engine=engine)) for name in recipes}
    answers = answers_of(some | {None: on(latents, Scenario(None, ALONE, engine=engine))})
    everything, few, window, plain = (result(answers, name) for name in (*recipes, None))
    assert (everything.tokens, everything.steps) == (plain.tokens, plain.steps)
    assert few.classes == ["AMXMLAKeepImpl"] and all(few.events) and all(window.events)
    own = AutoModelForCausalLM.from_pretrained(latents, dtype=torch.bfloat16).eval()
    cache = keepset.Cache(own, recipes[1], prompt_length=len(ALONE[0].ids), history=True)
    fed(own, cache, cache.recipe, ALONE[0].ids, few.tokens[0] or [])
    for event, other in zip(cache.events, few.events[0], strict=True):
        for layer, heads in layers_of(other).items():
            assert heads == [event.keep_set.positions(layer, 0, 0).tolist()]
    for each in (few, window):
        assert each.steps[-1]["free"] - plain.steps[-1]["free"] == each.stats["blocks_freed"] > 0
        each.check_nothing_left()


def test_what_latents_do_not_have_is_refused(latents: Path) -> None:
    some = {name: on(latents, Scenario(name, [])) for name in ("match(snapkv(window=8), window=8, keep=40)",)}
    for answer in answers_of(some).values():
        assert "the model caches latents, of which keys and values are both made; leave match out." in answer
