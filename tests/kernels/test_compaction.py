"""Entries that move, against the same taken one by one."""

from __future__ import annotations

import pytest
import torch

from keepset.kernels.compaction import append_entries, pack_entries
from keepset.kernels.packed import HeadTable, Run

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
    packed = pack_entries(columns, torch.cat(chosen), torch.tensor(counts).view(2, 3), max(counts))
    for name, column in columns.items():
        rows = [column[head // 3, head % 3][entries] for head, entries in enumerate(chosen)]
        assert packed[name].dtype == column.dtype and torch.equal(packed[name], torch.cat(rows))


@pytest.mark.parametrize("n", [1, 40])
def test_new_entries_follow_those_of_their_head(implementation: str, n: int) -> None:
    draw = torch.Generator().manual_seed(2)
    runs = [Run(0, 2, 0, 3, 50), Run(2, 1, 100, 0, 41), Run(3, 1, 141, 9, 50)]
    before = {"keys": torch.randn(191, 8, generator=draw), "credit": torch.randn(191, generator=draw)}
    packed = {name: column.clone() for name, column in before.items()}
    new = {
        "keys": torch.randn(2, n, 2, 8, generator=draw).transpose(1, 2),
        # What has no number yet has one zero for all.
        "credit": torch.zeros(()).expand(2, 2, n),
    }
    # The table is of a time before two entries came to every head.
    older = [Run(run.first, run.heads, run.start, run.count - 2, run.capacity) for run in runs]
    table = HeadTable(older, torch.device("cpu"))
    table.grown = 2
    for run in runs:
        run.count += n
    append_entries(list(packed.values()), list(new.values()), runs, table)
    for name, column in before.items():
        expected = column.clone()
        for head, (start, count) in enumerate([(0, 3), (50, 3), (100, 0), (141, 9)]):
            for i in range(n):
                expected[start + count + i] = new[name][head // 2, head % 2, i]
        assert torch.equal(packed[name], expected)
