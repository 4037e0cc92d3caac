"""Tiny random models of many architectures, and the dense oracle that every layout is held against."""

from __future__ import annotations

import atexit
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import keepset
from keepset.core.method import Allocator
from keepset.core.statistics import Statistics, offer, save
from keepset.hf import observed_cache
from keepset.lab.calibrate.corpus import Corpus
from keepset.lab.calibrate.measure import measure
from tests.methods.naive import SMALL, random_predictor
from tests.on_gpu import GPU
from tests.real_shapes import shape_model

torch.set_num_threads(1)

_COMMON = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
_COMMON |= dict(vocab_size=200, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_HYBRID = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=24)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, rope_theta=1e4)
_SCALED = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=8, rope_theta=1e4, llama_4_scaling_beta=0.3
)
_WIDE = dict(head_dim=16, global_head_dim=32, num_global_key_value_heads=2, hidden_size_per_layer_input=0)
_MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=8)
_ZAMBA = dict(n_mamba_heads=8, mamba_d_state=16, mamba_ngroups=1, chunk_size=8, adapter_rank=8, num_key_value_heads=4)
_MAY_BE_NONE = ("sliding_window", "final_logit_softcapping")
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_deep": ("llama", dict(num_hidden_layers=4)),
    "llama_shallow": ("llama", dict(num_hidden_layers=1)),
    "llama_mha": ("llama", dict(num_key_value_heads=4)),
    "llama_mqa": ("llama", dict(num_key_value_heads=1, num_attention_heads=8)),
    "llama_odd_head": ("llama", dict(head_dim=10)),
    "llama_yarn": ("llama", dict(rope_parameters=_YARN)),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", dict(head_dim=32)),
    "phi3": ("phi3", dict(sliding_window=None)),
    "phi3_partial": ("phi3", dict(sliding_window=None, partial_rotary_factor=0.5)),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral_window": ("mistral", dict(sliding_window=24)),
    "gemma3": ("gemma3_text", dict(head_dim=16, tie_word_embeddings=False, **_HYBRID)),
    "gemma4": ("gemma4_text", dict(tie_word_embeddings=False, num_kv_shared_layers=0, **_WIDE, **_HYBRID)),
    "ministral3": ("ministral3", dict(rope_parameters=_SCALED, sliding_window=None)),
    "phi": ("phi", {}),
    "cohere": ("cohere", {}),
    "gpt_neox": ("gpt_neox", dict(num_key_value_heads=None)),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", dict(num_key_value_heads=None)),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=2)),
    "lfm2": ("lfm2", dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)),
    "qwen3_moe": ("qwen3_moe", dict(head_dim=16, num_experts=4, **_EXPERTS)),
}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": ("falcon_h1", dict(tie_word_embeddings=False, mamba_d_ssm=128, mamba_d_conv=4, **_MAMBA)),
    "zamba2": (
        "zamba2",
        dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, use_mem_rope=True, **_ZAMBA),
    ),
}
"""Models whose layers hold states beside attention."""

MORE_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_groups_of_3": ("llama", dict(hidden_size=96, num_attention_heads=6)),
    "llama_one_head": ("llama", dict(num_attention_heads=1, num_key_value_heads=1, head_dim=6)),
    "gpt_neox_partial": ("gpt_neox", dict(num_key_value_heads=None, rotary_pct=0.25)),
    "stablelm": ("stablelm", dict(partial_rotary_factor=0.25)),
    "glm4": ("glm4", dict(head_dim=16)),
    "granite": ("granite", dict(attention_multiplier=0.3, residual_multiplier=0.5)),
    "cohere2": ("cohere2", _HYBRID),
    "starcoder2": ("starcoder2", dict(sliding_window=None)),
    "mixtral": ("mixtral", dict(num_local_experts=4, sliding_window=None, **_EXPERTS)),
    "olmoe": ("olmoe", dict(num_experts=4, num_experts_per_tok=2)),
    "gemma2": ("gemma2", dict(head_dim=16, attn_logit_softcapping=1.5, final_logit_softcapping=None, **_HYBRID)),
    "gpt_oss": ("gpt_oss", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, **_HYBRID)),
    "llama_real": ("llama", {}),  # see `tests/real_shapes.py`
}
"""Those that only random walks meet (`tests/hf/walks`)."""


@cache
def tiny(name: str) -> Any:
    """A tiny random model; weights large enough that attention is far from uniform, norms and biases that matter."""
    kind, overrides = {**ARCHITECTURES, **HYBRIDS, **MORE_ARCHITECTURES}[name]
    torch.manual_seed(0)
    model = with_random_weights(untrained(kind, **overrides))
    model = shape_model(model) if name.endswith("_real") else model
    model.config.name_or_path = str(tokenizer(f"tiny-{name}", "U:{{ messages[0]['content'] }}.A:"))
    offer(model.config.name_or_path, lambda: statistics(name))
    return model


