"""Attention of a task's tokens and its column statistics, against the same written out number by number."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keepset.kernels import dispatch, second_pass
from keepset.kernels.second_pass import PackedSequence, SoftmaxScope, second_pass_attention
from tests.methods.naive import EXACT, dot, softmax
from tests.tiers import examples

NAMES = {"sum", "max", "square"}


def random(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def naive(
    queries: Tensor, entries: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scaling: float
) -> tuple[list[list[list[float]]], list[list[list[float]]]]:
    """Output `[query_heads][n]`, and attention to the entries `[query_heads][n][entries]`."""
    group = len(queries) // len(entries[0])
    outputs, attentions = [], []
    for head, rows in enumerate(queries.double().tolist()):
        keys, values = (
            torch.cat([a[head // group], b[head // group]]).double().tolist() for a, b in zip(entries, own, strict=True)
        )
        cached = entries[0].shape[1]
        outputs.append([])
        attentions.append([])
        for i, query in enumerate(rows):
            seen = cached + i + 1
            weights = softmax([dot(query, key) * scaling for key in keys[:seen]])
            outputs[-1].append(
                [sum(w * v[d] for w, v in zip(weights, values, strict=False)) for d in range(len(values[0]))]
            )
            attentions[-1].append(weights[:cached])
    return outputs, attentions


@examples(60)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (3, 3, 20, 9, 5, 4))),
    rows=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_attention_and_its_columns(sizes: tuple[int, int, int, int, int, int], rows: int, seed: int) -> None:
    kv_heads, group, cached, n, head_dim, value_dim = sizes
    queries = random(seed, kv_heads * group, n, head_dim) * 2
    entries = random(seed + 1, kv_heads, cached, head_dim), random(seed + 2, kv_heads, cached, value_dim)
    own = random(seed + 3, kv_heads, n, head_dim), random(seed + 4, kv_heads, n, value_dim)
    with patch.object(second_pass, "_LEAST_ROWS", rows), patch.object(second_pass, "PRODUCT_BLOCK", 1):
        output, received = second_pass_attention(queries, entries, own, 0.7, NAMES)
    outputs, attentions = naive(queries, entries, own, 0.7)
    torch.testing.assert_close(output.double(), torch.tensor(outputs, dtype=torch.float64), **EXACT)
    paid = torch.tensor(attentions, dtype=torch.float64)
    for name, expected in {"sum": paid.sum(1), "max": paid.amax(1), "square": paid.square().sum(1)}.items():
        torch.testing.assert_close(received[name].double(), expected, **EXACT)


@pytest.mark.parametrize("value_dim", [4, 3])
def test_as_kernels_of_a_gpu_make_it(triton_interpreted: None, value_dim: int) -> None:
    sizes = [3, 1, 4]
    queries, own = random(0, 6, 8, 4), (random(1, 2, 8, 4), random(2, 2, 8, value_dim))
    entries = random(3, 2, 11, 4), random(4, 2, 11, value_dim)
    scopes = [None, SoftmaxScope(2, 3, 7), SoftmaxScope(0, 0, 5)]
    pieces = [PackedSequence(size, scope) for size, scope in zip(sizes, scopes, strict=True)]
    output, received = second_pass_attention(queries, entries, own, 0.5, NAMES, pieces)
    with patch.object(dispatch, "INTERPRETED", False):
        expected, columns = second_pass_attention(queries, entries, own, 0.5, NAMES, pieces)
    torch.testing.assert_close(output, expected, **EXACT)
    for name in NAMES:
        torch.testing.assert_close(received[name], columns[name], **EXACT)


def test_only_what_is_asked_for() -> None:
    one = random(0, 1, 1, 4)
    assert second_pass_attention(one, (one, one), (one, one), 1.0, set())[1] == {}
    assert set(second_pass_attention(one, (one, one), (one, one), 1.0, {"max"})[1]) == {"max"}


@pytest.mark.parametrize("blocks", [1, 2**18])
def test_bfloat16_is_close_to_float32(blocks: int) -> None:
    parts = [
        random(seed, heads, size, 8) for seed, (heads, size) in enumerate([(6, 5), (2, 30), (2, 30), (2, 5), (2, 5)])
    ]

    def run(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        queries, keys, values, own_keys, own_values = (part.to(dtype) for part in parts)
        with patch.object(second_pass, "PRODUCT_BLOCK", blocks):
            return second_pass_attention(queries, (keys, values), (own_keys, own_values), 8**-0.5, NAMES)

    (output, received), (exact, columns) = run(torch.bfloat16), run(torch.float32)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, rtol=0.05, atol=0.03)
    for name in NAMES:
        assert received[name].dtype == torch.float32
        torch.testing.assert_close(received[name], columns[name], rtol=0.05, atol=0.005)


def test_a_number_that_overflowed_stays_in_its_own_head() -> None:
    queries, keys, own = random(0, 4, 3, 4), random(1, 2, 9, 4), random(2, 2, 3, 4)
    keys[0, 2, 0] = math.nan
    output, received = second_pass_attention(queries, (keys, keys), (own, own), 1.0, NAMES)
    assert output[:2].isnan().all() and output[2:].isfinite().all()
    assert all(columns[:2].isnan().all() and columns[2:].isfinite().all() for columns in received.values())


@examples(40)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_pieces_are_as_if_each_came_alone(sizes: list[int], seed: int) -> None:
    n = sum(sizes)
    queries, own = random(seed, 6, n, 4), (random(seed + 1, 2, n, 4), random(seed + 2, 2, n, 3))
    entries = random(seed + 3, 2, 11, 4), random(seed + 4, 2, 11, 3)
    amongs = [None if size % 2 else SoftmaxScope(2, 3, 3 + size) for size in sizes]
    pieces = [PackedSequence(size, among) for size, among in zip(sizes, amongs, strict=True)]
    output, received = second_pass_attention(queries, entries, own, 0.5, NAMES, pieces)
    alone, start = [], 0
    for piece in pieces:
        part = slice(start, start + piece.tokens)
        start += piece.tokens
        mine = own[0][:, part], own[1][:, part]
        alone.append(second_pass_attention(queries[:, part], entries, mine, 0.5, NAMES, [piece]))
    torch.testing.assert_close(output, torch.cat([each for each, _ in alone], 1), **EXACT)
    for name, column in received.items():
        parts = torch.stack([each[name] for _, each in alone])
        torch.testing.assert_close(column, parts.amax(0) if name == "max" else parts.sum(0), **EXACT)
