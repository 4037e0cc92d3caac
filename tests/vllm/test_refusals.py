"""Configurations and models that cannot be served are refused in one sentence, when the engine starts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig

from keepset import KeepsetError, Recipe
from keepset.allocators.pool import Pool
from keepset.core.feature import Needs
from keepset.core.features.attention import SecondPass
from keepset.core.features.runtime_features import OutputProjection, Perplexity
from keepset.core.method import Method
from keepset.core.statistics import Statistics
from keepset.core.statistics import save as save_statistics
from keepset.core.tables import save
from keepset.core.traits import Traits
from keepset.defaults import ANSWERED_AT_ONCE
from keepset.errors import UnsupportedEngineError
from keepset.kernels.columns import ColumnStatistic
from keepset.methods.window import SnapKV
from keepset.vllm.recipe_support import one_rotation, served
from keepset.vllm.settings import (
    CONNECTOR,
    CONTEXT_CONNECTOR,
    CONVERSATION_CONNECTOR,
    engine_args,
    recipe_of,
    serve_options,
    spills_of,
)
from tests.core.test_tables import random_tables
from tests.methods.naive import Shape, random_statistics
from tests.paged.methods import Mass
from tests.vllm.late import Late

compat, validation = Late("keepset.vllm.compat"), Late("keepset.vllm.validation")
arguments, parsers = Late("vllm.engine.arg_utils"), Late("vllm.utils.argparse_utils")
formats, triton = Late("keepset.vllm.formats"), Late("vllm.v1.attention.backends.triton_attn")
modes, specs = Late("vllm.config"), Late("vllm.v1.kv_cache_interface")

ONE = [f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data", "decode_context", "prefill_context")]
OTHER_MODELS = ("is_encoder_decoder", "use_mla", "is_mm_prefix_lm", "is_diffusion", "is_multimodal_model")
SPLIT = [
    *("vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"),
    *("vllm::unified_mla_attention_with_output", "vllm::unified_mla_kv_cache_update"),
]


def config(**changes: Any) -> Any:
    """The part of a configuration that keepset looks at, and serves; a change goes to the part that has its name."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": dict.fromkeys(ONE, 1) | {"world_size": 1, "use_ubatching": False, "enable_dbo": False},
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True, "kv_cache_dtype_skip_layers": []},
        "scheduler_config": {"disable_hybrid_kv_cache_manager": False, "async_scheduling": False},
        "model_config": dict.fromkeys(OTHER_MODELS, False)
        | {"runner_type": "generate", "enforce_eager": True, "uses_mrope": False}
        | {"hf_text_config": LlamaConfig(), "using_transformers_backend": lambda: False},
        "attention_config": {"use_non_causal": False, "backend": None},
        "compilation_config": {"mode": "VLLM_COMPILE", "cudagraph_mode": "FULL_AND_PIECEWISE", "splitting_ops": SPLIT},
    }
    whole: dict[str, Any] = dict.fromkeys(("additional_config", "speculative_config", "kv_transfer_config"))
    for name, value in changes.items():
        (part,) = [part for part in (whole, *parts.values()) if name in part]
        part[name] = value
    compilation = parts["compilation_config"]
    compilation["mode"] = modes.CompilationMode[compilation["mode"]]
    compilation["cudagraph_mode"] = modes.CUDAGraphMode[compilation["cudagraph_mode"]]
    return SimpleNamespace(**whole, **{part: SimpleNamespace(**names) for part, names in parts.items()})


def refused(recipe: Recipe | str, **changes: Any) -> str:
    """Why a configuration is refused."""
    with pytest.raises(KeepsetError) as error:
        validation.check(config(**changes), Recipe.parse(recipe) if isinstance(recipe, str) else recipe)
    return str(error.value)


def connector(path: str | None, name: str = "MooncakeConnector") -> Any:
    own = {"kv_connector": name, "kv_connector_module_path": path, "kv_load_failure_policy": "fail"}
    return SimpleNamespace(**own)


def drafts(method: str = "ngram", **more: Any) -> dict[str, Any]:
    return {"speculative_config": SimpleNamespace(method=method), **more}


