"""What is held while vLLM measures is as much as will be needed, once it has made the cache of the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm.late import Late

memory = Late("keepset.vllm.memory")

GB = 2**30


@pytest.mark.parametrize("columns", [0, 1, 3])
@pytest.mark.parametrize(("entry_bytes", "kv_heads"), [(512, 8), (256, 2)])
def test_columns_of_all_that_the_rest_has_room_for(columns: int, entry_bytes: int, kv_heads: int) -> None:
    pool, workspace = 60 * GB, memory.needed_bytes(0, columns, entry_bytes, kv_heads, 131072)
    held = memory.needed_bytes(pool, columns, entry_bytes, kv_heads, 131072) - workspace
    entries = (pool - held) // entry_bytes
    assert 0 <= held - entries * columns * 4 <= entry_bytes
    # A copy of a layer's keys and values, and as much again for keys in float32 and for what is made of them.
    assert workspace == max(2**28, 3 * 131072 * kv_heads * entry_bytes)


def configured(share: float, given: int | None) -> Any:
    cache = SimpleNamespace(gpu_memory_utilization=share, kv_cache_memory_bytes=given)
    return SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(max_model_len=1000))


def test_of_what_vllm_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 of 80 GB are the model's; nine tenths may be used."""
    there = SimpleNamespace(is_cuda_alike=lambda: True, device_type="meta")
    monkeypatch.setattr("keepset.vllm.memory.current_platform", there)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 * GB, 80 * GB))
    held = memory.reserve(configured(0.9, None), 2, 512, 8)
    assert held.nbytes == int(56 * GB) * 8 // 520 + 2**28
    assert memory.reserve(configured(0.9, 10 * GB), 2, 512, 8) is None


def test_a_cpu_measures_nothing() -> None:
    assert memory.reserve(configured(0.9, None), 2, 512, 8) is None
