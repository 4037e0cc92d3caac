"""A file of statistics with random networks, as wide as fitted ones, to time `distilled`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from keepset.core.statistics import LayerStatistics, Predictor, Statistics, save

WIDTH, AGES = 64, 12


def write(config: PretrainedConfig, head_dim: int, path: Path) -> None:
    """Write the statistics for a model that rotates halves of its heads."""
    draw = torch.Generator().manual_seed(0)
    kv_heads, inputs, half = config.num_key_value_heads, 2 * head_dim + 2, head_dim // 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(kv_heads, *shape, generator=draw) * 0.1

    angle = config.rope_parameters["rope_theta"] ** -(torch.arange(half) / half)
    index, none = torch.arange(head_dim), torch.zeros(config.num_attention_heads, head_dim)
    layer = LayerStatistics(
        direction=none[:kv_heads],
        mean=none,
        covariance=none[..., None].expand(-1, -1, head_dim),
        norm=none,
        partner=torch.cat([index[half:], index[:half]]),
        frequency=torch.cat([-angle, angle]),
        gain=torch.ones(head_dim),
    )
    layers = range(config.num_hidden_layers)
    shapes = [(2, inputs), (WIDTH, inputs), (WIDTH,), (2, WIDTH), (2,), (AGES, AGES)]
    networks = {index: Predictor(*(normal(*shape) for shape in shapes)) for index in layers}
    about = {"model": {"layers": list(layers)}}
    save(Statistics(dict.fromkeys(layers, layer), predictors=networks, provenance=about), path)