PASTED = ("'", "--no-enable-prefix-caching", "--enforce-eager", "int8_per_token_head")
"""How a message ends that tells what to write."""

UNIFORM, RAGGED, INT8 = "snapkv(keep=0.25)", "adakv(snapkv, keep=0.25)", "int8(adakv(snapkv), keep=96)"
QUANTIZED, EVERY = "quantized(snapkv, bytes=0.05)", "snapkv(window=8, keep=256, every=64)"
TURNS = "snapkv(bytes=0.25, turns=True)"
PYRAMID, POOL, GATED = "pyramid(snapkv, keep=128)", "pool(snapkv, keep=96)", "compilerkv(elastic=True, keep=128)"
EIGHT, FP8 = {"cache_dtype": "int8_per_token_head"}, "fp8_per_token_head"
TWO_GPUS, TWO_STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
CARRIED = {"kv_transfer_config": connector(CONNECTOR["kv_connector_module_path"], CONNECTOR["kv_connector"])}
SERVED = {"enable_prefix_caching": False, **CARRIED}
"""A configuration for counts that come from the data."""
TALKING = {
    "enable_prefix_caching": False,
    "kv_transfer_config": connector(
        CONVERSATION_CONNECTOR["kv_connector_module_path"], CONVERSATION_CONNECTOR["kv_connector"]
    ),
}
"""A configuration that keeps conversations."""
SPILLS: dict[str, Any] = {
    "additional_config": {"keepset_conversations": {"folder": str(Path(__file__).parent), "bytes": 9, "owner_bytes": 9}}
}
"""A configuration with a folder for conversations that lose their pages."""
CONTEXTS: dict[str, Any] = {
    "additional_config": {"keepset_contexts": str(Path(__file__).parent)},
    "kv_transfer_config": connector(CONTEXT_CONNECTOR["kv_connector_module_path"], "ContextConnector"),
}
"""A configuration with contexts, whose heads may differ under any recipe."""
GIVE_CARRIER = (
    "how much it keeps depends on the data, so a KV connector must tell the scheduler; none is given. Write "
    "LLM(model, **keepset.vllm.engine_args('"
)
ONLY, MOVED = "the only KV connector that is served here is keepset's ", "because others move whole caches; leave"
WITHOUT_MANAGER = {"disable_hybrid_kv_cache_manager": True}

