"""Methods that look at statistics of the model, in the transformers runtime."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset.core.statistics import load, save
from keepset.lab.calibrate.corpus import Corpus
from keepset.lab.calibrate.measure import measure
from keepset.serving.start_checks import check_recipe
from tests.hf.models import prompt, same_keep_set, statistics, tiny


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
    own = compressed(tiny(name), "expected_attention(future=16, keep=13)", ids)
    measured = compressed(tiny(name), f"expected_attention(future=16, stats={str(file)!r}, keep=13)", ids)
    assert same_keep_set(own, measured)
    other = statistics(name)
    assert not same_keep_set(own, compressed(tiny(name), f"expected_attention(stats={str(other)!r}, keep=13)", ids))


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
    file, other = str(statistics("llama")), copy.deepcopy(tiny("llama"))
    keepset.Cache(copy.deepcopy(other).to(torch.bfloat16), f"qfilter(stats={file!r}, keep=8)")
    with torch.no_grad():
        other.get_parameter("model.layers.0.self_attn.q_proj.weight").neg_()
    with pytest.raises(keepset.KeepsetError, match="are of another model of this shape, with other weights"):
        keepset.Cache(other, f"qfilter(stats={file!r}, keep=8)")
    # What a server finds in a model's folder.
    tiny("llama").save_pretrained(tmp_path / "own")
    other.save_pretrained(tmp_path / "other")
    recipe = keepset.Recipe.parse(f"qfilter(stats={file!r}, keep=8)")
    check_recipe(recipe, str(tmp_path / "own"))
    with pytest.raises(keepset.KeepsetError, match="was made for another model than"):
        check_recipe(recipe, str(tmp_path / "other"))
