"""Pages whose entries lie in several places: every byte of an entry moves with it, and no other byte changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keepset import KeepsetError
from keepset.kernels.entry_parts import nvfp4_parts, slot_parts
from keepset.kernels.packed_formats import NVFP4Format, PackedFormat, TurboQuantFormat
from keepset.paged.engine import Pages
from keepset.paged.pages import PagedEntries, ScatteredPages, decoded_entries
from tests.kernels.packed import Bytes, memory_of, of_nvfp4, of_slots

BLOCKS, HEADS, SIZE, HEAD_DIM, LAYERS = 3, 2, 8, 64, 2
SHAPE = BLOCKS, HEADS, SIZE
ONE = torch.ones(())
NVFP4 = NVFP4Format(HEAD_DIM, torch.float32, ONE, ONE * 2)
SLOTS = TurboQuantFormat(HEAD_DIM, torch.float32, 3, 4, torch.linspace(-1, 1, 8), torch.eye(HEAD_DIM), True, False)

LAYOUTS = {
    "slots by heads": (SLOTS, of_slots, (SLOTS.key_bytes, SLOTS.value_bytes, True)),
    "slots by tokens": (SLOTS, of_slots, (SLOTS.key_bytes, SLOTS.value_bytes, False)),
    "nvfp4 by heads": (NVFP4, of_nvfp4, (HEAD_DIM, True, False)),
    "nvfp4 by tokens": (NVFP4, of_nvfp4, (HEAD_DIM, False, False)),
    "nvfp4 swizzled": (NVFP4, of_nvfp4, (HEAD_DIM, True, True)),
}


def made(name: str) -> tuple[PackedFormat, list[Tensor], Bytes, list[ScatteredPages]]:
    """Caches of some layers with random bytes, where their entries' bytes are, and their pages."""
    how, layout, options = LAYOUTS[name]
    caches, where = zip(*(layout(SHAPE, *options) for _ in range(LAYERS)), strict=True)
    for seed, cache in enumerate(caches):
        drawn = torch.randint(0, 256, memory_of(cache).shape, generator=torch.Generator().manual_seed(seed))
        memory_of(cache).copy_(drawn)
    if how is SLOTS:
        parts = [slot_parts(cache, how.key_bytes, how.value_bytes) for cache in caches]
    else:
        parts = [nvfp4_parts(cache, options[2]) for cache in caches]
    return how, list(caches), where[0], [ScatteredPages(parts, place, how) for place in range(LAYERS)]


def moved(caches: list[Tensor], where: Bytes, moves: list[tuple[int, int]]) -> list[Tensor]:
    """Every layer's memory after entries were moved from slot to slot, byte by byte."""
    before = [memory_of(cache).tolist() for cache in caches]
    after = [list(memory) for memory in before]
    for source, target in moves:
        (layer, *old), (new_layer, *new) = place_of(source), place_of(target)
        for old_byte, new_byte in zip(where(*old), where(*new), strict=True):
            after[new_layer][new_byte] = before[layer][old_byte]
    return [torch.tensor(memory, dtype=torch.uint8) for memory in after]


def place_of(slot: int) -> tuple[int, int, int, int]:
    """Layer, block, head and offset of a slot, counted from the first layer's on."""
    layer, slot = divmod(slot, BLOCKS * HEADS * SIZE)
    return layer, slot // SIZE // HEADS, slot // SIZE % HEADS, slot % SIZE