LATENTS, PICTURES = {"use_mla": True}, {"is_multimodal_model": True}
INDEXER = {"hf_text_config": LlamaConfig(index_topk=9)}
FOUR, OF_TEXT = "quantized(knorm, bits=4, keep=9)", "knorm(keep=9, protect='text')"
WHATEVER_THE_RECIPE: list[tuple[dict[str, Any], str]] = [
    *(
        (drafts(method), f"drafts by {method} are not served; use")
        for method in ("draft_model", "medusa", "mlp_speculator", "custom_class", "ngram_gpu", "dflash", "dspark")
    ),
    *(
        (
            {"kv_transfer_config": connector(path, name)},
            f"{ONLY}BlockCountConnector, {MOVED} {name} out of kv_transfer_config.",
        )
        for path, name in ((None, "OffloadingConnector"), (None, "MultiConnector"), ("lmcache.x", "LMCacheConnectorV1"))
    ),
    (CONTEXTS | CARRIED, f"{ONLY}ContextConnector, {MOVED} BlockCountConnector out of kv_transfer_config."),
    ({"decode_context_parallel_size": 2}, "context parallelism divides a request's entries"),
    ({"prefill_context_parallel_size": 2}, "context parallelism divides a request's entries"),
    ({"use_ubatching": True}, "micro-batch overlap runs two batches at once"),
    ({"enable_dbo": True}, "micro-batch overlap runs two batches at once"),
    *(
        (
            {"cache_dtype": kind},
            f"it serves KV caches of kind fp8, of kind int8_per_token_head and of 16 bits, not of kind {kind}; set "
            "kv_cache_dtype (--kv-cache-dtype) to fp8 or int8_per_token_head, or leave it out.",
        )
        for kind in ("int4_per_token_head", "nvfp4", "nvfp4_4over6", "turboquant_k8v4", "turboquant_3bit_nc")
    ),
    (CONTEXTS | drafts(), "speculative decoding takes tokens back, which requests with contexts"),
    (WITHOUT_MANAGER, "it needs vLLM's hybrid KV-cache manager"),
    ({"runner_type": "pooling"}, "only models that generate text have a cache to compress"),
    ({"is_encoder_decoder": True}, "encoder-decoder models are not supported"),
    (CONTEXTS | LATENTS, "contexts hold keys and values, and the model caches latents"),
    (LATENTS | {"cache_dtype": "fp8"}, "it reads latents in 16 and 32 bits only; leave kv_cache_dtype out"),
    (INDEXER, "the model has an indexer, which caches keys of its own beside latents"),
    ({"is_mm_prefix_lm": True}, "the model attends to parts of its prompt in both directions"),
    ({"is_diffusion": True}, "the model computes its answer's tokens more than once (diffusion)"),
    ({"use_non_causal": True}, "attention that is not causal is not supported"),
    *((changes, "") for changes in ({}, CONTEXTS, drafts(), {"cache_dtype": FP8}, {"splitting_ops": []})),
]
OF_RECIPES: list[tuple[str, dict[str, Any], str]] = [
    *((recipe, drafts(async_scheduling=True), "the scheduler runs ahead") for recipe in (EVERY, RAGGED)),
    (EVERY, drafts(), "drafts must end before events, which a KV"),
    ("mass", {"kv_transfer_config": connector(None)}, f"{ONLY}Block"),
    ("mass", CARRIED, "its layers keep different numbers of entries"),
    *((recipe, {"enable_prefix_caching": False}, GIVE_CARRIER) for recipe in ("mass", GATED)),
    (PYRAMID, {}, "its layers keep different numbers of entries, so that requests"),
    (
        "match(knorm, keep=9)",
        LATENTS,
        "the model caches latents, of which keys and values are both made; leave match out",
    ),
    ("knorm(keep=9, protect='image')", {}, "its model takes no images; leave protect='image' out."),
    (OF_TEXT, PICTURES, "a KV connector must tell where each request's images are; none is given."),
    ("expected_attention(keep=40)", {"uses_mrope": True}, "tokens of an image have positions"),
    (RAGGED, {"splitting_ops": []}, "CUDA graphs would replay vllm::unified_attention"),
    # What use_inductor_graph_partition makes of them:
    (RAGGED, {"splitting_ops": SPLIT[:1]}, "CUDA graphs would replay vllm::unified_kv_cache"),
    ("gvote", SERVED | {"enforce_eager": False}, "compiled code does not show the hidden states"),
    *((POOL, SERVED | several, "it compares all heads of all") for several in (TWO_GPUS, TWO_STAGES)),
    (INT8, {}, "it stores entries in 8 bits, and the KV cache is of kind auto. Write LLM(model"),
    (INT8, {"cache_dtype": FP8}, "it stores entries in 8 bits, and"),
    (FOUR, EIGHT, "it stores entries in 4 bits, and vLLM's pages hold 8 or 16; write bits=8."),
    *(
        (TURNS, TALKING | changes, reason)
        for changes, reason in (
            (CONTEXTS, "a server keeps either conversations or contexts; leave"),
            (SPILLS | {"data_parallel_size": 2}, "one engine keeps conversations in a folder; leave"),
            (drafts(), "a conversation's pages hold no drafts; leave"),
            ({"kv_transfer_config": None}, "a KV connector must say which conversation"),
            ({"enable_prefix_caching": True}, "conversations have their own pages"),
        )
    ),
    # These are served:
    (TURNS, CARRIED, f"{ONLY}ConversationConnector, {MOVED} BlockCountConnector out of kv_transfer_config."),
    (UNIFORM, SPILLS, "it keeps no conversations for which there is a folder; give turns=True"),
    *((TURNS, TALKING | more, "") for more in ({}, SPILLS)),
    *(("expected_attention(keep=512)", {"cache_dtype": kind}, "") for kind in ("bfloat16", "fp8")),
    ("match(snapkv, biases=False, keep=0.25)", {"cache_dtype": "fp8_e4m3"}, ""),
    *(
        (recipe, EIGHT, "")
        for recipe in ("int8(match(adakv(snapkv)), keep=96)", "quantized(adakv(snapkv), bytes=0.05)")
    ),
    (PYRAMID, {"enable_prefix_caching": False}, ""),
    *((recipe, SERVED, "") for recipe in ("mass", "pool(snapkv, keep=96, every=64)", GATED)),
    *(("h2o(keep=0.5)", TWO_GPUS | more, "") for more in ({}, LATENTS)),
    *(("gvote", SERVED | several, "") for several in (TWO_GPUS, TWO_STAGES)),
    *(("adakv(snapkv, keep=256, every=64)", changes, "") for changes in ({}, {"pipeline_parallel_size": 4})),
    ("compilerkv(keep=128)", {}, ""),
    *((RAGGED, {"splitting_ops": []} | more, "") for more in ({"mode": "NONE"}, {"cudagraph_mode": "NONE"})),
    (RAGGED, {}, ""),
]
CONFIGURATIONS = [*((UNIFORM, *row) for row in WHATEVER_THE_RECIPE), *OF_RECIPES]
"""Recipes, what is other in the configuration, and how the reason begins why it is refused."""


