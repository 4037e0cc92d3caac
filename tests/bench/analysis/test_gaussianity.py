"""Normality of hidden states against loops over numbers, and against what normal draws are like."""

from __future__ import annotations

import math
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

from keepset.bench.analysis.gaussianity import gaussianity, hidden_gaussianity
from keepset.errors import KeepsetError
from tests.cli.conftest import tiny_model


def by_loops(values: list[float]) -> tuple[float, float, float]:
    mean, spread = fmean(values), pstdev(values)
    scaled = sorted((value - mean) / spread for value in values)
    n, distance = len(scaled), 0.0
    for x in scaled:
        normal = 0.5 * (1 + math.erf(x / math.sqrt(2)))
        below, through = sum(y < x for y in scaled) / n, sum(y <= x for y in scaled) / n
        distance = max(distance, abs(normal - below), abs(normal - through))
    return distance, fmean(x**3 for x in scaled), fmean(x**4 for x in scaled) - 3


@pytest.mark.parametrize("tokens", [3, 17, 200])
def test_figures_are_those_of_loops(tokens: int) -> None:
    hidden = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(tokens)) ** 2 + 5
    measured = gaussianity(hidden)
    for channel in range(3):
        distance, skewness, kurtosis = by_loops(hidden[:, channel].double().tolist())
        assert measured.distance[channel].item() == pytest.approx(distance, abs=1e-9)
        assert measured.skewness[channel].item() == pytest.approx(skewness, abs=1e-9)
        assert measured.kurtosis[channel].item() == pytest.approx(kurtosis, abs=1e-9)


def test_normal_draws_are_near_and_others_far() -> None:
    draws = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0))
    near, far = gaussianity(7 * draws - 2), gaussianity(draws.exp())
    assert near.distance.item() < 0.03 and abs(near.skewness.item()) < 0.15 and abs(near.kurtosis.item()) < 0.3
    assert far.distance.item() > 0.15 and far.skewness.item() > 2
    assert gaussianity(torch.ones(5, 2)).distance.isnan().all()


def test_hidden_states_are_the_layer_norms_outputs() -> None:
    model: Any = tiny_model()
    ids = torch.arange(3, 40)[None]
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda module, args, output: outputs.append(output))
        for layer in model.model.layers
    ]
    measured = hidden_gaussianity(model, ids, skip=4)
    for hook in hooks:
        hook.remove()
    assert list(measured) == [0, 1] and len(outputs) == 2
    for layer, output in enumerate(outputs):
        distance, _, _ = by_loops(output[0, 4:, 5].double().tolist())
        assert measured[layer].distance[5].item() == pytest.approx(distance, abs=1e-6)
    with pytest.raises(KeepsetError, match="6 tokens are too few: the first 4 are left out, so give 7"):
        hidden_gaussianity(model, ids[:, :6], skip=4)
