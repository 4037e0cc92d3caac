"""Models with several kinds of layers: those that attend to all tokens are compressed, all others are vLLM's alone.

And models that cache latents (DeepSeek). Every token and every kept entry is the transformers runtime's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

import keepset
from keepset.vllm.settings import CONNECTOR
from tests.vllm.compared import CHUNKED, IDS, answers_of, asks, check_oracle, check_transformers, fed, layers_of, result
from tests.vllm.conftest import SHAPE, oracle_of
from tests.vllm.engine import BLOCK, Ask, Result, Scenario, run
from tests.vllm.oracle import Oracle
from tests.vllm.test_own_budgets import TURMOIL
from tests.vllm.test_tiny import (
    ACROSS,
    CRAMPED,
    ENGINE,
    EQUAL,
    FITTED,
    FROM_DATA,
    LAYERS_DIFFER,
    RAGGED,
    UNDISTURBED,
    few_blocks,
)

pytestmark = pytest.mark.full

WINDOW = 48
KINDS = ["full_attention", "full_attention", "sliding_attention"] * 2
"""Four layers that attend to all tokens and two with windows: two groups of the former, not of neighbours."""
EVERYTHING, WINDOW_ALONE = "knorm(keep=1.0)", "streaming_llm(keep=40, every=16)"
ALONE = [Ask(IDS[:200], 100)]
RECIPES = [RAGGED, LAYERS_DIFFER, FROM_DATA, ACROSS]
SCENARIOS = {recipe: Scenario(recipe, UNDISTURBED, engine=CHUNKED) for recipe in [*RECIPES, EVERYTHING]} | {
    "no recipe": Scenario(None, UNDISTURBED, engine=CHUNKED),
    "alone": Scenario(EQUAL, ALONE),
    "turmoil": Scenario(EQUAL, TURMOIL, (9, 33), {"max_num_batched_tokens": 96, "kv_transfer_config": CONNECTOR}),
}
FORESEEN = "snapkv(window=8, keep=32, every=16)"
BESIDE_CONVOLUTIONS = {
    # vLLM's own rotation is wrong on a CPU for queries as this model gives them.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    "kv_transfer_config": CONNECTOR,
}
MOMENTS = ["expected_attention(keep=40, buffer=24, every=16)", "gvote(keep=0.4)"]
CONVOLUTIONS = {
    recipe: (Scenario(recipe, UNDISTURBED, engine=CHUNKED | BESIDE_CONVOLUTIONS), UNDISTURBED)
    for recipe in (RAGGED, FROM_DATA, *MOMENTS)
} | {"cramped": (Scenario(FORESEEN, CRAMPED, engine=few_blocks(15) | BESIDE_CONVOLUTIONS), CRAMPED)}


NO_PADDING = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}


def saved(folder: Path, config: PreTrainedConfig, change: Callable[[PreTrainedModel], None] = lambda _: None) -> Path:
    """Save a random model of this configuration, changed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    change(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with sliding windows."""
    own = {"num_hidden_layers": len(KINDS), "layer_types": KINDS, "sliding_window": WINDOW}
    rotation = {"rope_theta": 10000.0, "rope_type": "default"}
    config = CwmConfig(**SHAPE, **own, **NO_PADDING, rope_parameters=rotation)
    return saved(tmp_path_factory.mktemp("windows"), config)


@pytest.fixture(scope="module")
def model(windows: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(windows).eval()


@pytest.fixture(scope="module")
def oracle(windows: Path) -> Oracle:
    return oracle_of(windows)


@pytest.fixture(scope="module")
def engine_of(windows: Path) -> Callable[[str], Result]:
    """What the engine of a name did; they ran one after another in one process."""
    answers = answers_of({name: on(windows, scenario) for name, scenario in SCENARIOS.items()})
    return lambda name: result(answers, name)


def on(folder: Path, scenario: Scenario, base: dict[str, Any] = ENGINE) -> Scenario:
    return replace(scenario, engine={"model": str(folder), **base, **scenario.engine})


EngineOf = Callable[[str], Result]


def test_whatever_happens_it_is_the_reference(engine_of: EngineOf, oracle: Oracle) -> None:
    engine = engine_of("turmoil")
    assert engine.groups == 3 and min(engine.preemptions[:5]) == 2
    check_oracle(oracle, EQUAL, TURMOIL, engine)


def test_pages_of_layers_that_attend_to_all_tokens_are_freed(engine_of: EngineOf, oracle: Oracle) -> None:
    """In each of their two groups; the pages of windows are freed by vLLM alone."""
    engine = engine_of("alone")
    check_oracle(oracle, EQUAL, ALONE, engine)
    events = range(200, 300, 16)
    assert [event["at"] for event in engine.events[0]] == list(events)
    assert {tuple(event["layers"]) for event in engine.events[0]} == {("0", "3", "1", "4")}
    begins, tokens = zip(*engine.steps_of(0), strict=True)
    lengths = list(accumulate(tokens))
    dropped = [max((at - 40 for at in events if at < length), default=0) for length in lengths]
    unseen = [max(begin - WINDOW + 1, 0) for begin in begins]
    windows = [-(-length // BLOCK) - gone // BLOCK for length, gone in zip(lengths, unseen, strict=True)]
    held = [engine.free_before - step["free"] for step in engine.steps]
    whole = [2 * (-(-length // BLOCK) - gone // BLOCK) for length, gone in zip(lengths, dropped, strict=True)]
    assert held == [one + other for one, other in zip(whole, windows, strict=True)]
    assert engine.stats["blocks_freed"] == 2 * ((events[-1] - 40) // BLOCK)
    assert engine.stats["events"] == len(events)
    assert engine.stats["entries_kept"] == len(events) * 40 * 2 * 4  # of two heads of four layers


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_the_reference(recipe: str, engine_of: EngineOf, model: PreTrainedModel, oracle: Oracle) -> None:
    engine = engine_of(recipe)
    assert all(engine.events) and engine.stats["blocks_freed"] > 0
    check_oracle(oracle, recipe, UNDISTURBED, engine)
    check_transformers(model, recipe, UNDISTURBED, engine)


def test_where_everything_may_stay_it_is_vllm(engine_of: EngineOf, oracle: Oracle) -> None:
    everything, plain = engine_of(EVERYTHING), engine_of("no recipe")
    check_oracle(oracle, None, UNDISTURBED, plain)
    assert (everything.tokens, everything.steps) == (plain.tokens, plain.steps)
    assert not any(everything.events) and not any(everything.stats.values())
    assert plain.classes == ["CPUAttentionBackendImpl"] and everything.classes == ["CPUKeepImpl"]


@torch.no_grad()
def test_windows_are_shared_as_far_as_they_follow_from_tokens(
    windows: Path, model: PreTrainedModel, oracle: Oracle
) -> None:
    """The entries of an answer follow from what was kept of its prompt. To another request it is a prompt like any."""
    first = Ask(IDS[:100], 70)
    cache = keepset.Cache(model, EQUAL, prompt_length=len(first.ids))
    options = {"max_new_tokens": 70, "min_new_tokens": 70, "do_sample": False}
    text = model.generate(torch.tensor([first.ids]), past_key_values=cache, **options)[0, :160].tolist()
    second = Ask(text + IDS[1000:1040], 20, add=75)  # offers the answer's tokens as its prompt
    third = Ask(text + IDS[1000:1035] + IDS[2000:2010], 40, add=100)
    # Otherwise vLLM keeps the pages of windows at the ends of prompts alone.
    engine = {"enable_prefix_caching": True, "prefix_cache_retention_interval": BLOCK, **CHUNKED}
    some = [first, second, third]
    shared = result(answers_of({"": on(windows, Scenario(EQUAL, some, engine=engine))}), "")
    assert shared.tokens[0] is not None and first.ids + shared.tokens[0][:60] == text
    assert shared.cached == [0, 32, 160]
    check_oracle(oracle, EQUAL, some, shared)


def draw_sinks(model: PreTrainedModel) -> None:
    draw = torch.Generator().manual_seed(5)  # another draw had a near tie on processors without AVX-512
    for name, each in model.named_parameters():
        if name.endswith("sinks"):
            each.data = (
                (torch.randn(each.shape, generator=draw) + 2).bfloat16().float()
            )  # as exactly as vLLM holds them


def shrink_embeddings(model: PreTrainedModel) -> None:
    """Or every token would be followed by itself."""
    model.get_input_embeddings().weight.data *= 0.1


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CAPS = {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 3.0}


@pytest.mark.parametrize(
    ("config", "own", "change"),
    [(GptOssConfig, EXPERTS, draw_sinks), (Gemma2Config, CAPS, shrink_embeddings)],
    ids=["sinks", "caps"],
)
def test_caps_and_sinks(config: Any, own: dict[str, Any], change: Any, tmp_path: Path) -> None:
    """The attention that recipes look at has them, as those which vLLM and keepset compute."""
    recipes = [EQUAL, RAGGED, FITTED[0], "h2o(keep=0.5)", MOMENTS[0]]
    folder = saved(tmp_path, config(**SHAPE, **own, num_hidden_layers=4, sliding_window=WINDOW), change)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = CHUNKED | {"kv_transfer_config": CONNECTOR}
    answers = answers_of({recipe: on(folder, Scenario(recipe, UNDISTURBED, engine=engine)) for recipe in recipes})
    for recipe in recipes:
        assert all(result(answers, recipe).events)
        check_transformers(model, recipe, UNDISTURBED, result(answers, recipe))


def test_beside_convolutions(tmp_path: Path) -> None:
    """vLLM keeps their states in pages, which it clears between two steps: the events of one must not see that."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"num_attention_heads": 2}
    own = {"num_key_value_heads": 1, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
    config = Lfm2Config(**shape | own, block_auto_adjust_ff_dim=False, block_multiple_of=32)
    config.update({"conv_dim": 64, "block_dim": 64})  # as vLLM reads them
    convolutions = saved(tmp_path, config)
    model = AutoModelForCausalLM.from_pretrained(convolutions).eval()
    answers = answers_of({name: on(convolutions, scenario) for name, (scenario, _) in CONVOLUTIONS.items()})
    for name, (scenario, some) in CONVOLUTIONS.items():
        engine = result(answers, name)
        assert not sum(engine.preemptions) and engine.stats["blocks_freed"] > 0
        check_transformers(model, scenario.recipe, some, engine)
        engine.check_nothing_left()
    assert min(step["free"] for step in result(answers, "cramped").steps) < 3


def check_beside(folder: Path, engine: dict[str, Any]) -> None:
    """Check that heads with equal and with other pages have a model's tokens and entries of transformers."""
    model, recipes = AutoModelForCausalLM.from_pretrained(folder).eval(), (EQUAL, ACROSS)
    answers = answers_of({recipe: on(folder, Scenario(recipe, UNDISTURBED, engine=engine)) for recipe in recipes})
    for recipe in recipes:
        some = result(answers, recipe)
        assert all(some.events) and some.stats["blocks_freed"] > 0
        check_transformers(model, recipe, UNDISTURBED, some)
        some.check_nothing_left()


def check_in_16_bits(folder: Path, engine: dict[str, Any], compressed: dict[str, Any], *recipes: str) -> list[Result]:
    """Check a model in 16 bits, where tokens depend on the program: vLLM's alone are what they are compared with.

    What stays of a window depends on positions only. Return what the engines of further recipes did.
    """
    half, some = {"model": str(folder), **engine, "dtype": "bfloat16"}, (EVERYTHING, WINDOW_ALONE, *recipes)
    scenarios = {name: Scenario(name, ALONE, engine=half | compressed) for name in some}
    answers = answers_of({**scenarios, "": Scenario(None, ALONE, engine=half)})
    plain, everything, window, *others = (result(answers, name) for name in ("", *some))
    assert (everything.tokens, everything.steps) == (plain.tokens, plain.steps)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    cache = keepset.Cache(model, WINDOW_ALONE, prompt_length=len(ALONE[0].ids), history=True)
    fed(model, cache, cache.recipe, ALONE[0].ids, window.tokens[0] or [])
    for event, other in zip(cache.events, window.events[0], strict=True):
        for layer, heads in layers_of(other).items():
            assert heads == [event.keep_set.positions(layer, 0, head).tolist() for head in range(len(heads))]
    for each in (window, *others):
        assert all(each.events)
        assert each.steps[-1]["free"] - plain.steps[-1]["free"] == each.stats["blocks_freed"] > 0
        each.check_nothing_left()
    return others


def test_beside_chunks(tmp_path: Path) -> None:
    """Layers that attend to chunks of the text."""
    kinds = {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]}
    own = {"num_hidden_layers": 4, "attention_chunk_size": 64, "intermediate_size_mlp": 96}
    experts = {"num_local_experts": 2, "moe_layers": [0, 1, 2, 3]}
    check_beside(saved(tmp_path, Llama4TextConfig(**SHAPE, **kinds, **own, **experts, **NO_PADDING)), CHUNKED)


def test_beside_mamba(tmp_path: Path) -> None:
    """Layers with attention and a recurrent state (Mamba 2) side by side."""
    own = {"num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16}
    config = FalconH1Config(**SHAPE, **own, **NO_PADDING, mamba_n_groups=1, mamba_chunk_size=16)
    check_beside(saved(tmp_path, config), CHUNKED | {"kv_transfer_config": CONNECTOR})


def test_beside_gated_delta_nets(tmp_path: Path) -> None:
    """In 16 bits, as vLLM computes them on CPUs, for heads of this size."""
    own = {"num_key_value_heads": 4, "head_dim": 128, "partial_rotary_factor": 0.5, "num_hidden_layers": 3}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    states = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1}
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 2}
    config = Qwen3NextConfig(**SHAPE | own, **experts, **states, **kinds, shared_expert_intermediate_size=32)
    deltas = saved(tmp_path, config)
    check_in_16_bits(deltas, ENGINE, {"kv_transfer_config": CONNECTOR})


