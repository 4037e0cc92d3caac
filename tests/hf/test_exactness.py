"""Nothing dropped changes nothing; what is dropped is as if masked out; counts and bytes are what they claim."""

from __future__ import annotations

import copy
import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.core.budget import Budget
from keepset.core.features.attention import SecondPass
from keepset.core.features.queries import WindowAttention
from tests.allocators.nestings import AROUND, CAPS, Nesting, allowed, made
from tests.hf.models import (
    ARCHITECTURES,
    LAYOUTS,
    feed,
    full,
    generate,
    kept_of,
    oracle_gap,
    padded_or_not,
    padded_prompt,
    prompt,
    recipe,
    refusal,
    tiny,
)
from tests.kernels.interpreter import on_operators
from tests.tiers import FULL

LENGTH, PADDING, NEW = 40, [0, 7], 4
COMPRESSED = [name for name in ARCHITECTURES if name != "mistral_window"]
"""All but the one that has nothing but sliding windows, which bound themselves."""

# One layer is too few for heads to be sure to differ.
by_architecture = pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "llama_shallow"])
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_method = pytest.mark.parametrize("method", keepset.METHODS)
KINDS = ["knorm", "snapkv", "h2o", "expected_attention", "second_pass", "gvote"]
KINDS += ["adakv", "pyramid", "pool", "ams", "match", "quantized"]
"""Of everything that methods look at, of every layout, and of what is done to entries, one."""
OF_EACH_KIND = [pytest.param(name, marks=[] if name in KINDS else pytest.mark.full) for name in keepset.METHODS]
"""All methods, of which the fast tier has those."""


@cache
def full_tokens(architecture: str, padded: bool) -> Tensor:
    ids, mask = padded_prompt(PADDING if padded else [0, 0], LENGTH)
    return full(tiny(architecture), ids, mask, max_new_tokens=NEW).sequences


def compressed(architecture: str, text: Any, padding: list[int]) -> tuple[keepset.Cache, Any]:
    ids, mask = padded_prompt(padding, LENGTH)
    cache = keepset.Cache(tiny(architecture), text)
    return cache, generate(tiny(architecture), ids, cache, mask, max_new_tokens=NEW)


SOME = [
    ("adakv", "pyramid", "snapkv"),
    ("pyramid", "adakv", "snapkv"),
    ("adakv", "chunkkv", "pyramid", "snapkv"),
    ("composite", "adakv", "ams", "snapkv"),
    ("pool", "ams", "uniform", "snapkv"),
    ("match", "dynamic", "adakv", "snapkv"),
    ("quantized", "match", "adakv", "snapkv"),
    ("adakv", "gvote"),
    ("quantized", "match", "reread"),
]


# --- nothing dropped


@pytest.mark.few(9)
@pytest.mark.cross
@by_architecture
@by_layout
def test_keeping_all_changes_nothing(architecture: str, layout: str) -> None:
    keeps = (1.0, 100)
    for keep in keeps if FULL else [keeps[list(ARCHITECTURES).index(architecture) % 2]]:
        cache, output = compressed(architecture, LAYOUTS[layout].format(keep=keep), PADDING)
        assert torch.equal(output.sequences, full_tokens(architecture, padded=True))
    if architecture in COMPRESSED:
        assert cache.keep_set.counts[:, :, 0].tolist() == [[LENGTH, LENGTH - 7]] * len(cache.keep_set.layers)


@pytest.mark.full
@pytest.mark.spread
@pytest.mark.parametrize("method", [name for name in keepset.METHODS if name != "quantized"])  # which rounds
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@padded_or_not
def test_keeping_all_changes_nothing_for_any_method(architecture: str, method: str, padding: list[int]) -> None:
    for keep in (1.0, 100):
        _, output = compressed(architecture, recipe(method, keep), padding)
        assert torch.equal(output.sequences, full_tokens(architecture, padding == PADDING))


# --- what is dropped is as if masked out


@pytest.mark.cross
@by_architecture
@by_layout
@padded_or_not
def test_dropped_entries_are_as_if_masked(architecture: str, layout: str, padding: list[int]) -> None:
    cache, output = compressed(architecture, LAYOUTS[layout].format(keep=12), padding)
    assert oracle_gap(tiny(architecture), cache, output, padded_prompt(padding, LENGTH)[1]) < 5e-5
    if architecture in COMPRESSED:
        heads = cache.keep_set.counts.shape[-1]
        assert cache.keep_set.layout == ("dense" if layout == "head-ragged" and heads == 1 else layout)
        assert not torch.equal(output.sequences, full_tokens(architecture, padding == PADDING))


