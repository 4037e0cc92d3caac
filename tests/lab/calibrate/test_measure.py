"""Statistics against the model's own projections, number by number."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import keepset
from keepset import KeepsetError
from keepset.core.statistics import RowStatistics
from keepset.lab.calibrate.corpus import Corpus
from keepset.lab.calibrate.measure import SKIP, measure
from tests.hf.models import ARCHITECTURES, prompt, tiny

ROTARY = ["llama", "llama_mqa", "llama_odd_head", "llama_yarn", "qwen2", "qwen3", "phi3_partial", "gpt_neox", "smollm3"]


def corpus(*lengths: int) -> Corpus:
    return Corpus([prompt(1, length, seed=length)[0] for length in lengths], "0", 3)


def queries(model: Any, ids: Tensor, rotated: bool) -> list[Tensor]:
    """Every layer's queries `[query_heads, tokens, head_dim]`, from the model's projections, for Llama's like."""
    config, layers = model.config, []
    size = config.head_dim

    def projected(module: Any, args: Any, output: Tensor) -> None:
        rows = output[0].unflatten(-1, (-1, size)).transpose(0, 1)
        if rotated:
            angles = torch.arange(len(ids))[:, None] * 10000.0 ** -(torch.arange(size // 2) * 2 / size)
            x, y = rows.chunk(2, -1)
            rows = torch.cat([x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()], -1)
        layers.append(rows.double())

    handles = [layer.self_attn.q_proj.register_forward_hook(projected) for layer in model.model.layers]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return [rows[:, SKIP:] for rows in layers]


def all_queries(name: str, lengths: tuple[int, ...], rotated: bool) -> list[Tensor]:
    runs = [queries(tiny(name), ids, rotated) for ids in corpus(*lengths).passages]
    return [torch.cat(layer, 1) for layer in zip(*runs, strict=True)]


@pytest.mark.parametrize("name", ["llama", "llama_mha", "llama_mqa", "llama_odd_head", "llama_yarn"])
def test_moments_are_those_of_all_queries_before_rotation(name: str) -> None:
    statistics = measure(tiny(name), corpus(40, 23, 17))
    for layer, rows in zip(statistics.layers.values(), all_queries(name, (40, 23, 17), False), strict=True):
        mean = rows.sum(1) / rows.shape[1]
        torch.testing.assert_close(layer.mean.double(), mean, rtol=1e-4, atol=1e-5)
        for head, own in enumerate(rows):
            torch.testing.assert_close(
                layer.covariance[head].double(), torch.cov(own.T, correction=0), rtol=1e-4, atol=1e-5
            )
        half = rows.shape[-1] // 2
        for number in range(half):
            lengths = [[math.hypot(row[number], row[number + half]) for row in own.tolist()] for own in rows]
            means = torch.tensor([sum(head) / len(head) for head in lengths])
            for place in (number, number + half):
                torch.testing.assert_close(layer.norm[:, place], means, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama_mha", "llama_mqa"])
def test_direction_is_the_first_right_singular_vector_of_rotated_queries(name: str) -> None:
    statistics = measure(tiny(name), corpus(40, 23))
    for layer, rows in zip(statistics.layers.values(), all_queries(name, (40, 23), True), strict=True):
        directions = []
        for own in rows:
            vector = torch.linalg.svd(own, full_matrices=False).Vh[0]
            directions.append(vector if (own @ vector).mean() > 0 else -vector)
        kv_heads = len(layer.direction)
        expected = torch.stack(directions).unflatten(0, (kv_heads, -1)).mean(1)
        torch.testing.assert_close(layer.direction.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ROTARY, "gpt2"])
def test_the_measured_rotation_is_the_models(name: str, dtype: torch.dtype) -> None:
    """Keys that the model cached for one token over and over are one key, rotated."""
    model = tiny(name)
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    statistics = measure(twin, corpus(20))
    if name == "gpt2":
        assert not any(layer.frequency.any() for layer in statistics.layers.values())
        return
    # Of the first layer the input is the token alone, whatever its position.
    past = keepset.Cache(model, "knorm(keep=1.0)")
    with torch.no_grad():
        model(torch.full((1, 30), 7), past_key_values=past)
    keys = past.managed_layers[0].store.padded()[0]["keys"]
    layer = statistics.layers[0]
    measured = RowStatistics(lambda name: getattr(layer, name)[None])
    turned = torch.stack(
        [measured.rotate(keys[:, :, :1] / layer.gain, torch.tensor([[at]]))[0, :, 0] for at in range(30)], 1
    )
    torch.testing.assert_close(turned[None], keys, rtol=1e-3, atol=1e-3)


def test_layers_that_do_not_rotate_have_no_frequencies_and_what_cannot_be_measured_is_refused() -> None:
    statistics = measure(tiny("smollm3"), corpus(20))
    assert [bool(layer.frequency.any()) for layer in statistics.layers.values()] == [True, False]
    with pytest.warns(UserWarning, match="compresses nothing"), pytest.raises(KeepsetError, match="nothing to measure"):
        measure(tiny("mistral_window"), corpus(20))
    model = copy.deepcopy(tiny("llama"))
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = math.inf
    with pytest.raises(KeepsetError, match=r"not finite|cannot undo"):
        measure(model, corpus(20))


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_only_layers_that_can_be_compressed_are_measured(name: str) -> None:
    assert list(measure(tiny(name), corpus(20)).layers) == [1, 3]


def test_the_order_of_passages_does_not_matter_and_provenance_says_of_what() -> None:
    one, other = measure(tiny("llama"), corpus(30, 20)), measure(tiny("llama"), corpus(20, 30))
    for a, b in zip(one.layers.values(), other.layers.values(), strict=True):
        torch.testing.assert_close(a.covariance, b.covariance)
        torch.testing.assert_close(a.direction, b.direction)
    provenance = measure(tiny("llama"), corpus(30, 20)).provenance
    assert provenance["keepset"] == keepset.__version__
    assert provenance["model"]["architecture"] == "LlamaForCausalLM"
    assert provenance["model"]["layers"] == [0, 1]
    assert [provenance["model"][name] for name in ("query_heads", "kv_heads", "head_dim")] == [4, 2, 16]
    assert provenance["corpus"] == {"sha256": "0", "passages": 2, "tokens": 50, "left_out": 8}
    assert provenance["seed"] == 3
    hashes = {measure(tiny(name), corpus(20)).provenance["model"]["config_sha256"] for name in ("llama", "llama_yarn")}
    assert len(hashes) == 2 and len(ARCHITECTURES) > 2
