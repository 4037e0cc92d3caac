"""Requests whose heads take sub-pages one by one: what tables in closed form are held against."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

POISON = -(10**6)
"""In the block table wherever the request has no block, so that any look-up there shows."""


@dataclass
class Head:
    """One head's entries, in order, and the sub-pages that it was given; the first may be other requests', too."""

    held: list[int] = field(default_factory=list)
    pages: list[tuple[int, int]] = field(default_factory=list)
    shared: int = 0


class Allocator:
    """One request in one layer, token by token: who needs a page takes the next one that is free."""

    def __init__(self, kv_heads: int, block_size: int) -> None:
        self.block_size = block_size
        self.heads = [Head() for _ in range(kv_heads)]
        self.length = 0
        self.first = 0
        self.next = (0, 0)
        self.own: int | None = None

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block_size)

    def append(self) -> None:
        for head in self.heads:
            self._put(head, self.length)
        self.length += 1

    def event(self, kept: list[list[int]], first: int) -> None:
        self.heads = [Head() for _ in kept]
        self.first, self.own = first, None
        self.next = (first, 0)
        for head, survivors in zip(self.heads, kept, strict=True):
            for entry in survivors:
                self._put(head, entry)

    def share(self, counts: list[int], own: int) -> None:
        """From now on the request holds so many entries, all pages but each head's last one in blocks before `own`."""
        shared = [max(-(-count // self.block_size) - 1, 0) for count in counts]
        self.own, self.first = own, own - -(-sum(shared) // len(counts))
        places = iter([(block, place) for block in range(self.first, own) for place in range(len(counts))])
        self.heads = [Head([], [next(places) for _ in range(pages)], pages) for pages in shared]
        for head, count in zip(self.heads, counts, strict=True):
            for entry in range(count):
                self._put(head, entry)

    def _put(self, head: Head, entry: int) -> None:
        full = len(head.held) == len(head.pages) * self.block_size
        if full and self.own is not None:
            (place,) = (place for place, other in enumerate(self.heads) if other is head)
            head.pages.append((self.own + len(head.pages) - head.shared, place))
        elif full:
            head.pages.append(self.next)
            block, place = self.next
            self.next = (block, place + 1) if place + 1 < len(self.heads) else (block + 1, 0)
        head.held.append(entry)

    @property
    def layout(self) -> tuple[list[int], int, int, int]:
        """Of the state now, as if an event had just happened."""
        return [len(head.held) for head in self.heads], self.length, self.first, int(self.own is not None)


class Row:
    """A request of a few layers: the allocators, the states to test and the request's blocks."""

    def __init__(self, layers: int, kv_heads: int, block_size: int, width: int, offset: int) -> None:
        self.layers = [Allocator(kv_heads, block_size) for _ in range(layers)]
        self.states: list[tuple[list[int], int, int, int]] = [([0] * kv_heads, 0, 0, 0)] * layers
        self.kv_heads = kv_heads
        # Requests own disjoint blocks, in no order.
        self.ids = (offset + torch.randperm(width, generator=torch.Generator().manual_seed(offset))).tolist()

    @property
    def length(self) -> int:
        return self.layers[0].length

    def block_table(self) -> list[int]:
        first = min(layer.first for layer in self.layers)
        return [block if first <= i < self.layers[0].blocks else POISON for i, block in enumerate(self.ids)]

    def subpages(self, layer: int, head: int) -> list[int]:
        return [self.ids[block] * self.kv_heads + place for block, place in self.layers[layer].heads[head].pages]
