"""What is held beside the pool, while as many requests run as it holds entries of."""

from __future__ import annotations

import pytest
import torch

from keepset import Recipe
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.layer_group import LayerGroup
from keepset.paged.page_tables import FreedBlocks
from keepset.paged.pages import StridedPages
from keepset.paged.passing import PassingQueries
from keepset.paged.planner import Planner
from keepset.paged.query_records import slots_for
from keepset.paged.recording import Recording

REQUESTS, BLOCK = 64, 16
SMOLLM2, HALF_A_BILLION = (9, 3, 64, torch.float32, 96, 32), (14, 2, 64, torch.bfloat16, 96, 32)
OF_AMS_PAPER = (28, 4, 128, torch.bfloat16, 256, 512)


def beside(shape: tuple[int, int, int, torch.dtype, int, int], method: str) -> float:
    """Bytes that one layer holds of queries and of entries apart from keys and values, in those of keep + every entries
    of each request."""
    query_heads, kv_heads, size, dtype, keep, every = shape
    recipe = Recipe.of(Recipe.parse(method).method, keep=keep, every=every)
    blocks = REQUESTS * (keep + every) // BLOCK
    pages = StridedPages(torch.zeros(blocks, kv_heads, BLOCK, 2 * size, dtype=dtype))
    recording = Recording.of(recipe, query_heads // kv_heads, size, dtype.itemsize)
    schedule = EvictionSchedule(recipe, 0, (0,), kv_heads, BLOCK)
    planner = Planner(schedule, recording, (0,), REQUESTS, blocks, FreedBlocks())
    passing = PassingQueries(recording, 1, slots_for(REQUESTS), query_heads, size, dtype)
    group = LayerGroup(planner, [lambda: pages], passing, size**-0.5)
    return (passing.nbytes + group.columns.nbytes) / (pages.slots * pages.entry_bytes)


@pytest.mark.parametrize("shape", [SMOLLM2, HALF_A_BILLION, OF_AMS_PAPER], ids=["smollm2", "half a billion", "ams"])
@pytest.mark.parametrize("method", ["ams(tova)", "r_kv", "snapkv", "rpc"])
def test_a_tenth_of_the_entries_at_most(method: str, shape: tuple[int, int, int, torch.dtype, int, int]) -> None:
    assert 0 < beside(shape, method) <= 0.1


@pytest.mark.parametrize("shape", [SMOLLM2, HALF_A_BILLION, OF_AMS_PAPER], ids=["smollm2", "half a billion", "ams"])
def test_moments_weigh_as_much_as_their_queries_or_less(shape: tuple[int, int, int, torch.dtype, int, int]) -> None:
    """There is room for half as many requests again as run."""
    query_heads, kv_heads, size, dtype, keep, every = shape
    triangle = 4 * query_heads * (size * (size + 1) // 2 + size)
    queries = min(every, 256) * query_heads * size * dtype.itemsize
    least = 1.5 * min(triangle, queries) / ((keep + every) * kv_heads * 2 * size * dtype.itemsize)
    assert least < beside(shape, "ams(expected_attention(buffer=256))") < least + 0.1
