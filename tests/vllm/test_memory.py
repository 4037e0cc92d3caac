"""The bytes reserved while vLLM measures are those needed once there is a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepset import Recipe
from keepset.paged.entry_columns import columns_of
from tests.vllm.late import Late

memory = Late("keepset.vllm.spec")

MB, GB = 2**20, 2**30


def shape(longest: int = 131072) -> Any:
    """The shape of an 8B model."""
    return memory.Shape(layers=32, kv_heads=8, head_dim=128, entry_bytes=512, bytes_read=512, longest=longest)


@pytest.mark.parametrize("columns", [0, 1, 3])
@pytest.mark.parametrize("entry_bytes", [512, 256])
def test_columns_of_all_that_the_rest_has_room_for(columns: int, entry_bytes: int) -> None:
    pool = 60 * GB
    held = memory.column_bytes(columns, pool, entry_bytes)
    entries = (pool - held) // entry_bytes
    assert 0 <= held - entries * columns * 4 <= entry_bytes


def test_events_of_long_prompts() -> None:
    """Nothing grows with a prompt's heads but what is chosen from, where all heads keep equally many."""
    of = {
        text: memory.event_bytes(Recipe.parse(text), shape(), False)
        for text in ("snapkv(keep=0.25)", "knorm(keep=0.9)")
    }
    assert set(of.values()) == {256 * MB}
    assert memory.event_bytes(Recipe.parse("knorm(keep=0.9)"), shape(1000), False) == 256 * MB
    whole = 131072 * 8 * 512
    # Where heads differ, or a server has contexts, all that stays is out of the pages at a time.
    for text in ("adakv(knorm, keep=0.25)", "knorm(keep=0.25)"):
        assert memory.event_bytes(Recipe.parse(text), shape(), True) == 256 * MB + whole // 4
    assert memory.event_bytes(Recipe.parse("adakv(knorm, keep=2048)"), shape(), True) == 256 * MB + 2048 * 8 * 512
    assert memory.event_bytes(Recipe.parse("match(knorm, keep=0.25)"), shape(), True) == 3 * whole + 64 * MB


def configured(share: float, given: int | None) -> Any:
    cache = SimpleNamespace(
        gpu_memory_utilization=share, kv_cache_memory_bytes=given, enable_prefix_caching=share < 0.9
    )
    return SimpleNamespace(cache_config=cache, additional_config=None)


def test_of_what_vllm_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 of 80 GB are the model's; nine tenths may be used, or eight where requests may share pages."""
    there = SimpleNamespace(is_cuda_alike=lambda: True, device_type="meta")
    monkeypatch.setattr("keepset.vllm.spec.current_platform", there)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 * GB, 80 * GB))
    recipe = Recipe.parse("snapkv(keep=0.25)")
    held = memory.reserve(configured(0.9, None), recipe, 4, columns_of(recipe, 4), shape())
    assert held.nbytes == int(56 * GB) * 4 // 516 + 256 * MB
    held = memory.reserve(configured(0.8, None), recipe, 4, columns_of(recipe, 4), shape())
    assert held.nbytes == int(48 * GB) * 4 // 516 + 256 * MB + 131072 * 8 * 32 * 4
    of_each_head = Recipe.parse("compilerkv(global_mean=False, elastic=False, keep=512, every=64)")
    held = memory.reserve(configured(0.8, None), of_each_head, 4, columns_of(of_each_head, 4), shape())
    assert held.nbytes == int(48 * GB) * 20 // 532 + 256 * MB + 4 * 131072 * 8 * 32 * 4
    assert memory.reserve(configured(0.9, 10 * GB), recipe, 4, columns_of(recipe, 4), shape()) is None


def test_a_cpu_measures_nothing() -> None:
    recipe = Recipe.parse("snapkv(keep=0.25)")
    assert memory.reserve(configured(0.9, None), recipe, 4, columns_of(recipe, 4), shape()) is None
