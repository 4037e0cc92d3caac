"""Tables from step to step, against allocators that are told the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Recipe
from keepset.kernels import page_layout
from keepset.kernels.page_layout import PagedTokens, PageGroup, PageLayout
from keepset.paged.engine import EngineSize
from keepset.paged.eviction import EvictionSchedule
from keepset.paged.layout_table import EmptiedBlocks
from keepset.paged.ragged_heads import PerHeadSequences, RaggedHeadTables
from keepset.paged.step import RaggedStep
from tests.paged.allocator import POISON, Row
from tests.tiers import examples

WIDTH = 16


def tables_of(layers: int, kv_heads: int, block_size: int, blocks: int, requests: int) -> RaggedHeadTables:
    recipe = Recipe.parse("adakv(knorm, keep=8)")
    schedule = EvictionSchedule(recipe, 0, tuple(range(layers)), kv_heads, 4, block_size)
    size = EngineSize(requests, blocks)
    return RaggedHeadTables(schedule, PageGroup(range(layers), layers, blocks), size, EmptiedBlocks())


class Batch:
    """Requests that run in any order, step by step."""

    def __init__(self, requests: int, layers: int, kv_heads: int, block_size: int) -> None:
        self.size = block_size
        blocks = requests * WIDTH
        self.rows = [Row(layers, kv_heads, block_size, WIDTH, r * WIDTH, blocks) for r in range(requests)]
        self.compressed = [False] * requests
        self.tables = tables_of(layers, kv_heads, block_size, blocks, requests)

    def step(self, order: list[int], tokens: list[int], event: bool = False) -> RaggedStep | None:
        """So many new tokens for these requests; the tables and slots that they get are checked."""
        rows = [self.rows[r] for r in order]
        before = [row.length for row in rows]
        appended = [row.append() for row, n in zip(rows, tokens, strict=True) for _ in range(n)]
        expected = [[slot for new in appended for slot in new[index]] for index in range(len(rows[0].layers))]
        table = self.block_table(order)
        after = [row.length for row in rows]
        # Place in the step, row and length of each token.
        each = [
            (r, length - n + i + 1) for r, (length, n) in enumerate(zip(after, tokens, strict=True)) for i in range(n)
        ]
        where = [(at, *one) for at, one in enumerate(each)]
        places, of, lengths = torch.tensor(where).T.contiguous().unbind()
        seen = PagedTokens(table, lengths, max(after), places, of)
        if all(n == 1 for n in tokens):
            seen = PagedTokens(table, lengths, max(after))
        must = [self.compressed[r] for r in order]
        tokens_of_layouts = seen if any(must) else None
        lengths = torch.tensor(before), torch.tensor(after), torch.tensor(must).int()
        step = self.tables.follow(table, *lengths, tokens_of_layouts, False, event, event)
        if step is None:
            assert not event and not any(must)
            return None
        held = [[[len(head.held) for head in layer.heads] for layer in row.layers] for row in rows]
        pages = self.tables.pages_of(torch.arange(len(order)), table, max(after), None)
        before_layer = [index * len(self.rows) * WIDTH * rows[0].kv_heads for index in range(len(rows[0].layers))]
        for index, others in enumerate(before_layer):
            occupied = pages.occupied(range(index, index + 1))
            assert occupied.entries.tolist() == [of_layers[index] for of_layers in held]
            for r, row in enumerate(rows):
                for head in range(row.kv_heads):
                    own = row.subpages(index, head)
                    assert (occupied.subpages[r, head, : len(own)] - others).tolist() == own
        assert step.lengths.tolist() == after
        if step.tokens is None:
            assert not any(must)
            return step
        per_head = PerHeadSequences(step)
        for index, others in enumerate(before_layer):
            own = per_head.batch(index)
            assert all(part.is_contiguous() for part in own)  # kernels walk them by address
            assert (own.slot_mapping - others * self.size).tolist() == expected[index]
            for heads, (_, r, length) in zip(own.block_table.unflatten(0, (len(where), -1)), where, strict=True):
                for head, found in enumerate(heads):
                    need = sum(entry < length for entry in rows[r].layers[index].heads[head].held)
                    pages = rows[r].subpages(index, head)[: -(-need // self.size)]
                    assert (found[: len(pages)] - others).tolist() == pages
        # Pages that nobody needs yet may be told, but nothing may be looked up where there is no block.
        assert step.tables is not None and int(step.tables.min()) >= 0
        return step

    def event(self, order: list[int], keep: float) -> None:
        """All of these are compressed, right after a step: head `h` keeps its share of the newest entries."""
        table = self.block_table(order)
        for index in range(len(self.rows[0].layers)):
            left = []
            for r in order:
                allocator = self.rows[r].layers[index]
                shares = [int(keep * len(head.held) / (h + 1)) for h, head in enumerate(allocator.heads)]
                kept = [head.held[-max(1, n) :] for head, n in zip(allocator.heads, shares, strict=True)]
                counts = torch.tensor([len(entries) for entries in kept])
                needed = int(page_layout.blocks_needed(counts, torch.tensor(allocator.length), self.size))
                allocator.event(kept, allocator.blocks - needed)
                left.append(counts)
            pages = self.tables.pages_of(torch.arange(len(order)), table, WIDTH * self.size, None)
            assignment = pages.assign(range(index, index + 1), torch.stack(left))
            assert assignment.fits is not None and all(assignment.fits.host_values)
            assignment.take(max(int(counts.max()) for counts in left))
        for r in order:
            self.compressed[r] = True

    def block_table(self, order: list[int]) -> torch.Tensor:
        return torch.tensor([self.rows[r].block_table() for r in order], dtype=torch.int32)


@examples(60)
@given(st.data(), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 4, 5]), st.integers(1, 3))
def test_every_step_has_the_pages_of_an_allocator(
    data: st.DataObject, kv_heads: int, block_size: int, requests: int
) -> None:
    batch = Batch(requests, 2, kv_heads, block_size)
    order = list(range(requests))
    most = WIDTH * block_size
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        if data.draw(st.integers(0, 3), label="others") == 0:
            order = data.draw(st.permutations(range(requests)).map(lambda all: all[: max(1, len(all) - 1)]))
        tokens = [1] * len(order)
        if data.draw(st.integers(0, 4), label="many") == 0:
            tokens = [data.draw(st.integers(1, block_size + 2), label="tokens") for _ in order]
        if any(batch.rows[r].length + n > most for r, n in zip(order, tokens, strict=True)):
            break
        event = data.draw(st.integers(0, 4), label="event") == 0
        batch.step(order, tokens, event)
        if event:
            batch.event(order, data.draw(st.sampled_from([0.1, 0.5, 1.0]), label="keep"))


def compressed(requests: int, layers: int, kv_heads: int, block_size: int) -> Batch:
    """Requests of ten tokens that have just been compressed."""
    batch, order = Batch(requests, layers, kv_heads, block_size), list(range(requests))
    batch.step(order, [9] * requests)
    batch.step(order, [1] * requests, event=True)
    batch.event(order, 0.5)
    return batch


def test_what_stays_as_it_is_is_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = page_layout.tables

    def tables(layout: PageLayout, *args: Any) -> torch.Tensor:
        if layout.counts.shape[1] > 1:  # of all layers, and not of one's event
            made.append(batch.rows[0].length)
        return original(layout, *args)

    monkeypatch.setattr("keepset.paged.ragged_heads.page_layout.tables", tables)
    batch = compressed(2, 2, 3, 4)
    made.clear()
    for _ in range(10):
        batch.step([0, 1], [1, 1])
    # With the first token after the event, and with the first of each block.
    assert made == [11, 13, 17]
    for order in ([0, 1], [1, 0], [0, 1], [0], [0, 1]):
        batch.step(order, [1] * len(order))
    assert made == [11, 13, 17, 21, 22, 23, 24, 25]


def test_several_tokens_of_a_single_head_follow_one_another_in_memory() -> None:
    """Each of several ranks may have one head. The step checks addresses, by which kernels walk."""
    batch = compressed(2, 3, 1, 4)
    assert batch.step([0, 1], [3, 1]) is not None


def test_a_page_that_another_request_took_over_is_not_mistaken_for_its_own() -> None:
    """The newest page of one that has ended, at a block's end, becomes another's first after as many cached tokens."""
    tables = tables_of(1, 1, 4, 20, 1)
    one = torch.ones(1, dtype=torch.long)

    def advance(blocks: list[int], before: int, compressed: bool, event: bool = False) -> RaggedStep | None:
        table = torch.tensor([blocks], dtype=torch.int32)
        tokens = PagedTokens(table, one * (before + 1), before + 1) if compressed else None
        return tables.follow(table, one * before, one * (before + 1), one * compressed, tokens, False, event, event)

    advance([3, 7], 6, False)
    advance([3, 7], 7, False, event=True)
    pages = tables.pages_of(torch.tensor([0]), torch.tensor([[3, 7]], dtype=torch.int32), 8, None)
    pages.assign(range(1), torch.tensor([[3]])).take(3)
    for before in (8, 9, 10, 11):
        assert advance([POISON, 7, 9], before, True) is not None
    assert advance([3, 4, 5, 9], 12, False) is None


def test_a_request_that_is_not_where_it_was_is_refused() -> None:
    batch = compressed(1, 1, 2, 8)
    batch.step([0], [1])
    batch.step([0], [1])
    batch.rows[0].layers[0].length -= 1
    with pytest.raises(RuntimeError, match="lost the page tables"):
        batch.step([0], [1])
