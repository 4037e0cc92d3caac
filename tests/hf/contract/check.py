"""What keepset does with one model: its own tokens, what a masked reference says, and which methods it can run."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import keepset
from tests.hf.contract.builds import usual_layers
from tests.hf.models import GREEDY, generate, weights_of

LENGTH, QUESTION, NEW, KEEP = 40, 6, 5, 20
NEEDS = {
    "keys": f"knorm(keep={KEEP})",
    "window": f"snapkv(window=8, keep={KEEP})",
    "moments": f"expected_attention(future=16, keep={KEEP})",
    "second pass": f"reread(keep={KEEP})",
    "hidden states": f"gvote(p_nuc=1.0, future=16, keep={KEEP})",
    "match": f"match(snapkv(window=8), keep={KEEP})",
    "8 bits": f"quantized(knorm, keep={KEEP})",
    "4 bits": f"quantized(knorm, bits=4, keep={KEEP})",
}
"""A recipe of each kind of thing that methods look at."""
EVERY = "snapkv(window=8, keep=20, every=4)"
OK = "yes"


@dataclass
class Row:
    """What was found of one model type.

    Attributes:
        kind: the model type.
        layers, compressed: layers that cache something of a tiny model, and those that keepset compresses.
        usual: the same of the type's usual configuration, those that are compressed first.
        refused: the sentence by which keepset refuses the model as a whole; empty if it does not.
        says: for each check `yes`, or the sentence by which keepset refuses it.
        findings: what is not as it should be, by check.
    """

    kind: str
    layers: int = 0
    compressed: int = 0
    usual: tuple[int, int] = (0, 0)
    refused: str = ""
    says: dict[str, str] = field(default_factory=dict)
    findings: dict[str, str] = field(default_factory=dict)


def check(kind: str, model: Any, needs: Iterable[str] = NEEDS) -> Row:
    """Return what keepset does with a tiny model, under recipes of some kinds."""
    row = Row(kind)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            past = keepset.Cache(model, NEEDS["keys"])
    except keepset.KeepsetError as error:
        row.refused = _sentence(row, "model", error)
        return row
    except Exception as error:
        row.findings["model"] = told(error)
        return row
    row.layers, row.compressed, row.usual = len(past.layers), len(past.managed_layers), usual_layers(kind)
    if not past.managed_layers:
        row.refused = next(
            str(warning.message) for warning in caught if "keepset compresses nothing" in str(warning.message)
        )
        return row
    ids = torch.randint(20, 200, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    # transformers' SDPA leaves out soft caps, and the causality of a mask that PaliGemma makes.
    model.set_attn_implementation("eager")
    with _found(row, "own tokens"):
        past_of_model = DynamicCache(config=model.config.get_text_config(decoder=True))
        expected = generate(model, ids, past_of_model, max_new_tokens=NEW)
        _run(row, "all kept", lambda: _all_kept(model, ids, expected.sequences))
    if "own tokens" in row.findings:
        return row
    if row.says.get("all kept", OK) != OK:
        row.refused = row.says["all kept"]
        return row
    _run(row, "several tokens", lambda: _several_tokens(model, ids, expected.logits[0]))
    for need in needs:
        _run(row, need, lambda recipe=NEEDS[need]: _compressed(model, ids, recipe))
    _run(row, "every", lambda: _compressed(model, ids, EVERY, new=10))
    return row


def told(error: Exception) -> str:
    """Return an error as one line: its kind, its words and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    file = re.sub(r".*(transformers|torch|keepset|tests)/", r"\1/", last.filename)
    words = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {words} ({file}, {last.name})"


def _sentence(row: Row, name: str, error: Exception) -> str:
    message = str(error)
    if "\n" in message or not message.endswith(".") or re.search(r"[.!?] [A-Z]", message):
        row.findings[name] = f"not one sentence: {message}"
    return message


def _run(row: Row, name: str, run: Callable[[], str]) -> None:
    """Note what comes of a check."""
    with _found(row, name):
        try:
            wrong = run()
        except keepset.KeepsetError as error:
            row.says[name] = _sentence(row, name, error)
            return
        if wrong:
            row.findings[name] = wrong
        else:
            row.says[name] = OK


@contextmanager
def _found(row: Row, name: str) -> Iterator[None]:
    """Note any exception as a finding."""
    try:
        yield
    except Exception as error:
        row.findings[name] = told(error)


