"""Configurations and models that cannot be served are refused in one sentence, when the engine starts."""

from __future__ import annotations

import shlex
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from keepset import KeepsetError, Recipe
from keepset.allocators.pool import Pool
from keepset.core.feature import Needs
from keepset.core.features.attention import SecondPass
from keepset.core.features.runtime_features import OutputProjection, Perplexity
from keepset.core.statistics import Statistics
from keepset.core.statistics import save as save_statistics
from keepset.core.tables import save
from keepset.core.traits import Traits
from keepset.defaults import ANSWERED_AT_ONCE
from keepset.errors import UnsupportedEngineError
from keepset.kernels.columns import ColumnStatistic
from keepset.methods.window import SnapKV
from keepset.vllm.recipe_support import served
from keepset.vllm.settings import CONNECTOR, CONTEXT_CONNECTOR, engine_args, recipe_of, serve_options
from tests.core.test_tables import random_tables
from tests.methods.naive import Shape, random_statistics
from tests.paged.methods import Mass
from tests.vllm.late import Late

compat, validation = Late("keepset.vllm.compat"), Late("keepset.vllm.validation")
arguments, parsers = Late("vllm.engine.arg_utils"), Late("vllm.utils.argparse_utils")
formats, triton = Late("keepset.vllm.formats"), Late("vllm.v1.attention.backends.triton_attn")
modes, specs = Late("vllm.config"), Late("vllm.v1.kv_cache_interface")


ONE = [f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "decode_context", "prefill_context")]
OTHER_MODELS = ("is_encoder_decoder", "use_mla", "is_mm_prefix_lm", "is_diffusion", "is_multimodal_model")
SPLIT = [
    *("vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"),
    *("vllm::unified_mla_attention_with_output", "vllm::unified_mla_kv_cache_update"),
]


def config(**changes: Any) -> Any:
    """The part of a configuration that keepset looks at, and serves; `part__name=value` changes it."""
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
    for path, value in changes.items():
        part, _, name = path.partition("__")
        assert name in parts[part] if name else part in whole
        (parts[part] if name else whole)[name or part] = value
    compilation = parts["compilation_config"]
    compilation["mode"] = modes.CompilationMode[compilation["mode"]]
    compilation["cudagraph_mode"] = modes.CUDAGraphMode[compilation["cudagraph_mode"]]
    return SimpleNamespace(**whole, **{part: SimpleNamespace(**names) for part, names in parts.items()})


def refused(recipe: Recipe | str, **changes: Any) -> str:
    """Why a configuration is refused."""
    with pytest.raises(KeepsetError) as error:
        validation.check(config(**changes), Recipe.parse(recipe) if isinstance(recipe, str) else recipe)
    return str(error.value)


def connector(path: str | None, name: str = "MooncakeConnector", **more: Any) -> Any:
    own = {"kv_connector": name, "kv_connector_module_path": path, "kv_load_failure_policy": "fail"}
    return SimpleNamespace(**own | more)


PASTED = ("'", "--no-enable-prefix-caching", "--enforce-eager", "int8_per_token_head")
"""How a message ends that tells what to write."""

UNIFORM, RAGGED, INT8 = "snapkv(keep=0.25)", "adakv(snapkv, keep=0.25)", "int8(adakv(snapkv), keep=96)"
QUANTIZED = "quantized(snapkv, bytes=0.05)"
GIVE_CARRIER = (
    "how much it keeps depends on the data, so a KV connector must tell the scheduler; none is given. Write "
    "LLM(model, **keepset.vllm.settings('"
)

NGRAM = SimpleNamespace(method="ngram")
SERVED = {
    "cache_config__enable_prefix_caching": False,
    "kv_transfer_config": connector(CONNECTOR["kv_connector_module_path"], CONNECTOR["kv_connector"]),
}
"""A configuration for counts that come from the data."""
CONTEXTS: dict[str, Any] = {
    "additional_config": {"keepset_contexts": str(Path(__file__).parent)},
    "kv_transfer_config": connector(CONTEXT_CONNECTOR["kv_connector_module_path"], "ContextConnector"),
}
"""A configuration with contexts, whose heads may differ under any recipe."""

