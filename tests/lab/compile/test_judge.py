"""Verdicts against recipes with the same tables in a file, and against the model's own full cache."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import keepset
from keepset import KeepsetError
from keepset.contexts.fingerprint import fingerprint
from keepset.core.tables import Tables, neutral, save
from keepset.lab.compile.judge import Judge
from keepset.methods.compilerkv import CompilerKV
from tests.hf.models import tiny
from tests.lab.compile.conftest import TOKENS, context

WINDOW = 5
by_model = pytest.mark.parametrize("name", ["llama", "llama_mqa", "gemma3"])


def acting(model: Any, keep: int, seed: int = 0) -> Tables:
    """Random tables for one budget."""
    layers = len(keepset.Cache(model, "knorm(keep=1.0)").managed_layers)
    draw = torch.Generator().manual_seed(seed)
    tables = neutral(layers, model.config.num_attention_heads, 1.0, [keep])
    weights, gate = (torch.rand(part.shape, generator=draw) for part in (tables.weights, tables.gate))
    return dataclasses.replace(tables, weights=weights, gate=gate, provenance={"model": fingerprint(model)})


def continued(model: Any, cache: Any) -> list[list[float]]:
    """Log-probabilities after every token of the continuation but the last."""
    ids = context(0).ids[None]
    with torch.no_grad():
        model(ids[:, :TOKENS], past_key_values=cache, use_cache=True)
        logits = model(ids[:, TOKENS:-1], past_key_values=cache, use_cache=True).logits[0]
    return logits.double().log_softmax(-1).tolist()


@pytest.mark.few
@by_model
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("variant", ["", "global_mean=False, ", "relative_norm=False, "])
def test_a_verdict_is_what_the_recipe_with_these_tables_loses(
    name: str, variant: str, elastic: bool, tmp_path: Path
) -> None:
    model, path, keep = tiny(name), tmp_path / "tables", 10
    tables = acting(model, keep)
    save(tables, path)
    method = keepset.Recipe.parse(f"compilerkv({variant}window={WINDOW}, keep=1.0)").method
    assert isinstance(method, CompilerKV)
    verdict = Judge(model, method, context(0)).verdict(tables, keep, elastic=elastic)

    recipe = f"compilerkv(tables={str(path)!r}, {variant}window={WINDOW}, elastic={elastic}, keep={keep})"
    cache = keepset.Cache(model, recipe)
    compressed = continued(model, cache)
    model.set_attn_implementation("sdpa")
    full = continued(model, DynamicCache())
    after = context(0).ids[TOKENS + 1 :].tolist()
    lost = [a[token] - b[token] for a, b, token in zip(compressed, full, after, strict=True)]
    assert verdict.said == pytest.approx(sum(lost) / len(lost), abs=1e-4)
    kl = [sum(math.exp(b) * (b - a) for a, b in zip(*rows, strict=True)) for rows in zip(compressed, full, strict=True)]
    assert verdict.expected == pytest.approx(-sum(kl) / len(kl), abs=1e-4)
    assert verdict.expected < 0
    assert cache.keep_set is not None
    assert verdict.kept == pytest.approx(float(cache.keep_set.counts.double().mean()))
    assert elastic or verdict.kept == keep
    uncut = keepset.Cache(model, recipe.replace(f"keep={keep}", "keep=1.0"))
    continued(model, uncut)
    assert uncut.keep_set is not None
    assert verdict.admitted == pytest.approx(float(uncut.keep_set.counts.double().mean()))


@by_model
def test_the_risk_is_what_bins_are_made_of(name: str, tmp_path: Path) -> None:
    """Equations 12 and 13 once more, from the model's own attention and logits."""
    model, ids = tiny(name), context(0).ids[None, :TOKENS]
    entropy, perplexity = Judge(model, CompilerKV(window=WINDOW), context(0)).risk
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(ids, output_attentions=True)
    model.set_attn_implementation("sdpa")
    compressed = keepset.Cache(model, "knorm(keep=1.0)").managed_layers
    heads = [head[-WINDOW:].tolist() for index in compressed for head in output.attentions[index][0]]
    mass = [sum(row[t] for head in heads for row in head) for t in range(TOKENS)]
    share = [each / sum(mass) for each in mass]
    assert entropy == pytest.approx(-sum(x * math.log(x) for x in share if x), rel=1e-4)
    log_probabilities = output.logits[0].double().log_softmax(-1)
    losses = [-float(log_probabilities[t - 1, ids[0, t]]) for t in range(TOKENS - WINDOW, TOKENS)]
    assert perplexity == pytest.approx(math.exp(sum(losses) / WINDOW), rel=1e-4)


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = tiny("llama")
    judge = Judge(model, CompilerKV(window=WINDOW), context(0))
    head = model.lm_head.weight.data.clone()
    try:
        model.lm_head.weight.data.fill_(torch.nan)
        with pytest.raises(KeepsetError, match="not finite numbers: no tables can be compiled"):
            judge.verdict(acting(model, 10), 10, elastic=False)
    finally:
        model.lm_head.weight.data.copy_(head)