def untrained(kind: str, **overrides: Any) -> Any:
    """A tiny model of a type, as transformers begins to train it."""
    options = {k: v for k, v in {**_COMMON, **overrides}.items() if v is not None or k in _MAY_BE_NONE}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval()


def with_random_weights(model: Any) -> Any:
    """The model with other weights."""
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 0.15 * noise if parameter.ndim > 1 else parameter.data + 0.2 * noise
    return model.to("cuda") if GPU else model


@cache
def tokenizer(name: str, template: str | None = None) -> Path:
    """A folder with a tokenizer of letters, among the tokens of tiny models."""
    letters = {"?": 0, **{letter: 3 + i for i, letter in enumerate("\n .,:abcdefghijklmnopqrstuvwxyzARU")}}
    backend = Tokenizer(WordLevel(letters, unk_token="?"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    path = Path(tempfile.mkdtemp()) / name
    atexit.register(shutil.rmtree, path.parent)
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template).save_pretrained(path)
    return path


@cache
def statistics(name: str) -> Path:
    """A file of a tiny model's statistics."""
    path = Path(tempfile.mkdtemp()) / f"{name}.safetensors"
    atexit.register(shutil.rmtree, path.parent)
    save(with_networks(tiny(name)), path)
    return path


def with_networks(model: Any) -> Statistics:
    """Statistics of a model on random texts, with random gates and networks."""
    measured = measure(model, Corpus([prompt(1, 30, seed)[0] for seed in (5, 6)], "0", 0))
    draw = torch.Generator().manual_seed(0)
    gates = {index: torch.rand(len(layer.direction), generator=draw) for index, layer in measured.layers.items()}
    predictors = {
        index: random_predictor(*layer.direction.shape[:1], 2 * layer.direction.shape[1], draw)
        for index, layer in measured.layers.items()
    }
    return replace(measured, retrieval=gates, predictors=predictors)


def prompt(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 200, (batch, length), generator=generator)


def rotated(module: Any, rotary: Any, queries: Tensor, position: int) -> Tensor:
    """Queries `[..., n, head_dim]` of an attention module, all at one position, by the papers' formulas."""
    config = module.config
    if not getattr(module, "use_rope", True):
        return queries
    kind = {"layer_type": module.layer_type} if config.model_type == "gemma4_text" else {}
    cos, sin = (part[0] for part in rotary(queries, torch.tensor([[position]]), **kind))
    turned, unrotated = queries.split([cos.shape[-1], queries.shape[-1] - cos.shape[-1]], -1)
    if config.model_type == "cohere":
        partners = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        partners = torch.cat([-second, first], -1)
    scale = 1.0
    if beta := config.rope_parameters.get("llama_4_scaling_beta"):
        scale += beta * math.log(1 + position // config.rope_parameters["original_max_position_embeddings"])
    return scale * torch.cat([turned * cos + partners * sin, unrotated], -1)


def left_padded(ids: Tensor, padding: list[int]) -> tuple[Tensor, Tensor]:
    """The ids with so much padding at the left of each row, and the attention mask."""
    mask = torch.ones_like(ids)
    ids = ids.clone()
    for row, pad in enumerate(padding):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return ids, mask


def padded_prompt(padding: list[int], length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ids of one row for each number of padding tokens, which stand at the left, and the attention mask."""
    return left_padded(prompt(len(padding), length, seed), padding)


GREEDY: dict[str, Any] = dict(
    do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0, eos_token_id=None
)


def generate(model: Any, ids: Tensor, past: Any = None, mask: Tensor | None = None, **options: Any) -> Any:
    """`model.generate` with every step's logits."""
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        return model.generate(input_ids=ids, attention_mask=mask, past_key_values=past, **{**GREEDY, **options})


def full(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """`generate` as transformers does it by itself: sdpa and its own cache."""
    model.set_attn_implementation("sdpa")
    return generate(model, ids, None, mask, **options)


@torch.no_grad()
def feed(model: Any, past: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """The logits of tokens that follow what is cached; the mask covers all."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=positions, past_key_values=past).logits


def hooks_on(model: Any) -> int:
    """The number of hooks on a model's modules, but for those by which a decoder reports its calls for good."""
    hooks = (
        hooks_of_module
        for module in model.modules()
        for hooks_of_module in (module._forward_pre_hooks, module._forward_hooks)
    )
    return sum(
        hook.__module__ != observed_cache.__name__ for hooks_of_module in hooks for hook in hooks_of_module.values()
    )


padded_or_not = pytest.mark.parametrize("padding", [[0, 0], [0, 7]], ids=["whole", "padded"])


@contextmanager
def refusal(words: str) -> Iterator[None]:
    """A KeepsetError with these words whose message is one sentence."""
    with pytest.raises(keepset.KeepsetError, match=words) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and not re.search(r"[.!?] [A-Z]", message), message


@contextmanager
def hidden_states(model: Any) -> Iterator[dict[int, list[Tensor]]]:
    """Collect what enters each attention module while a model runs, `[requests, tokens, hidden]` of each forward."""
    found: dict[int, list[Tensor]] = {}

    def see(module: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        found.setdefault(module.layer_idx, []).append(hidden.detach().clone())

    modules = [module for module in model.modules() if hasattr(module, "q_proj")]
    hooks = [module.register_forward_pre_hook(see, with_kwargs=True) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


PLAIN: dict[int, tuple[Tensor, Tensor, float]] = {}
"""Queries, keys and scaling of every layer of the newest forward under the attention implementation `plain`."""


def _plain_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention, in a sliding window where there is one, that remembers what it looked at."""
    group, n = query.shape[1] // key.shape[1], query.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    PLAIN[module.layer_idx] = query[0], key[0], scaling
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    visible = (distance >= 0) & (distance < (kwargs.get("sliding_window") or n))
    weights = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("plain", _plain_attention)


def allocated(cache: keepset.Cache) -> int:
    """Bytes of all storages that a cache reaches, but for its log of events and its count of tokens and padding.

    And but for the addresses of heads that kernels read: 112 bytes a head, half of them on the host.
    """
    found: dict[int, int] = {}
    _storages(cache, found, set())
    return sum(found.values())


def _storages(value: Any, found: dict[int, int], visited: set[int]) -> None:
    if id(value) in visited or isinstance(value, type | torch.nn.Module):
        return
    visited.add(id(value))
    if isinstance(value, Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return
    parts = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
    skipped = ("events", "progress", "_from_files", "_second", "recipe", "host_table", "_device_table")
    parts += [part for name, part in getattr(value, "__dict__", {}).items() if name not in skipped]
    for part in parts:
        _storages(part, found, visited)


LAYOUTS = {
    "dense": "snapkv(window=5, kernel=3, keep={keep})",
    "layer-ragged": "pyramid(snapkv(window=4), keep={keep})",
    "head-ragged": "adakv(snapkv(window=4), keep={keep})",
}
"""A recipe of each layout."""


def recipe(method: str, keep: int | float) -> str:
    """The text of a recipe for any registered method, sized for tiny prompts."""
    parameters = "".join(f"{name}={value!r}, " for name, value in SMALL.get(method, {}).items())
    if issubclass(keepset.METHODS[method], Allocator):
        parameters = "snapkv(window=4), " + parameters
    always = "sinks=2, recent=4, " if method in ("ams", "duo_attention") else ""
    return f"{method}({parameters}{always}keep={keep})"


def kept_of(keep_set: Any, request: int = 0) -> dict[int, list[list[int]]]:
    """Return the positions that each head keeps of a request, by layer."""
    heads = range(keep_set.counts.shape[-1])
    return {layer: [keep_set.positions(layer, request, head).tolist() for head in heads] for layer in keep_set.layers}


def same_keep_set(a: keepset.KeepSet, b: keepset.KeepSet) -> bool:
    """Return whether two sets hold the same positions in every layer, request and head."""
    return a.layers == b.layers and all(
        torch.equal(a.layer(layer).counts, b.layer(layer).counts)
        and torch.equal(a.layer(layer).packed_positions, b.layer(layer).packed_positions)
        for layer in a.layers
    )


@torch.no_grad()
def check_copies(model: Any, cache: keepset.Cache, path: Path) -> None:
    """Two requests go on alike once saved and loaded, forked, with tokens taken back, and in another order."""
    ids = prompt(2, 12)
    cache.save(path)

    def following(past: keepset.Cache, rows: list[int]) -> Tensor:
        return model(ids[rows, :3], past_key_values=past, use_cache=True).logits[rows]

    expected, loaded = following(cache.fork(), [0, 1]), keepset.Cache.load(path, model)
    assert loaded.nbytes == cache.fork().nbytes and loaded.keep_set.nbytes == cache.keep_set.nbytes
    assert torch.equal(following(loaded, [0, 1]), expected)
    cropped, swapped = cache.fork(), cache.fork()
    model(ids[:, 5:9], past_key_values=cropped, use_cache=True)
    cropped.crop(-4)
    swapped.reorder_cache(torch.tensor([1, 0]))
    for past, rows in ((cropped, [0, 1]), (swapped, [1, 0])):
        assert torch.allclose(following(past, rows), expected, atol=1e-5)


class Oracle:
    """The model run densely over a finished sequence, each dropped entry hidden by an explicit mask."""

    current: Oracle
    """The one whose masks the attention function below applies."""

    def __init__(self, cache: keepset.Cache | None, mask: Tensor) -> None:
        self.mask = mask.bool()
        self.event = cache.events[0] if cache is not None and cache.events else None
        self.stored: dict[int, dict[str, Tensor]] = {}
        """Of layers whose entries were changed their columns, `[requests, kv_heads, entries, ...]`, and which exist."""
        if cache is not None and cache.recipe.method.stage:
            for index, layer in cache.managed_layers.items():
                columns, exists = layer.store.padded()
                self.stored[index] = {**columns, "exists": exists}

    def logits(self, model: Any, ids: Tensor) -> Tensor:
        """Logits of every position of `ids`, `[batch, tokens, vocabulary]`."""
        Oracle.current = self
        implementation = model.config._attn_implementation
        model.set_attn_implementation("oracle")
        positions = (self.mask.long().cumsum(-1) - 1).clamp(min=0)
        try:
            with torch.no_grad():
                return model(ids, attention_mask=self.mask.long(), position_ids=positions, use_cache=False).logits
        finally:
            model.set_attn_implementation(implementation)

    def visible(self, layer: int, heads: int, window: int | None) -> Tensor:
        """`[batch, heads, n, n]`: what each query may see."""
        n = self.mask.shape[1]
        at = torch.arange(n)
        distance = at[:, None] - at
        causal = (distance >= 0) & (distance < (n if window is None else window))
        visible = (causal & self.mask[:, None]).unsqueeze(1).repeat(1, heads, 1, 1)
        if self.event is not None and layer in self.event.keep_set.layers:
            for b in range(len(self.mask)):
                tokens = self.mask[b].nonzero()[:, 0]
                for h in range(heads):
                    dropped = at < self.event.length
                    dropped[tokens[self.event.keep_set.positions(layer, b, h)]] = False
                    visible[b, h, self.event.length :] &= ~dropped
        # Padding sees itself: nobody looks at it, but a softmax over nothing is NaN.
        return visible | (~self.mask[:, None, :, None] & (distance == 0))

    def rewritten(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and biases, `[batch, kv_heads, n, ...]`, that tokens after the event find."""
        keys, values, biases = keys.clone(), values.clone(), torch.zeros_like(values[..., 0], dtype=torch.float32)
        if layer in self.stored and self.event is not None:
            stored = self.stored[layer]
            for b in range(len(self.mask)):
                tokens = self.mask[b].nonzero()[:, 0]
                for h in range(values.shape[1]):
                    exists = stored["exists"][b, h]
                    at = tokens[stored["positions"][b, h][exists].long()]
                    keys[b, h, at] = stored["keys"][b, h][exists]
                    values[b, h, at] = stored["values"][b, h][exists]
                    biases[b, h, at] = stored["bias"][b, h][exists] if "bias" in stored else 0.0
        return keys, values, biases


def extended(mask: Tensor, length: int) -> Tensor:
    """The mask of a prompt with ones up to `length`."""
    return torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)


def oracle_gap(model: Any, cache: keepset.Cache, output: Any, mask: Tensor) -> float:
    """Largest difference between the logits of every generated token and the oracle's."""
    ids = output.sequences[:, :-1]
    logits = torch.stack(output.logits, 1)
    reference = Oracle(cache, extended(mask, ids.shape[1])).logits(model, ids)
    return float((logits - reference[:, -logits.shape[1] :]).abs().max())


def weights_of(
    products: Tensor,
    hidden: Tensor,
    biases: Tensor | float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention of scaled products `[batch, query_heads, n, entries]`, with a model's soft cap and its heads' sinks."""
    logits = products if softcap is None else softcap * torch.tanh(products / softcap)
    logits = (logits + biases).masked_fill(hidden, float("-inf"))
    if s_aux is None:
        return logits.softmax(-1)
    sinks = s_aux.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]


def _oracle_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    visible = Oracle.current.visible(module.layer_idx, key.shape[1], kwargs.get("sliding_window"))
    scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    hidden = ~visible.repeat_interleave(group, 1)
    attended = weights_of(scores, hidden, **kwargs) @ value.repeat_interleave(group, 1)
    if (event := Oracle.current.event) is not None and module.layer_idx in Oracle.current.stored:
        facing, fitted, biases = (
            part.repeat_interleave(group, 1) for part in Oracle.current.rewritten(module.layer_idx, key, value)
        )
        scores = query @ facing.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
        weights = weights_of(scores, hidden, biases[:, :, None], **kwargs)
        attended[:, :, event.length :] = (weights.to(fitted.dtype) @ fitted)[:, :, event.length :]
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register("oracle", _oracle_attention)
