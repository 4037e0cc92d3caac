"""`EntryStore` against lists of entries, through any sequence of what can happen to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from keepset.core.keep_set import HeadCounts
from keepset.hf.store import EntryStore
from keepset.kernels.packed import HeadTable
from tests.tiers import examples


@dataclass(frozen=True)
class Entry:
    """A number of its own, from which its key and value follow, its position, and what a method noted."""

    number: int
    position: int
    credit: float


Request = list[list[Entry]]
"""The entries of each head."""


@dataclass
class Pair:
    """A store and what it should hold."""

    store: EntryStore
    requests: list[Request]


class Stores(RuleBasedStateMachine):
    """Everything is done to a store and to lists; afterwards they must agree."""

    pairs = Bundle("pairs")

    @initialize(
        target=pairs,
        data=st.data(),
        batch=st.integers(1, 3),
        heads=st.integers(1, 3),
        sizes=st.sampled_from([(1, 1), (3, 5), (8, 8), (10, 6)]),
        entries=st.integers(0, 9),
        by_token=st.booleans(),
    )
    def pack(
        self, data: st.DataObject, batch: int, heads: int, sizes: tuple[int, int], entries: int, by_token: bool
    ) -> Pair:
        """A prompt's columns, laid out head by head or token by token as models make them."""
        self.heads, (self.key_dim, self.value_dim) = heads, sizes
        self.numbers = itertools.count(1)
        self.pairs_made: list[Pair] = []
        table = [[[self.entry(at, credited=True) for at in range(entries)] for _ in range(heads)] for _ in range(batch)]
        columns = self.columns(table)
        if by_token:
            columns = {name: c.transpose(1, 2).contiguous().transpose(1, 2) for name, c in columns.items()}
        return self.kept(data, columns, table)

    @rule(pair=pairs, data=st.data(), n=st.integers(1, 70), padded=st.booleans())
    def append(self, pair: Pair, data: st.DataObject, n: int, padded: bool) -> None:
        """New tokens for all heads of every request, except where there is padding."""
        batch = len(pair.requests)
        real = [[True] * n] * batch
        if padded:
            real = data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=batch, max_size=batch))
        positions = torch.tensor([list(itertools.accumulate(row, initial=50))[1:] for row in real])
        new = [[[self.entry(int(at)) for at in row] for _ in range(self.heads)] for row in positions]
        columns = self.columns(new)
        tokens = [torch.tensor([at for at, exists in enumerate(row) if exists], dtype=torch.int64) for row in real]
        pair.store.append(columns["keys"], columns["values"], positions, tokens if padded else None)
        for request, tokens, exists in zip(pair.requests, new, real, strict=True):
            for head, entries in zip(request, tokens, strict=True):
                head.extend(itertools.compress(entries, exists))

    @rule(target=pairs, pair=pairs, data=st.data())
    def keep(self, pair: Pair, data: st.DataObject) -> Pair:
        """Another compression of what there is."""
        columns, _ = pair.store.padded()
        return self.kept(data, columns, pair.requests)

    @rule(target=pairs, pair=pairs, data=st.data())
    def keep_as_stored(self, pair: Pair, data: st.DataObject) -> Pair:
        """Keep some entries, with keys and values as they lie."""
        return self.kept(data, pair.store.other_columns, pair.requests, pair.store.kept)

    @rule(pair=pairs, data=st.data())
    def reorder(self, pair: Pair, data: st.DataObject) -> None:
        """Let requests change places, come twice, or go."""
        rows = data.draw(st.lists(st.integers(0, len(pair.requests) - 1), min_size=1, max_size=4))
        pair.store.reorder(rows)
        pair.requests = [[list(head) for head in pair.requests[row]] for row in rows]

    @rule(pair=pairs, data=st.data(), uniform=st.booleans())
    def crop(self, pair: Pair, data: st.DataObject, uniform: bool) -> None:
        """The newest entries are taken back."""
        there = [min(map(len, request)) for request in pair.requests]
        removed = [data.draw(st.integers(0, most)) for most in there]
        if uniform:
            removed = [min(removed)] * len(removed)
        pair.store.crop(removed)
        for request, count in zip(pair.requests, removed, strict=True):
            request[:] = [head[: len(head) - count] for head in request]

    @rule(target=pairs, pair=pairs)
    def fork(self, pair: Pair) -> Pair:
        """A copy; what happens to either must not be seen by the other."""
        return self.made(pair.store.fork(), [[list(head) for head in request] for request in pair.requests])

    @invariant()
    def agree(self) -> None:
        for pair in self.pairs_made:
            check(pair, self.columns(pair.requests))

    # --- helpers

    def entry(self, position: int, credited: bool = False) -> Entry:
        number = next(self.numbers)
        return Entry(number, position, number / 2 if credited else 0.0)

    def columns(self, requests: list[Request]) -> dict[str, Tensor]:
        """Rectangular columns of these entries, zero where a head has fewer."""
        longest = max(len(head) for request in requests for head in request)
        hole = Entry(0, 0, 0.0)
        table = [[head + [hole] * (longest - len(head)) for head in request] for request in requests]
        numbers = torch.tensor([[[float(entry.number) for entry in head] for head in request] for request in table])
        exists = numbers[..., None] > 0
        return {
            "keys": torch.where(exists, numbers[..., None] + torch.arange(self.key_dim) / 16, 0.0),
            "values": torch.where(exists, -numbers[..., None] - torch.arange(self.value_dim) / 16, 0.0),
            "positions": torch.tensor(
                [[[entry.position for entry in head] for head in request] for request in table], dtype=torch.int32
            ),
            "credit": torch.tensor([[[entry.credit for entry in head] for head in request] for request in table]),
        }

    def kept(
        self,
        data: st.DataObject,
        columns: dict[str, Tensor],
        requests: list[Request],
        pack: Callable[..., EntryStore] = EntryStore.pack,
    ) -> Pair:
        indices, kept = [], []
        for request in requests:
            kept.append([])
            for head in request:
                chosen = data.draw(st.lists(st.booleans(), min_size=len(head), max_size=len(head)))
                indices += [i for i, stays in enumerate(chosen) if stays]
                kept[-1].append(list(itertools.compress(head, chosen)))
        counts = torch.tensor([[len(head) for head in request] for request in kept])
        return self.made(pack(columns, torch.tensor(indices, dtype=torch.long), HeadCounts(counts)), kept)

    def made(self, store: EntryStore, requests: list[Request]) -> Pair:
        self.pairs_made.append(Pair(store, requests))
        return self.pairs_made[-1]


