"""Where kernels are launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from keepset.kernels import attention, columns, compaction, dispatch
from keepset.kernels.packed import HeadRun, PackedHeads

KERNELS = ("_append", "_attend_part", "_columns", "_log_sum_exp", "_pack")


def test_each_kernel_is_launched_on_the_gpu_of_its_tensors(
    triton_interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.posing import Gpu, Posing

    assert torch.cuda.device("cuda:1").idx == dispatch.launched_on(torch.device("cuda:1")).idx == 1  # type: ignore[attr-defined]
    current: list[torch.device] = []

    @contextmanager
    def launched_on(device: torch.device) -> Iterator[None]:
        current.append(device)
        before = kernels()
        yield
        assert kernels() > before

    def kernels() -> int:
        return sum(n for name, n in gpu.launches.items() if name.startswith(KERNELS))

    for module in (attention, columns, compaction):
        monkeypatch.setattr(module, "launched_on", launched_on)
    with Gpu(monkeypatch) as gpu:
        keys, new = Posing(torch.randn(6, 8)), Posing(torch.randn(1, 2, 1, 8))
        store = PackedHeads(keys, keys, Posing(torch.arange(6, dtype=torch.int32)), [HeadRun(0, 2, 0, 2, 3)])
        attention.append_entries([store], new, new, Posing(torch.tensor([[7]])))
        attention.ragged_attention(new, [store], 0.3)
        columns.attention_columns(new[0], new[0])
        indices, counts = Posing(torch.tensor([0, 0])), Posing(torch.tensor([[1, 1]]))
        compaction.pack_entries({"keys": new}, indices, counts)
    assert len(current) == 5 and {device.type for device in current} == {"meta"}
