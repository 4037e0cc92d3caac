"""Models whose weights are not what their parameters say: adapters, offloaded and quantized weights, wide precision.

What a cache keeps is what it keeps of the same model with plain weights, and a saved context serves no other model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keepset
from keepset.contexts.fingerprint import fingerprint, has_other_weights, sample, stored_weights, stores_other_weights
from tests.hf.models import full, generate, prompt, refusal, same_keep_set, tiny, untrained, with_random_weights

TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "phi": ["q_proj", "v_proj", "dense"],
    "deepseek_v3": ["kv_b_proj", "o_proj"],
}
PROJECTED = ["criticalkv(snapkv(window=4), keep=12)", 'second_pass(values="projected", keep=12)']


def peft() -> Any:
    return pytest.importorskip("peft", reason="PEFT, with which these tests add adapters, is not installed.")


def latents() -> Any:
    """A tiny model that caches latents."""
    torch.manual_seed(0)
    sizes = dict(kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32)
    return with_random_weights(untrained("deepseek_v3", num_key_value_heads=4, **sizes, **experts))


def with_adapters(name: str, *names: str, dora: bool = False) -> Any:
    """A tiny model in PEFT's wrapper with random adapters, of which the first is in use."""
    base = latents() if name == "deepseek_v3" else copy.deepcopy(tiny(name))
    targets = TARGETS.get(name, ["q_proj", "k_proj", "v_proj", "o_proj"])
    transposed = name == "gpt2"
    wrapped: Any = None
    for seed, adapter in enumerate(names or ("first",)):
        torch.manual_seed(seed)
        config = peft().LoraConfig(
            r=4,
            lora_alpha=12,
            target_modules=targets,
            use_dora=dora,
            init_lora_weights=False,
            fan_in_fan_out=transposed,
        )
        if wrapped is None:
            wrapped = peft().get_peft_model(base, config, adapter_name=adapter)
        else:
            wrapped.add_adapter(adapter, config)
    return wrapped.eval()


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_scale")]


@torch.no_grad()
def kept_and_logits(model: Any, recipe: str) -> tuple[Any, Tensor]:
    cache, ids = keepset.Cache(model, recipe), prompt(1, 40)
    model(input_ids=ids, past_key_values=cache)
    return cache.keep_set, model(input_ids=prompt(1, 3, seed=1), past_key_values=cache).logits