REFUSED = [
    *(
        (recipe, {"speculative_config": NGRAM, "scheduler_config__async_scheduling": True}, "the scheduler runs ahead")
        for recipe in ("snapkv(keep=256, every=64)", RAGGED)
    ),
    (
        "snapkv(window=8, keep=256, every=64)",
        {"speculative_config": NGRAM},
        "drafts must end before events, which a KV",
    ),
    *(
        (UNIFORM, {"speculative_config": SimpleNamespace(method=method)}, f"drafts by {method} are not served; use")
        for method in ("draft_model", "medusa", "mlp_speculator", "custom_class", "ngram_gpu", "dflash", "dspark")
    ),
    *(
        (
            UNIFORM,
            {"kv_transfer_config": connector(path, name)},
            "the only KV connector that is served here is keepset's BlockCountConnector, because others move whole "
            f"caches; leave {name} out of kv_transfer_config.",
        )
        for path, name in ((None, "OffloadingConnector"), (None, "MultiConnector"), ("lmcache.x", "LMCacheConnectorV1"))
    ),
    ("mass", {"kv_transfer_config": connector(None)}, "the only KV connector that is served here is keepset's Block"),
    (
        UNIFORM,
        CONTEXTS | {"kv_transfer_config": SERVED["kv_transfer_config"]},
        "the only KV connector that is served here is keepset's ContextConnector, because others move whole caches; "
        "leave BlockCountConnector out of kv_transfer_config.",
    ),
    ("mass", {"cache_config__enable_prefix_caching": False}, GIVE_CARRIER),
    (UNIFORM, {"parallel_config__decode_context_parallel_size": 2}, "context parallelism divides a request's entries"),
    (UNIFORM, {"parallel_config__prefill_context_parallel_size": 2}, "context parallelism divides a request's entries"),
    (UNIFORM, {"parallel_config__use_ubatching": True}, "micro-batch overlap runs two batches at once"),
    (UNIFORM, {"parallel_config__enable_dbo": True}, "micro-batch overlap runs two batches at once"),
    *(
        (
            UNIFORM,
            {"cache_config__cache_dtype": kind},
            f"it serves KV caches of kind fp8, of kind int8_per_token_head and of 16 bits, not of kind {kind}; set "
            "kv_cache_dtype (--kv-cache-dtype) to fp8 or int8_per_token_head, or leave it out.",
        )
        for kind in ("int4_per_token_head", "nvfp4", "nvfp4_4over6", "turboquant_k8v4", "turboquant_3bit_nc")
    ),
    (
        UNIFORM,
        CONTEXTS | {"speculative_config": NGRAM},
        "speculative decoding takes tokens back, which requests with contexts",
    ),
    ("pyramid(snapkv, keep=128)", {}, "its layers keep different numbers of entries, so that requests"),
    ("mass", {"kv_transfer_config": SERVED["kv_transfer_config"]}, "its layers keep different numbers of entries"),
    (UNIFORM, {"scheduler_config__disable_hybrid_kv_cache_manager": True}, "it needs vLLM's hybrid KV-cache manager"),
    (UNIFORM, {"model_config__runner_type": "pooling"}, "only models that generate text have a cache to compress"),
    (UNIFORM, {"model_config__is_encoder_decoder": True}, "encoder-decoder models are not supported"),
    (
        "match(snapkv, keep=96)",
        {"model_config__use_mla": True},
        "the model caches latents, of which keys and values are both made; leave match out",
    ),
    (
        UNIFORM,
        CONTEXTS | {"model_config__use_mla": True},
        "contexts hold keys and values, and the model caches latents",
    ),
    (
        UNIFORM,
        {"model_config__use_mla": True, "cache_config__cache_dtype": "fp8"},
        "it reads latents in 16 and 32 bits only; leave kv_cache_dtype out",
    ),
    (
        UNIFORM,
        {"model_config__hf_text_config": LlamaConfig(index_topk=2048)},
        "the model has an indexer, which caches keys of its own beside latents",
    ),
    (UNIFORM, {"model_config__is_mm_prefix_lm": True}, "the model attends to parts of its prompt in both directions"),
    ("snapkv(keep=0.25, protect='image')", {}, "its model takes no images; leave protect='image' out."),
    (
        "snapkv(keep=0.25, protect='text')",
        {"model_config__is_multimodal_model": True},
        "a KV connector must tell where each request's images are; none is given.",
    ),
    (
        UNIFORM,
        {"model_config__is_diffusion": True},
        "the model computes its answer's tokens more than once (diffusion)",
    ),
    ("expected_attention(keep=40)", {"model_config__uses_mrope": True}, "tokens of an image have positions"),
    (UNIFORM, {"attention_config__use_non_causal": True}, "attention that is not causal is not supported"),
    (RAGGED, {"compilation_config__splitting_ops": []}, "CUDA graphs would replay vllm::unified_attention"),
    # What use_inductor_graph_partition makes of them:
    (RAGGED, {"compilation_config__splitting_ops": SPLIT[:1]}, "CUDA graphs would replay vllm::unified_kv_cache"),
    ("gvote", SERVED | {"model_config__enforce_eager": False}, "compiled code does not show the hidden states"),
    ("pool(snapkv, keep=96)", SERVED | {"parallel_config__tensor_parallel_size": 2}, "it compares all heads of all"),
    ("pool(snapkv, keep=96)", SERVED | {"parallel_config__pipeline_parallel_size": 2}, "it compares all heads of all"),
    ("int8(snapkv, keep=96)", {}, "it stores entries in 8 bits, and the KV cache is of kind auto. Write LLM(model"),
    (
        "quantized(snapkv, bits=4, keep=96)",
        {"cache_config__cache_dtype": "int8_per_token_head"},
        "it stores entries in 4 bits, and vLLM's pages hold 8 or 16; write bits=8.",
    ),
    ("int8(snapkv, keep=96)", {"cache_config__cache_dtype": "fp8_per_token_head"}, "it stores entries in 8 bits, and"),
    ("compilerkv(elastic=True, keep=128)", {"cache_config__enable_prefix_caching": False}, GIVE_CARRIER),
]


