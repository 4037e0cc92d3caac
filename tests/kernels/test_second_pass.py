"""Attention of a task's tokens and its column statistics, against the same written out number by number."""

from __future__ import annotations

import math
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
from tests.kernels.interpreter import on_operators
from tests.kernels.test_attention import attention_of, other_softmax
from tests.methods.naive import EXACT
from tests.tiers import examples

NAMES = {"sum", "max", "square"}


def random(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def pair(seed: int, heads: int, n: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Keys of 4 numbers, and values."""
    return random(seed, heads, n, 4), random(seed + 1, heads, n, value_dim)


def check(
    made: tuple[Tensor, dict[str, Tensor]],
    queries: Tensor,
    entries: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    softmax: Softmax,
    scope: SoftmaxScope | None = None,
) -> None:
    """Output, and columns of attention to the entries, against attention number by number."""
    output, received = made
    (heads, n, _), cached = queries.shape, entries[0].shape[1]
    group, paid = heads // len(entries[0]), torch.zeros(heads, n, cached, dtype=torch.float64)
    for head, i in product(range(heads), range(n)):
        keys, values = (
            torch.cat([a[head // group], b[head // group, : i + 1]]).double() for a, b in zip(entries, own, strict=True)
        )
        products = keys @ queries[head, i].double() * softmax.scaling
        expected = attention_of(products, softmax, head) @ values
        torch.testing.assert_close(output[head, i].double(), expected, **EXACT)
        sinks, start, stop = scope or (0, 0, cached)
        seen = [*range(sinks), *range(start, stop), *range(cached, cached + i + 1)]
        paid[head, i, start:stop] = attention_of(products[seen], softmax, head)[sinks : sinks + stop - start]
    for name, right in {"sum": paid.sum(1), "max": paid.amax(1), "square": paid.square().sum(1)}.items():
        torch.testing.assert_close(received[name].double(), right, **EXACT)


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
        made = second_pass_attention(queries, entries, own, Softmax(0.7), NAMES)
        few = second_pass_attention(queries, entries, own, Softmax(0.7), {"max"})[1]
    check(made, queries, entries, own, Softmax(0.7))
    assert list(few) == ["max"] and torch.equal(few["max"], made[1]["max"])  # only what is asked for


@pytest.mark.parametrize("value_dim", [4, 3])
def test_as_kernels_of_a_gpu_make_it(triton_interpreted: None, value_dim: int) -> None:
    queries, own, entries = random(0, 6, 8, 4), pair(1, 2, 8, value_dim), pair(3, 2, 11, value_dim)
    scopes = (3, None), (1, SoftmaxScope(2, 3, 7)), (4, SoftmaxScope(0, 0, 5))
    pieces = [PackedSequence(*each) for each in scopes]
    made = second_pass_attention(queries, entries, own, Softmax(0.5), NAMES, pieces)
    with pytest.MonkeyPatch.context() as patch:
        on_operators(patch)
        right = second_pass_attention(queries, entries, own, Softmax(0.5), NAMES, pieces)
    torch.testing.assert_close(made, right, **EXACT)


@pytest.mark.parametrize("scope", [None, SoftmaxScope(2, 3, 7)])
@pytest.mark.parametrize("kind", [1, 2, 3])
def test_caps_and_sinks(implementation: str, kind: int, scope: SoftmaxScope | None) -> None:
    """In a narrower softmax a sink still has its part."""
    queries, own, entries, softmax = random(0, 6, 5, 4), pair(1, 2, 5, 4), pair(3, 2, 11, 4), other_softmax(6)[kind]
    made = second_pass_attention(queries, entries, own, softmax, NAMES, [PackedSequence(5, scope)])
    check(made, queries, entries, own, softmax, scope)


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
    queries, keys, own = random(0, 4, 3, 4), random(1, 2, 9, 4), random(2, 2, 3, 4)
    keys[0, 2, 0] = math.nan
    output, received = second_pass_attention(queries, (keys, keys), (own, own), Softmax(1.0), NAMES)
    for part in (output, *received.values()):
        assert part[:2].isnan().all() and part[2:].isfinite().all()


@examples(40)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_pieces_are_as_if_each_came_alone(sizes: list[int], seed: int) -> None:
    queries, own, entries = random(seed, 6, sum(sizes), 4), pair(seed + 1, 2, sum(sizes), 3), pair(seed + 3, 2, 11, 3)
    pieces = [PackedSequence(size, None if size % 2 else SoftmaxScope(2, 3, 3 + size)) for size in sizes]
    output, received = second_pass_attention(queries, entries, own, Softmax(0.5), NAMES, pieces)
    splits = (part.split(sizes, 1) for part in (queries, *own))
    alone = [
        second_pass_attention(few, entries, (keys, values), Softmax(0.5), NAMES, [piece])
        for few, keys, values, piece in zip(*splits, pieces, strict=True)
    ]
    torch.testing.assert_close(output, torch.cat([each for each, _ in alone], 1), **EXACT)
    for name, column in received.items():
        parts = torch.stack([each[name] for _, each in alone])
        torch.testing.assert_close(column, parts.amax(0) if name == "max" else parts.sum(0), **EXACT)