@pytest.mark.spread
@by_method
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma4", "ministral3", "phi"])  # that rotate in other ways
@padded_or_not
def test_dropped_entries_are_as_if_masked_for_any_method(architecture: str, method: str, padding: list[int]) -> None:
    keeps = (12, 0.3)
    for keep in keeps if FULL else [keeps[list(keepset.METHODS).index(method) % 2]]:
        cache, output = compressed(architecture, recipe(method, keep), padding)
        assert oracle_gap(tiny(architecture), cache, output, padded_prompt(padding, LENGTH)[1]) < 5e-5


@by_layout
def test_keeping_all_in_bfloat16(layout: str) -> None:
    model = copy.deepcopy(tiny("llama")).bfloat16()
    ids, mask = padded_prompt(PADDING, LENGTH)
    expected = full(model, ids, mask, max_new_tokens=NEW)
    output = generate(model, ids, keepset.Cache(model, LAYOUTS[layout].format(keep=1.0)), mask, max_new_tokens=NEW)
    assert torch.equal(output.sequences, expected.sequences)


# --- a request does not notice its batch


@pytest.mark.few(6)
@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
@pytest.mark.parametrize("name", OF_EACH_KIND)
@torch.no_grad()
def test_a_request_whose_prompt_is_padding_keeps_nothing(name: str) -> None:
    """Its text, of which all tokens come after the prompt, is attended to as without a cache."""
    prompt_length, model, (ids, mask) = 18, tiny("llama"), padded_prompt([0, 22], 30)
    rows = {"both": [0, 1], "the empty one": [1], "the other": [0]}
    caches = {who: keepset.Cache(model, recipe(name, 14), prompt_length=prompt_length) for who in rows}

    def fed(who: str) -> Tensor:
        feed(model, caches[who], ids[rows[who], :prompt_length], mask[rows[who], :prompt_length])
        return feed(model, caches[who], ids[rows[who], prompt_length:], mask[rows[who]])[:, -1]

    if caches["both"].recipe.method.traits.needs.of(SecondPass):
        for who, index in (("both", 1), ("the empty one", 0)):
            with refusal(f"Request {index} has nothing but padding within the prompt"):
                fed(who)
        return
    logits = {who: fed(who) for who in rows}
    positions = (mask[1:].cumsum(-1) - 1).clamp(min=0)
    whole = model(ids[1:], attention_mask=mask[1:], position_ids=positions, use_cache=False).logits[0, -1]
    together, empty, full_request = (caches[who].keep_set for who in rows)
    assert together.counts[:, 1].eq(0).all() and empty.counts.eq(0).all() and kept_of(together) == kept_of(full_request)
    rounded = 0.05 if name == "quantized" else 1e-4  # tokens after the prompt are stored in 8 bits, too
    for found in (logits["both"][1], logits["the empty one"][0]):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=rounded)
    torch.testing.assert_close(logits["both"][0], logits["the other"][0], rtol=1e-4, atol=1e-4)


# --- counts


@pytest.mark.few(18)
@pytest.mark.cross
@by_method
@padded_or_not
@pytest.mark.parametrize("keep", [12, 0.4])
def test_counts_are_those_asked_for(method: str, padding: list[int], keep: int | float) -> None:
    cache, _ = compressed("llama_mha", recipe(method, keep), padding)
    targets = torch.tensor([12 if keep == 12 else int((LENGTH - pad) * keep) for pad in padding])
    counts = cache.keep_set.counts
    layout = cache.recipe.method.traits.layout
    if layout == "dense":
        assert torch.equal(counts, targets[None, :, None].expand_as(counts))
    elif layout == "layer-ragged":
        assert torch.equal(counts, counts[:, :, :1].expand_as(counts))
        assert torch.equal(counts.sum(0), (targets * counts.shape[0])[:, None].expand_as(counts[0]))
    elif cache.recipe.method.traits.across_layers or not cache.recipe.method.traits.equal_layers:
        # One number for all heads of all layers: a fraction is rounded once.
        heads = counts.shape[0] * counts.shape[-1]
        in_all = [12 * heads if keep == 12 else int((LENGTH - pad) * heads * keep) for pad in padding]
        assert counts.sum((0, 2)).tolist() == in_all
    else:
        assert torch.equal(counts.sum(-1), (targets * counts.shape[-1]).expand_as(counts[..., 0]))


# --- bytes


def reachable(length: int) -> list[str]:
    """Tensors that somebody still holds and that have room for `length` tokens."""
    gc.collect()
    return [
        f"{tensor.dtype} {tuple(tensor.shape)}"
        for tensor in gc.get_objects()
        if type(tensor) is Tensor
        and (length in tensor.shape or (tensor.numel() and tensor.untyped_storage().nbytes() % length == 0))
    ]


