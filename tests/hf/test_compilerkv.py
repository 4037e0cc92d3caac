"""CompilerKV with compiled tables under `generate`."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import keepset
from keepset.contexts.fingerprint import sample
from keepset.core.tables import save
from keepset.hf.prompt_session import Recorder
from tests.core.test_tables import random_tables
from tests.hf.models import generate, oracle_gap, padded_or_not, padded_prompt, prompt, same_keep_set, tiny
from tests.methods.test_compilerkv import check_theorem

LENGTH, PADDING, NEW = 40, [0, 7], 8
pytestmark = pytest.mark.filterwarnings("ignore:compilerkv has no tables")
by_model = pytest.mark.parametrize("name", ["llama", "llama_mha", "llama_mqa", "gemma3"])


def shape_of(model: Any) -> tuple[int, int]:
    return len(keepset.Cache(model, "knorm(keep=1.0)").managed_layers), model.config.num_attention_heads


@pytest.fixture
def tables(tmp_path: Path, name: str) -> str:
    """A file of tables for the test's model, with thresholds far apart."""
    tables = random_tables(*shape_of(tiny(name)))
    tables.gate.copy_(torch.rand(tables.gate.shape, generator=torch.Generator().manual_seed(1)))
    save(tables, tmp_path / "tables")
    return str(tmp_path / "tables")


@pytest.mark.few(4)
@by_model
@padded_or_not
def test_elastic_layers_are_as_if_masked(name: str, tables: str, padding: list[int]) -> None:
    model, (ids, mask) = tiny(name), padded_prompt(padding, LENGTH)
    cache = keepset.Cache(model, f"compilerkv(tables={tables!r}, window=5, elastic=True, keep=36)")
    output = generate(model, ids, cache, mask, max_new_tokens=NEW)
    assert oracle_gap(model, cache, output, mask) < 5e-5
    assert cache.keep_set is not None
    counts = cache.keep_set.counts
    assert torch.equal(counts, counts[:, :, :1].expand_as(counts))
    assert int(counts.min()) < 33 and 5 < int(counts.max()) <= 36


@by_model
def test_rows_chunks_and_a_shared_prefill_choose_alike(name: str, tables: str) -> None:
    model, (ids, mask) = tiny(name), padded_prompt(PADDING, LENGTH)
    recipe = keepset.Recipe.parse(f"compilerkv(tables={tables!r}, window=5, elastic=True, keep=20)")
    cache = keepset.Cache(model, recipe)
    generate(model, ids, cache, mask, max_new_tokens=1)
    assert cache.keep_set is not None
    chunked = keepset.Cache(model, recipe, prompt_length=LENGTH)
    generate(model, ids, chunked, mask, max_new_tokens=1, prefill_chunk_size=13)
    assert chunked.keep_set is not None and same_keep_set(cache.keep_set, chunked.keep_set)
    for row, pad in enumerate(PADDING):
        recorder = Recorder(model, recipe.method.traits.needs)
        recorder.prefill(ids[row : row + 1, pad:])
        alone = keepset.Cache.from_prompt(model, recipe, recorder, recorder.observations).keep_set
        assert alone is not None
        for layer in alone.layers:
            assert torch.equal(alone.positions(layer, 0, 0), cache.keep_set.positions(layer, row, 0))


def test_what_does_not_go_is_said(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(keepset.KeepsetError, match="There is no file 'absent' with tables"):
        keepset.Cache(model, "compilerkv(tables='absent', keep=70)")
    save(random_tables(), tmp_path / "tables")
    with pytest.raises(keepset.KeepsetError, match="leave every= out"):
        keepset.Cache(model, f"compilerkv(tables={str(tmp_path / 'tables')!r}, elastic=True, keep=70, every=8)")
    save(random_tables(9, 3), tmp_path / "other")
    with pytest.raises(keepset.KeepsetError, match="theirs has 9 layers of 3 query heads, this one 2 of 4"):
        keepset.Cache(model, f"compilerkv(tables={str(tmp_path / 'other')!r}, window=5, keep=20)")


def test_tables_are_a_models_own(tmp_path: Path) -> None:
    """Another model of the same shape is refused; the tables' own model is not, in whatever precision."""
    model, other = tiny("llama"), copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        other.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1.01)
    path = str(tmp_path / "tables")
    known = {"model": {"name": "tiny", "sample": sample(model)}}
    save(dataclasses.replace(random_tables(*shape_of(model)), provenance=known), Path(path))
    recipe = f"compilerkv(tables={path!r}, window=5, keep=20)"
    generate(model, prompt(1, LENGTH), keepset.Cache(model, recipe), max_new_tokens=1)
    for dtype in (torch.bfloat16, torch.float16):
        keepset.Cache(copy.deepcopy(model).to(dtype), recipe)
    for another in (other, tiny("qwen2")):
        with pytest.raises(keepset.KeepsetError, match="are of another model of this shape, with other weights"):
            keepset.Cache(another, recipe)
    keepset.Cache(other, recipe.replace("window", "head_table=False, gate=False, window"))  # which reads none


@pytest.mark.parametrize(("name", "keep"), [("llama", 6), ("llama_mqa", 20), ("llama", 39)])
def test_theorem_4_1_on_a_models_own_attention(name: str, keep: int) -> None:
    """Over all rows of every layer, those among them that see nothing of what stays."""
    model, ids = tiny(name), prompt(1, LENGTH)
    cache = keepset.Cache(model, f"compilerkv(window=5, keep={keep})")
    generate(model, ids, cache, max_new_tokens=1)
    assert cache.keep_set is not None
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    for layer, attention in enumerate(attentions):
        check_theorem(attention[0].double().tolist(), cache.keep_set.positions(layer, 0, 0).tolist())