@pytest.mark.parametrize(
    ("recipe", "changes", "reason"), CONFIGURATIONS, ids=[reason[:45] or recipe for recipe, _, reason in CONFIGURATIONS]
)
def test_a_configuration_is_refused_or_served(recipe: str, changes: dict[str, Any], reason: str) -> None:
    if not reason:
        validation.check(config(**changes), served(Recipe.parse(recipe)))
        return
    message = refused(recipe, **changes)
    assert message.startswith(f"keepset cannot serve {Recipe.parse(recipe)}: {reason}")
    assert message.endswith((".", *PASTED)) and "\n" not in message


def test_all_that_is_missing_is_said_at_once() -> None:
    message = refused("gvote", enforce_eager=False, **WITHOUT_MANAGER)
    reasons = ("it needs vLLM's hybrid", "How much it keeps", "Its layers keep", "Compiled code does not show")
    places = [message.index(reason) for reason in reasons]
    assert places == sorted(places)
    assert message.endswith(f"start vllm serve MODEL with {serve_options('gvote')}")


@pytest.mark.parametrize("recipe", [UNIFORM, RAGGED, "mass", PYRAMID, "gvote", INT8, QUANTIZED, None])
@pytest.mark.parametrize("shares", [False, True])
def test_engine_args_are_all_that_vllm_must_be_told(recipe: str | None, shares: bool, tmp_path: Path) -> None:
    contexts = tmp_path if shares else None
    args = engine_args(recipe, contexts=contexts)
    words = shlex.split(serve_options(recipe, contexts=contexts))
    parsed = arguments.EngineArgs.add_cli_args(parsers.FlexibleArgumentParser()).parse_args(words)
    assert parsed.additional_config == args["additional_config"]
    assert parsed.enable_prefix_caching == args.get("enable_prefix_caching")
    assert parsed.enforce_eager == args.get("enforce_eager", False)
    assert parsed.kv_cache_dtype == args.get("kv_cache_dtype", "auto")
    connector = parsed.kv_transfer_config
    assert {name: getattr(connector, name) for name in args["kv_transfer_config"]} == args["kv_transfer_config"]
    made = config(
        additional_config=args["additional_config"],
        kv_transfer_config=connector,
        enable_prefix_caching=args.get("enable_prefix_caching", True),
        enforce_eager=args.get("enforce_eager", False),
        cache_dtype=args.get("kv_cache_dtype", "auto"),
    )
    if shares and recipe in ("mass", PYRAMID, "gvote"):  # for which no argument helps
        with pytest.raises(UnsupportedEngineError, match="share contexts as they share prefixes, so all layers"):
            validation.check(made, Recipe.parse(recipe))
    else:
        validation.check(made, recipe_of(made))


