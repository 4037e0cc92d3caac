"""Queries before an event are added up a few at a time, those of all requests in the same steps."""

from __future__ import annotations

import torch

from keepset.paged.event_queue import EventQueue
from keepset.paged.freed_blocks import FreedBlocks
from tests.paged.layers import batch_of, layer_group

LAYERS, HEADS, GROUP, DIM, BLOCK, WIDTH, PROMPT = 1, 2, 2, 8, 4, 60, 40


def test_requests_of_any_phase_are_added_up_together() -> None:
    """Four of them, each a token behind the one before, so that one by one their rings are full in four steps."""
    caches = torch.randn(LAYERS, 4 * WIDTH, HEADS, BLOCK, 2 * DIM)
    group, queue = layer_group("snapkv(window=64, keep=100, every=64)", list(caches), GROUP), EventQueue(FreedBlocks())
    assert group.planner.recording.waiting == 4
    added = []
    for step in range(30):
        before = [PROMPT + step - behind for behind in range(4) if step >= behind]
        batch = batch_of([(PROMPT, n if n > PROMPT else 0, n + 1) for n in before], WIDTH, BLOCK)
        plan = queue.plan(group, batch)
        added.append([len(addition.slots) for addition in plan.before_events])
        group.record(range(LAYERS), plan, torch.randn(LAYERS, len(batch.slot_mapping), HEADS * GROUP, DIM))
    assert added[6:] == [[4] if step % 4 == added[:10].index([4]) % 4 else [] for step in range(6, 30)], added
