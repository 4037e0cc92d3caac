"""The workspace of an event is fixed, however long the prompt, and does not change what the event keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keepset.paged.event_queue import EventQueue
from keepset.paged.fp8 import EightBits
from keepset.paged.freed_blocks import FreedBlocks
from keepset.paged.layer_group import LayerGroup
from keepset.paged.query_operations import QueryAddition
from keepset.paged.step import StepPlan
from tests.paged.layers import batch_of, layer_group
from tests.paged.peak import Peak

LAYERS, HEADS, GROUP, DIM, BLOCK, WIDTH = 2, 3, 2, 8, 4, 40
STEPS = [
    [(30, 0, 33), (53, 0, 53), (21, 0, 21)],  # the first one's prompt ends before its step does
    [(30, 33, 37), (53, 53, 60), (21, 21, 28)],
    [(30, 37, 44), (53, 60, 67), (21, 28, 35)],
]
"""Prompts, and tokens before and after a step."""


def run(group: LayerGroup) -> None:
    """Three steps, whose events are executed; what new tokens write is in the pages already."""
    queue, draw = EventQueue(FreedBlocks()), torch.Generator().manual_seed(5)
    for step in STEPS:
        batch = batch_of(step, WIDTH, BLOCK)
        plan = queue.plan(group, batch)
        queries = torch.randn(len(group.layers), len(batch.slot_mapping), HEADS * GROUP, DIM, generator=draw)
        if plan.in_layers:
            group.record(range(len(group.layers)), plan, queries)
    queue.run()


def random_caches() -> Tensor:
    shape = LAYERS, len(STEPS[0]) * WIDTH, HEADS, BLOCK, 2 * DIM
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


RECIPES = [
    *("knorm(keep=11, every=7)", "keydiff(keep=11, every=7)", "snapkv(window=4, keep=11, every=7)"),
    *("adakv(snapkv(window=4), keep=11, every=7)", "tova(keep=0.3)", "r_kv(window=4, keep=11, every=7)"),
    "ams(tova, window=6, recent=4, sinks=1, keep=11, every=7)",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_heads_one_by_one_are_as_all_together(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where entries have come after the event, in its own step."""
    together, apart = random_caches(), random_caches()
    run(layer_group(recipe, list(together), GROUP))
    monkeypatch.setattr("keepset.paged.paged_observation.WORKSPACE", 1)
    monkeypatch.setattr("keepset.paged.event_execution.WORKSPACE", 1)
    monkeypatch.setattr("keepset.core.observation._AT_ONCE", 1)
    run(layer_group(recipe, list(apart), GROUP))
    assert not torch.equal(together, random_caches())
    assert torch.equal(together, apart)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_entries_of_eight_bits_are_those_that_they_stand_for(recipe: str, kind: torch.dtype) -> None:
    """Moved bit for bit; chosen as if a cache in float32 held what they mean, with each layer's own scales."""
    scales = [(0.5, 0.25), (0.3, 2.0)]
    stored = (random_caches() / 0.4).to(kind)
    how = [EightBits(kind, torch.tensor(keys), torch.tensor(values), torch.float32) for keys, values in scales]
    parts = [torch.tensor([keys, values]).repeat_interleave(DIM) for keys, values in scales]
    factors = torch.stack(parts)
    meant = stored.float() * factors[:, None, None, None]
    held = stored.view(torch.uint8)
    run(layer_group(recipe, list(held), GROUP, how))
    run(layer_group(recipe, list(meant), GROUP))
    assert not torch.equal(held, (random_caches() / 0.4).to(kind).view(torch.uint8))
    assert torch.equal(held.view(kind).float() * factors[:, None, None, None], meant)


def test_sums_are_a_requests_own_only_where_its_pages_are_anothers_too() -> None:
    """Three windows open in one step: two prompts begin alike, and the third has a later page of the first."""
    group, queue = layer_group("snapkv(window=8, keep=15)", list(random_caches()), GROUP), EventQueue(FreedBlocks())
    batch = batch_of([(53, 0, 53)] * 3, WIDTH, BLOCK)
    apart = queue.plan(group, batch)
    assert additions(apart) and not any(addition.owners for addition in additions(apart))
    draw = torch.randn(LAYERS, 159, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(5))
    group.record(range(LAYERS), apart, draw)
    assert not group.columns._private
    queue.run()
    batch = batch_of([(53, 0, 53)] * 3, WIDTH, BLOCK)
    batch.block_table[1, 0] = batch.block_table[0, 0]
    batch.block_table[2, 5] = batch.block_table[0, 5]
    shared = queue.plan(group, batch)
    assert [len(addition.owners) for addition in additions(shared)] == [0, 1, 1]
    group.record(range(LAYERS), shared, draw)
    assert group.columns._private
    queue.run()
    assert not group.columns._private


def additions(plan: StepPlan) -> list[QueryAddition]:
    """The additions of a step's plan."""
    return [operation for operation in plan.in_layers if isinstance(operation, QueryAddition)]


MIB = 2**20
LONG, SIZE, KV_HEADS, HEAD_DIM = 131072, 16, 8, 128


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    [
        # A window's attention takes most of the time: of all its queries once.
        *("adakv(snapkv, keep=0.25)", "snapkv(window=8, keep=0.25)", "chunkkv(snapkv(window=8), keep=0.25)"),
        *("knorm(keep=0.25)", "keydiff(keep=0.5)", "tova(keep=0.25)", "streaming_llm(keep=0.5)"),
    ],
)
def test_a_prompt_of_131072_tokens(recipe: str) -> None:
    """A layer of an 8B model, whose keys and values of it weigh 512 MiB: no more than 160 of 256 MiB besides.

    Queries of 64 requests take 80 more (`test_bytes`).
    """
    blocks = LONG // SIZE
    few = torch.randn(64, KV_HEADS, SIZE, 2 * HEAD_DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    group = layer_group(recipe, [few.repeat(blocks // 64, 1, 1, 1)], 4)
    _ = group.columns
    queue, request = EventQueue(FreedBlocks()), [(LONG, LONG - 64, LONG)]
    plan = queue.plan(group, batch_of(request, blocks, SIZE))
    queries = torch.randn(1, 64, KV_HEADS * 4, HEAD_DIM).bfloat16()
    with Peak() as peak:
        if plan.in_layers:
            group.record(range(1), plan, queries)
        queue.run()
    # Where heads differ all that stays is out of the pages at a time: here an eighth of a gigabyte.
    assert plan.events and 0 < peak.nbytes < 160 * MIB, peak.nbytes / MIB