@pytest.mark.parametrize(("written", "elsewhere"), [("", 4), ("bits=8, ", 8)])
def test_a_server_has_8_bits(written: str, elsewhere: int) -> None:
    recipe = f"quantized(knorm, {written}bytes=0.05)"
    args = engine_args(recipe)
    assert args["kv_cache_dtype"] == "int8_per_token_head"
    executed = recipe_of(config(additional_config=args["additional_config"]))
    assert executed is not None and executed.method.traits.key_bits == 8
    assert executed == recipe_of(config(additional_config={"keepset": str(executed)}))
    assert Recipe.parse(recipe).method.traits.key_bits == elsewhere  # under transformers


def test_breakable_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breakable graphs replay what writes to the cache, whatever the operators that graphs are split at."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    validation.check(config(), Recipe.parse(UNIFORM))
    validation.check(config(cudagraph_mode="NONE"), Recipe.parse(RAGGED))
    assert refused(RAGGED).endswith("to wrong places; set VLLM_USE_BREAKABLE_CUDAGRAPH=0.")


def test_what_compiled_tables_can_do(tmp_path: Path) -> None:
    """Their thresholds go by the perplexity, which vLLM cannot tell; head weights alone are served."""
    path = str(tmp_path / "tables")
    save(random_tables(), Path(path))
    said = refused(f"compilerkv(tables={path!r}, elastic=True, keep=128)", **SERVED)
    assert "compilerkv looks at the prompt's perplexity, " in said and said.endswith(" (gate=False).")
    validation.check(config(**SERVED), Recipe.parse(f"compilerkv(tables={path!r}, elastic=True, gate=False, keep=128)"))
    validation.check(config(), Recipe.parse(f"compilerkv(tables={path!r}, keep=128)"))
    assert "There is no file 'absent' with tables" in refused("compilerkv(tables='absent', gate=False)", **SERVED)


def test_statistics_must_be_there_and_whole(tmp_path: Path) -> None:
    """A process takes those of its own heads; methods that compare all heads need all."""
    assert "run `keepset calibrate --model MODEL" in refused("adakv(qfilter, keep=96)")
    assert "There is no file 'absent'" in refused("triattention(stats='absent', keep=96)")
    layers = random_statistics(Shape((5,), 2, 3, 6, 4), (0, 1)).layers
    save_statistics(Statistics(layers, {"model": {"name": "some", "layers": [0, 1]}, "seed": 3}), tmp_path / "stats")
    named = f"stats={str(tmp_path / 'stats')!r}"
    validation.check(config(**TWO_GPUS), Recipe.parse(f"qfilter({named}, keep=96)"))
    assert "it compares all heads" in refused(f"duo_attention({named}, keep=0.5)", **SERVED | TWO_GPUS)


@pytest.mark.parametrize("recipe", ["h2o(keep=96, every=24)", "gvote(every=24)"])
def test_what_only_a_prompt_tells_is_not_there_later(recipe: str) -> None:
    said = refused(recipe, **SERVED)
    assert "whole prompt" in said and said.endswith("leave every= out.")


def mine(base: type[Method], *args: Any, **own: Any) -> Recipe:
    """A recipe of a method with traits of its own."""
    return Recipe.of(type("Mine", (base,), {"name": "mine", **own})(*args), keep=96)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (
            mine(Mass, traits=Traits(needs=Needs(SecondPass(frozenset({ColumnStatistic.MAX}))))),
            "mine has tokens look at the prompt a second",
        ),
        (mine(Mass, traits=Traits(needs=Needs(OutputProjection()))), "mine looks at the output projection"),
        (mine(Mass, traits=Traits(needs=Needs(Perplexity(8)))), "mine looks at the prompt's perplexity"),
        (
            mine(Pool, SnapKV(), own_traits=Traits(equal_layers=False, across_layers=True)),
            "mine looks across layers whose quotas differ",
        ),
    ],
)
def test_methods_that_paged_attention_cannot_feed(recipe: Recipe, sentence: str) -> None:
    assert sentence in refused(recipe)


