"""Stores in 8 and 4 bits against lists of entries: what is read is what plain numbers say, whatever happens to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from keepset.contexts.columns import dequantized
from keepset.core.keep_set import HeadCounts
from keepset.hf.store import EntryStore
from keepset.kernels.attention import ragged_attention
from keepset.kernels.softmax import Softmax
from tests.kernels.few_bits import in_steps, matrix, rounded

SIZES = (6, 4)


@dataclass(frozen=True)
class Entry:
    """A key and a value, and whether what 4 bits have lost of them is still known."""

    position: int
    bits: int
    rows: tuple[Tensor, Tensor]
    is_new: bool = True

    def read(self, part: int) -> Tensor:
        mixed = self.rows[part].double() @ matrix(SIZES[part]).T
        if self.bits == 8:
            return in_steps(mixed) @ matrix(SIZES[part])
        first = rounded(mixed)
        second = rounded(mixed - first) if self.is_new else 0.0
        return (first + second) @ matrix(SIZES[part])


Heads = list[list[Entry]]


class Walk:
    """A store of two requests with two heads each, and the entries of its four heads."""

    def __init__(self, seed: int, bits: int) -> None:
        self.draw, self.torch_draw = random.Random(seed), torch.Generator().manual_seed(seed)
        self.position, self.bits = 0, bits
        heads = [[self.entry() for _ in range(7)] for _ in range(4)]
        columns = {name: self.column(heads, part) for part, name in enumerate(("keys", "values"))}
        columns["positions"] = torch.tensor([[e.position for e in head] for head in heads], dtype=torch.int32)
        self.heads: Heads = []
        self.store = self.keep({name: column.unflatten(0, (2, 2)) for name, column in columns.items()}, heads, True)
        self.store.quantize(bits)

    def entry(self) -> Entry:
        key, value = (torch.randn(size, generator=self.torch_draw) for size in SIZES)
        self.position += 1
        return Entry(self.position, self.bits, (key, value))

    def column(self, heads: Heads, part: int) -> Tensor:
        return torch.stack([torch.stack([entry.rows[part] for entry in head]) for head in heads])

    def keep(self, columns: dict[str, Tensor], heads: Heads, first: bool) -> EntryStore:
        chosen = [sorted(self.draw.sample(range(len(head)), self.draw.randint(1, len(head)))) for head in heads]
        self.heads = [[replace(head[i], is_new=False) for i in own] for head, own in zip(heads, chosen, strict=True)]
        counts = HeadCounts(torch.tensor([len(own) for own in chosen]).view(2, 2))
        indices = torch.tensor([i for own in chosen for i in own])
        return EntryStore.pack(columns, indices, counts) if first else self.store.kept(columns, indices, counts)

    def event(self) -> None:
        self.store = self.keep(self.store.other_columns, self.heads, False)

    def append(self) -> None:
        n, padded = self.draw.randint(1, 5), self.draw.random() < 0.5
        new = [[self.entry() for _ in range(n)] for _ in range(4)]
        for token in range(n):
            for head in range(1, 4):
                new[head][token] = replace(new[head][token], position=new[0][token].position)
        positions = torch.tensor([[entry.position for entry in new[0]]] * 2)
        keys, values = (self.column(new, part).unflatten(0, (2, 2)) for part in (0, 1))
        real = [sorted(self.draw.sample(range(n), self.draw.randint(0, n))) for _ in range(2)]
        real = real if padded else [list(range(n))] * 2
        self.store.append(
            keys, values, positions, [torch.tensor(own, dtype=torch.long) for own in real] if padded else None
        )
        for head, entries in enumerate(self.heads):
            entries += [new[head][token] for token in real[head // 2]]

    def crop(self) -> None:
        most = min(map(len, self.heads)) - 1
        removed = [self.draw.randint(0, most) for _ in range(2)]
        removed = removed if self.draw.random() < 0.5 else [min(removed)] * 2
        self.store.crop(removed)
        self.heads = [head[: len(head) - removed[i // 2]] for i, head in enumerate(self.heads)]

    def reorder(self) -> None:
        requests = [self.draw.randint(0, 1) for _ in range(2)]
        self.store.reorder(requests)
        self.heads = [list(self.heads[2 * request + head]) for request in requests for head in (0, 1)]

    def copy(self) -> None:
        counts = torch.tensor(self.store.counts).view(2, 2)
        packed = {name: column.clone() for name, column in self.store.packed.items()}
        self.store = self.store.fork() if self.draw.random() < 0.5 else EntryStore.of(packed, counts)

    def trim(self) -> None:
        self.store.trim()
        assert self.store.nbytes == self.store.entries_nbytes

    def check(self) -> None:
        assert self.store.counts == [len(head) for head in self.heads]
        columns, exists = self.store.padded()
        packed = dequantized(self.store.packed, torch.tensor(self.store.counts).view(2, 2))
        assert packed["positions"].tolist() == [entry.position for head in self.heads for entry in head]
        for part, name in enumerate(("keys", "values")):
            right = torch.cat([torch.stack([entry.read(part) for entry in head]) for head in self.heads])
            for found in (columns[name][exists], packed[name]):
                torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)
            assert not columns[name][~exists].any()
        index = torch.tensor([[self.draw.randrange(len(head)) for _ in range(3)] for head in self.heads])
        for part, found in enumerate(self.store.take(index.view(2, 2, 3))):
            right = torch.stack([self.heads[h][i].read(part) for h, own in enumerate(index.tolist()) for i in own])
            torch.testing.assert_close(found.flatten(0, 2).double(), right, rtol=1e-4, atol=1e-5)
        queries = torch.randn(2, 6, 1, SIZES[0], generator=self.torch_draw)
        output = ragged_attention(queries, [self.store.heads], Softmax(0.5))
        for query in range(12):
            head = self.heads[query // 3]
            keys, values = (torch.stack([entry.read(part) for entry in head]) for part in (0, 1))
            weights = (keys @ queries.flatten(0, 1)[query, 0].double() * 0.5).softmax(0)
            torch.testing.assert_close(
                output[query // 6, 0, query % 6].double(), weights @ values, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_what_is_read_is_what_plain_numbers_say(seed: int, bits: int) -> None:
    walk = Walk(seed, bits)
    walk.check()
    for _ in range(6):
        walk.draw.choice([walk.append, walk.append, walk.event, walk.crop, walk.reorder, walk.copy, walk.trim])()
        walk.check()


def test_a_new_token_takes_what_is_said() -> None:
    walk = Walk(0, 4)
    walk.store.trim()
    before, new = walk.store.nbytes, [[walk.entry() for _ in range(3)] for _ in range(4)]
    keys, values = (walk.column(new, part).unflatten(0, (2, 2)) for part in (0, 1))
    walk.store.append(keys, values, torch.arange(3).expand(2, 3) + 90)
    walk.store.trim()
    # Two layers, each of 3 and 2 bytes, two float32 scales and a position.
    assert walk.store.nbytes - before == 4 * 3 * walk.store.token_bytes == 4 * 3 * 2 * (3 + 2 + 8 + 4)
