"""Methods that look at a file of their model, statistics or compiled tables, in the transformers runtime."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.contexts.fingerprint import sample
from keepset.core.statistics import load, save
from keepset.core.tables import save as save_tables
from keepset.hf.prompt_session import Recorder
from keepset.lab.calibrate.corpus import Corpus
from keepset.lab.calibrate.measure import measure
from keepset.serving.start_checks import check_recipe
from tests.core.test_tables import random_tables
from tests.hf.models import generate, oracle_gap, padded_or_not, padded_prompt, prompt, same_keep_set, statistics, tiny
from tests.methods.test_compilerkv import check_theorem

pytestmark = pytest.mark.filterwarnings("ignore:compilerkv has no tables")


def compressed(model: Any, recipe: str, ids: Tensor) -> keepset.KeepSet:
    past = keepset.Cache(model, recipe)
    with torch.no_grad():
        model(ids, past_key_values=past)
    assert past.keep_set is not None
    return past.keep_set


@pytest.mark.parametrize("name", ["llama", "llama_yarn", "phi3_partial", "smollm3", "gpt2"])
def test_statistics_of_the_prompt_itself_choose_as_its_own_moments_do(name: str, tmp_path: Path) -> None:
    """The file's rotation is used in one, the model's own modules in the other."""
    ids, file = prompt(1, 40, seed=2), tmp_path / "stats"
    save(measure(tiny(name), Corpus([ids[0]], "0", 0)), file)
    from_prompt = compressed(tiny(name), "expected_attention(future=16, keep=13)", ids)
    measured = compressed(tiny(name), f"expected_attention(future=16, stats={str(file)!r}, keep=13)", ids)
    assert same_keep_set(from_prompt, measured)
    other_file = statistics(name)
    assert not same_keep_set(
        from_prompt, compressed(tiny(name), f"expected_attention(stats={str(other_file)!r}, keep=13)", ids)
    )


def plain_keys(model: Any, ids: Tensor) -> list[Tensor]:
    """Every layer's keys before rotation, `[kv_heads, tokens, head_dim]`, from Llama's projections."""
    found: list[Tensor] = []

    def projected(module: Any, args: Any, output: Tensor) -> None:
        found.append(output[0].unflatten(-1, (-1, model.config.head_dim)).transpose(0, 1).double())

    handles = [layer.self_attn.k_proj.register_forward_hook(projected) for layer in model.model.layers]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def test_triattention_scores_the_models_keys_before_rotation() -> None:
    """The paper's series over keys that never were rotated, with the configuration's frequencies."""
    model, ids, keep = tiny("llama"), prompt(1, 37, seed=3), 11
    kept = compressed(model, f"triattention(horizon=512, keep={keep})", ids)
    measured = load(str(statistics("llama")))
    half = model.config.head_dim // 2
    for index, keys in enumerate(plain_keys(model, ids)):
        layer = measured.layers[index]
        for head, rows in enumerate(keys):
            members = []
            for query_head in (2 * head, 2 * head + 1):
                mean, norm = layer.mean[query_head].tolist(), layer.norm[query_head].tolist()
                scores = []
                for position, key in enumerate(rows.tolist()):
                    score = 0.0
                    for f in range(half):
                        centre, part = complex(mean[f], mean[f + half]), complex(key[f], key[f + half])
                        frequency = 10000.0 ** (-f / half)
                        product = centre * part.conjugate()
                        angle = math.atan2(product.imag, product.real)
                        turns = [math.cos(frequency * (37 + 2**n - position) + angle) for n in range(10)]
                        score += abs(product) * sum(turns) / 10
                        score += (norm[f] - abs(centre)) * abs(part)
                    scores.append(score)
                row = torch.tensor(scores)
                members.append((row - row.mean()) / row.std(correction=0))
            best = torch.maximum(*members).topk(keep).indices.sort().values
            assert kept.positions(index, 0, head).tolist() == best.tolist()


@pytest.mark.parametrize("method", ["qfilter", "triattention", "expected_attention"])
def test_what_has_no_statistics_or_those_of_another_shape_is_refused(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(statistics("llama_mqa"))
    with pytest.raises(keepset.KeepsetError, match="of another model: theirs has 2 layers with 1 KV heads of size 8"):
        keepset.Cache(tiny("llama"), f"{method}(stats={file!r}, keep=8)")
    if method == "qfilter":
        monkeypatch.setattr(tiny("llama").config, "name_or_path", "some/model")
        with pytest.raises(keepset.KeepsetError, match="run `keepset calibrate --model some/model --out"):
            keepset.Cache(tiny("llama"), "adakv(qfilter, keep=8)")


def test_statistics_of_other_weights_are_refused_at_once(tmp_path: Path) -> None:
    file, another = str(statistics("llama")), copy.deepcopy(tiny("llama"))
    keepset.Cache(copy.deepcopy(another).to(torch.bfloat16), f"qfilter(stats={file!r}, keep=8)")
    with torch.no_grad():
        another.get_parameter("model.layers.0.self_attn.q_proj.weight").neg_()
    with pytest.raises(keepset.KeepsetError, match="are of another model of this shape, with other weights"):
        keepset.Cache(another, f"qfilter(stats={file!r}, keep=8)")
    # What a server finds in a model's folder.
    tiny("llama").save_pretrained(tmp_path / "own")
    another.save_pretrained(tmp_path / "other")
    recipe = keepset.Recipe.parse(f"qfilter(stats={file!r}, keep=8)")
    check_recipe(recipe, str(tmp_path / "own"))
    with pytest.raises(keepset.KeepsetError, match="was made for another model than"):
        check_recipe(recipe, str(tmp_path / "other"))


# --- CompilerKV's tables

LENGTH, PADDING, NEW = 40, [0, 7], 8
by_model = pytest.mark.parametrize("name", ["llama", "llama_mha", "llama_mqa", "gemma3"])


def shape_of(model: Any) -> tuple[int, int]:
    return len(keepset.Cache(model, "knorm(keep=1.0)").managed_layers), model.config.num_attention_heads


@pytest.fixture
def tables(tmp_path: Path, name: str) -> str:
    """A file of tables for the test's model, with thresholds far apart."""
    tables = random_tables(*shape_of(tiny(name)))
    tables.gate.copy_(torch.rand(tables.gate.shape, generator=torch.Generator().manual_seed(1)))
    save_tables(tables, tmp_path / "tables")
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
    save_tables(random_tables(), tmp_path / "tables")
    with pytest.raises(keepset.KeepsetError, match="leave every= out"):
        keepset.Cache(model, f"compilerkv(tables={str(tmp_path / 'tables')!r}, elastic=True, keep=70, every=8)")
    save_tables(random_tables(9, 3), tmp_path / "other")
    with pytest.raises(keepset.KeepsetError, match="theirs has 9 layers of 3 query heads, this one 2 of 4"):
        keepset.Cache(model, f"compilerkv(tables={str(tmp_path / 'other')!r}, window=5, keep=20)")


def test_tables_are_a_models_own(tmp_path: Path) -> None:
    """Another model of the same shape is refused; the tables' own model is not, in whatever precision."""
    model, changed = tiny("llama"), copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        changed.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1.01)
    path = str(tmp_path / "tables")
    provenance = {"model": {"name": "tiny", "sample": sample(model)}}
    save_tables(dataclasses.replace(random_tables(*shape_of(model)), provenance=provenance), Path(path))
    recipe = f"compilerkv(tables={path!r}, window=5, keep=20)"
    generate(model, prompt(1, LENGTH), keepset.Cache(model, recipe), max_new_tokens=1)
    for dtype in (torch.bfloat16, torch.float16):
        keepset.Cache(copy.deepcopy(model).to(dtype), recipe)
    for another in (changed, tiny("qwen2")):
        with pytest.raises(keepset.KeepsetError, match="are of another model of this shape, with other weights"):
            keepset.Cache(another, recipe)
    keepset.Cache(changed, recipe.replace("window", "head_table=False, gate=False, window"))  # which reads none


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