def test_another_version_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.320.1")
    said = refused(UNIFORM)
    assert "vLLM 0.320.1 " in said and "install vllm==0.32.* or vllm==0.33.*" in said


@pytest.mark.parametrize(
    "borrowed",
    [
        {"vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager.remove_skipped_blocks": ("request",)},
        {"vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager.forget": ()},
        {"vllm.v2.attention": ()},
    ],
)
def test_a_vllm_whose_inside_is_another(borrowed: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(compat.changed(latents=True)) == []
    monkeypatch.setattr("keepset.vllm.compat.BORROWED", borrowed)
    said = refused(UNIFORM)
    assert f"{next(iter(borrowed))} of vLLM" in said and "differs from the tested one; install " in said


FULL: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16}
PACKED = "is quantized or packed in a way that keepset does not know"
ROWS = {"kv_quant_mode": "INT8_PER_TOKEN_HEAD", "dtype": torch.int8, "state_content_bytes": 136}
HALVES = {"kv_quant_mode": "INT4_PER_TOKEN_HEAD", "dtype": torch.uint8, "state_content_bytes": 72}
SPECS = [
    ("SlidingWindowSpec", {"sliding_window": 128}, "is of the kind SlidingWindowSpec"),
    ("FullAttentionSpec", {"non_causal": True}, "is attended to in both directions"),
    ("FullAttentionSpec", {"head_size_v": 32}, "has values of another size than keys"),
    ("FullAttentionSpec", {"kv_quant_mode": "TURBOQUANT_K8V4"}, PACKED),
    ("FullAttentionSpec", {"num_head_slots": 4}, PACKED),
    ("FullAttentionSpec", ROWS | {"state_content_bytes": 128}, PACKED),  # which has no room for scales
    ("FullAttentionSpec", ROWS | {"dtype": torch.uint8}, PACKED),
    ("FullAttentionSpec", ROWS | {"state_content_bytes": 140, "head_size": 66}, PACKED),  # scales lie off their places
    ("FullAttentionSpec", HALVES, PACKED),
]


def spec(kind: str, more: dict[str, Any]) -> Any:
    """A cache of vLLM's."""
    more = ({"block_size": 16} if kind == "MambaSpec" else FULL) | more
    quantised = {"kv_quant_mode": specs.KVQuantMode[more["kv_quant_mode"]]} if "kv_quant_mode" in more else {}
    return getattr(specs, kind)(**more | quantised)