def check(pair: Pair, expected: dict[str, Tensor]) -> None:
    store, heads = pair.store, [head for request in pair.requests for head in request]
    assert store.counts == [len(head) for head in heads]
    assert store.entries == sum(store.counts) and store.heads.keys.dtype == torch.float32

    columns, exists = store.padded()
    assert exists.flatten(0, 1).sum(-1).tolist() == store.counts
    assert columns.keys() == expected.keys()
    for name, column in expected.items():
        # Equal everywhere, so zero in holes.
        assert column.dtype == columns[name].dtype and torch.equal(columns[name], column), name

    packed, table = store.heads, HeadTable([store.heads])
    assert [h for run in packed.runs for h in range(run.first, run.first + run.heads)] == list(range(len(heads)))
    for run in packed.runs:
        for i in range(run.heads):
            batch, head = divmod(run.first + i, store.kv_heads)
            held = slice(store.counts[run.first + i])
            assert torch.equal(run.view(packed.keys)[i], expected["keys"][batch, head, held])
            assert torch.equal(run.view(packed.values)[i], expected["values"][batch, head, held])
            assert torch.equal(run.view(packed.positions)[i], expected["positions"][batch, head, held])
            # What kernels are told is the same; there are neither biases nor scales.
            *addresses, count = table.addresses[:, run.first + i].tolist()
            assert count + table.grown == run.count
            columns_of = (packed.keys, packed.values, packed.positions)
            if count + table.grown:
                assert addresses == [*(run.view(column)[i].data_ptr() for column in columns_of), 0, 0, 0]

    assert store.nbytes == sum(column.untyped_storage().nbytes() for column in store._columns.values())


Stores.TestCase.settings = examples(
    60, derandomize=False, stateful_step_count=15, suppress_health_check=list(HealthCheck)
)
TestStores = Stores.TestCase


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
