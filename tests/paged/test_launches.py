"""What an event would launch on a GPU: no more for many layers than for two, and it keeps what a CPU keeps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from keepset import Recipe
from keepset.paged.event_queue import EventQueue
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.layer_group import LayerGroup
from keepset.paged.page_tables import FreedBlocks
from keepset.paged.pages import StridedPages
from keepset.paged.passing import PassingQueries
from keepset.paged.planner import Planner
from keepset.paged.query_records import slots_for
from keepset.paged.recording import Recording

pytest.importorskip("triton")
from tests.paged.test_waits import BLOCK, WIDTH, batch_of
from tests.posing import Gpu, Posing

HEADS, DIM, ROWS = 2, 8, 2
FIRST, AGAIN = [(18, 0, 18), (13, 0, 13)], [(18, 18, 25), (13, 13, 20)]


def group(recipe: str, caches: list[Tensor]) -> LayerGroup:
    layers = tuple(range(len(caches)))
    schedule = EvictionSchedule(Recipe.parse(recipe), 0, layers, HEADS, BLOCK)
    recording = Recording.of(schedule.recipe, 1, DIM, 4)
    planner = Planner(schedule, recording, layers, 8, ROWS * WIDTH, FreedBlocks())
    passing = PassingQueries(recording, len(layers), slots_for(8), HEADS, DIM, torch.float32)
    return LayerGroup(planner, [partial(StridedPages, cache) for cache in caches], passing, 1.0)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["knorm(keep=10, every=7)", "keydiff(keep=10, every=7)"])
def test_an_event_launches_the_same_for_any_number_of_layers(recipe: str, triton_interpreted: None) -> None:
    counted = []
    for layers in (2, 32):
        draw = torch.Generator().manual_seed(layers)
        there = torch.randn(layers, ROWS * WIDTH, HEADS, BLOCK, 2 * DIM, generator=draw)
        here = there.clone()
        plain, queue = group(recipe, list(here)), EventQueue(FreedBlocks())
        for step in (FIRST, AGAIN, []):
            queue.plan(plain, batch_of(step, posing=False)) if step else queue.run()
        with pytest.MonkeyPatch.context() as patch, Gpu(patch) as gpu:
            posing, queue = group(recipe, list(map(Posing, there))), EventQueue(FreedBlocks())
            for step in (FIRST, AGAIN):
                queue.plan(posing, batch_of(step, posing=True))
                gpu.reset()
                queue.run()
                counted.append((gpu.launches.total(), gpu.waits.total()))
        assert torch.equal(here, there)
    first, again, *many = counted
    assert many == [first, again]
    # Prompts of two lengths are two events, and then one; the host asks for nothing but how many entries each keeps.
    assert (first[1], again[1]) == (2, 1) and first[0] <= 2 * 110
