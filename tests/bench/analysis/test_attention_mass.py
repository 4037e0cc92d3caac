from __future__ import annotations

import math

import pytest
import torch

from keepset.bench.analysis.diagnostics import attention_kept
from tests.methods.naive import DTYPES, SHAPES, Shape, length_of, observe, tolerance, window_attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_share_of_the_windows_attention(shape: Shape, dtype: torch.dtype) -> None:
    # After an event positions have gaps, and differ from head to head.
    draw = torch.Generator().manual_seed(3)
    steps = torch.randint(1, 4, (shape.batch, shape.kv_heads, shape.entries), generator=draw)
    positions = steps.cumsum(-1)
    if shape.batch == 1:  # Every head has seen the newest token.
        positions += positions[..., -1:].max() - positions[..., -1:]
    observation = observe(shape, dtype=dtype, positions=positions)
    mask = torch.rand(observation.valid.shape, generator=draw) < 0.4
    kept = observation.keep(mask).layer(0)
    measured = attention_kept(observation.window_attention(8), observation.positions, kept)
    for request in range(shape.batch):
        for head in range(shape.kv_heads):
            inside = total = 0.0
            for group in range(shape.group):
                for row in window_attention(observation, request, head * shape.group + group, 8):
                    total += math.fsum(row)
                    inside += math.fsum(
                        row[i] for i in range(length_of(observation, request)) if mask[request, head, i]
                    )
            expected = torch.tensor(inside / total if total else 1.0)
            torch.testing.assert_close(measured[request, head], expected, **tolerance(dtype))


def test_nobody_looks() -> None:
    observation = observe(Shape((5,), 1, 1, 3, 3))
    kept = observation.keep(torch.zeros(1, 1, 5, dtype=torch.bool)).layer(0)
    assert attention_kept(torch.zeros(1, 1, 8, 5), observation.positions, kept).item() == 1.0