@pytest.mark.parametrize(("recipe", "changes", "sentence"), REFUSED, ids=[sentence[:45] for *_, sentence in REFUSED])
def test_a_configuration_that_is_refused(recipe: str, changes: dict[str, Any], sentence: str) -> None:
    message = refused(recipe, **changes)
    assert message.startswith(f"keepset cannot serve {Recipe.parse(recipe)}: {sentence}")
    assert message.endswith((".", *PASTED)) and "\n" not in message


def test_all_that_is_missing_is_said_at_once() -> None:
    message = refused(
        "gvote", model_config__enforce_eager=False, scheduler_config__disable_hybrid_kv_cache_manager=True
    )
    reasons = ("it needs vLLM's hybrid", "How much it keeps", "Its layers keep", "Compiled code does not show")
    places = [message.index(reason) for reason in reasons]
    assert places == sorted(places)
    assert message.endswith(f"start vllm serve MODEL with {serve_options('gvote')}")


@pytest.mark.parametrize(
    "recipe", [UNIFORM, RAGGED, "mass", "pyramid(snapkv, keep=128)", "gvote", INT8, QUANTIZED, None]
)
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
        cache_config__enable_prefix_caching=args.get("enable_prefix_caching", True),
        model_config__enforce_eager=args.get("enforce_eager", False),
        cache_config__cache_dtype=args.get("kv_cache_dtype", "auto"),
    )
    if shares and recipe in ("mass", "pyramid(snapkv, keep=128)", "gvote"):  # for which no argument helps
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


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (UNIFORM, {}),
        (UNIFORM, CONTEXTS),
        (UNIFORM, {"speculative_config": NGRAM}),
        ("adakv(snapkv, keep=256, every=64)", {}),
        ("expected_attention(keep=512)", {"cache_config__cache_dtype": "bfloat16"}),
        ("expected_attention(keep=512)", {"cache_config__cache_dtype": "fp8"}),
        ("match(snapkv, biases=False, keep=0.25)", {"cache_config__cache_dtype": "fp8_e4m3"}),
        ("int8(match(adakv(snapkv)), keep=96)", {"cache_config__cache_dtype": "int8_per_token_head"}),
        (UNIFORM, {"cache_config__cache_dtype": "fp8_per_token_head"}),
        ("quantized(adakv(snapkv), bytes=0.05)", {"cache_config__cache_dtype": "int8_per_token_head"}),
        ("pyramid(snapkv, keep=128)", {"cache_config__enable_prefix_caching": False}),
        ("mass", SERVED),
        ("pool(snapkv, keep=96, every=64)", SERVED),
        ("h2o(keep=0.5)", {"parallel_config__tensor_parallel_size": 2}),
        ("h2o(keep=0.5)", {"parallel_config__tensor_parallel_size": 2, "model_config__use_mla": True}),
        ("gvote", SERVED | {"parallel_config__tensor_parallel_size": 2}),
        ("gvote", SERVED | {"parallel_config__pipeline_parallel_size": 2}),
        ("adakv(snapkv, keep=256, every=64)", {"parallel_config__pipeline_parallel_size": 4}),
        ("compilerkv(elastic=True, keep=128)", SERVED),
        ("compilerkv(keep=128)", {}),
        (UNIFORM, {"compilation_config__splitting_ops": []}),
        (RAGGED, {}),
        (RAGGED, {"compilation_config__splitting_ops": [], "compilation_config__mode": "NONE"}),
        (RAGGED, {"compilation_config__splitting_ops": [], "compilation_config__cudagraph_mode": "NONE"}),
    ],
)
def test_a_configuration_that_is_served(recipe: str, changes: dict[str, Any]) -> None:
    validation.check(config(**changes), served(Recipe.parse(recipe)))


