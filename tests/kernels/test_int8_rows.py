"""Compiled attention over rows of 8-bit integers, entry by entry; and rows that are written, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from keepset.kernels.mixing import mixing_of_stores
from keepset.kernels.page_format import PageFormat
from keepset.kernels.softmax import Softmax
from tests.kernels.quantised import random_rows
from tests.kernels.test_attention import TOLERANCE, seeded
from tests.kernels.test_paged_heads import expected

pytest.importorskip("numba")
from keepset.kernels import int8_rows

pytestmark = pytest.mark.skipif(not int8_rows.AVAILABLE, reason="needs PyTorch with GNU's OpenMP")
LENGTHS = [9, 0, 1, 33, 34, 4, 0, 40]
BIASED = [9, 0, 1, 0, 33, 2, 0, 7]
"""How many of each head's first entries have a bias."""


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def stored(dim: int, entries: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Entries as they are stored, and what their keys and values stand for, which are mixed."""
    rows = random_rows(entries, 2, kind="int8", head_dim=dim, own_scales=True, draw=draw)
    numbers, scales = rows[..., :dim].view(torch.int8).double(), rows[..., dim:].contiguous().view(torch.float32)
    keys, values = (numbers * scales.double()).unbind(1)
    return rows.flatten(1).view(torch.int8), keys, values


def around(dim: int, draw: torch.Generator, scaling: float = 1.0) -> Tensor:
    """Two matrices that undo each other, by which queries and sums are multiplied; the first has a factor."""
    matrix = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=draw)).Q
    return torch.stack((matrix * scaling, matrix.T)).float()


@pytest.mark.few(1)
@pytest.mark.spread
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", list(int8_rows.NUMBERS), ids=str)
@pytest.mark.parametrize(("dim", "size", "group"), [(12, 8, 2), (80, 16, 5), (8, 4, 3), (64, 32, 1), (128, 16, 8)])
def test_attention_is_that_of_every_entry(dim: int, size: int, group: int, dtype: torch.dtype) -> None:
    """Behind a head's end its pages hold what is no number."""
    draw, most = seeded(1), -(-max(LENGTHS) // size)
    tables = torch.randperm(len(LENGTHS) * most, generator=draw).view(-1, most).int()
    pages = torch.full((tables.numel(), size, 2 * dim + 8), -1, dtype=torch.int8)
    entries, matrices = [], around(dim, draw, scaling=0.5)
    for length, table in zip(LENGTHS, tables, strict=True):
        rows, keys, values = stored(dim, length, draw)
        own = pages[table].flatten(0, 1)
        own[:length] = rows
        pages[table] = own.view(-1, size, 2 * dim + 8)
        entries.append((keys @ matrices[1].double(), values @ matrices[1].double()))
    queries = torch.randn(len(LENGTHS), group, dim, generator=draw)
    queries[3] *= 40  # the largest weight is all there is
    queries = queries.to(dtype)
    output = torch.full(queries.shape, 7.0, dtype=dtype)
    column, biased = torch.randn(tables.numel() * size, generator=draw), torch.tensor(BIASED)
    lengths = torch.tensor(LENGTHS).int()
    int8_rows.attend(queries, pages, tables, lengths, output, matrices, (column, biased.int()))
    biases = [torch.zeros(length) for length in LENGTHS]
    for bias, table, count in zip(biases, tables, BIASED, strict=True):
        bias[:count] = column.view(-1, size)[table.long()].flatten()[:count]
    right = expected(queries.double(), entries, Softmax(0.5), biases)
    torch.testing.assert_close(output.double(), right, **TOLERANCE[dtype])


def test_a_key_that_is_no_number_makes_none_of_its_head_and_alters_no_other() -> None:
    draw, dim = seeded(2), 12
    rows, _, _ = stored(dim, 64, draw)
    lengths, tables = torch.tensor([32, 32]).int(), torch.arange(8).view(2, 4).int()
    queries, before, after = torch.randn(2, 2, dim, generator=draw), torch.empty(2, 2, dim), torch.empty(2, 2, dim)
    pages, matrices = rows.view(8, 8, -1), around(dim, draw)
    int8_rows.attend(queries, pages, tables, lengths, before, matrices)
    pages[6, 1, dim : dim + 4].view(torch.float32)[:] = math.nan
    int8_rows.attend(queries, pages, tables, lengths, after, matrices)
    assert after[1].isnan().all()
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)


@pytest.mark.few(1)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", list(int8_rows.NUMBERS), ids=str)
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "not mixed"])
def test_rows_are_written_as_pytorch_rounds_them(dim: int, dtype: torch.dtype, mixed: bool) -> None:
    """Halves, zeros, numbers of any size, and what is no number."""
    draw, n = seeded(3), 600
    keys = torch.randn(n, dim, generator=draw) * torch.logspace(-9, 9, n)[:, None]
    values = torch.randint(-254, 255, (n, dim), generator=draw) / 2
    values[:, 0] = 127
    keys[7], keys[8, 3], keys[9, 5], values[10] = 0, math.nan, math.inf, -math.inf
    keys, values = keys.to(dtype), values.to(dtype)
    slots = torch.randperm(40 * 16, generator=draw)[:n]
    pages = torch.full((40, 16, 2 * dim + 8), 7, dtype=torch.int8)
    right = pages.clone()
    mixing = mixing_of_stores(dim, "cpu") if mixed else None
    mix = torch.eye(dim) if mixing is None else mixing.mix
    int8_rows.write(keys, values, pages, slots, mix.double().contiguous())
    rows = PageFormat(torch.int8, dim, dtype, mixing=mixing).encode_entries(keys, values)
    right.flatten(0, 1)[slots] = torch.cat(rows, -1).view(torch.int8)
    torch.testing.assert_close(pages, right, rtol=0, atol=0)