@pytest.mark.parametrize(("kind", "more", "reason"), SPECS, ids=[reason for *_, reason in SPECS])
def test_a_cache_that_is_refused(kind: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(KeepsetError) as error:
        validation.check_spec(spec(kind, more))
    assert str(error.value) == f"keepset cannot serve this model: the cache of its layers {reason}."


def test_a_cache_that_is_served() -> None:
    latents = spec("MLAAttentionSpec", {"num_kv_heads": 1})
    for whole in (
        latents,
        *(spec("FullAttentionSpec", {"kv_quant_mode": mode}) for mode in ("NONE", "FP8_PER_TENSOR")),
    ):
        assert validation.check_spec(whole) is whole
    for mode, dtype in (("INT8_PER_TOKEN_HEAD", torch.int8), ("FP8_PER_TOKEN_HEAD", torch.uint8)):
        rows = spec("FullAttentionSpec", {"kv_quant_mode": mode, "dtype": dtype})
        customized = triton.TritonAttentionBackend.customize_spec(rows)
        assert validation.check_spec(customized).state_content_bytes == 136
        assert formats.as_on_gpus(rows) == customized


WINDOWS = ("SlidingWindowSpec", {"sliding_window": 128})
STATES = ("MambaSpec", {"shapes": ((4, 8),), "dtypes": (torch.float32,)})
BESIDE = [
    (
        WINDOWS,
        CONTEXTS,
        "contexts hold layers that attend to all tokens, and the model has others; leave contexts out.",
    ),
    (WINDOWS, TWO_STAGES, "which layers of other stages are compressed; use tensor"),
    (WINDOWS, {"cache_dtype": "fp8"}, "on CPUs the model's other layers cannot read a KV cache of kind fp8;"),
    (STATES, {}, "with recurrent layers a KV connector must have pages packed in time; none is given. Write LLM("),
]


def layer(heads: int) -> Any:
    return SimpleNamespace(impl=SimpleNamespace(num_heads=heads, num_kv_heads=2, head_size=64))


@pytest.mark.parametrize(("kind", "changes", "reason"), BESIDE, ids=[reason for *_, reason in BESIDE])
def test_what_is_refused_beside_other_layers(
    kind: tuple[str, dict[str, Any]], changes: dict[str, Any], reason: str
) -> None:
    recipe, layers = Recipe.parse(UNIFORM), [layer(4)]
    validation.check_layers(config(**changes), recipe, layers, [])
    validation.check_layers(config(), recipe, layers, [spec(*WINDOWS)])
    validation.check_layers(config(**SERVED), recipe, layers, [spec(*STATES)])
    with pytest.raises(KeepsetError, match=re.escape(reason[1:])):
        validation.check_layers(config(**changes), recipe, layers, [spec(*kind)])


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (7, "give an object with folder, bytes, owner_bytes"),
        ({"folder": "nowhere", "bytes": 9, "owner_bytes": 9}, "give one that is there"),
        ({"folder": ".", "bytes": 0, "owner_bytes": True}, "limits of 0 and True: give numbers of bytes"),
    ],
)
def test_where_conversations_go_is_said_in_full(said: Any, sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence):
        spills_of(config(additional_config={"keepset_conversations": said}))


def test_conversations_are_refused_beside_layers_that_forget() -> None:
    validation.check_layers(config(**TALKING), Recipe.parse(TURNS), [layer(4)], [spec(*WINDOWS)])
    with pytest.raises(KeepsetError, match="layers with recurrent states keep nothing between turns"):
        validation.check_layers(config(**TALKING), Recipe.parse(TURNS), [layer(4)], [spec(*WINDOWS), spec(*STATES)])


def test_layers_that_cannot_be_compressed_together() -> None:
    recipe, chunks = Recipe.parse(UNIFORM), spec("ChunkedLocalAttentionSpec", {"attention_chunk_size": 128})
    with pytest.raises(KeepsetError, match="so there is nothing to compress; serve the model without a recipe"):
        validation.check_layers(config(), recipe, [], [chunks])
    with pytest.raises(KeepsetError, match=r"differ in their heads \(.*\(4, 2, 64\), \(8, 2, 64\)\)"):
        validation.check_layers(config(), recipe, [layer(4), layer(8)], [])
    assert validation.leaves_alone(chunks) and validation.leaves_alone(None)
    assert not validation.leaves_alone(spec("FullAttentionSpec", {}))
    assert not validation.leaves_alone(spec("MLAAttentionSpec", {"num_kv_heads": 1}))
    with pytest.raises(KeepsetError, match="is of the kind HiddenStateCacheSpec"):
        validation.leaves_alone(spec("HiddenStateCacheSpec", {"num_kv_heads": 1}))


class Impl(SimpleNamespace):
    """A layer's implementation, by its attributes."""

    __module__ = "keepset.vllm.backends"


FOREIGN = SimpleNamespace(alibi_slopes=None, logits_soft_cap=None)
LAYERS = [
    ({"kv_sharing_target_layer_name": "model.layers.3"}, {}, "shares its keys and values with another layer"),
    ({}, {"chunk_lookback": 1}, "attends to chunks"),
    ({}, {"alibi_slopes": [0.5]}, "adds biases by distance to its logits (ALiBi)"),
    ({"_k_scale": torch.ones(8)}, {}, "has a scale for each head of its cache"),
    ({"unseen": True}, {}, "has no module of its own, so its queries before rotation are not found"),
    ({"impl": FOREIGN}, {}, "brings its own attention backend"),
    ({}, {}, ""),
    ({}, {"logits_soft_cap": 30.0, "sinks": object()}, ""),
]


