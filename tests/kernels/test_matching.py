"""Kept entries are fitted to attention over all, as naive least squares would."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from keepset.kernels import matching
from keepset.kernels.entry_format import FORMATS
from keepset.kernels.matching import FitProblem, match_attention
from keepset.kernels.softmax import Softmax
from tests.kernels.few_bits import matrix, rounded
from tests.kernels.test_attention import attention_of, seeded

PLAIN = Softmax(0.4)


def random_heads(heads: int, queries: int, entries: int, size: int, seed: int = 0) -> FitProblem:
    draw = seeded(seed)
    asking, keys, values = (
        torch.randn(heads, *shape, generator=draw) for shape in ((queries, size), (entries, size), (entries, size + 2))
    )
    is_asked = torch.ones(heads, queries, dtype=torch.bool)
    return FitProblem(2 * asking, is_asked, keys, values, torch.zeros(heads, entries))


def fit(
    heads: FitProblem, kept: Tensor, ridge: float = 0.03, biases: bool = True, softmax: Softmax = PLAIN, bits: int = 16
) -> tuple[Tensor, Tensor]:
    exists, format = torch.ones_like(kept, dtype=torch.bool), FORMATS.get(bits)
    return match_attention(heads, kept, exists, softmax, ridge, biases, format)


def as_read(keys: Tensor) -> Tensor:
    """Keys of 4 bits, one by one."""
    mixing = matrix(keys.shape[-1])
    return torch.stack([rounded(row) for row in keys.double() @ mixing.T]) @ mixing


def attention(
    heads: FitProblem, head: int, kept: Tensor | slice = slice(None), biases: Tensor | float = 0.0,
    softmax: Softmax = PLAIN, keys: Tensor | None = None,
) -> np.ndarray:  # fmt: skip
    """Of every query over some entries alone, from their own logits; each query is a head of the softmax."""
    keys = heads.keys[head][kept] if keys is None else keys
    added, products = heads.added[head][kept] + biases, heads.queries[head].double() @ keys.double().T * 0.4
    whole = replace(softmax, sinks=None if softmax.sinks is None else softmax.sinks[head])
    return np.stack([attention_of(row, whole, query, added).numpy() for query, row in enumerate(products)])


def error(
    heads: FitProblem, head: int, kept: Tensor, biases: Tensor, values: Tensor, softmax: Softmax = PLAIN
) -> float:
    """How far attention over the kept entries alone is from that over all."""
    output = attention(heads, head, kept, biases, softmax) @ values.double().numpy()
    target = attention(heads, head, softmax=softmax) @ heads.values[head].double().numpy()
    return float(np.square(output - target).sum())


def solved(rows: np.ndarray, right: np.ndarray, root: float, towards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Normal equations with a row for every unknown that leaves its place."""
    return np.concatenate([rows, root * np.eye(rows.shape[1])]), np.concatenate([right, root * towards])


@pytest.mark.parametrize("blocks", [1, 2**20])
@pytest.mark.parametrize(("softcap", "sunk"), [(None, False), (0.5, False), (None, True), (0.5, True)])
def test_caps_and_sinks(monkeypatch: pytest.MonkeyPatch, softcap: float | None, sunk: bool, blocks: int) -> None:
    """A twin is stood for by log two; and what is fitted is nearer to the whole than what was there."""
    monkeypatch.setattr(matching, "PRODUCT_BLOCK", blocks)
    draw, exact = seeded(3), 1e-4 if softcap is None and not sunk else 1e-3

    def softmax(queries: int) -> Softmax:
        return Softmax(0.4, softcap, torch.randn(1, queries, generator=draw) + 1.0 if sunk else None)

    heads, kept, makes = random_heads(1, 40, 6, 8), torch.arange(6)[None], softmax(40)
    twins = FitProblem(heads.queries, heads.asked, *(torch.cat([part, part], 1) for part in heads[2:]))
    biases, values = fit(twins, kept, softmax=makes)
    torch.testing.assert_close(biases, torch.full_like(biases, math.log(2)), rtol=exact, atol=exact)
    torch.testing.assert_close(values, heads.values, rtol=exact, atol=exact)

    many, kept_indices, makes = random_heads(1, 60, 30, 8), torch.arange(0, 30, 3)[None], softmax(60)
    biases, values = fit(many, kept_indices, 0.001, softmax=makes)
    before = error(many, 0, kept_indices[0], torch.zeros(10), many.values[0, kept_indices[0]], makes)
    assert error(many, 0, kept_indices[0], biases[0], values[0], makes) < 0.3 * before