DROPPING = [
    *(pytest.param(recipe(str(each.values[0]), 12), id=each.values[0], marks=each.marks) for each in OF_EACH_KIND),
    *(pytest.param(f"{text.format(keep=12)[:-1]}, every=4)", id=text) for text in LAYOUTS.values()),
]


@pytest.mark.parametrize("text", DROPPING)
@torch.no_grad()
def test_the_dropped_part_is_gone(text: Any) -> None:
    length, past = 157, keepset.Cache(tiny("llama"), text)  # prime, and nothing else has this size
    tiny("llama")(prompt(1, length), past_key_values=past, logits_to_keep=1)
    assert reachable(length) == []
    assert past.keep_set.entries == 12 * 2 * 2
    whole = keepset.Cache(tiny("llama"), "snapkv(keep=1.0)")  # whose entries are found
    tiny("llama")(prompt(1, length), past_key_values=whole, logits_to_keep=1)
    assert len(reachable(length)) >= 2 * len(whole)


@pytest.mark.few(5)
@pytest.mark.parametrize("nesting", SOME, ids="-".join)
def test_bytes_of_nestings_are_those_of_the_budget(nesting: Nesting) -> None:
    check_nesting(nesting)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
@pytest.mark.parametrize("outermost", AROUND)
def test_bytes_of_any_nesting(outermost: str) -> None:
    for nesting in [nesting for nesting in allowed() if nesting[0] == outermost][::5]:
        if nesting[-1] not in ("duo_attention", "kvzip"):  # which ask for a file and a tokenizer
            check_nesting(nesting)


def check_nesting(nesting: Nesting) -> None:
    """Once at the prompt's end, by a fraction, then by a number while tokens come."""
    length, share, keep, every, events = 40, 0.3, 12, 5, 3
    model, ids, method = tiny("llama"), prompt(1, length + every * events), made(nesting)
    heads = model.config.num_key_value_heads * model.config.num_hidden_layers
    # Key, value, position, and what the method remembers; while tokens come also what it is shown of each entry.
    sizes = (1, 2) if "quantized" in nesting else (4, 0)
    entry = 2 * sizes[0] * model.config.head_dim + 4 * (sizes[1] + 1 + len(method.traits.state_names))
    shown = 4 * len(method.traits.needs.of(WindowAttention))
    once = keepset.Cache(model, keepset.Recipe(method, Budget(share, 2, 3)))
    with torch.no_grad():
        model(ids[:, :length], past_key_values=once)
    entries = int(share * length) * heads
    assert once.keep_set.entries <= entries and once.nbytes == once.keep_set.entries * entry
    if nesting[-1] not in CAPS:
        assert once.keep_set.entries > entries - heads
    if any(feature.prompt_only for feature in method.traits.needs):
        return
    cache = keepset.Cache(model, keepset.Recipe(method, Budget(keep, 2, 3), keepset.Schedule(every=every)))
    for begin, end in [(0, length), *((token, token + 1) for token in range(length, ids.shape[1]))]:
        with torch.no_grad():
            model(ids[:, begin:end], past_key_values=cache)
        if (end - length) % every == 0:
            assert cache.events[-1].length == end
            assert cache.keep_set.entries <= keep * heads and cache.nbytes_entries <= keep * heads * (entry + shown)
    assert len(cache.events) == events + 1


# --- a GPU's kernels, run by Triton's interpreter


def both_kernels(text: Any, padding: list[int], architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and what stays are the same as on PyTorch's operators, and attention is that of the dense oracle."""
    (ids, mask), model = padded_prompt(padding, 20), tiny(architecture)
    cache = keepset.Cache(model, text)
    output = generate(model, ids, cache, mask, max_new_tokens=3)
    assert oracle_gap(model, cache, output, mask) < 1e-4
    on_operators(monkeypatch)
    plain = keepset.Cache(model, text)
    assert torch.equal(output.sequences, generate(model, ids, plain, mask, max_new_tokens=3).sequences)
    assert cache.keep_set.iou(plain.keep_set).eq(1).all() and cache.nbytes == plain.nbytes


@pytest.mark.few(3)
@pytest.mark.cross
@by_layout
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa", "llama_odd_head", "phi3_partial", "gemma3"])
@padded_or_not
def test_kernels_of_layouts(
    triton_interpreted: None, architecture: str, layout: str, padding: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    both_kernels(LAYOUTS[layout].format(keep=9), padding, architecture, monkeypatch)


@pytest.mark.spread
@pytest.mark.full
@by_method
@padded_or_not
def test_kernels_of_methods(
    triton_interpreted: None, method: str, padding: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    both_kernels(recipe(method, 12), padding, "llama_shallow", monkeypatch)


# --- what methods remember
