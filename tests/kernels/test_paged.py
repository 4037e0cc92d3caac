"""Pages of an engine: attention, new entries, copies and shifted tables, one by one and by allocators of pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset.kernels.page_entries import read_pages, take_entries, write_entries
from keepset.kernels.page_format import PageFormat
from keepset.kernels.page_layout import FiledLayouts, PagedTokens, PageLayout
from keepset.kernels.paged import append_to_pages, follow_layouts, paged_attention, shift_step
from keepset.kernels.softmax import Softmax
from tests.kernels.quantised import ALL_FORMATS, quantised
from tests.kernels.test_attention import TOLERANCE, attention_of, seeded
from tests.paged.allocator import Row
from tests.tiers import FULL

WIDTH = 12 if FULL else 7
"""Blocks of a request, at most."""
NAN, BF16 = float("nan"), torch.bfloat16


@dataclass
class Case:
    """Requests in the pages of a layer, and their newest tokens.

    Attributes:
        rows: of two layers, of which the second is looked at; those of length 0 only fill up.
        new: tokens of each that are new.
        caches: what no head holds is NaN.
    """

    rows: list[Row]
    new: list[int]
    caches: list[Tensor]
    layout: PageLayout
    bias: Tensor

    @classmethod
    def draw(cls, lengths: list[int], new: list[int], kv_heads: int, size: int, dim: int, dtype: torch.dtype) -> Case:
        """Requests of so many tokens; every other one was compressed or shares pages, its new tokens came since."""
        draw = seeded(sum(lengths) + kv_heads)
        rows = [Row(2, kv_heads, size, WIDTH, r * WIDTH, len(lengths) * WIDTH) for r in range(len(lengths))]
        for r, (row, length, n) in enumerate(zip(rows, lengths, new, strict=True)):
            before, kept = length - n if r % 2 else length, []
            for layer in row.layers:
                for _ in range(before):
                    layer.append()
                kept.append([int(torch.randint(before + 1, (), generator=draw)) for _ in range(kv_heads)])
                kept[-1][-1] = 0
            if r == 1:
                # The first head has as many full pages as a block has in all layers, or all there can be.
                kept = [[min(size * 2 * kv_heads + 1, before), *(n // 2 for n in counts[1:])] for counts in kept]
                row.share(kept, row.layers[0].blocks - 2)
            for index, (layer, counts) in enumerate(zip(row.layers, kept, strict=True)):
                if r % 2 and r > 1:
                    layer.event([head.held[:count] for head, count in zip(layer.heads, counts, strict=True)], 0)
                    row.states[index] = layer.layout
                for _ in range(length - before):
                    layer.append()
        # By token, as FlashAttention has it: strides are whatever they are.
        caches = [
            torch.full((len(rows) * WIDTH, size, kv_heads, 2 * dim), NAN).to(dtype).transpose(1, 2) for _ in range(2)
        ]
        bias = torch.full((2, caches[0].shape[0] * kv_heads * size), NAN)
        for row in rows:
            for number in range(kv_heads):
                for slot, _ in _slots(row, number, size):
                    layer, *address = at(slot, size, kv_heads, len(caches[0]))
                    caches[layer][tuple(address)] = torch.randn(2 * dim, generator=draw).to(dtype)
                    bias[layer, slot % bias.shape[1]] = torch.randn((), generator=draw)
        shared_slots = [slot for row in rows[1:2] for head in range(kv_heads) for slot, _ in _slots(row, head, size)]
        assert len(rows) == 1 or {slot // bias.shape[1] for slot in shared_slots} == {0, 1}
        state = [torch.tensor([[state[part] for state in row.states] for row in rows]) for part in range(4)]
        return cls(rows, new, caches, PageLayout(*(part[:, 1:] for part in state)), bias)

    def tokens(self, listed: bool) -> PagedTokens:
        """The new ones: of requests with one each, or as a list, in which what comes first comes last."""
        table = torch.tensor([row.block_table() for row in self.rows], dtype=torch.int32)
        lengths = torch.tensor([row.length for row in self.rows], dtype=torch.int32)
        if not listed:
            return PagedTokens(table, lengths, int(lengths.max()))
        new = enumerate(zip(self.rows, self.new, strict=True))
        several = [(r, row.length - n + i + 1) for r, (row, n) in new for i in range(n)]
        listed_indices = [index for index in range(len(several)) if index % 5 != 2][::-1]
        listed_rows = torch.tensor([several[index] for index in listed_indices], dtype=torch.int32).T.contiguous()
        return PagedTokens(table, listed_rows[1], int(lengths.max()), torch.tensor(listed_indices), listed_rows[0])

    def held(self, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """A head's entries in the second layer, in order, their numbers, and the biases of those that were kept."""
        (blocks, kv_heads, size, width), kept = self.caches[0].shape, self.rows[row].states[1][0][head]
        slots = _slots(self.rows[row], head, size)
        numbers, biases = torch.zeros(len(slots), width, dtype=torch.float64), torch.zeros(len(slots))
        for i, (slot, _) in enumerate(slots):
            layer, *address = at(slot, size, kv_heads, blocks)
            numbers[i] = self.caches[layer][tuple(address)]
            if i < kept:
                biases[i] = self.bias[layer, slot % self.bias.shape[1]]
        return torch.tensor([entry for _, entry in slots]), numbers, biases