def test_models_without_layers_that_grow_are_refused(tmp_path: Path) -> None:
    """When the engine starts: of recurrent layers vLLM asks keepset nothing else."""
    shape = {name: SHAPE[name] for name in ("hidden_size", "vocab_size")}
    configs: dict[str, PreTrainedConfig] = {
        "windows": MistralConfig(**SHAPE, num_hidden_layers=1, sliding_window=WINDOW),
        "states": MambaConfig(**shape, state_size=4, num_hidden_layers=1),
    }
    some = {}
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        some[name] = on(tmp_path / name, Scenario("knorm(keep=40)", []))
    for answer in answers_of(some).values():
        assert "nothing to compress; serve the model without a recipe" in answer


PAGE = 16
LATENT_ENGINE: dict[str, Any] = {
    # vLLM's kernels for CPUs are made for latents of this size, these pages and no parts of prompts. Its own rotation
    # is wrong on a CPU for queries as these models give them.
    "attention_config": {"backend": "CPU_MLA"},
    "block_size": PAGE,
    "max_model_len": 256,
    "num_gpu_blocks_override": 160,
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT_RECIPES = [
    *(EQUAL, RAGGED, LAYERS_DIFFER, FROM_DATA, ACROSS, "h2o(bytes=0.3)"),
    *("expected_attention(keep=40, buffer=24, every=16)", "pool(prompt_queries, bytes=0.25)", "gvote(keep=0.4)"),
]
SOME = [*asks((90, 60), 40), Ask(IDS[900:1000], 30, add=10)]
"""The last prompt comes while others are decoded."""
LATENT_ALONE = [Ask(IDS[:130], 60)]


def save_latents(folder: Path, low_rank: bool) -> Path:
    """Save a random model whose queries are made by way of a low rank, or of hidden states at once."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    kind, rank = (DeepseekV3Config, 24) if low_rank else (DeepseekV2Config, None)
    own = {"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 3, "q_lora_rank": rank}
    return saved(folder, kind(**shape | own | LATENT))


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_latents(tmp_path_factory.mktemp("latents"), low_rank=True)


@pytest.fixture(scope="module")
def latent_model(latents: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(latents).eval()


def test_latents_are_the_transformers_runtimes(latents: Path, latent_model: PreTrainedModel) -> None:
    """With pages of a layer's own, too; and freed pages are counted."""
    some = {recipe: on(latents, Scenario(recipe, SOME), LATENT_ENGINE) for recipe in LATENT_RECIPES}
    answers = answers_of(some | {"alone": on(latents, Scenario(EQUAL, LATENT_ALONE), LATENT_ENGINE)})
    for recipe in LATENT_RECIPES:
        engine = result(answers, recipe)
        assert engine.classes == ["CPUMLAKeepImpl"] and all(engine.events) and engine.stats["blocks_freed"] > 0
        check_transformers(latent_model, recipe, SOME, engine)
        engine.check_nothing_left()
    alone, events = result(answers, "alone"), range(130, 190, 16)
    lengths = list(accumulate(tokens for _, tokens in alone.steps_of(0)))
    dropped = [max((at - 40 for at in events if at < length), default=0) for length in lengths]
    held = [alone.free_before - step["free"] for step in alone.steps]
    assert held == [-(-length // PAGE) - gone // PAGE for length, gone in zip(lengths, dropped, strict=True)]
    assert alone.stats["entries_kept"] == len(events) * 40 * 3  # one entry for all heads of a layer


def test_latents_without_a_low_rank_and_with_budgets_of_requests(tmp_path: Path) -> None:
    folder = save_latents(tmp_path / "model", low_rank=False)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    (engine,) = run(on(folder, Scenario(EQUAL, SOME, engine={"kv_transfer_config": CONNECTOR}), LATENT_ENGINE))
    check_transformers(model, EQUAL, SOME, engine)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_backend_of_latents_for_gpus_but_for_its_kernels(
    graphs: bool, latents: Path, latent_model: PreTrainedModel
) -> None:
    """What kernels do plain torch does, in called steps and in replayed ones."""
    own = {"max_num_batched_tokens": 512}  # of prompts that are computed in parts other kernels gather rows
    scenario = Scenario(None, SOME, engine=own, backend="TRITON_MLA", graphs=graphs)
    recipes = (EQUAL, ACROSS)
    engines = run(*(on(latents, replace(scenario, recipe=recipe), LATENT_ENGINE) for recipe in recipes))
    for recipe, engine in zip(recipes, engines, strict=True):
        assert engine.classes == ["TritonMLAKeepImpl"] and all(engine.events) and (engine.replays > 10) == graphs
        check_transformers(latent_model, recipe, SOME, engine)
        engine.check_nothing_left()


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's other kernels need AMX")
def test_latents_in_16_bits(latents: Path) -> None:
    own = LATENT_ENGINE | {"attention_config": {}, "block_size": 32, "max_model_len": 512}
    (few,) = check_in_16_bits(latents, own, {}, EQUAL)
    assert few.classes == ["AMXMLAKeepImpl"]
