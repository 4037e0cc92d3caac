"""Attention of decoded tokens over pages of each head, entry by entry; quantised caches are what they stand for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset.kernels import paged
from keepset.kernels.page_entries import read_pages
from keepset.kernels.paged import attend_heads
from keepset.kernels.softmax import Softmax
from tests.kernels.quantised import ALL_FORMATS, quantised
from tests.kernels.test_attention import TOLERANCE, attention_of, seeded

SIZE, LENGTHS = 4, [9, 0, 1, 33, 34, 4, 0, 40]
"""Entries of a page, and of each head."""
_TINY = torch.finfo(torch.float32).tiny


def expected(queries: Tensor, entries: list[tuple[Tensor, Tensor]], softmax: Softmax, biases: list[Tensor]) -> Tensor:
    """Head by head and query by query."""
    output = torch.zeros(queries.shape, dtype=torch.float64)
    for head, ((keys, values), bias) in enumerate(zip(entries, biases, strict=True)):
        own = replace(softmax, sinks=None if softmax.sinks is None else softmax.sinks[head])
        for query in range(queries.shape[1] if len(keys) else 0):
            logits = keys.double() @ queries[head, query].double() * softmax.scaling
            output[head, query] = attention_of(logits, own, query, bias) @ values.double()
    return output


@pytest.mark.few
@pytest.mark.parametrize("block", [1, 100, 2**20])
@pytest.mark.parametrize(("biased", "capped"), [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("stored", [None, *ALL_FORMATS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_every_entry(
    dtype: torch.dtype, stored: Any, biased: bool, capped: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a head's end its pages hold what is no number."""
    monkeypatch.setattr(paged, "PRODUCT_BLOCK", block)
    draw, dim, most = seeded(1), 8, -(-max(LENGTHS) // SIZE)
    tables = torch.randperm(len(LENGTHS) * most, generator=draw).view(-1, most)
    cache, how = torch.randn(tables.numel(), 1, SIZE, 2 * dim, generator=draw).to(dtype), None
    for length, table in zip(LENGTHS, tables, strict=True):
        pages = cache[table].flatten(0, 2)
        pages[length:] = math.nan
        cache[table] = pages.view(-1, 1, SIZE, 2 * dim)
    floats = cache
    if stored:
        (cache,), (floats,), how = quantised([cache], *stored, torch.float64, draw)
        how = replace(how, dtype=dtype)
    ends = zip(LENGTHS, tables, strict=True)
    entries = [floats[table].flatten(0, 2)[:length].chunk(2, -1) for length, table in ends]
    largest = max(float(keys.abs().max()) for keys, _ in entries if len(keys))
    # Logits of hundreds would have their last bits decide the fifth digit of attention.
    queries = (torch.randn(len(LENGTHS), 3, dim, generator=draw) / largest).to(dtype)
    column = torch.randn(len(LENGTHS), most * SIZE, generator=draw)
    output = torch.full(queries.shape, 7.0).to(dtype)
    softmax = Softmax(0.3, 0.1, torch.randn(len(LENGTHS), 3, generator=draw)) if capped else Softmax(0.3)

    def read(subpages: Tensor) -> tuple[Tensor, ...]:
        return read_pages([cache], 0, subpages).chunk(2, -1)

    added, lengths = (lambda some, number: column[some, :number]) if biased else None, torch.tensor(LENGTHS)
    attend_heads(queries, read, tables.int(), lengths.int(), SIZE, softmax, output, how, added)
    biases = [column[head, :length] * biased for head, length in enumerate(LENGTHS)]
    right = expected(queries, entries, softmax, biases)
    # Values of thousands may cancel one another, and are rounded as what they are: they have a size of 1 here.
    sizes = expected(queries, [(keys, values.abs()) for keys, values in entries], softmax, biases).clamp(min=_TINY)
    torch.testing.assert_close(output.double() / sizes, right / sizes, **TOLERANCE[dtype])


def test_heads_of_about_one_length_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, none padded by more than a quarter, and no block beyond its size but of a single head."""
    monkeypatch.setattr(paged, "PRODUCT_BLOCK", 1000)
    sizes = [0, 100, 3, 120, 40, 41, 0, 5, 1000, 124, 42]
    groups = list(paged._of_similar_size(sizes, 2))
    assert sorted(head for group in groups for head in group) == list(range(len(sizes)))
    for group in groups:
        longest, shortest = max(sizes[head] for head in group), min(sizes[head] for head in group)
        assert longest <= 1.25 * shortest
        assert len(group) == 1 or len(group) * longest * 2 <= 1000
    assert [0, 6] in groups and [4, 5, 10] in groups
    assert list(paged._of_similar_size([], 2)) == []
