"""Requests whose heads take sub-pages one by one: what tables in closed form are held against."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

POISON = -(10**6)
"""In the block table wherever the request has no block, so that any look-up there shows."""


Page = tuple[int, int, int]
"""A block by its logical position, the layer whose cache it is of, and the place in it."""


@dataclass
class Head:
    """One head's entries, in order, and the sub-pages that it was given; the first may be other requests', too."""

    held: list[int] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    shared: int = 0


class Allocator:
    """One request in one layer, token by token: who needs a page takes the next one that is free."""

    def __init__(self, kv_heads: int, block_size: int, layer: int = 0) -> None:
        self.block_size, self.layer = block_size, layer
        self.heads = [Head() for _ in range(kv_heads)]
        self.length = 0
        self.first = 0
        self.next = (0, 0)
        self.own: int | None = None
        self.through = 0

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block_size)

    def append(self) -> None:
        for head in self.heads:
            self._put(head, self.length)
        self.length += 1

    def event(self, kept: list[list[int]], first: int) -> None:
        self.heads = [Head() for _ in kept]
        self.first, self.own, self.through = first, None, 0
        self.next = (first, 0)
        for head, survivors in zip(self.heads, kept, strict=True):
            for entry in survivors:
                self._put(head, entry)

    def share(self, counts: list[int], own: int, free: list[Page]) -> None:
        """Make the request hold so many entries. All pages but each head's last one are taken from the free ones."""
        shared = [max(-(-count // self.block_size) - 1, 0) for count in counts]
        self.own = self.first = own
        self.heads = [Head([], [free.pop(0) for _ in range(pages)], pages) for pages in shared]
        for head, count in zip(self.heads, counts, strict=True):
            for entry in range(count):
                self._put(head, entry)

    def _put(self, head: Head, entry: int) -> None:
        full = len(head.held) == len(head.pages) * self.block_size
        if full and self.own is not None:
            (place,) = (place for place, other in enumerate(self.heads) if other is head)
            head.pages.append((self.own + len(head.pages) - head.shared, self.layer, place))
        elif full:
            block, place = self.next
            head.pages.append((block, self.layer, place))
            self.next = (block, place + 1) if place + 1 < len(self.heads) else (block + 1, 0)
        head.held.append(entry)

    @property
    def layout(self) -> tuple[list[int], int, int, int]:
        """The layout as if an event had just happened."""
        return [len(head.held) for head in self.heads], self.length, self.first, self.through


class Row:
    """A request of a few layers: the allocators, the states to test and the request's blocks."""

    def __init__(self, layers: int, kv_heads: int, block_size: int, width: int, offset: int, blocks: int = 0) -> None:
        self.layers, self.blocks = [Allocator(kv_heads, block_size, layer) for layer in range(layers)], blocks
        self.states: list[tuple[list[int], int, int, int]] = [([0] * kv_heads, 0, 0, 0)] * layers
        self.kv_heads = kv_heads
        # Requests own disjoint blocks, in no order.
        self.ids = (offset + torch.randperm(width, generator=torch.Generator().manual_seed(offset))).tolist()

    @property
    def length(self) -> int:
        return self.layers[0].length

    def append(self) -> list[list[int]]:
        """Give the request one more token, and return the slots of its entries, layer by layer."""
        slots = []
        for index, layer in enumerate(self.layers):
            layer.append()
            ends = [(self.subpages(index, place)[-1], len(head.held) - 1) for place, head in enumerate(layer.heads)]
            slots.append([page * layer.block_size + entry % layer.block_size for page, entry in ends])
        return slots

    def block_table(self) -> list[int]:
        first = min(
            min([layer.first, *(page[0] for head in layer.heads for page in head.pages)]) for layer in self.layers
        )
        return [block if first <= i < self.layers[0].blocks else POISON for i, block in enumerate(self.ids)]

    def share(self, counts: list[list[int]], own: int) -> None:
        """The request begins with so many entries of each layer's heads; what others see ends before block `own`."""
        size = self.layers[0].block_size
        shared = sum(max(-(-count // size) - 1, 0) for layer in counts for count in layer)
        first = own - -(-shared // (len(counts) * self.kv_heads))
        free = [
            (block, layer, head)
            for block in range(first, own)
            for layer in range(len(counts))
            for head in range(self.kv_heads)
        ]
        whole = len(free)
        for index, (layer, own_counts) in enumerate(zip(self.layers, counts, strict=True)):
            layer.through = first * len(counts) * self.kv_heads + whole - len(free) + 1
            layer.share(own_counts, own, free)
            self.states[index] = layer.layout

    def subpages(self, layer: int, head: int) -> list[int]:
        """A head's sub-pages, numbered on from the layer's own cache into those that follow."""
        pages = self.layers[layer].heads[head].pages
        further = [(of - layer) % len(self.layers) * self.blocks for _, of, _ in pages]
        return [
            (beyond + self.ids[block]) * self.kv_heads + place
            for beyond, (block, _, place) in zip(further, pages, strict=True)
        ]