def test_breakable_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breakable graphs replay what writes to the cache, whatever the operators that graphs are split at."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    validation.check(config(), Recipe.parse(UNIFORM))
    validation.check(config(compilation_config__cudagraph_mode="NONE"), Recipe.parse(RAGGED))
    assert refused(RAGGED).endswith("to wrong places; set VLLM_USE_BREAKABLE_CUDAGRAPH=0.")


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


@pytest.mark.parametrize(("kind", "more", "reason"), SPECS, ids=[reason for *_, reason in SPECS])
def test_a_cache_that_is_refused(kind: str, more: dict[str, Any], reason: str) -> None:
    if "kv_quant_mode" in more:
        more = more | {"kv_quant_mode": specs.KVQuantMode[more["kv_quant_mode"]]}
    with pytest.raises(KeepsetError) as error:
        validation.check_spec(getattr(specs, kind)(**FULL | more))
    assert str(error.value) == f"keepset cannot serve this model: the cache of its layers {reason}."


def test_a_cache_that_is_served() -> None:
    for mode in ("NONE", "FP8_PER_TENSOR"):
        spec = specs.FullAttentionSpec(**FULL, kv_quant_mode=specs.KVQuantMode[mode])
        assert validation.check_spec(spec) is spec
    latents = specs.MLAAttentionSpec(**FULL | {"num_kv_heads": 1})
    assert validation.check_spec(latents) is latents
    for mode in ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"):
        dtype = torch.int8 if mode.startswith("INT8") else torch.uint8
        spec = specs.FullAttentionSpec(**FULL | {"kv_quant_mode": specs.KVQuantMode[mode], "dtype": dtype})
        assert validation.check_spec(triton.TritonAttentionBackend.customize_spec(spec)).state_content_bytes == 136
        assert formats.as_on_gpus(spec) == triton.TritonAttentionBackend.customize_spec(spec)


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
    named, two = f"stats={str(tmp_path / 'stats')!r}", {"parallel_config__tensor_parallel_size": 2}
    validation.check(config(**two), Recipe.parse(f"qfilter({named}, keep=96)"))
    assert "it compares all heads" in refused(f"duo_attention({named}, keep=0.5)", **SERVED | two)


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        (Needs(SecondPass(frozenset({ColumnStatistic.MAX}))), "mine has tokens look at the prompt a second"),
        (Needs(OutputProjection()), "mine looks at the output projection"),
        (Needs(Perplexity(8)), "mine looks at the prompt's perplexity"),
    ],
)
def test_methods_that_paged_attention_cannot_feed(needs: Needs, sentence: str) -> None:
    class Mine(Mass):
        name = "mine"

        @cached_property
        def traits(self) -> Traits:
            return Traits(needs=needs)

    assert sentence in refused(Recipe.of(Mine()))