def test_a_twin_of_one_entry_alone() -> None:
    """That one stands for two, the others for themselves."""
    heads, kept = random_heads(1, 40, 6, 8), torch.arange(6)[None]
    twin = FitProblem(heads.queries, heads.asked, *(torch.cat([part, part[:, :1]], 1) for part in heads[2:]))
    gap = error(twin, 0, kept[0], *(part[0] for part in fit(twin, kept, ridge=1e-6)))
    assert gap < 1e-2 * error(twin, 0, kept[0], torch.zeros(6), heads.values[0])


def test_nothing_dropped_changes_nothing() -> None:
    heads = random_heads(2, 30, 9, 4)
    biases, values = fit(heads, torch.arange(9).expand(2, -1))
    assert not biases.any() and torch.equal(values, heads.values)


@pytest.mark.parametrize(("queries", "kept"), [(60, 12), (12, 20), (25, 25)], ids=["tall", "wide", "square"])
@pytest.mark.parametrize(("bits", "sunk"), [(16, False), (4, False), (16, True)])
def test_values_are_those_of_ridge_regression(queries: int, kept: int, bits: int, sunk: bool) -> None:
    """Towards the values that there were. Kept keys in 4 bits get attention as they will be read."""
    heads, ridge = random_heads(2, queries, 40, 6), 0.1
    softmax = Softmax(0.4, 0.5, torch.randn(2, queries, generator=seeded(4)) + 1.0) if sunk else PLAIN
    kept_indices = torch.stack([torch.randperm(40, generator=seeded(i))[:kept] for i in range(2)])
    _, values = fit(heads, kept_indices, ridge, False, softmax, bits)
    for head in range(2):
        keys = heads.keys[head][kept_indices[head]]
        paid = attention(heads, head, kept_indices[head], 0.0, softmax, as_read(keys) if bits == 4 else keys)
        target = attention(heads, head, softmax=softmax) @ heads.values[head].double().numpy()
        root = math.sqrt(ridge * np.square(paid).sum() / kept)
        rows, right = solved(paid, target, root, heads.values[head, kept_indices[head]].double().numpy())
        expected = np.linalg.lstsq(rows, right, rcond=None)[0]
        np.testing.assert_allclose(values[head].numpy(), expected, rtol=1e-3, atol=2e-4)


def test_weights_are_near_to_those_of_non_negative_least_squares() -> None:
    """Towards the one weight that is best for all alike."""
    heads, kept_indices, ridge = random_heads(1, 80, 30, 6), torch.arange(0, 30, 3)[None], 0.1
    biases, _ = fit(heads, kept_indices, ridge)
    shares = attention(heads, 0)[:, kept_indices[0]]
    uniform = np.full(10, shares.sum() / np.square(shares.sum(-1)).sum())
    rows, right = solved(shares, np.ones(80), math.sqrt(ridge * np.square(shares).sum() / 10), uniform)
    _, best = scipy.optimize.nnls(rows, right)
    ours = np.linalg.norm(rows @ np.exp(biases[0].double().numpy()) - right)
    start = np.linalg.norm(rows @ uniform - right)
    assert best <= ours + 1e-9 and ours - best < 0.02 * (start - best)


def test_what_no_reference_query_looks_at_stands_for_as_many_as_the_rest() -> None:
    heads = random_heads(1, 40, 12, 8)
    heads.added[0, 4] = -60.0
    biases, values = fit(heads, torch.tensor([[0, 2, 4, 5, 9]]))
    torch.testing.assert_close(values[0, 2], heads.values[0, 4])
    shares = attention(heads, 0)[:, [0, 2, 4, 5, 9]].sum(-1)
    assert float(biases[0, 2]) == pytest.approx(math.log(shares.sum() / np.square(shares).sum()), abs=1e-4)


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_never_further_than_selection_on_the_reference_queries(seed: int, biases: bool) -> None:
    draw = seeded(seed)
    queries, entries, size = (int(torch.randint(*ends, (), generator=draw)) for ends in [(1, 30), (2, 40), (1, 9)])
    heads = random_heads(3, queries, entries, size, seed)
    count = int(torch.randint(1, entries + 1, (), generator=draw))
    kept_indices = torch.stack([torch.randperm(entries, generator=draw)[:count].sort().values for _ in range(3)])
    fitted_biases, values = fit(heads, kept_indices, biases=biases)
    for head, head_indices in enumerate(kept_indices):
        before = error(heads, head, head_indices, torch.zeros(count), heads.values[head, head_indices])
        assert error(heads, head, head_indices, fitted_biases[head], values[head]) <= before * (1 + 1e-4) + 1e-9
    assert biases or not fitted_biases.any()