def at(slot: int, size: int, kv_heads: int, blocks: int) -> tuple[int, int, int, int]:
    """Of a slot of the second layer, whose numbers go on in the first: layer, block, head and offset."""
    page = slot // size
    return (1 + page // kv_heads // blocks) % 2, page // kv_heads % blocks, page % kv_heads, slot % size


def _slots(row: Row, head: int, size: int) -> list[tuple[int, int]]:
    """Slots of a head's entries, and these, in order."""
    pages, head_entries = row.subpages(1, head), row.layers[1].heads[head].held
    return [(pages[i // size] * size + i % size, entry) for i, entry in enumerate(head_entries)]


def numbered(tokens: PagedTokens) -> list[tuple[int, int, int]]:
    """Each token's place in the step, its row, and the length of its request with it."""
    whole = torch.arange(len(tokens.lengths))
    token_indices, rows = (whole if part is None else part for part in (tokens.places, tokens.rows))
    return list(zip(token_indices.tolist(), rows.tolist(), tokens.lengths.tolist(), strict=True))


def expected(
    case: Case, queries: Tensor, tokens: PagedTokens, softmax: Softmax, biased: bool, latent: int | None = None
) -> Tensor:
    """Entry by entry; of latents the value is a part of the key."""
    output = torch.zeros(*queries.shape[:2], latent or queries.shape[2], dtype=torch.float64)
    _, kv_heads, _, width = case.caches[0].shape
    group = queries.shape[1] // kv_heads
    keys, values = (slice(width // 2), slice(width // 2, None)) if latent is None else (slice(None), slice(latent))
    for token_index, row, length in numbered(tokens):
        for head in range(kv_heads) if length else ():
            entries, numbers, biases = case.held(row, head)
            visible = entries < length
            numbers, biases = numbers[visible], biases[visible] * biased
            for query in range(head * group, (head + 1) * group):
                products = numbers[:, keys] @ queries[token_index, query].double() * softmax.scaling
                output[token_index, query] = attention_of(products, softmax, query, biases) @ numbers[:, values]
    return output


def stored_as(
    case: Case, kind: str, scales: tuple[float, float] | None, dtype: torch.dtype, draw: torch.Generator
) -> tuple[list[Tensor], PageFormat]:
    """Caches of other entries in a quantised format, and the format; the case holds what they stand for."""
    stored, case.caches, how = quantised(case.caches, kind, scales, torch.float64, draw)
    return stored, replace(how, dtype=dtype)


def new_places(case: Case, tokens: PagedTokens) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
    """For each new token and KV head its place in the step, the head, and block, head and offset of it."""
    blocks, kv_heads, size, _ = case.caches[0].shape
    for token_index, row, length in numbered(tokens):
        for head in range(kv_heads) if length else ():
            ((slot, _),) = [pair for pair in _slots(case.rows[row], head, size) if pair[1] == length - 1]
            yield token_index, head, at(slot, size, kv_heads, blocks)[1:]


SHAPES = [
    # kv heads, group, block size, head size, dtype
    pytest.param((2, 3, 16, 80, torch.float32), id="odd"),
    pytest.param((8, 1, 16, 64, torch.bfloat16), id="many", marks=pytest.mark.full),
    pytest.param((1, 8, 32, 128, torch.bfloat16), id="one", marks=pytest.mark.full),
    pytest.param((3, 8, 32, 64, torch.float32), id="three", marks=pytest.mark.full),
]
Shape = tuple[int, int, int, int, torch.dtype]
LENGTHS = [190, 150, 1, 2, 0, 65] if FULL else [108, 100, 1, 2, 0, 35]


def softmax_of(shape: Shape, capped: bool) -> Softmax:
    """One whose caps and sinks change much, or one with neither."""
    sinks = torch.randn(shape[0] * shape[1], generator=seeded(7)) * 3
    return Softmax(0.2, 1.5, sinks) if capped else Softmax(0.2)


@pytest.mark.few
@pytest.mark.spread
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(
    ("listed", "biased"),
    [(True, True), *(pytest.param(*each, marks=pytest.mark.full) for each in [(False, False), (False, True)])],
)
def test_attention_is_that_of_every_entry(
    implementation: str, shape: Shape, listed: bool, biased: bool, capped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "triton":
        from keepset.kernels.triton import paged

        monkeypatch.setattr(paged, "LEAST_PART", 64)  # so that heads are cut
    check_attention(shape, listed, biased, softmax_of(shape, capped))


def check_attention(
    shape: Shape, listed: bool, biased: bool, softmax: Softmax, stored: tuple[str, Any] | None = None
) -> None:
    """Attention of decoded tokens, or of some tokens of a step, which leaves the output of the others as it is."""
    (kv_heads, group, size, dim, dtype), new = shape, [1, 18 if stored else 3, 1, 1, 0, 2]
    new = new if listed else [min(length, 1) for length in LENGTHS]
    case = Case.draw(LENGTHS, new, kv_heads, size, dim, torch.float32 if stored else dtype)
    caches, how = stored_as(case, *stored, dtype, seeded(2)) if stored else (case.caches, None)
    tokens, count = case.tokens(listed), sum(new) if listed else len(LENGTHS)
    # As a part of what a projection makes of all.
    queries = torch.randn(count, kv_heads * group + 2, dim, generator=seeded(1)).to(dtype)[:, : kv_heads * group]
    output = torch.full((count, kv_heads * group, dim), 7.0, dtype=dtype)
    paged_attention(queries, caches, 1, tokens, case.layout, softmax, output, case.bias if biased else None, how)
    right = expected(case, queries, tokens, softmax, biased)
    left_alone = sorted(set(range(count)) - {token_index for token_index, _, _ in numbered(tokens)})
    assert bool(left_alone) is listed
    right[left_alone] = 7.0
    torch.testing.assert_close(output.double(), right, **TOLERANCE[dtype])


@pytest.mark.few
@pytest.mark.parametrize(("group", "dtype"), [(3, torch.float32), (20, torch.bfloat16)])
def test_attention_over_latents_is_that_of_every_entry(
    implementation: str, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where heads are many, in blocks of them."""
    if implementation == "triton":
        from keepset.kernels.triton import paged

        monkeypatch.setattr(paged, "LEAST_PART", 64)
        monkeypatch.setattr(paged, "_MOST_NUMBERS", 16)
    case, latent = Case.draw(LENGTHS, [min(length, 1) for length in LENGTHS], 1, 16, 20, dtype), 28
    tokens, softmax = case.tokens(False), softmax_of((1, group, 16, 20, dtype), capped=True)
    queries = torch.randn(len(LENGTHS), group, 40, generator=seeded(1)).to(dtype)
    output = torch.full((len(LENGTHS), group, latent), 7.0, dtype=dtype)
    paged_attention(queries, case.caches, 1, tokens, case.layout, softmax, output, value_dim=latent)
    right = expected(case, queries, tokens, softmax, False, latent)
    torch.testing.assert_close(output.double(), right, **TOLERANCE[dtype])


@pytest.mark.few
@pytest.mark.cross
@pytest.mark.parametrize(("kind", "scales"), ALL_FORMATS)
@pytest.mark.parametrize("shape", [(2, 3, 16, 80, torch.float32), (1, 8, 32, 128, BF16), (3, 1, 16, 64, BF16)])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("biased", [True, False])
def test_attention_over_quantised_pages_is_that_of_what_they_stand_for(
    implementation: str, shape: Shape, kind: str, scales: tuple[float, float] | None, listed: bool, biased: bool
) -> None:
    kv_heads, group, size, dim, dtype = shape
    softmax = softmax_of(shape, capped=biased)
    check_attention((kv_heads, group, size, dim, dtype), listed, biased, softmax, (kind, scales))


@pytest.mark.few
@pytest.mark.cross
@pytest.mark.parametrize(("kind", "scales"), ALL_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_entries_are_quantised_where_they_are_written(
    implementation: str, kind: str, scales: tuple[float, float] | None, dtype: torch.dtype
) -> None:
    """Bit for bit as `PageFormat` does it; numbers are of all sizes, and some are none."""
    kv_heads, size, dim = 3, 16, 20
    case = Case.draw(LENGTHS, [min(length, 1) for length in LENGTHS], kv_heads, size, dim, torch.float32)
    stored, _, how = quantised(case.caches, kind, scales, dtype, seeded(2))
    keys, values = (torch.randn(len(LENGTHS), kv_heads, dim, generator=seeded(seed)) for seed in (3, 4))
    keys *= torch.logspace(-8, 5, kv_heads * len(LENGTHS)).view(-1, kv_heads, 1)
    keys[0, 1, 2], keys[1, 2, 3], keys[5] = math.nan, math.inf, 0.0
    keys[3, 0, :6] = torch.tensor([127.0, 0.5, -0.5, 1.5, 2.5, -2.5])
    keys, values, cache = keys.to(dtype), values.to(dtype), stored[1]
    right = cache.clone()
    rows = torch.cat([part.view(cache.dtype) for part in how.encode_entries(keys, values)], -1)
    tokens = case.tokens(False)
    for token, head, address in new_places(case, tokens):
        right[address] = rows[token, head]
    append_to_pages(keys, values, cache, tokens, case.layout, how)
    assert_same_rows(cache, right, how)


def assert_same_rows(rows: Tensor, expected: Tensor, how: PageFormat) -> None:
    """All bits are the same, but where what is read is NaN."""
    for part, right_part in zip(rows.chunk(2, -1), expected.chunk(2, -1), strict=True):
        scale = how.key_scale
        read, right = how.decode(part, scale), how.decode(right_part, scale)
        assert torch.equal(read.isnan(), right.isnan())
        number = ~right.isnan().any(-1)
        assert number.any() and torch.equal(part[number], right_part[number])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("listed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_new_entries_are_where_an_allocator_puts_them(implementation: str, shape: Shape, listed: bool) -> None:
    (kv_heads, _, size, dim, dtype), new = shape, [1, 18, 1, 1, 0, 2]
    case = Case.draw(LENGTHS, new if listed else [min(n, 1) for n in new], kv_heads, size, dim, dtype)
    tokens, count = case.tokens(listed), sum(new) if listed else len(LENGTHS)
    keys, values = torch.randn(count, 2 * kv_heads, dim, generator=seeded(1)).to(dtype).chunk(2, 1)
    cache = case.caches[1]
    right = cache.clone()
    for token, head, address in new_places(case, tokens):
        right[address] = torch.cat((keys[token, head], values[token, head]))
    append_to_pages(keys, values, cache, tokens, case.layout)
    assert not torch.equal(cache.nan_to_num(), torch.zeros_like(cache))
    assert torch.equal(cache.nan_to_num(9.0), right.nan_to_num(9.0))


def test_of_no_tokens_nothing_is_launched(implementation: str) -> None:
    case = Case.draw([5], [1], 2, 16, 16, torch.float32)
    none, rows = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, 16)
    tokens, before = PagedTokens(case.tokens(False).block_table, none, 5, none, none), case.caches[1].clone()
    paged_attention(rows, case.caches, 1, tokens, case.layout, Softmax(1.0), rows)
    append_to_pages(rows, rows, case.caches[1], tokens, case.layout)
    assert torch.equal(case.caches[1].nan_to_num(), before.nan_to_num())


@pytest.mark.few(4)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_go_and_come(implementation: str, layers: int, size: int, dtype: torch.dtype) -> None:
    draw, blocks, heads, width = seeded(3), 9, 2, 6
    # Each layer's heads lie apart, as some engines have them.
    whole = torch.randn(layers, heads, blocks, size, width, generator=draw).to(dtype).transpose(1, 2)
    caches = list(whole)
    # Numbers go on into the caches that follow, around in a circle.
    subpages = torch.randperm(layers * blocks * heads, generator=draw)[:12].view(2, heads, 3)
    entries = torch.cat([read_pages(caches, index, subpages) for index in range(layers)])
    assert entries.shape == (layers * 2, heads, 3 * size, width)
    for layer, row, head, index in product(range(layers), range(2), range(heads), range(3)):
        further, page = divmod(int(subpages[row, head, index]), blocks * heads)
        page_entries = entries[layer * 2 + row, head, index * size : index * size + size]
        assert torch.equal(page_entries, caches[(layer + further) % layers][page // heads, page % heads])
    expected = whole.clone()
    entry_numbers = torch.randperm(layers * blocks * heads * size, generator=draw)[:50]
    slots, of_layers = entry_numbers // layers, entry_numbers % layers
    new = torch.randn(50, width, generator=draw).to(dtype)
    for number, (layer, slot) in enumerate(zip(of_layers.tolist(), slots.tolist(), strict=True)):
        expected[layer, slot // size // heads, slot // size % heads, slot % size] = new[number]
    through = of_layers * (blocks * heads * size) + slots
    write_entries(caches, *new.chunk(2, -1), through)
    assert torch.equal(whole, expected)
    again = torch.randint(50, (70,), generator=draw)
    assert torch.equal(torch.cat(take_entries(caches, through[again]), -1), new[again])


@pytest.mark.parametrize("size", [16, 32])
def test_tables_are_shifted_by_what_was_dropped(implementation: str, size: int) -> None:
    """Prompts, chunks and decoding rows, at and off the edges of blocks, and rows that fill the step up."""
    # Tokens before and after the step, and entries that were dropped.
    rows = [(0, 40, 0), (600, 1200, 0), (100, 101, 64), (100, 101, 63), (96, 97, 1), (1299, 1300, 1187), (47, 80, 33)]
    rows += [(0, 0, 0), (0, 0, 0)]
    table = torch.randperm(len(rows) * 100, generator=seeded(0)).view(len(rows), 100).int()
    starts = torch.tensor([0, *(after - before for before, after, _ in rows)]).cumsum(0).int()
    tokens = int(starts[-1])
    slots, expected = torch.full((tokens + 3,), -1), torch.full((tokens + 3,), -1)
    for row, (before, after, gone) in enumerate(rows):
        for token, position in zip(range(int(starts[row]), tokens), range(before, after), strict=False):
            shifted = position - gone % size
            slots[token] = int(table[row, position // size]) * size + position % size
            expected[token] = int(table[row, shifted // size]) * size + shifted % size
    left_table, left = torch.zeros(12, 100, dtype=torch.int32), torch.full((12,), 99, dtype=torch.int32)
    addresses = left_table.data_ptr(), left.data_ptr(), slots.data_ptr()
    lengths, dropped = torch.tensor([row[1] for row in rows]).int(), torch.tensor([row[2] for row in rows])
    shift_step(table, lengths, starts, dropped, slots, size, left_table[: len(rows)], left[: len(rows)])
    assert (left_table.data_ptr(), left.data_ptr(), slots.data_ptr()) == addresses
    assert torch.equal(slots, expected)
    assert left.tolist() == [after - gone for _, after, gone in rows] + [99] * 3
    for row, (_, after, gone) in enumerate(rows):
        blocks = -(-(after - gone) // size)
        assert torch.equal(left_table[row, :blocks], table[row, gone // size : gone // size + blocks])


@pytest.mark.few
@pytest.mark.parametrize("taken_back", range(7))
def test_layouts_are_found_again_after_drafts_were_taken_back(implementation: str, taken_back: int) -> None:
    """Of 7 new tokens in three pages of two requests; the other one's were all right."""
    filed, rows = (FiledLayouts.empty(number, 3, 2, torch.device("cpu")) for number in (12, 2))
    for part in filed.layout:
        part.copy_(torch.arange(part.numel()).view(part.shape))
    filed.tokens.fill_(7)
    expected = [part[[5, 9]].clone() for part in filed.layout]
    table, lost = torch.tensor([[4, 5, 6, 7], [8, 9, 10, 11]]), torch.zeros(1, dtype=torch.int32)
    left = 14 - taken_back
    for before, after, pages in ((7, 7), (14, 14), [7, 11]), ((left, 14), (left + 1, 15), [4 + left // 4, 11]):
        step = torch.tensor([before, after, (1, 1)])
        assert follow_layouts(filed, table, *step, lost, 4, rows.layout, 6).tolist() == pages
        assert all(torch.equal(part, right) for part, right in zip(rows.layout, expected, strict=True))
    assert not lost
    follow_layouts(filed, table, *torch.tensor([(7, 7), (8, 8), (1, 1)]), lost, 4, rows.layout, 6)
    assert lost
