"""`EntryStore` against lists of entries, in 32 bits and in few, whatever happens to it and to its forks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from keepset.contexts.columns import dequantized
from keepset.core.keep_set import HeadCounts
from keepset.hf.store import EntryStore
from keepset.kernels.attention import ragged_attention
from keepset.kernels.packed import HeadTable
from keepset.kernels.softmax import Softmax
from tests.kernels import few_bits
from tests.kernels.few_bits import in_steps, rounded

matrix = cache(few_bits.matrix)


@dataclass(frozen=True)
class Entry:
    """A key and a value, the position, what a method noted, and whether what 4 bits have lost is still known."""

    rows: tuple[Tensor, Tensor]
    position: int
    credit: float
    is_new: bool = True

    def read(self, part: int, bits: int) -> Tensor:
        if bits == 32:
            return self.rows[part]
        mixing = matrix(len(self.rows[part]))
        mixed = self.rows[part].double() @ mixing.T
        if bits == 8:
            return in_steps(mixed) @ mixing
        first = rounded(mixed)
        return (first + (rounded(mixed - first) if self.is_new else 0.0)) @ mixing


Heads = list[list[Entry]]
"""The entries of every head, request after request."""


@dataclass
class Pair:
    store: EntryStore
    heads: Heads


class Walk:
    """Everything is done to stores and to lists; afterwards they must agree."""

    def __init__(self, seed: int, bits: int) -> None:
        self.draw, self.numbers, self.bits = random.Random(seed), torch.Generator().manual_seed(seed), bits
        self.kv_heads, batch, entries = self.draw.randint(1, 3), self.draw.randint(1, 3), self.draw.randint(0, 9)
        self.sizes = self.draw.choice([(6, 4), (8, 8), (10, 6), *[(1, 1), (3, 5)] * (bits == 32)])
        heads = [
            [self.entry(at, credit=self.draw.random()) for at in range(entries)] for _ in range(batch * self.kv_heads)
        ]
        columns = self.columns(heads)
        if self.draw.random() < 0.5:  # laid out token by token, as models make them
            columns = {name: column.transpose(1, 2).contiguous().transpose(1, 2) for name, column in columns.items()}
        self.pairs = [self.kept(columns, heads, EntryStore.pack)]
        if bits != 32:
            self.pairs[0].store.quantize(bits)

    def run(self, steps: int) -> None:
        operations = [self.append, self.append, self.keep, self.reorder, self.crop, self.fork, self.copy, self.trim]
        operations.append(self.leave_out)
        for _ in range(steps):
            index = self.draw.randrange(len(self.pairs))
            pair = self.draw.choice(operations)(self.pairs[index])
            if pair is None or self.draw.random() < 0.5 or len(self.pairs) == 3:
                self.pairs[index] = pair or self.pairs[index]
            else:
                self.pairs.append(pair)
            for pair_to_check in self.pairs:
                self.check(pair_to_check)

    # --- what happens

    def append(self, pair: Pair) -> None:
        """New tokens for all heads of every request, except where there is padding."""
        batch, n = len(pair.heads) // self.kv_heads, self.draw.choice([1, 1, 3, self.draw.randint(1, 70)])
        padded = self.draw.random() < 0.5
        real = [[not padded or self.draw.random() < 0.5 for _ in range(n)] for _ in range(batch)]
        positions = torch.tensor([list(itertools.accumulate(row, initial=50))[1:] for row in real])
        new = [[self.entry(int(at)) for at in row] for row in positions for _ in range(self.kv_heads)]
        columns = self.columns(new)
        tokens = [torch.tensor([at for at, exists in enumerate(row) if exists], dtype=torch.int64) for row in real]
        pair.store.append(columns["keys"], columns["values"], positions, tokens if padded else None)
        for index, entries in enumerate(new):
            pair.heads[index] += itertools.compress(entries, real[index // self.kv_heads])

    def keep(self, pair: Pair) -> Pair:
        """Another compression of what there is, with keys and values as they lie or as somebody looked at them."""
        if self.bits == 32 and self.draw.random() < 0.5:
            return self.kept(pair.store.padded()[0], pair.heads, EntryStore.pack)
        return self.kept(pair.store.other_columns, pair.heads, pair.store.kept)

    def reorder(self, pair: Pair) -> None:
        """Requests change places, come twice, or go."""
        batch = len(pair.heads) // self.kv_heads
        rows = [self.draw.randrange(batch) for _ in range(self.draw.randint(1, 4))]
        pair.store.reorder(rows)
        heads = [pair.heads[self.kv_heads * row : self.kv_heads * (row + 1)] for row in rows]
        pair.heads = [list(head) for request in heads for head in request]

    def crop(self, pair: Pair) -> None:
        requests = [pair.heads[first : first + self.kv_heads] for first in range(0, len(pair.heads), self.kv_heads)]
        removed = [self.draw.randint(0, min(map(len, request))) for request in requests]
        if self.draw.random() < 0.5:
            removed = [min(removed)] * len(removed)
        pair.store.crop(removed)
        pair.heads = [head[: len(head) - removed[index // self.kv_heads]] for index, head in enumerate(pair.heads)]

    def leave_out(self, pair: Pair) -> None:
        """Tokens go from every head that has them."""
        first = self.draw.choice([2, 5, 51, 53, 60])
        spans = [(first, first + self.draw.randint(1, 3)), (9, self.draw.choice([10, 52]))]
        pair.store.leave_out(spans)
        pair.heads = [
            [entry for entry in head if not any(begin <= entry.position < end for begin, end in spans)]
            for head in pair.heads
        ]

    def fork(self, pair: Pair) -> Pair:
        """A copy; what happens to either must not be seen by the other."""
        return Pair(pair.store.fork(), [list(head) for head in pair.heads])

    def copy(self, pair: Pair) -> Pair:
        """A store as a file brings it back."""
        counts = torch.tensor(pair.store.counts).view(-1, self.kv_heads)
        packed = {name: column.clone() for name, column in pair.store.packed.items()}
        return Pair(EntryStore.of(packed, counts), [list(head) for head in pair.heads])

    def trim(self, pair: Pair) -> None:
        pair.store.trim()
        assert pair.store.nbytes == pair.store.entries_nbytes

    # --- helpers

    def entry(self, position: int, credit: float = 0.0) -> Entry:
        key, value = (torch.randn(size, generator=self.numbers) for size in self.sizes)
        return Entry((key, value), position, credit)

    def columns(self, heads: Heads, bits: int = 32) -> dict[str, Tensor]:
        """Rectangular columns of these entries, zero where a head has fewer."""
        longest = max(map(len, heads))

        def column(read: Callable[[Entry], Tensor], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            table = torch.zeros(len(heads), longest, *size, dtype=dtype)
            for row, head in zip(table, heads, strict=True):
                for at, entry in enumerate(head):
                    row[at] = read(entry)
            return table.unflatten(0, (-1, self.kv_heads))

        return {
            "keys": column(lambda entry: entry.read(0, bits), self.sizes[:1], torch.float32),
            "values": column(lambda entry: entry.read(1, bits), self.sizes[1:], torch.float32),
            "positions": column(lambda entry: torch.tensor(entry.position), (), torch.int32),
            "credit": column(lambda entry: torch.tensor(entry.credit), (), torch.float32),
        }

    def kept(self, columns: dict[str, Tensor], heads: Heads, pack: Callable[..., EntryStore]) -> Pair:
        chosen = [[at for at in range(len(head)) if self.draw.random() < 0.7] for head in heads]
        counts = HeadCounts(torch.tensor([len(indices) for indices in chosen]).view(-1, self.kv_heads))
        store = pack(columns, torch.tensor([at for indices in chosen for at in indices], dtype=torch.long), counts)
        kept = [
            [replace(head[at], is_new=False) for at in indices] for head, indices in zip(heads, chosen, strict=True)
        ]
        return Pair(store, kept)

    # --- what must agree

    def check(self, pair: Pair) -> None:
        store, heads, exact = pair.store, pair.heads, self.bits == 32
        close = dict(rtol=0.0, atol=0.0) if exact else dict(rtol=1e-4, atol=1e-5)
        assert store.counts == [len(head) for head in heads] and store.entries == sum(store.counts)
        columns, exists = store.padded()
        expected = self.columns(heads, self.bits)
        assert exists.flatten(0, 1).sum(-1).tolist() == store.counts
        assert columns.keys() == expected.keys()
        for name, column in expected.items():  # equal everywhere, so zero in holes
            torch.testing.assert_close(columns[name], column, **(close if name in ("keys", "values") else {}))
        if exact:
            self.check_table(store, expected)
            assert store.nbytes == sum(column.untyped_storage().nbytes() for column in store.columns.tensors.values())
        else:
            packed = dequantized(store.packed, torch.tensor(store.counts).view(-1, self.kv_heads))
            for name in expected:
                torch.testing.assert_close(packed[name], expected[name][exists], **close)
        if all(store.counts):
            self.check_looks(pair, **close)

    def check_looks(self, pair: Pair, **close: float) -> None:
        """Some entries that are looked at, and attention."""
        store, heads = pair.store, pair.heads
        index = torch.tensor([[self.draw.randrange(len(head)) for _ in range(3)] for head in heads])
        for part, found in enumerate(store.take(index.view(-1, self.kv_heads, 3))):
            right = [
                heads[h][i].read(part, self.bits) for h, head_indices in enumerate(index.tolist()) for i in head_indices
            ]
            torch.testing.assert_close(found.flatten(0, 2), torch.stack(right).float(), **close)
        queries = torch.randn(len(heads) // self.kv_heads, 2 * self.kv_heads, 1, self.sizes[0], generator=self.numbers)
        output = ragged_attention(queries, [store.heads], Softmax(0.5))
        for query, row in enumerate(queries.flatten(0, 2).double()):
            keys, values = (
                torch.stack([entry.read(part, self.bits) for entry in heads[query // 2]]).double() for part in (0, 1)
            )
            right = (keys @ row * 0.5).softmax(0) @ values
            torch.testing.assert_close(output.flatten(0, 2)[query].double(), right, rtol=1e-4, atol=1e-5)

    def check_table(self, store: EntryStore, expected: dict[str, Tensor]) -> None:
        """What kernels are told of where the heads are; there are neither biases nor scales."""
        packed, table = store.heads, HeadTable([store.heads])
        assert packed.keys.dtype == torch.float32
        assert [h for run in packed.runs for h in range(run.first, run.first + run.heads)] == [
            *range(len(store.counts))
        ]
        for run, i in ((packed_run, i) for packed_run in packed.runs for i in range(packed_run.heads)):
            batch, head = divmod(run.first + i, store.kv_heads)
            entries = slice(store.counts[run.first + i])
            looked_at = [run.view(column)[i] for column in (packed.keys, packed.values, packed.positions)]
            for name, column in zip(("keys", "values", "positions"), looked_at, strict=True):
                assert torch.equal(column, expected[name][batch, head, entries])
            *addresses, count = table.addresses[:, run.first + i].tolist()
            assert count + table.grown == run.count
            assert not run.count or addresses == [*(column.data_ptr() for column in looked_at), 0, 0, 0]


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 24), marks=pytest.mark.full)], ids=["few", "many"])
def test_what_is_read_is_what_plain_numbers_say(seeds: range, bits: int) -> None:
    for seed in seeds:
        Walk(seed, bits).run(12)


def test_a_packed_store_has_no_byte_too_many() -> None:
    columns = {
        "keys": torch.randn(2, 3, 50, 7),
        "values": torch.randn(2, 3, 50, 5),
        "positions": torch.arange(50, dtype=torch.int32).expand(2, 3, 50),
    }
    counts = torch.tensor([[4, 4, 4], [2, 0, 9]])
    store = EntryStore.pack(columns, torch.arange(23), HeadCounts(counts))
    assert store.nbytes == 23 * (7 * 4 + 5 * 4 + 4)


def test_growth_is_by_blocks() -> None:
    keys, values = torch.randn(2, 1, 2, 5, 4)
    columns = {"keys": keys, "values": values, "positions": torch.arange(5, dtype=torch.int32).expand(1, 2, 5)}
    store = EntryStore.pack(columns, torch.arange(5).repeat(2), HeadCounts(torch.tensor([[5, 5]])))
    sizes = set()
    for position in range(5, 60):
        store.append(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), torch.tensor([[position]]))
        sizes.add(store.nbytes)
    assert len(sizes) == 1


def test_a_new_token_of_4_bits_takes_what_is_said() -> None:
    keys, values = torch.randn(1, 2, 7, 6), torch.randn(1, 2, 7, 4)
    columns = {"keys": keys, "values": values, "positions": torch.arange(7, dtype=torch.int32).expand(1, 2, 7)}
    store = EntryStore.pack(columns, torch.arange(7).repeat(2), HeadCounts(torch.tensor([[7, 7]])))
    store.quantize(4)
    store.trim()
    before = store.nbytes
    store.append(keys[:, :, :3], values[:, :, :3], torch.arange(90, 93)[None])
    store.trim()
    # Two layers, each of 3 and 2 bytes, two float32 scales and a position.
    assert store.nbytes - before == 2 * 3 * store.token_bytes == 2 * 3 * 2 * (3 + 2 + 8 + 4)