def test_layers_whose_events_differ_are_not_chosen_together() -> None:
    class Mine(Pool):
        name = "mine"
        own_traits = Traits(equal_layers=False, across_layers=True)

    assert "mine looks across layers whose quotas differ" in refused(Recipe.of(Mine(SnapKV()), keep=96))


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


WINDOWS = ("SlidingWindowSpec", {"sliding_window": 128})
STATES = ("MambaSpec", {"shapes": ((4, 8),), "dtypes": (torch.float32,)})
BESIDE = [
    (
        WINDOWS,
        CONTEXTS,
        "contexts hold layers that attend to all tokens, and the model has others; leave contexts out.",
    ),
    (
        WINDOWS,
        {"parallel_config__pipeline_parallel_size": 2},
        "which layers of other stages are compressed; use tensor",
    ),
    (
        WINDOWS,
        {"cache_config__cache_dtype": "fp8"},
        "on CPUs the model's other layers cannot read a KV cache of kind fp8;",
    ),
    (STATES, {}, "with recurrent layers a KV connector must have pages packed in time; none is given. Write LLM("),
]


def other(kind: str, more: dict[str, Any]) -> Any:
    shape = {"block_size": 16} if kind == "MambaSpec" else FULL
    return getattr(specs, kind)(**shape | more)


def layer(heads: int) -> Any:
    return SimpleNamespace(impl=SimpleNamespace(num_heads=heads, num_kv_heads=2, head_size=64))


@pytest.mark.parametrize(("kind", "changes", "reason"), BESIDE, ids=[reason for *_, reason in BESIDE])
def test_what_is_refused_beside_other_layers(
    kind: tuple[str, dict[str, Any]], changes: dict[str, Any], reason: str
) -> None:
    recipe, layers, others = Recipe.parse(UNIFORM), [layer(4)], [other(*kind)]
    validation.check_layers(config(**changes), recipe, layers, [])
    validation.check_layers(config(), recipe, layers, [other(*WINDOWS)])
    validation.check_layers(config(**SERVED), recipe, layers, [other(*STATES)])
    with pytest.raises(KeepsetError) as error:
        validation.check_layers(config(**changes), recipe, layers, others)
    assert reason[1:] in str(error.value)


def test_layers_that_cannot_be_compressed_together() -> None:
    recipe, chunks = Recipe.parse(UNIFORM), other("ChunkedLocalAttentionSpec", {"attention_chunk_size": 128})
    with pytest.raises(KeepsetError, match="so there is nothing to compress; serve the model without a recipe"):
        validation.check_layers(config(), recipe, [], [chunks])
    with pytest.raises(KeepsetError, match=r"differ in their heads \(.*\(4, 2, 64\), \(8, 2, 64\)\)"):
        validation.check_layers(config(), recipe, [layer(4), layer(8)], [])
    assert validation.leaves_alone(chunks) and validation.leaves_alone(None)
    assert not validation.leaves_alone(specs.FullAttentionSpec(**FULL))
    latents = FULL | {"num_kv_heads": 1}
    assert not validation.leaves_alone(specs.MLAAttentionSpec(**latents))
    with pytest.raises(KeepsetError, match="is of the kind HiddenStateCacheSpec"):
        validation.leaves_alone(specs.HiddenStateCacheSpec(**latents))


LAYERS = [
    ({"kv_sharing_target_layer_name": "model.layers.3"}, {}, "shares its keys and values with another layer"),
    ({}, {"chunk_lookback": 1}, "attends to chunks"),
    ({}, {"alibi_slopes": [0.5]}, "adds biases by distance to its logits (ALiBi)"),
    ({"_k_scale": torch.ones(8)}, {}, "has a scale for each head of its cache"),
    ({"unseen": True}, {}, "has no module of its own, so its queries before rotation are not found"),
]


