"""The output projection's weights, against what the model's own module makes of values with a single one in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import keepset
from keepset.core.features.runtime_features import OutputProjection
from keepset.hf.model_support import output_projection
from tests.hf.models import ARCHITECTURES, generate, prompt, tiny


def attention_modules(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Attention modules that have one, with their output projection."""
    names = ("o_proj", "out_proj", "dense", "c_proj")
    return [
        (module, getattr(module, name))
        for module in model.modules()
        if hasattr(module, "layer_idx")
        for name in names
        if hasattr(module, name) and hasattr(module, "is_causal")
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_hot_values_give_the_projections_rows(architecture: str) -> None:
    model = tiny(architecture)
    config = model.config
    heads = config.num_attention_heads
    found = attention_modules(model)
    assert len(found) == config.num_hidden_layers // (2 if architecture == "lfm2" else 1)
    for module, projection in found:
        size = getattr(module, "head_dim", None) or config.hidden_size // heads
        weights = output_projection(module, heads, size)
        assert weights.untyped_storage().data_ptr() == projection.weight.untyped_storage().data_ptr()
        assert not weights.requires_grad
        with torch.no_grad():
            rows = projection(torch.eye(heads * size)) - projection(torch.zeros(1, heads * size))
        torch.testing.assert_close(weights.flatten(0, 1), rows, rtol=1e-5, atol=1e-5)


def test_a_module_without_one_is_refused() -> None:
    module = nn.Module()
    module.o_proj = nn.Linear(8, 8)
    for heads, size in ((4, 2), (2, 4)):
        assert output_projection(module, heads, size).shape == (heads, size, 8)
    with pytest.raises(keepset.KeepsetError, match="could not find the output projection of Module"):
        output_projection(module, 4, 3)
    module.o_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(keepset.KeepsetError, match="unquantized"):
        output_projection(module, 4, 2)


@pytest.mark.parametrize("text", ["criticalkv(snapkv(window=4), keep=12)", "criticalkv(knorm, keep=12, every=5)"])
def test_an_event_sees_the_layers_own_weights(text: str) -> None:
    model = tiny("llama")
    seen: dict[int, torch.Tensor] = {}

    def observer(observation: Any, budget: Any, keep_set: Any) -> None:
        seen[observation.layer] = observation[OutputProjection()]

    cache = keepset.Cache(model, text, observer=observer)
    generate(model, prompt(1, 30), cache, max_new_tokens=8)
    for index, layer in enumerate(model.model.layers):
        assert torch.equal(seen[index].flatten(0, 1), layer.self_attn.o_proj.weight.t())
    assert all(seen[0] is not other for other in list(seen.values())[1:])
