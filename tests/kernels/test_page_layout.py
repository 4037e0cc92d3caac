"""Page tables in closed form, against allocators that hand page after page out."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from keepset.kernels.page_layout import PageGroup, PageLayout, blocks_needed, entries, own_block, slots, tables
from tests.paged.allocator import POISON, Allocator, Row
from tests.tiers import examples

KV_HEADS, SIZES = st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 4, 5])


def tables_of(rows: list[Row], block_size: int, spare: int) -> tuple[PageLayout, torch.Tensor, torch.Tensor]:
    """The layout of a batch, the entries of its heads and their tables."""
    layout = PageLayout(*(torch.tensor([[state[part] for state in row.states] for row in rows]) for part in range(4)))
    counts = entries(layout, torch.tensor([row.length for row in rows]))
    block_table = torch.tensor([row.block_table() for row in rows], dtype=torch.int32)
    layers = len(rows[0].layers)
    group = PageGroup(range(layers), layers, rows[0].blocks)
    pages = -(-int(counts.max()) // block_size) + spare
    return layout, counts, tables(layout, counts, block_table, block_size, pages, group)


def check(rows: list[Row], block_size: int, spare: int) -> None:
    """Tables and counts of the whole batch are those of the allocators."""
    _, counts, found = tables_of(rows, block_size, spare)
    assert counts.tolist() == [[[len(head.held) for head in layer.heads] for layer in row.layers] for row in rows]
    assert found.dtype == torch.int32
    for r, row in enumerate(rows):
        for index, allocator in enumerate(row.layers):
            taken = [row.subpages(index, head) for head in range(row.kv_heads)]
            assert found[r, index].tolist() == [
                head_pages + [0] * (found.shape[-1] - len(head_pages)) for head_pages in taken
            ]
            blocks = [page[0] for head in allocator.heads for page in head.pages[head.shared :]]
            assert all(allocator.first <= block < allocator.blocks for block in blocks)
        every = [page for layer in row.layers for head in layer.heads for page in head.pages]
        assert len(set(every)) == len(every)


def append(rows: list[Row], tokens: list[int], block_size: int) -> None:
    """So many new tokens for each request in one step: their slots are where the allocators put them."""
    batch = [(r, rows[r].length + i) for r, n in enumerate(tokens) for i in range(n)]
    appended = [rows[r].append() for r, _ in batch]
    expected = [[slot for new in appended for slot in new[index]] for index in range(len(rows[0].layers))]
    row_and_position = torch.tensor(batch, dtype=torch.int64).reshape(-1, 2)
    layout, _, pages = tables_of(rows, block_size, 0)
    found = slots(layout, pages, row_and_position[:, 1], row_and_position[:, 0], block_size)
    assert found.dtype == torch.int64 and found.tolist() == expected


def compress(row: Row, data: st.DataObject, block_size: int) -> None:
    """An event in every layer: some entries of every head survive, at the end of the blocks that they need."""
    awkward = st.sampled_from([0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size])
    for index, allocator in enumerate(row.layers):
        most = [len(head.held) for head in allocator.heads]
        counts = [min(n, data.draw(awkward | st.integers(0, n), label="count")) for n in most]
        latest = allocator.blocks - int(blocks_needed(torch.tensor(counts), torch.tensor(allocator.length), block_size))
        assert latest >= allocator.first  # whatever is kept, it fits where it came from
        first = max(allocator.first, latest - data.draw(st.integers(0, 2), label="slack"))
        stride = data.draw(st.integers(1, 3), label="stride")
        kept = [sorted(head.held[::-stride][:n]) for head, n in zip(allocator.heads, counts, strict=True)]
        allocator.event(kept, first)
        row.states[index] = allocator.layout


@examples(150)
@given(st.data(), KV_HEADS, SIZES, st.integers(1, 2), st.integers(1, 3), st.integers(1, 5))
def test_tables_and_slots_are_those_of_an_allocator(
    data: st.DataObject, kv_heads: int, block_size: int, layers: int, requests: int, steps: int
) -> None:
    """Without an event they are the engine's own: what an allocator hands out block by block."""
    width = 30
    rows = [Row(layers, kv_heads, block_size, width, r * width) for r in range(requests)]
    for _ in range(steps):
        tokens = [data.draw(st.integers(0, 3 * block_size + 1), label="tokens") for _ in rows]
        before = [[[list(head.pages) for head in layer.heads] for layer in row.layers] for row in rows]
        append(rows, tokens, block_size)
        check(rows, block_size, spare=data.draw(st.integers(0, 2), label="spare"))
        for row, old in zip(rows, before, strict=True):  # nothing moves between events
            for layer, old_layer in zip(row.layers, old, strict=True):
                for head, pages in zip(layer.heads, old_layer, strict=True):
                    assert head.pages[: len(pages)] == pages
        for row in rows:
            if row.length and data.draw(st.booleans(), label="event"):
                compress(row, data, block_size)
        check(rows, block_size, spare=0)