class Impl(SimpleNamespace):
    """A layer's implementation, by its attributes."""

    __module__ = "keepset.vllm.backends"


@pytest.mark.parametrize(("own", "of_impl", "reason"), LAYERS, ids=[reason for *_, reason in LAYERS])
def test_a_layer_that_is_refused(own: dict[str, Any], of_impl: dict[str, Any], reason: str) -> None:
    impl = Impl(**{"alibi_slopes": None, "logits_soft_cap": 0, "sinks": None} | of_impl)
    layer = SimpleNamespace(**{"kv_sharing_target_layer_name": None, "impl": impl} | own)
    with pytest.raises(KeepsetError) as error:
        validation.check_layer("model.layers.7.self_attn.attn", layer, unseen=own.get("unseen", False))
    assert str(error.value) == f"keepset cannot serve this model: its layer model.layers.7.self_attn.attn {reason}."


def test_a_layer_that_is_served() -> None:
    impl = Impl(alibi_slopes=None, logits_soft_cap=None)
    layer = SimpleNamespace(kv_sharing_target_layer_name=None, impl=impl)
    validation.check_layer("layer", layer)
    layer.impl = Impl(alibi_slopes=None, logits_soft_cap=30.0, sinks=object())
    validation.check_layer("layer", layer)
    layer.impl = SimpleNamespace(alibi_slopes=None, logits_soft_cap=None)
    with pytest.raises(KeepsetError, match="its layer name brings its own attention backend"):
        validation.check_layer("name", layer)


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, object()])
def test_no_recipe_is_no_recipe(additional: Any) -> None:
    assert recipe_of(SimpleNamespace(additional_config=additional)) is None  # type: ignore[arg-type]
    assert recipe_of(None) is None


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ({}, ANSWERED_AT_ONCE),
        ({"parallel_config__tensor_parallel_size": 2}, "quantized(prompt_queries, bytes=0.25, short=256)"),
        ({"speculative_config": NGRAM}, ANSWERED_AT_ONCE),
        (
            {"speculative_config": NGRAM, "scheduler_config__async_scheduling": True},
            "quantized(prompt_queries, bytes=0.25, short=256)",
        ),
        ({"cache_config__cache_dtype": "auto"}, "pool(prompt_queries, bytes=0.25, short=256)"),
        ({"kv_transfer_config": None}, "quantized(prompt_queries, bytes=0.25, short=256)"),
        (CONTEXTS | {"cache_config__enable_prefix_caching": True}, "quantized(prompt_queries, bytes=0.25, short=256)"),
        ({"model_config__hf_text_config": Gemma3TextConfig()}, "quantized(pool(snapkv), bytes=0.25, short=256)"),
        ({"model_config__using_transformers_backend": lambda: True}, "quantized(pool(snapkv), bytes=0.25, short=256)"),
        (
            {"model_config__use_mla": True, "cache_config__cache_dtype": "auto"},
            "pool(prompt_queries, bytes=0.25, short=256)",
        ),
        (
            {
                "cache_config__cache_dtype": "auto",
                "kv_transfer_config": None,
                "cache_config__enable_prefix_caching": True,
            },
            "prompt_queries(bytes=0.25, short=256)",
        ),
    ],
)
def test_an_engine_that_is_told_true_takes_the_default_less_what_it_cannot_serve(
    changes: dict[str, Any], recipe: str
) -> None:
    """Started with nothing else, too."""
    settings = {**SERVED, "cache_config__cache_dtype": "int8_per_token_head", **changes}
    made = config(**{**settings, "additional_config": {**settings.get("additional_config", {}), "keepset": True}})
    taken = recipe_of(made)
    assert str(taken) == recipe
    validation.check(made, taken)


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


@pytest.mark.parametrize("recipe", ["h2o(keep=96, every=24)", "gvote(every=24)"])
def test_what_only_a_prompt_tells_is_not_there_later(recipe: str) -> None:
    said = refused(recipe, **SERVED)
    assert "whole prompt" in said and said.endswith("leave every= out.")
