"""Attention over an engine's pages, and new entries in them, against allocators that deal page after page out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from keepset.kernels.page_layout import PageLayout
from keepset.kernels.paged import append_to_pages, paged_attention
from keepset.kernels.paged_arguments import PagedTokens
from tests.paged.allocator import Row

TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-5),
    # Weights and outputs are rounded to bfloat16's 8 bits: of outputs below 4 that takes a few 2**-7.
    torch.bfloat16: dict(rtol=0.02, atol=0.03),
}
WIDTH = 12
"""Blocks of a request, at most."""
NAN = float("nan")


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
        draw = torch.Generator().manual_seed(sum(lengths) + kv_heads)
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
                    layer, *place = at(slot, size, kv_heads, len(caches[0]))
                    caches[layer][tuple(place)] = torch.randn(2 * dim, generator=draw).to(dtype)
                    bias[layer, slot % bias.shape[1]] = torch.randn((), generator=draw)
        held = [slot for row in rows[1:2] for head in range(kv_heads) for slot, _ in _slots(row, head, size)]
        assert len(rows) == 1 or {slot // bias.shape[1] for slot in held} == {0, 1}
        state = [torch.tensor([[state[part] for state in row.states] for row in rows]) for part in range(4)]
        return cls(rows, new, caches, PageLayout(*(part[:, 1:] for part in state)), bias)

    def tokens(self, listed: bool) -> PagedTokens:
        """The new ones: of requests with one each, or as a list, in which what comes first comes last."""
        table = torch.tensor([row.block_table() for row in self.rows], dtype=torch.int32)
        lengths = torch.tensor([row.length for row in self.rows], dtype=torch.int32)
        if not listed:
            return PagedTokens(table, lengths, int(lengths.max()))
        several = [(r, row.length - n + i + 1) for r, row in enumerate(self.rows) for i, n in _numbered(self.new[r])]
        places = [place for place in range(len(several)) if place % 5 != 2][::-1]
        some = torch.tensor([several[place] for place in places], dtype=torch.int32).T.contiguous()
        return PagedTokens(table, some[1], int(lengths.max()), torch.tensor(places), some[0])


def _numbered(n: int) -> list[tuple[int, int]]:
    return [(i, n) for i in range(n)]


def at(slot: int, size: int, kv_heads: int, blocks: int) -> tuple[int, int, int, int]:
    """Of a slot of the second layer, whose numbers go on in the first: layer, block, head and offset."""
    page = slot // size
    return (1 + page // kv_heads // blocks) % 2, page // kv_heads % blocks, page % kv_heads, slot % size


def _slots(row: Row, head: int, size: int) -> list[tuple[int, int]]:
    """Slots of a head's entries, and these, in order."""
    pages, held = row.subpages(1, head), row.layers[1].heads[head].held
    return [(pages[i // size] * size + i % size, entry) for i, entry in enumerate(held)]


def expected(case: Case, queries: Tensor, tokens: PagedTokens, scaling: float, biased: bool) -> Tensor:
    """Entry by entry."""
    output = torch.zeros(queries.shape, dtype=torch.float64)
    blocks, kv_heads, size, width = case.caches[0].shape
    group, half = queries.shape[1] // kv_heads, width // 2
    for index, length in enumerate(tokens.lengths.tolist()):
        place = index if tokens.places is None else int(tokens.places[index])
        row = index if tokens.rows is None else int(tokens.rows[index])
        for head in range(kv_heads) if length else ():
            kept, entries, added = case.rows[row].states[1][0][head], [], []
            for i, (slot, entry) in enumerate(_slots(case.rows[row], head, size)):
                if entry >= length:
                    continue
                layer, *there = at(slot, size, kv_heads, blocks)
                entries.append(case.caches[layer][tuple(there)].double())
                added.append(float(case.bias[layer, slot % case.bias.shape[1]]) if biased and i < kept else 0.0)
            numbers, biases = torch.stack(entries), torch.tensor(added, dtype=torch.float64)
            for query in range(head * group, (head + 1) * group):
                logits = numbers[:, :half] @ queries[place, query].double() * scaling + biases
                output[place, query] = logits.softmax(0) @ numbers[:, half:]
    return output


SHAPES = [
    # kv heads, group, block size, head size, dtype
    pytest.param(2, 3, 16, 80, torch.float32, id="odd"),
    pytest.param(8, 1, 16, 64, torch.bfloat16, id="many", marks=pytest.mark.full),
    pytest.param(1, 8, 32, 128, torch.bfloat16, id="one", marks=pytest.mark.full),
    pytest.param(3, 8, 32, 64, torch.float32, id="three", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kv_heads", "group", "size", "dim", "dtype"), SHAPES)
@pytest.mark.parametrize(
    ("listed", "biased"),
    [(True, True), *(pytest.param(*each, marks=pytest.mark.full) for each in [(False, False), (False, True)])],
)
def test_attention_is_that_of_every_entry(
    implementation: str,
    kv_heads: int,
    group: int,
    size: int,
    dim: int,
    dtype: torch.dtype,
    listed: bool,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if implementation == "triton":
        from keepset.kernels.triton import paged

        monkeypatch.setattr(paged, "LEAST_PART", 64)  # so that heads are cut
    lengths, new = [190, 150, 1, 2, 0, 65], [1, 3, 1, 1, 0, 2]
    case = Case.draw(lengths, new if listed else [min(n, 1) for n in new], kv_heads, size, dim, dtype)
    tokens, count = case.tokens(listed), sum(new) if listed else len(lengths)
    draw = torch.Generator().manual_seed(1)
    # As a part of what a projection makes of all.
    queries = torch.randn(count, kv_heads * group + 2, dim, generator=draw).to(dtype)[:, : kv_heads * group]
    output = torch.full((count, kv_heads * group, dim), 7.0, dtype=dtype)
    paged_attention(queries, case.caches, 1, tokens, case.layout, 0.2, output, case.bias if biased else None)
    right = expected(case, queries, tokens, 0.2, biased)
    if listed:  # the others are left alone
        assert tokens.places is not None
        others = [place for place in range(count) if place not in tokens.places.tolist()]
        assert others
        right[others] = 7.0
    torch.testing.assert_close(output.double(), right, **TOLERANCE[dtype])


@pytest.mark.parametrize(("kv_heads", "group", "size", "dim", "dtype"), SHAPES)
@pytest.mark.parametrize("listed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_new_entries_are_where_an_allocator_puts_them(
    implementation: str, kv_heads: int, group: int, size: int, dim: int, dtype: torch.dtype, listed: bool
) -> None:
    lengths, new = [190, 150, 1, 2, 0, 65], [1, 18, 1, 1, 0, 2]
    case = Case.draw(lengths, new if listed else [min(n, 1) for n in new], kv_heads, size, dim, dtype)
    tokens, count = case.tokens(listed), sum(new) if listed else len(lengths)
    draw = torch.Generator().manual_seed(1)
    both = torch.randn(count, 2 * kv_heads, dim, generator=draw).to(dtype)
    keys, values = both.chunk(2, 1)
    cache = case.caches[1]
    right = cache.clone()
    for index, length in enumerate(tokens.lengths.tolist()):
        place = index if tokens.places is None else int(tokens.places[index])
        row = index if tokens.rows is None else int(tokens.rows[index])
        for head in range(kv_heads) if length else ():
            ((slot, _),) = [pair for pair in _slots(case.rows[row], head, size) if pair[1] == length - 1]
            entry = torch.cat((keys[place, head], values[place, head]))
            right[at(slot, size, kv_heads, len(cache))[1:]] = entry
    append_to_pages(keys, values, cache, tokens, case.layout)
    assert not torch.equal(cache.nan_to_num(), torch.zeros_like(cache))
    assert torch.equal(cache.nan_to_num(9.0), right.nan_to_num(9.0))


def test_of_no_tokens_nothing_is_launched(implementation: str) -> None:
    case = Case.draw([5], [1], 2, 16, 16, torch.float32)
    none = torch.zeros(0, dtype=torch.int32)
    tokens, before = PagedTokens(case.tokens(False).block_table, none, 5, none, none), case.caches[1].clone()
    rows = torch.zeros(0, 2, 16)
    paged_attention(rows, case.caches, 1, tokens, case.layout, 1.0, rows)
    append_to_pages(rows, rows, case.caches[1], tokens, case.layout)
    assert torch.equal(case.caches[1].nan_to_num(), before.nan_to_num())
