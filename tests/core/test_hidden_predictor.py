"""Modules on hidden states against their formulas, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from keepset.core.hidden_predictor import HiddenGate, HiddenNetwork, HiddenPredictor
from tests.methods.naive import EXACT, dot, random_modules

Row = list[float]


def affine(weight: Tensor, bias: Tensor | None, row: Row) -> Row:
    rows = weight.double().tolist()
    offsets = [0.0] * len(rows) if bias is None else bias.double().tolist()
    return [dot(weights, row) + offset for weights, offset in zip(rows, offsets, strict=True)]


def naive_network(module: HiddenNetwork, row: Row) -> Row:
    """KVzap's scores of one token, a number per KV head."""
    if module.hidden_weight is not None:
        row = [x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in affine(module.hidden_weight, module.hidden_bias, row)]
    return affine(module.weight, module.bias, row)


def naive_gate(module: HiddenGate, row: Row) -> Row:
    """Fast KVzip's scores of one token: each query's share of the token's own key, beside the base keys."""
    dim, group = len(module.key_norm), module.offset.shape[1]

    def normed(part: Row, weight: Tensor) -> Row:
        root = math.sqrt(dot(part, part) / dim + 1e-6)
        return [x / root * w for x, w in zip(part, weight.tolist(), strict=True)]

    queries, keys = affine(module.query_weight, module.query_bias, row), affine(module.key_weight, None, row)
    scores = []
    for head in range(module.kv_heads):
        key = normed(keys[head * dim : (head + 1) * dim], module.key_norm)
        shares = []
        for member in range(group):
            first = (head * group + member) * dim
            query = normed(queries[first : first + dim], module.query_norm)
            own = dot(query, key) / math.sqrt(dim) + float(module.offset[head, member])
            others = [dot(query, base) / math.sqrt(dim) for base in module.base[head].tolist()]
            shares.append(1 / (1 + sum(math.exp(other - own) for other in others)))
        scores.append(sum(shares) / group)
    return scores


def naive_scores(module: HiddenPredictor, hidden: Tensor) -> Tensor:
    """The scores of `[tokens, inputs]`, `[kv_heads, tokens]`."""
    formula = naive_gate if isinstance(module, HiddenGate) else naive_network
    return torch.tensor([formula(module, row) for row in hidden.double().tolist()]).T  # type: ignore[operator]


def modules(dtype: torch.dtype = torch.float32) -> dict[str, HiddenPredictor]:
    draw = torch.Generator().manual_seed(3)
    made = random_modules(3, 7, draw, group=2)
    network = made["kvzap"]
    assert isinstance(network, HiddenNetwork)
    made["linear"] = HiddenNetwork(torch.randn(3, 7, generator=draw), network.bias)
    return {
        name: type(each).of({field: weights.to(dtype) for field, weights in each.tensors.items()})
        for name, each in made.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["kvzap", "linear", "fast_kvzip"])
def test_scores_are_the_formulas(name: str, dtype: torch.dtype) -> None:
    """Weights and hidden states may be of 16 bits; what is computed of them is not rounded."""
    module = modules(dtype)[name]
    hidden = (torch.randn(2, 9, 7, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    scores = module.scores(hidden)
    assert scores.dtype == torch.float32 and scores.shape == (2, 3, 9)
    for row, own in zip(scores, hidden, strict=True):
        torch.testing.assert_close(row, naive_scores(module, own), **EXACT)


def test_many_tokens_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(1, 11, 7)
    whole = {name: module.scores(hidden) for name, module in modules().items()}
    monkeypatch.setattr("keepset.core.hidden_predictor._BLOCK", 4)
    for name, module in modules().items():
        torch.testing.assert_close(module.scores(hidden), whole[name])


def test_a_gate_does_not_overflow() -> None:
    gate = modules()["fast_kvzip"]
    large = type(gate).of({**gate.tensors, "base": gate.tensors["base"] * 1e4})
    assert large.scores(torch.randn(1, 30, 7)).isfinite().all()


@pytest.mark.parametrize("name", ["kvzap", "linear", "fast_kvzip"])
def test_weights_that_do_not_fit_are_refused(name: str) -> None:
    module = modules()[name]
    for field, weights in module.tensors.items():
        damaged = [weights[:-1], weights[None], weights * math.nan, weights.int()]
        for wrong in damaged:
            with pytest.raises(ValueError):
                type(module).of({**module.tensors, field: wrong})
    with pytest.raises(ValueError):
        type(module).of({**module.tensors, "more": torch.ones(1)})
    with pytest.raises(ValueError):
        type(module).of({})