@examples(150)
@given(st.data(), st.sampled_from([1, 3, 8]), st.sampled_from([1, 2, 4, 7]), st.integers(1, 40))
def test_blocks_needed_is_the_least_that_ever_suffices(
    data: st.DataObject, kv_heads: int, block_size: int, length: int
) -> None:
    counts = data.draw(st.lists(st.integers(0, length), min_size=kv_heads, max_size=kv_heads))
    allocator = Allocator(kv_heads, block_size)
    for _ in range(length):
        allocator.append()
    at_event = allocator.blocks
    allocator.event([list(range(n)) for n in counts], 0)
    most = 0
    for _ in range(3 * block_size + 1):  # blocks that came since are the request's own
        used = max((block + 1 for head in allocator.heads for block, *_ in head.pages), default=0)
        most = max(most, used - (allocator.blocks - at_event))
        allocator.append()
    found = blocks_needed(torch.tensor([[counts], [counts]]), torch.tensor([[length], [length]]), block_size)
    assert found.tolist() == [[most], [most]] and most <= at_event


@examples(150)
@given(st.data(), KV_HEADS, SIZES, st.integers(1, 3))
def test_after_shared_pages_a_request_writes_to_its_own(
    data: st.DataObject, kv_heads: int, block_size: int, layers: int
) -> None:
    """Whatever each head holds of a context, no page before the first own block is written to, and none is missing.

    What is shared is in as few blocks as hold the pages of all layers together.
    """
    length = data.draw(st.integers(1, 6 * block_size), label="tokens")
    awkward = st.sampled_from([0, 1, block_size, length]).filter(lambda count: count <= length)
    layer_counts = st.lists(awkward | st.integers(0, length), min_size=kv_heads, max_size=kv_heads)
    counts = data.draw(st.lists(layer_counts, min_size=layers, max_size=layers), label="counts")
    first_own = own_block(torch.tensor(counts), length, block_size)
    full = sum(max(-(-count // block_size) - 1, 0) for layer in counts for count in layer)
    assume(first_own * layers * kv_heads >= full)
    row = Row(layers, kv_heads, block_size, 17, 5, 40)  # as many blocks as all the tokens fill
    for layer in row.layers:
        layer.length = length
    row.share(counts, first_own)
    assert (
        first_own <= (length - 1) // block_size
    )  # the newest token's page, under which state is filed, is one of them
    heads = [head for layer in row.layers for head in layer.heads]
    before = [head.pages[: head.shared] for head in heads]
    assert len({block for pages in before for block, *_ in pages}) == -(-full // (layers * kv_heads))
    for tokens in (0, 1, *[data.draw(st.integers(1, 3), label="new") for _ in range(3 * block_size)]):
        append([row], [tokens], block_size)
        check([row], block_size, 0)
    for head, shared in zip(heads, before, strict=True):
        assert head.pages[: len(shared)] == shared
        assert all(page[0] < first_own for page in shared) and all(
            page[0] >= first_own for page in head.pages[len(shared) :]
        )


def test_empty_batches() -> None:
    """No rows, no tokens, no pages: shapes without elements, and no look-up."""
    none, single = (
        PageLayout(*(torch.zeros(rows, *shape, dtype=torch.long) for shape in ((2, 3), (2,), (2,), (2,))))
        for rows in (0, 1)
    )
    nothing, table = torch.zeros(0, dtype=torch.long), torch.full((1, 4), POISON, dtype=torch.int32)
    assert tables(none, entries(none, nothing), torch.zeros(0, 4, dtype=torch.int32), 4, 5).shape == (0, 2, 3, 5)
    counts = entries(single, torch.tensor([0]))
    without_pages = tables(single, counts, table, 4, 0)
    assert without_pages.shape == (1, 2, 3, 0)
    assert slots(single, without_pages, nothing, nothing, 4).shape == (2, 0)
    assert tables(single, counts, table, 4, 2).count_nonzero() == 0