@pytest.mark.few
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("recipe", [*PROJECTED, "expected_attention(keep=12)", "snapkv(window=4, keep=12)"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gpt_neox", "gpt2", "deepseek_v3"])
def test_adapters_are_seen_as_if_they_were_merged(name: str, recipe: str, dora: bool) -> None:
    model = with_adapters(name, dora=dora)
    merged = copy.deepcopy(model).merge_and_unload()
    (kept, logits), (expected, merged_logits) = (kept_and_logits(variant, recipe) for variant in (model, merged))
    assert same_keep_set(kept, expected)
    torch.testing.assert_close(logits, merged_logits, rtol=1e-3, atol=1e-4)  # merging rounds
    with model.disable_adapter():
        assert fingerprint(model) == fingerprint(latents() if name == "deepseek_v3" else tiny(name))


def test_a_cache_takes_the_wrapper_of_adapters(tmp_path: Path) -> None:
    model, ids = with_adapters("llama"), prompt(2, 30)
    expected = full(copy.deepcopy(model).merge_and_unload(), ids)
    cache = keepset.Cache(model, "knorm(keep=1.0)")
    answer = generate(model, ids, cache)
    assert torch.equal(answer.sequences, expected.sequences)
    model.base_model.model.model.layers[1].register_forward_pre_hook(stop := Stop())
    with pytest.raises(RuntimeError, match="stopped"):
        model(input_ids=prompt(2, 3), past_key_values=cache)
    del stop
    with refusal("A forward with this cache ended before its last layer"):
        cache.save(tmp_path / "context")
    learned = peft().PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with refusal("PeftModelForCausalLM puts learned tokens in front of every prompt"):
        keepset.Cache(peft().get_peft_model(copy.deepcopy(tiny("llama")), learned), "knorm(keep=4)")


class Stop:
    def __call__(self, *_: Any) -> None:
        raise RuntimeError("stopped")


def scaled(model: Any) -> None:
    for layer in layers_of(model):
        layer.set_scale("first", 0.5)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another": lambda model: model.set_adapter("second"),
    "both": lambda model: model.base_model.set_adapter(["first", "second"]),
    "scale": scaled,
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "unloaded": lambda model: model.unload(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_context_serves_the_adapters_that_it_was_made_with(tmp_path: Path, change: str) -> None:
    model, ids = with_adapters("llama", "first", "second"), prompt(1, 30)
    cache, numbers = keepset.Cache(model, "knorm(keep=12)"), sample(model)
    model(input_ids=ids, past_key_values=cache)
    cache.save(tmp_path / "context")
    # The same adapter under another name, beside no other.
    renamed = with_adapters("llama", "first")
    assert fingerprint(renamed) == fingerprint(model)
    assert keepset.Cache.load(tmp_path / "context", renamed).get_seq_length() == 30
    changed = CHANGES[change](model)
    changed = changed if isinstance(changed, nn.Module) else model
    with refusal("is a context of another model, whose (adapters|weights) differ; load that model"):
        keepset.Cache.load(tmp_path / "context", changed)
    if change != "unloaded":  # which leaves the cache's model without adapters
        with refusal("has read with other adapters than are in use now"):
            cache.save(tmp_path / "another")
    assert has_other_weights(getattr(changed, "get_base_model", lambda: changed)(), numbers)


def test_a_batch_with_an_adapter_for_each_request_is_not_saved(tmp_path: Path) -> None:
    model = with_adapters("llama", "first", "second")
    cache = keepset.Cache(model, "knorm(keep=12)")
    model(input_ids=prompt(2, 30), past_key_values=cache, adapter_names=["first", "second"])
    with refusal("has read with other adapters than are in use now"):
        cache.save(tmp_path / "context")
    with refusal("could not find the output projection of LlamaAttention, which must be linear"):
        model(
            input_ids=prompt(2, 30),
            past_key_values=keepset.Cache(model, PROJECTED[0]),
            adapter_names=["first", "second"],
        )


def test_statistics_of_a_model_are_not_those_of_its_adapters() -> None:
    model, plain = with_adapters("llama"), tiny("llama")
    assert has_other_weights(model.get_base_model(), sample(plain)) and has_other_weights(plain, sample(model))
    assert not has_other_weights(model.get_base_model(), sample(model))
    with model.disable_adapter():
        keepset.Cache(model, "qfilter(keep=12)")
    with refusal("are of another model of this shape, with other weights"):
        keepset.Cache(model, "qfilter(keep=12)")


class Packed(nn.Module):
    """A linear layer whose weights are buffers of few bits, as GPTQ's are."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.in_features, largest = linear.in_features, 2 ** (bits - 1) - 1
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / largest
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scales", scale)

    @property
    def dense(self) -> Tensor:
        return self.qweight * self.scales

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.dense.t()


def packed(bits: int) -> Any:
    model = copy.deepcopy(tiny("llama"))
    for layer in model.model.layers:
        layer.self_attn.o_proj = Packed(layer.self_attn.o_proj, bits)
    return model


def test_weights_in_buffers_count(tmp_path: Path) -> None:
    four, dense = packed(4), copy.deepcopy(tiny("llama"))
    for layer, packed_layer in zip(dense.model.layers, four.model.layers, strict=True):
        layer.self_attn.o_proj.weight.data = packed_layer.self_attn.o_proj.dense
    for recipe in PROJECTED:
        (kept, logits), (expected, dense_logits) = (kept_and_logits(variant, recipe) for variant in (four, dense))
        assert same_keep_set(kept, expected)
        torch.testing.assert_close(logits, dense_logits)
    cache = keepset.Cache(four, "knorm(keep=12)")
    four(prompt(1, 30), past_key_values=cache)
    cache.save(tmp_path / "context")
    assert keepset.Cache.load(tmp_path / "context", packed(4)).get_seq_length() == 30
    with refusal("whose weights differ"):
        keepset.Cache.load(tmp_path / "context", packed(3))
    declared = copy.deepcopy(four)
    declared.config.quantization_config = {"quant_method": "gptq", "bits": 3}
    with refusal(r'whose quantization differs: unknown there, {"bits": 3, "quant_method": "gptq"} here'):
        keepset.Cache.load(tmp_path / "context", declared)
    cache = keepset.Cache(declared, "knorm(keep=12)")
    declared(prompt(1, 30), past_key_values=cache)
    cache.save(tmp_path / "declared")
    with refusal(r'whose quantization differs: {"bits": 3, "quant_method": "gptq"} there, none here'):
        keepset.Cache.load(tmp_path / "declared", four)


def test_an_output_projection_that_is_not_linear_is_refused() -> None:
    model = packed(4)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda *_: None)
        layer.self_attn.o_proj.forward = lambda hidden, wrapped=layer.self_attn.o_proj: (
            wrapped.dense.t()[0] * hidden.tanh()
        )
    with refusal("could not find the output projection of LlamaAttention, which must be linear"):
        kept_and_logits(model, PROJECTED[0])


@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_have_the_fingerprint_of_the_model(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = latents() if name == "deepseek_v3" else copy.deepcopy(tiny(name))
    model.to(dtype).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert fingerprint(loaded)["weights"] == stored_weights(tmp_path, loaded.config, dtype)


def test_samples_of_weights_of_any_shape_are_compared_with_files(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("llama"))
    for name, shape in (("single", ()), ("none", (0, 4)), ("one", (1, 1, 1))):
        model.register_buffer(name, torch.full(shape, 2.0))
    model.save_pretrained(tmp_path)
    assert {"single", "none", "one"} <= sample(model).keys()
    assert not stores_other_weights(tmp_path, sample(model))
    model.single += 1
    assert stores_other_weights(tmp_path, sample(model))


OFFLOADED = ["criticalkv(knorm, keep=12)", "expected_attention(keep=12)", "second_pass(keep=12)"]


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])  # the last two have tied weights
def test_offloaded_weights_are_read_where_they_are(tmp_path: Path, name: str, where: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate, which offloads weights, is not installed.")
    plain, model, ids = tiny(name), copy.deepcopy(tiny(name)), prompt(1, 40)
    if where == "cpu":
        accelerate.cpu_offload(model, torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path / "weights"), torch.device("cpu"))
    assert next(model.parameters()).is_meta
    assert fingerprint(model) == fingerprint(plain) and not has_other_weights(model, sample(plain))
    for recipe in OFFLOADED:
        caches = [keepset.Cache(variant, recipe) for variant in (model, plain)]
        for cache, variant in zip(caches, (model, plain), strict=True):
            variant(input_ids=ids, past_key_values=cache)
            cache.save(tmp_path / "context", force=True)
            for reader in (model, plain):
                loaded = keepset.Cache.load(tmp_path / "context", reader)
                assert loaded.managed_layers.keys() == cache.managed_layers.keys()
                assert reader(input_ids=prompt(1, 2), past_key_values=loaded).logits.isfinite().all()
        assert same_keep_set(caches[0].keep_set, caches[1].keep_set)


def test_weights_that_are_nowhere(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("llama"))
    cache = keepset.Cache(model, "knorm(keep=12)")
    model(prompt(1, 30), past_key_values=cache)
    model.to("meta")
    with refusal("LlamaForCausalLM has weights that are not loaded \\('model.embed_tokens.weight'\\)"):
        cache.save(tmp_path / "context")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_weights_of_torchao(tmp_path: Path) -> None:
    ao = pytest.importorskip("torchao.quantization", reason="torchao, which quantizes weights, is not installed.")
    for config in (ao.Int8WeightOnlyConfig(), ao.Int8DynamicActivationInt8WeightConfig()):
        first, same, dense = (copy.deepcopy(tiny("llama")) for _ in range(3))
        ao.quantize_(first, config)
        ao.quantize_(same, config)
        for layer, quantized in zip(dense.model.layers, first.model.layers, strict=True):
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):
                    module.weight.data = quantized.get_submodule(name).weight.dequantize()
        dense.lm_head.weight.data = first.lm_head.weight.dequantize()
        assert fingerprint(first) == fingerprint(same) and fingerprint(first) != fingerprint(dense)
        assert not has_other_weights(first, sample(tiny("llama")))
        cache = keepset.Cache(first, PROJECTED[0])
        first(prompt(1, 30), past_key_values=cache)
        cache.save(tmp_path / "context", force=True)
        assert keepset.Cache.load(tmp_path / "context", same).get_seq_length() == 30
        with refusal("whose weights differ"):
            keepset.Cache.load(tmp_path / "context", dense)
        if isinstance(config, ao.Int8WeightOnlyConfig):  # activations are exact
            assert same_keep_set(kept_and_logits(first, PROJECTED[0])[0], kept_and_logits(dense, PROJECTED[0])[0])


WIDE = ["expected_attention", "criticalkv(snapkv(window=4))", "match(adakv(knorm))", "gvote", "second_pass", "qfilter"]


@pytest.mark.parametrize("recipe", [*WIDE, "int8(snapkv(window=4))", "quantized(knorm, bits=4)"])
def test_a_model_in_double_precision(tmp_path: Path, recipe: str) -> None:
    model = copy.deepcopy(tiny("llama")).double()
    recipe = f"{recipe[:-1]}, keep=0.5)" if recipe.endswith(")") else f"{recipe}(keep=0.5)"
    caches = [keepset.Cache(variant, recipe) for variant in (model, tiny("llama"))]
    for cache, variant in zip(caches, (model, tiny("llama")), strict=True):
        variant(prompt(1, 60), past_key_values=cache)
    assert same_keep_set(caches[0].keep_set, caches[1].keep_set)
    caches[0].save(tmp_path / "context")
    loaded = keepset.Cache.load(tmp_path / "context", model)
    ids = prompt(1, 5)
    logits = [model(**cache.ask(ids)).logits for cache in (loaded, caches[0])]
    assert torch.equal(*logits) and logits[0].dtype == torch.float64
