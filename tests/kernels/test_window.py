"""What packed heads receive of a few queries, against a softmax that is written out query by query."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from keepset.kernels.packed import PackedHeads
from keepset.kernels.softmax import GroupReduction, Softmax
from keepset.kernels.window import add_received, received_attention
from tests.kernels.test_attention import (
    COUNTS,
    attention_of,
    heads_of,
    in_4_bits,
    in_8_bits,
    other_softmax,
    packed_heads,
    seeded,
)

TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=1e-6), torch.bfloat16: dict(rtol=0.02, atol=1e-4)}
ROUNDED = {torch.float32: dict(rtol=0.02, atol=1e-5), torch.bfloat16: dict(rtol=0.02, atol=1e-4)}
"""Of 8 and 4 bits: a GPU's product takes keys in the queries' type."""


def received(
    products: Tensor, softmax: Softmax, heads: range, sums_of: GroupReduction, bias: Tensor | float = 0.0
) -> Tensor:
    """What entries receive of one query by its heads, `[numbers, entries]`.

    Args:
        products: of a KV head's query heads with the entries that the query sees, scaled, `[group, entries]`.
        softmax: of all query heads.
        heads: the group's, among all query heads.
        sums_of: what is added up of a group.
        bias: of each entry.
    """
    if sums_of == "largest":
        sinks = None if softmax.sinks is None else softmax.sinks[heads.start : heads.stop].amax(0, keepdim=True)
        return attention_of(products.amax(0), replace(softmax, sinks=sinks), 0, bias)[None]
    each = torch.stack([attention_of(row, softmax, head, bias) for head, row in zip(heads, products, strict=True)])
    return each if sums_of == "each" else each.mean(0, keepdim=True)


def expected(
    queries: Tensor, packed: PackedHeads, kv_heads: int, last: Tensor, softmax: Softmax, sums_of: GroupReduction
) -> Tensor:
    """The column; places that hold no entry stay as they are."""
    group = queries.shape[1] // kv_heads
    column = torch.ones(len(packed.keys), *sums_of.shape(group), dtype=torch.float64)
    for run, i in heads_of(packed):
        request, kv_head = divmod(run.first + i, kv_heads)
        place = torch.arange(run.count) + run.start + i * run.capacity
        for row in range(queries.shape[2]):
            seen = place[packed.positions[place] <= last[request, row]]
            heads = range(kv_head * group, (kv_head + 1) * group)
            products = queries[request, heads, row].double() @ packed.keys[seen].double().T * softmax.scaling
            bias = 0.0 if packed.bias is None else packed.bias[seen]
            column[seen] += received(products, softmax, heads, sums_of, bias).T.reshape(-1, *column.shape[1:])
    return column


@pytest.mark.few
@pytest.mark.cross
@pytest.mark.parametrize("sums_of", GroupReduction)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 3, 9])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("kind", range(4))
def test_sums(
    implementation: str,
    counts: list[list[int]],
    dtype: torch.dtype,
    n: int,
    group: int,
    sums_of: GroupReduction,
    bits: int,
    kind: int,
) -> None:
    """Some of the queries see nothing, or do not exist."""
    packed, batch, kv_heads = packed_heads(counts, (10, 6), dtype, spare=2), len(counts), len(counts[0])
    draw = seeded(n)
    if group == 3:
        packed = replace(packed, bias=torch.randn(len(packed.keys), generator=draw))
    stored, written = {16: lambda packed: (packed, packed), 8: in_8_bits, 4: in_4_bits}[bits](packed)
    queries = torch.randn(batch, n, kv_heads * group, 10, generator=draw).to(dtype).transpose(1, 2)
    last = torch.randint(-1, 12, (batch, n), generator=draw).sort().values
    column = torch.ones(len(packed.keys), *sums_of.shape(group))
    softmax = other_softmax(kv_heads * group)[kind]
    add_received(column, queries, stored, kv_heads, last, softmax, sums_of)
    right = expected(queries, written, kv_heads, last, softmax, sums_of)
    torch.testing.assert_close(column.double(), right, **(TOLERANCE if bits == 16 else ROUNDED)[dtype])


@pytest.mark.cross
@pytest.mark.parametrize("sums_of", [GroupReduction.EACH, GroupReduction.LARGEST])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("kind", range(4))
def test_sums_of_heads_that_lie_apart(
    implementation: str,
    sums_of: GroupReduction,
    group: int,
    n: int,
    dtype: torch.dtype,
    by_token: bool,
    holes: bool,
    kind: int,
) -> None:
    """As a model makes keys: head by head, or token by token; some entries do not exist, and have biases."""
    heads, entries, size, draw = 3, 90, 12, seeded(5)
    shape = (entries, heads, size) if by_token else (heads, entries, size)
    keys = torch.randn(*shape, generator=draw).to(dtype)
    keys = keys.transpose(0, 1) if by_token else keys
    queries = torch.randn(heads, group, n, size, generator=draw).to(dtype)
    positions = torch.arange(entries).expand(heads, -1)
    last = torch.randint(-1, entries, (heads, n), generator=draw).sort().values
    valid = bias = None
    if holes:
        valid = torch.rand(heads, entries, generator=draw) < 0.7
        bias = torch.randn(heads, entries, generator=draw)
    whole = other_softmax(heads * group)[kind]
    softmax = whole.by_query_group(1, heads)
    sums = received_attention(queries, keys, positions, last, softmax, valid, sums_of, bias)
    right = torch.zeros(heads, 1 if sums_of == "largest" else group, entries, dtype=torch.float64)
    for head, row in product(range(heads), range(n)):
        seen = positions[head] <= last[head, row]
        seen = (seen if valid is None else seen & valid[head]).nonzero()[:, 0]
        products = queries[head, :, row].double() @ keys[head, seen].double().T * whole.scaling
        own = 0.0 if bias is None else bias[head, seen]
        right[head][:, seen] += received(products, whole, range(head * group, (head + 1) * group), sums_of, own)
    torch.testing.assert_close(sums.double(), right, **TOLERANCE[dtype])


@pytest.mark.parametrize("longest", [300, pytest.param(700, marks=pytest.mark.full)])
def test_a_long_head_beside_none_and_many_queries(triton_interpreted: None, longest: int) -> None:
    packed = packed_heads([[0, longest, 1]], (16, 16), torch.float32, spare=1)
    queries, last = torch.randn(1, 6, 70, 16, generator=seeded(1)), torch.arange(longest - 70, longest)[None]
    for softmax in other_softmax(6)[::3]:
        column = torch.ones(len(packed.keys))
        add_received(column, queries, packed, 3, last, softmax)
        right = expected(queries, packed, 3, last, softmax, GroupReduction.MEAN)
        torch.testing.assert_close(column.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sums_of", GroupReduction)
@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_spoils_its_own_head_only(
    implementation: str, strange: float, sums_of: GroupReduction
) -> None:
    packed = packed_heads([[4, 5]], (8, 8), torch.float32, spare=3)
    packed.runs[1].view(packed.keys)[0, 2] = strange
    column = torch.zeros(len(packed.keys), *sums_of.shape(2))
    add_received(column, torch.ones(1, 4, 2, 8), packed, 2, torch.full((1, 2), 20), Softmax(0.3), sums_of)
    of_head = [run.view(column) for run in packed.runs]
    assert of_head[0].isfinite().all() and of_head[1].isnan().all()