@pytest.mark.parametrize(("kept", "part"), [(12, 1.0), (40, 0.5)])
def test_what_is_read_in_4_bits_is_nearer_if_it_was_fitted_to_that(kept: int, part: float) -> None:
    """Also where nothing was dropped: values make up for rounded keys."""
    heads = random_heads(1, 60, 40, 6)
    kept_indices = torch.randperm(40, generator=seeded(0))[:kept].sort().values
    outputs, keys, gaps = (
        attention(heads, 0) @ heads.values[0].double().numpy(),
        as_read(heads.keys[0][kept_indices]),
        [],
    )
    for bits in (4, 16):
        biases, values = (fitted[0] for fitted in fit(heads, kept_indices[None], bits=bits))
        read = attention(heads, 0, kept_indices, biases, keys=keys) @ values.double().numpy()
        gaps.append(float(np.square(read - outputs).sum()))
    assert gaps[0] < part * gaps[1]


def test_heads_of_other_lengths_do_not_change_one_another() -> None:
    """Places and queries that do not exist, whatever they hold, and entries that were fitted before."""
    long, short = random_heads(1, 20, 15, 4, 1), random_heads(1, 14, 11, 4, 2)
    long.added[0, 3] = 0.7
    queries, keys, values = (torch.full_like(part, math.nan) for part in (long.queries, long.keys, long.values))
    queries[0, :14], keys[0, :11], values[0, :11] = short.queries[0], short.keys[0], short.values[0]
    is_asked, added = torch.arange(20)[None] < 14, torch.where(torch.arange(15) < 11, 0.0, -math.inf)[None]
    longer = FitProblem(queries, is_asked, keys, values, added)
    together = FitProblem(*(torch.cat(parts) for parts in zip(long, longer, strict=True)))
    kept = torch.tensor([[0, 3, 7, 9, 14], [1, 5, 10, 0, 0]])
    exists = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    biases, fitted = match_attention(together, kept, exists, Softmax(0.4), 0.03, True)
    for row, (alone, kept_indices) in enumerate([(long, kept[:1]), (short, kept[1:, :3])]):
        count = kept_indices.shape[1]
        (right, right_values), found = fit(alone, kept_indices), (biases[row, :count], fitted[row, :count])
        torch.testing.assert_close(found, (right[0], right_values[0]), rtol=1e-4, atol=1e-5)
    assert not biases[1, 3:].any()


@pytest.mark.parametrize("broken", ["key", "value", "query", "no queries", "equal keys"])
def test_what_cannot_be_fitted_stays(broken: str) -> None:
    heads, kept_indices = random_heads(2, 20, 12, 4), torch.tensor([[0, 2, 5], [1, 6, 11]])
    match broken:
        case "key":
            heads.keys[0, 4] = math.nan
        case "value":
            heads.values[0, 4] = math.inf
        case "query":
            heads.queries[0, 3] = math.nan
        case "no queries":
            heads.asked[0] = False
        case _:
            heads.keys[0] = heads.keys[0, :1]
    biases, values = fit(heads, kept_indices)
    assert biases.isfinite().all() and values.isfinite().all()
    if broken in ("key", "value", "no queries"):
        assert not biases[0].any() and torch.equal(values[0], heads.values[0, kept_indices[0]])
    if broken == "equal keys":  # a rank of one: all entries are one, of the mean value
        assert error(heads, 0, kept_indices[0], biases[0], values[0]) < 1e-2
    alone = fit(FitProblem(*(part[1:] for part in heads)), kept_indices[1:])
    torch.testing.assert_close((biases[1], values[1]), (alone[0][0], alone[1][0]), rtol=1e-4, atol=1e-5)


def test_bfloat16_is_fitted_in_float32() -> None:
    heads, kept_indices = random_heads(2, 50, 24, 8), torch.arange(0, 24, 2).expand(2, -1)
    rounded = heads._replace(**{name: getattr(heads, name).bfloat16() for name in ("queries", "keys", "values")})
    exact = rounded._replace(**{name: getattr(rounded, name).float() for name in ("queries", "keys", "values")})
    for ours, expected in zip(fit(rounded, kept_indices), fit(exact, kept_indices), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected)
