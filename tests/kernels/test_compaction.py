"""Entries that move, against the same taken one by one."""

from __future__ import annotations

import pytest
import torch

from keepset.kernels.attention import append_entries
from keepset.kernels.compaction import pack_entries
from keepset.kernels.packed import HeadRun, PackedHeads

KEYS = {"by head": (2, 3, 20, 5), "by token": (2, 20, 3, 5)}


@pytest.mark.parametrize("order", KEYS)
@pytest.mark.parametrize("counts", [[0, 1, 20, 7, 5, 3], [4] * 6, [0] * 6])
def test_every_head_keeps_its_own(implementation: str, order: str, counts: list[int]) -> None:
    draw = torch.Generator().manual_seed(2)
    keys = torch.randn(KEYS[order], generator=draw).bfloat16()
    keys = keys if order == "by head" else keys.transpose(1, 2)
    columns = {
        "keys": keys,
        "values": torch.randn(2, 3, 26, 64, generator=draw)[:, :, :20],
        "positions": torch.arange(20, dtype=torch.int32).expand(2, 3, 20),
        "credit": torch.randn(2, 3, 20, generator=draw),
    }
    chosen = [torch.randperm(20, generator=draw)[:count].sort().values for count in counts]
    packed = pack_entries(columns, torch.cat(chosen), torch.tensor(counts).view(2, 3))
    for name, column in columns.items():
        rows = [column[head // 3, head % 3][entries] for head, entries in enumerate(chosen)]
        assert packed[name].dtype == column.dtype and torch.equal(packed[name], torch.cat(rows))


@pytest.mark.parametrize("n", [1, 40])
def test_new_entries_follow_those_of_their_head(implementation: str, n: int) -> None:
    draw = torch.Generator().manual_seed(2)
    runs = [[HeadRun(0, 2, 0, 3, 50)], [HeadRun(0, 1, 0, 0, 41), HeadRun(1, 1, 41, 9, 50)]]
    stores = []
    for of_store, places in zip(runs, (100, 91), strict=True):
        keys, values = torch.randn(places, 8, generator=draw), torch.randn(places, 5, generator=draw).bfloat16()
        stores.append(PackedHeads(keys, values, torch.full((places,), -1, dtype=torch.int32), of_store))
    keys, values = (torch.randn(2, n, 2, size, generator=draw).transpose(1, 2) for size in (8, 5))
    positions = torch.arange(n) + torch.tensor([[12], [30]])
    # The second store's table, when it is written, is of a time before two entries came to every head.
    stores[1].grown = 2
    expected = [[column.clone() for column in (store.keys, store.values, store.positions)] for store in stores]
    for head, (start, count) in enumerate([(0, 3), (50, 3), (0, 0), (41, 9)]):
        for i in range(n):
            of_head = (keys[head // 2, head % 2, i], values[head // 2, head % 2, i], positions[head // 2, i])
            for column, new in zip(expected[head // 2], of_head, strict=True):
                column[start + count + i] = new
    append_entries(stores, keys, values.bfloat16(), positions)
    for store, right in zip(stores, expected, strict=True):
        assert torch.equal(store.keys, right[0]) and torch.equal(store.values, right[1])
        assert torch.equal(store.positions, right[2])
