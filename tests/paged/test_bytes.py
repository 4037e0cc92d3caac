"""Bytes beside the pool, while as many requests run as the pool holds entries of."""

from __future__ import annotations

import pytest
import torch

from keepset import Recipe
from keepset.kernels.softmax import Softmax
from keepset.paged.layer_group import LayerGroup
from keepset.paged.pages import StridedPages
from keepset.paged.query_records import slots_for
from keepset.recording import QueryRing, Recording
from tests.paged.layers import batch_of, planner_of

REQUESTS, BLOCK = 64, 16
BY_HEAD = "compilerkv(elastic=False, global_mean=False)"
"""Which sums up for each query head."""
Shape = tuple[int, int, int, torch.dtype, int, int]
SHAPES = [
    pytest.param((9, 3, 64, torch.float32, 96, 32), id="smollm2"),
    pytest.param((14, 2, 64, torch.bfloat16, 96, 32), id="half a billion"),
    pytest.param((28, 4, 128, torch.bfloat16, 256, 512), id="ams paper"),
]
"""Query heads, KV heads, numbers of a head, type, keep and every."""


def beside(shape: Shape, method: str) -> float:
    """Bytes that one layer holds of queries and of entries apart from keys and values, in those of keep + every entries
    of each request."""
    query_heads, kv_heads, size, dtype, keep, every = shape
    recipe = Recipe.of(Recipe.parse(method).method, keep=keep, every=every)
    blocks = REQUESTS * (keep + every) // BLOCK
    pages = StridedPages([torch.zeros(blocks, kv_heads, BLOCK, 2 * size, dtype=dtype)])
    planner = planner_of(recipe, 1, kv_heads, BLOCK, query_heads // kv_heads, size, dtype.itemsize, blocks=blocks)
    ring = QueryRing(planner.recording, 1, slots_for(REQUESTS), query_heads, size, dtype)
    group = LayerGroup(planner, [lambda: pages], ring, Softmax(size**-0.5))
    return (ring.nbytes + sum(column.nbytes for column in group.columns._columns.values())) / (
        pages.slots * pages.entry_bytes
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["ams(tova)", "ams(snapkv)", "r_kv", "zigzag(snapkv)", "rpc", BY_HEAD])
def test_a_tenth_of_the_entries_at_most(method: str, shape: Shape) -> None:
    """Or, of seven sums of each small entry, a sixth."""
    assert 0 < beside(shape, method) <= (1 / 6 if (method, shape[0]) == (BY_HEAD, 14) else 0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_weigh_as_much_as_their_queries_or_less(shape: Shape) -> None:
    """There is room for a quarter more requests than run."""
    query_heads, kv_heads, size, dtype, keep, every = shape
    triangle = 4 * query_heads * (size * (size + 1) // 2 + size)
    queries = min(every, 256) * query_heads * size * dtype.itemsize
    least = 1.25 * min(triangle, queries) / ((keep + every) * kv_heads * 2 * size * dtype.itemsize)
    assert least < beside(shape, "ams(expected_attention(buffer=256))") < least + 0.1


@pytest.mark.parametrize("method", ["snapkv", "ams(tova)", "r_kv", "rpc", "adakv(snapkv)", "ams(snapkv(window=64))"])
def test_queries_of_64_requests_of_an_8b_model(method: str) -> None:
    """32 layers with 32 query heads and 8 KV heads of 128 numbers, whatever the prompts' lengths: under 128 MiB."""
    recipe = Recipe.of(Recipe.parse(method).method, keep=2048, every=256)
    recording = Recording.of_recipe(recipe, 4, 128, 2)
    ring = QueryRing(recording, 32, slots_for(REQUESTS), 32, 128, torch.bfloat16, "meta")
    assert ring.nbytes == 32 * 80 * recording.size * 32 * 128 * 2 < 2**27


def test_prompts_of_131072_tokens_are_compressed_one_by_one() -> None:
    """And short ones together, so that an event takes no more entries out of the pages than one prompt has."""
    planner = planner_of("knorm(keep=0.25)", 1, 8, BLOCK, 4, 128, 2, blocks=10**6)
    for length, together in ((131072, 1), (8192, 16), (500, 64)):
        plan = planner.plan(batch_of([(length, length - 1, length)] * REQUESTS, 131072 // BLOCK, BLOCK))
        assert [len(event.rows) for event in plan.events] == [together] * (REQUESTS // together)
