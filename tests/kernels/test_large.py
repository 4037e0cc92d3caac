"""Kernels of what is large: numbers more than 2**31 apart, which 32 bits do not reach, and grids' limits.

Memory that is never touched costs nothing: only the few pages that are looked at are there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keepset.kernels.attention import append_entries, ragged_attention
from keepset.kernels.page_entries import read_pages, take_entries, write_entries
from keepset.kernels.page_layout import ColumnTarget, EntriesInPages, PagedTokens, PageLayout, RecordedQueries
from keepset.kernels.paged import append_to_pages, paged_attention
from keepset.kernels.softmax import Softmax
from keepset.kernels.window import add_received, add_received_in_pages
from tests.kernels.interpreter import Noted, on_operators
from tests.kernels.test_attention import packed_heads

HALF = torch.bfloat16
FAR = 2**30
"""Numbers from one token to the next."""
TOLERANCE = dict(rtol=0.02, atol=0.03)
HEADS, SIZE, DIM = 2, 16, 16
BLOCKS = 2**31 // (HEADS * SIZE * 2 * DIM) + 4


def apart(rows: Tensor) -> Tensor:
    """The same `[1, heads, n, dim]`, tokens far from one another."""
    far = torch.empty(FAR * rows.shape[2], dtype=rows.dtype)
    return far.as_strided(rows.shape, (FAR, DIM, FAR, 1)).copy_(rows)


def test_tokens_far_apart(triton_interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_heads([[9, 5]], (DIM, DIM), HALF, spare=3)
    queries, new = torch.randn(1, 4, 3, DIM).to(HALF), torch.randn(1, 2, 3, DIM).to(HALF)
    positions = torch.tensor([[2, 9, 12]])
    column, right = torch.zeros(2, len(packed.keys))
    attended = ragged_attention(apart(queries), [packed], Softmax(0.3), positions)
    add_received(column, apart(queries), packed, 2, positions, Softmax(0.3))
    append_entries([packed], apart(new), apart(new), positions)
    on_operators(monkeypatch)
    torch.testing.assert_close(attended, ragged_attention(queries, [packed], Softmax(0.3), positions), **TOLERANCE)
    add_received(right, queries, packed, 2, positions, Softmax(0.3))
    torch.testing.assert_close(column, right, rtol=1e-4, atol=1e-4)
    for run in packed.runs:
        assert torch.equal(run.view(packed.keys, run.count, 3), new[0, run.first : run.first + run.heads])


def test_pages_of_a_large_pool(triton_interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last blocks of it, against the same blocks as a pool of their own."""
    far, near = torch.empty(BLOCKS, HEADS, SIZE, 2 * DIM, dtype=HALF), torch.randn(4, HEADS, SIZE, 2 * DIM).to(HALF)
    far[-4:] = near
    before, lengths = BLOCKS - 4, torch.tensor([40], dtype=torch.int32)
    counts, none = torch.tensor([[[9, 20]]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    layout = PageLayout(counts, torch.full_like(none, 24), none, none)
    queries, new = torch.randn(1, 4, DIM).to(HALF), torch.randn(1, 2, DIM).to(HALF)
    slots = torch.randperm(4 * HEADS * SIZE)[:9]
    entries, last = torch.randn(2, 9, DIM).to(HALF), torch.tensor([[39]])

    def all_of_it(pool: Tensor, first: int) -> list[Tensor]:
        table = torch.tensor([[3, 1, 2]], dtype=torch.int32) + first
        tokens, output = PagedTokens(table, lengths, 40), torch.zeros(1, 4, DIM, dtype=HALF)
        beyond = first * HEADS * SIZE
        column = torch.zeros(1, len(pool) * HEADS * SIZE)
        write_entries([pool], *entries, slots + beyond)
        append_to_pages(new, new, pool, tokens, layout)
        paged_attention(queries, [pool], 0, tokens, layout, Softmax(0.3), output, torch.zeros_like(column))
        entries_in_pages = EntriesInPages(layout, table, lengths, counts, 40)
        recorded = RecordedQueries(queries[None, None], torch.tensor([0]), torch.tensor([[0]]))
        add_received_in_pages(
            [pool], range(1), recorded, entries_in_pages, ColumnTarget(column, last, lengths, Softmax(0.3))
        )
        pages = read_pages([pool], 0, torch.arange(2, 4)[None] + first * HEADS)
        return [output.float(), column[:, beyond:], pages, *take_entries([pool], slots + beyond), pool[-4:]]

    far_results = all_of_it(far, before)
    on_operators(monkeypatch)
    for result, right in zip(far_results, all_of_it(near, 0), strict=True):
        torch.testing.assert_close(result, right, **TOLERANCE)


def test_grids_of_many_queries_are_within_a_gpus_limits(
    triton_interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first axis may have 2**31 - 1 places, the others 65,535."""
    from keepset.kernels.triton import attention

    monkeypatch.setattr(attention, "_attend_part", noted := Noted())
    queries = torch.empty(1, 64, 70_000, DIM, dtype=HALF)
    ragged_attention(
        queries, [packed_heads([[9]], (DIM, DIM), HALF, spare=0)], Softmax(0.3), torch.empty(1, 70_000).long()
    )
    ((first, *later_axes),) = noted.grids
    assert first == 70_000 and max(later_axes) <= 65_535


def test_parts_of_many_tokens_take_a_quarter_of_a_gigabyte_at_most(
    triton_interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keepset.kernels.triton import paged

    monkeypatch.setattr(paged, "_attend_pages", noted := Noted())
    monkeypatch.setattr(paged, "_merge_parts", Noted())
    for n in 64, 2048, 16_384:
        queries, counts = torch.empty(n, 64, 128, dtype=HALF), torch.zeros(n, 1, 8)
        layout, table = PageLayout(counts, *[counts[..., 0]] * 3), torch.zeros(n, 1, dtype=torch.int32)
        pool, tokens = torch.zeros(1, 8, SIZE, 256, dtype=HALF), PagedTokens(table, counts[:, 0, 0], 131_072)
        paged_attention(queries, [pool], 0, tokens, layout, Softmax(0.3), queries)
    # Of float32 numbers; where there is one part it is the output itself.
    assert [parts for *_, parts in noted.grids] == [8, 2**26 // (2048 * 64 * 128), 1]