@pytest.mark.parametrize("name", LAYOUTS)
def test_entries_move_bit_for_bit(name: str) -> None:
    """Within a layer and to another one, some to places that others leave; nothing else changes."""
    _, caches, where, pages = made(name)
    in_all = LAYERS * BLOCKS * HEADS * SIZE
    draw = torch.Generator().manual_seed(9)
    sources, targets = (torch.randperm(in_all, generator=draw)[:40] for _ in range(2))
    right = moved(caches, where, list(zip(sources.tolist(), targets.tolist(), strict=True)))
    keys, values = (part[0] for part in pages[0].read(torch.arange(in_all // SIZE)[None]))
    pages[0].write(keys[sources], values[sources], targets)
    for cache, expected in zip(caches, right, strict=True):
        assert torch.equal(memory_of(cache), expected)
    assert not torch.equal(keys, pages[0].read(torch.arange(in_all // SIZE)[None])[0][0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_event_takes_entries_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at once or head by head, from the second layer on into the first, as an event does."""
    _, caches, where, pages = made(name)
    subpages = torch.tensor([[[4, 0], [5, 1]], [[8, 2], [9, 3]]])
    kept = [(0, 3), (1, 15), (2, 0), (2, 8), (3, 9)]
    index = torch.tensor([head * 2 * SIZE + place for head, place in kept])
    first = BLOCKS * HEADS  # sub-pages of the first layer
    sources = [(int(subpages.flatten(0, 1)[head, place // SIZE]) + first) * SIZE + place % SIZE for head, place in kept]
    sources = [slot % (LAYERS * first * SIZE) for slot in sources]
    targets = [0, 17, 40, 8, 90]
    right = moved(caches, where, list(zip(sources, targets, strict=True)))
    taken = [PagedEntries(pages[1], subpages).take(range(4), index)]
    monkeypatch.setattr("keepset.paged.pages.WORKSPACE", 0)
    taken.append(PagedEntries(pages[1], subpages).take(range(4), index))
    assert all(torch.equal(*parts) for parts in zip(*taken, strict=True))
    back = (torch.tensor(targets) - first * SIZE) % (LAYERS * first * SIZE)  # as the second layer counts
    pages[1].write(*taken[0], back)
    for cache, expected in zip(caches, right, strict=True):
        assert torch.equal(memory_of(cache), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_methods_see_keys_and_values(name: str) -> None:
    """Those of the bytes at the entry's places; each layer with its own scales."""
    how, caches, where, pages = made(name)
    subpages = torch.tensor([[1, 4], [3, 2]])
    found = decoded_entries(pages[1], subpages)
    paged = PagedEntries(pages[0], torch.tensor([[[1, 4]], [[7, 10]]]), [pages[0].format, pages[1].format])
    for row, some in enumerate(subpages.tolist()):
        for entry in range(2 * SIZE):
            subpage = some[entry // SIZE]
            memory = memory_of(caches[1])[where(subpage // HEADS, subpage % HEADS, entry % SIZE)]
            for read, stored in (
                (how.decode_keys(memory[None, : how.key_bytes])[0], found[0][row, entry]),
                (how.decode_values(memory[None, how.key_bytes :][:, : how.value_bytes])[0], found[1][row, entry]),
            ):
                torch.testing.assert_close(stored, read, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(paged.keys(slice(0, 1))[1], found[0][:1], equal_nan=True)
    torch.testing.assert_close(paged.values(slice(0, 1))[1], found[1][:1], equal_nan=True)


def test_pages_are_those_of_the_interface() -> None:
    pages = made("nvfp4 swizzled")[-1][0]
    assert isinstance(pages, Pages) and pages.slots == BLOCKS * HEADS * SIZE and pages.entry_bytes == 72
    assert (pages.head_dim, pages.value_dim, pages.block_size, pages.dtype) == (HEAD_DIM, HEAD_DIM, SIZE, torch.float32)
    pages.write(torch.zeros(0, 36, dtype=torch.uint8), torch.zeros(0, 36, dtype=torch.uint8), torch.zeros(0).long())


def test_other_strides_are_refused() -> None:
    cache = of_nvfp4(SHAPE, HEAD_DIM, True, False)[0]
    with pytest.raises(KeepsetError, match="Blocks of an NVFP4 cache must be dense"):
        nvfp4_parts(cache[:, :, ::2], swizzled=False)
    with pytest.raises(KeepsetError, match="must be laid out by heads, with heads of a multiple of 64 numbers"):
        nvfp4_parts(of_nvfp4(SHAPE, HEAD_DIM, False, False)[0], swizzled=True)