@pytest.mark.parametrize(("own", "of_impl", "reason"), LAYERS, ids=[reason for *_, reason in LAYERS])
def test_a_layer_is_refused_or_served(own: dict[str, Any], of_impl: dict[str, Any], reason: str) -> None:
    impl = Impl(**{"alibi_slopes": None, "logits_soft_cap": None, "sinks": None} | of_impl)
    layer = SimpleNamespace(**{"kv_sharing_target_layer_name": None, "impl": impl} | own)
    said = ""
    try:
        validation.check_layer("model.layers.7.self_attn.attn", layer, unseen=own.get("unseen", False))
    except KeepsetError as error:
        said = str(error)
    assert said == (reason and f"keepset cannot serve this model: its layer model.layers.7.self_attn.attn {reason}.")


DEFAULT, POOLED = "quantized(prompt_queries, bytes=0.25, short=256)", "pool(prompt_queries, bytes=0.25, short=256)"
WITHOUT_ROTATION = "quantized(pool(snapkv), bytes=0.25, short=256)"
NO_CARRIER = {"kv_transfer_config": None, "enable_prefix_caching": True}


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ({}, ANSWERED_AT_ONCE),
        (TWO_GPUS, DEFAULT),
        (drafts(), ANSWERED_AT_ONCE),
        (drafts(async_scheduling=True), DEFAULT),
        ({"cache_dtype": "auto"}, POOLED),
        ({"kv_transfer_config": None}, DEFAULT),
        (CONTEXTS | {"enable_prefix_caching": True}, DEFAULT),
        ({"hf_text_config": Gemma3TextConfig()}, WITHOUT_ROTATION),
        ({"using_transformers_backend": lambda: True}, WITHOUT_ROTATION),
        ({"use_mla": True, "cache_dtype": "auto"}, POOLED),
        ({"cache_dtype": "auto"} | NO_CARRIER, "prompt_queries(bytes=0.25, short=256)"),
    ],
)
def test_an_engine_that_is_told_true_takes_the_default_less_what_it_cannot_serve(
    changes: dict[str, Any], recipe: str
) -> None:
    """Started with nothing else, too."""
    settings = {**SERVED, **EIGHT, **changes}
    made = config(**{**settings, "additional_config": {**settings.get("additional_config", {}), "keepset": True}})
    taken = recipe_of(made)
    assert str(taken) == recipe
    validation.check(made, taken)


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, object()])
def test_no_recipe_is_no_recipe(additional: Any) -> None:
    assert recipe_of(SimpleNamespace(additional_config=additional)) is None  # type: ignore[arg-type]
    assert recipe_of(None) is None


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (False, "is False: give a recipe's text"),
        (0.25, "is 0.25: give a recipe's text"),
        ("snapkv", "does not say how much to keep"),
        ("snap_kv(keep=0.5)", "There is no method 'snap_kv'"),
    ],
)
def test_a_recipe_that_cannot_be_used(value: Any, sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence):
        recipe_of(SimpleNamespace(additional_config={"keepset": value}))  # type: ignore[arg-type]


ROTATION: dict[str, Any] = {"rope_theta": 1e4}
LONG = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 64, "factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "more", "tells"),
    [
        *((kind, {}, True) for kind in ["llama", "mistral", "qwen2", "qwen3", "glm4", "qwen3_next", "deepseek_v3"]),
        ("llama", {"rope_parameters": ROTATION | {"rope_type": "yarn", "factor": 4.0}}, True),
        ("llama", {"rope_parameters": ROTATION | LONG | {"rope_type": "longrope"}}, False),  # two tables
        ("llama", {"use_qk_norm": True}, False),  # norms after the rotation
        *((kind, {}, False) for kind in ("bloom", "gemma3_text", "smollm3", "cohere2")),
    ],
)
def test_whether_all_layers_rotate_by_one_table(kind: str, more: dict[str, Any], tells: bool) -> None:
    assert one_rotation(AutoConfig.for_model(kind, **more).to_dict()) == tells
