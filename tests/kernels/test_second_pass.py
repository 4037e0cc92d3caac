"""Attention of a task's tokens and its column statistics, against the same written out number by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keepset.kernels import second_pass
from keepset.kernels.second_pass import PackedSequence, SoftmaxScope, second_pass_attention
from keepset.kernels.softmax import Softmax
from tests.kernels.test_attention import attention_of, other_softmax
from tests.methods.naive import EXACT
from tests.tiers import examples

NAMES = {"sum", "max", "square"}
SIZES = st.tuples(*(st.integers(1, most) for most in (3, 3, 20, 5, 4)))
TOKENS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def random(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def pair(seed: int, heads: int, n: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Keys of 4 numbers, and values."""
    return random(seed, heads, n, 4), random(seed + 1, heads, n, value_dim)


def check(
    results: tuple[Tensor, dict[str, Tensor]], queries: Tensor, entries: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor], softmax: Softmax, pieces: Sequence[PackedSequence],
) -> None:  # fmt: skip
    """Output, and columns of attention to the entries, against attention number by number, piece by piece."""
    output, received = results
    (heads, n, _), cached, first = queries.shape, entries[0].shape[1], 0
    group, paid = heads // len(entries[0]), torch.zeros(heads, n, cached, dtype=torch.float64)
    for size, scope in pieces:
        sinks, start, stop = scope or (0, 0, cached)
        for head, i in product(range(heads), range(first, first + size)):
            pairs = zip(entries, new, strict=True)
            keys, values = (torch.cat([a[head // group], b[head // group, first : i + 1]]).double() for a, b in pairs)
            products = keys @ queries[head, i].double() * softmax.scaling
            expected = attention_of(products, softmax, head) @ values
            torch.testing.assert_close(output[head, i].double(), expected, **EXACT)
            visible = [*range(sinks), *range(start, stop), *range(cached, len(keys))]
            paid[head, i, start:stop] = attention_of(products[visible], softmax, head)[sinks : sinks + stop - start]
        first += size
    for name, right in {"sum": paid.sum(1), "max": paid.amax(1), "square": paid.square().sum(1)}.items():
        torch.testing.assert_close(received[name].double(), right, **EXACT)


@examples(70)
@given(SIZES, TOKENS, st.integers(0, 3), st.integers(1, 8), st.integers(0, 999), st.data())
def test_attention_and_its_columns(
    sizes: tuple[int, ...], tokens: list[int], kind: int, rows: int, seed: int, data: st.DataObject
) -> None:
    """Of one piece of a task, or of several, each of which is as if it came alone."""
    (kv_heads, group, cached, head_dim, value_dim), n, pieces = sizes, sum(tokens), []
    for size in tokens:
        ends = sorted(data.draw(st.tuples(*[st.integers(0, cached - 1)] * 3), label="scope"))
        scope = SoftmaxScope(ends[0], ends[1], ends[2] + 1) if data.draw(st.booleans(), label="scoped") else None
        pieces.append(PackedSequence(size, scope))
    softmax = replace(other_softmax(kv_heads * group)[kind], scaling=0.7)
    queries = random(seed, kv_heads * group, n, head_dim) * 2
    entries = random(seed + 1, kv_heads, cached, head_dim), random(seed + 2, kv_heads, cached, value_dim)
    new = random(seed + 3, kv_heads, n, head_dim), random(seed + 4, kv_heads, n, value_dim)
    with patch.object(second_pass, "_LEAST_ROWS", rows), patch.object(second_pass, "PRODUCT_BLOCK", 1):
        results = second_pass_attention(queries, entries, new, softmax, NAMES, pieces)
        few = second_pass_attention(queries, entries, new, softmax, {"max"}, pieces)[1]
    check(results, queries, entries, new, softmax, pieces)
    assert list(few) == ["max"] and torch.equal(few["max"], results[1]["max"])  # only what is asked for


@pytest.mark.cross
@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("value_dim", [4, 3])
def test_caps_and_sinks(implementation: str, value_dim: int, kind: int) -> None:
    """In a narrower softmax a sink still has its part."""
    scopes = (3, None), (1, SoftmaxScope(2, 3, 7)), (4, SoftmaxScope(0, 0, 5))
    queries, new, entries = random(0, 6, 8, 4), pair(1, 2, 8, value_dim), pair(3, 2, 11, value_dim)
    pieces, softmax = [PackedSequence(*piece) for piece in scopes], other_softmax(6)[kind]
    results = second_pass_attention(queries, entries, new, softmax, NAMES, pieces)
    check(results, queries, entries, new, softmax, pieces)


@pytest.mark.parametrize("blocks", [1, 2**18])
def test_bfloat16_is_close_to_float32(blocks: int) -> None:
    shapes = [(6, 5), (2, 30), (2, 30), (2, 5), (2, 5)]
    parts = [random(seed, heads, size, 8) for seed, (heads, size) in enumerate(shapes)]

    def run(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        queries, keys, values, own_keys, own_values = (part.to(dtype) for part in parts)
        with patch.object(second_pass, "PRODUCT_BLOCK", blocks):
            return second_pass_attention(queries, (keys, values), (own_keys, own_values), Softmax(8**-0.5), NAMES)

    (output, received), (exact, columns) = run(torch.bfloat16), run(torch.float32)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, rtol=0.05, atol=0.03)
    torch.testing.assert_close(received, columns, rtol=0.05, atol=0.005)  # both float32


def test_a_number_that_overflowed_stays_in_its_own_head() -> None:
    queries, keys, new = random(0, 4, 3, 4), random(1, 2, 9, 4), random(2, 2, 3, 4)
    keys[0, 2, 0] = math.nan
    output, received = second_pass_attention(queries, (keys, keys), (new, new), Softmax(1.0), NAMES)
    for part in (output, *received.values()):
        assert part[:2].isnan().all() and part[2:].isfinite().all()