def _all_kept(model: Any, ids: Tensor, expected: Tensor) -> str:
    output = generate(model, ids, keepset.Cache(model, "knorm(keep=1.0)"), max_new_tokens=NEW)
    if torch.equal(output.sequences, expected):
        return ""
    return f"other tokens than the model's own: {output.sequences[0, LENGTH:]} for {expected[0, LENGTH:]}"


def _several_tokens(model: Any, ids: Tensor, expected: Tensor) -> str:
    """Go on from a prompt with several tokens at once, and compare with the model's own logits after the whole text."""
    past = keepset.Cache(model, "knorm(keep=1.0)")
    prompt, question = ids.split([LENGTH - QUESTION, QUESTION], 1)
    generate(model, prompt, past, max_new_tokens=1)
    said = model.generate(**past.ask(question), **{**GREEDY, "max_new_tokens": 1})
    gap, scale = float((said.logits[0] - expected).abs().max()), max(float(expected.std()), 1.0)
    return "" if gap < 2e-3 * scale else f"logits {gap:.2g} away from those of the whole text"


def _compressed(model: Any, ids: Tensor, recipe: str, new: int = NEW) -> str:
    """Compress a prompt, and compare with the model run densely behind a mask; return what is wrong."""
    past = keepset.Cache(model, recipe, history=True)
    output = generate(model, ids, past, max_new_tokens=new)
    counts = past.events[0].keep_set.counts
    if counts.sum() != KEEP * counts.numel():
        return f"kept {counts.flatten().tolist()} entries of {KEEP} for each head"
    logits = torch.stack(output.logits, 1)
    if not bool(logits.isfinite().all()):
        return "logits that are no numbers"
    if past.recipe.method.stage:  # whose entries are changed
        return ""
    gap = float((logits - masked(model, past, output)).abs().max())
    scale = max(float(logits.std()), 1.0)
    return "" if gap < 2e-3 * scale else f"logits {gap:.2g} away from those of a masked reference"


# --- the reference


class _NotingCache(DynamicCache):
    """transformers' own cache, which notes on keys whose layer they are: models may run a module as several layers."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        key = key.view_as(key)
        key.layer = layer_idx  # type: ignore[attr-defined]
        return key, value


class _Masks:
    """The cache whose dropped entries the attention function below hides."""

    past: keepset.Cache


def masked(model: Any, past: keepset.Cache, output: Any, **extra: Tensor) -> Tensor:
    """Return the logits of all generated tokens, from one call in which dropped entries are hidden.

    Most models count positions from 0 as `generate` tells them, some by themselves: the prompt's last logits, before
    anything was dropped, tell which.
    """
    ids = output.sequences[:, :-1]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": True, **extra}
    positions_given = {"position_ids": torch.arange(ids.shape[1])[None]}
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    implementation = model.config._attn_implementation
    model.set_attn_implementation("masked")
    _Masks.past = past
    try:
        for positions in [positions_given, {}] if takes_positions else [{}]:
            past_of_model = _NotingCache(config=model.config.get_text_config(decoder=True))
            with torch.no_grad():
                logits = model(**inputs, **positions, past_key_values=past_of_model).logits[:, -len(output.logits) :]
            if torch.allclose(logits[:, 0], output.logits[0], rtol=1e-3, atol=1e-3):
                break
    finally:
        model.set_attn_implementation(implementation)
    return logits


def _masked_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    heads, n = key.shape[1], query.shape[2]
    shown = torch.ones(n, key.shape[2])
    if getattr(module, "is_causal", True):  # patches of an image see one another
        shown = shown.tril(key.shape[2] - n)
    shown = shown.bool() if attention_mask is None else attention_mask
    visible = shown.expand(len(query), 1, n, -1).repeat(1, heads, 1, 1)
    index, entries = getattr(key, "layer", None), heads
    if index is None and hasattr(module, "expand_kv"):  # keys made of latents, which all heads share
        index, entries = module.layer_idx, 1
    for event in _Masks.past.events:
        if index in event.keep_set.layers:
            for head in range(heads):
                dropped = torch.arange(key.shape[2]) < event.length
                dropped[event.keep_set.positions(index, 0, head * entries // heads)] = False
                visible[:, head, event.length :] &= ~dropped
    group = query.shape[1] // heads
    logits = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    weights = weights_of(logits, ~visible.repeat_interleave(group, 1), **kwargs)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def _masked_mask(**arguments: Any) -> Tensor | None:
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})


AttentionInterface.register("masked", _masked_attention)
AttentionMaskInterface.register("masked", _masked_mask)
