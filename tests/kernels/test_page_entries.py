"""Entries out of the pages of several layers and back, against the same one by one."""

from __future__ import annotations

import pytest
import torch

from keepset.kernels.page_entries import read_pages, take_entries, write_entries

LAYERS, BLOCKS, HEADS, WIDTH = 3, 9, 2, 6


@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_go_and_come(implementation: str, layers: int, size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    # Each layer's heads lie apart, as some engines have them.
    whole = torch.randn(layers, HEADS, BLOCKS, size, WIDTH, generator=draw).to(dtype).transpose(1, 2)
    caches = list(whole)
    # Numbers go on into the caches that follow, around in a circle.
    subpages = torch.randperm(layers * BLOCKS * HEADS, generator=draw)[:12].view(2, HEADS, 3)
    entries = torch.cat([read_pages(caches, place, subpages) for place in range(layers)])
    assert entries.shape == (layers * 2, HEADS, 3 * size, WIDTH)
    for layer in range(layers):
        for row in range(2):
            for head in range(HEADS):
                for place, subpage in enumerate(subpages[row, head].tolist()):
                    own = entries[layer * 2 + row, head, place * size : place * size + size]
                    further, page = divmod(subpage, BLOCKS * HEADS)
                    assert torch.equal(own, caches[(layer + further) % layers][page // HEADS, page % HEADS])
    expected = whole.clone()
    places = torch.randperm(layers * BLOCKS * HEADS * size, generator=draw)[:50]
    slots, of_layers = places // layers, places % layers
    new = torch.randn(50, WIDTH, generator=draw).to(dtype)
    for number, (layer, slot) in enumerate(zip(of_layers.tolist(), slots.tolist(), strict=True)):
        expected[layer, slot // size // HEADS, slot // size % HEADS, slot % size] = new[number]
    through = of_layers * (BLOCKS * HEADS * size) + slots
    write_entries(caches, *new.chunk(2, -1), through)
    assert torch.equal(whole, expected)
    again = torch.randint(50, (70,), generator=draw)
    assert torch.equal(torch.cat(take_entries(caches, through[again]), -1), new[again])
