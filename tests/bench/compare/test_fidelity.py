from __future__ import annotations

import math

import pytest
import torch

from keepset.bench.compare.fidelity import kl, mean, nll


def log_probabilities(logits: list[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(x) for x in logits))
    return [x - total for x in logits]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 256, 257, 600])
def test_each_token_has_its_own_figure(tokens: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(tokens)
    full, other = (3 * torch.randn(2, tokens, 5, generator=draw)).to(dtype)
    ids = torch.randint(5, (tokens,), generator=draw)
    p, q = ([log_probabilities(row) for row in logits.tolist()] for logits in (full, other))
    divergence = [sum(math.exp(a) * (a - b) for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)]
    assert kl(full, other).tolist() == pytest.approx(divergence, rel=1e-4, abs=1e-6)
    assert nll(full, ids).tolist() == pytest.approx([-p[i][ids[i + 1]] for i in range(tokens - 1)], rel=1e-5, abs=1e-6)


def test_nothing_has_a_mean_of_zero() -> None:
    assert mean(torch.tensor([])) == 0.0
    assert mean(torch.tensor([1.0, 2.0, 6.0])) == 3.0
