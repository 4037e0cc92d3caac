"""What a step's plan would ask of a GPU: where heads keep equally many, the host waits for nothing."""

from __future__ import annotations

import pytest
import torch

from keepset import Recipe
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.paged.page_tables import FreedBlocks
from keepset.paged.planner import Planner
from keepset.paged.step import ScheduledRequest, StepBatch

pytest.importorskip("triton")
from tests.posing import Gpu, Posing

BLOCK, WIDTH = 4, 30


def batch_of(requests: list[tuple[int, int, int]], posing: bool) -> StepBatch:
    """Of prompts, and the tokens before and after the step."""
    rows, first = [], 0
    for row, (prompt, before, after) in enumerate(requests):
        rows.append(ScheduledRequest(row, first, first + after - before, prompt, before, after))
        first += after - before
    table = torch.arange(len(rows) * WIDTH, dtype=torch.int32).view(len(rows), WIDTH)
    slots = [int(table[one.row, p // BLOCK]) * BLOCK + p % BLOCK for one in rows for p in range(one.before, one.after)]
    lengths = torch.tensor([one.after for one in rows], dtype=torch.int32)
    put = Posing if posing else lambda tensor: tensor
    starts = torch.tensor([0, *(one.end_query for one in rows)], dtype=torch.int32)
    most = max(one.after - one.before for one in rows)
    return StepBatch(rows, put(table), put(lengths), put(torch.tensor(slots)), put(starts), starts, most)


@pytest.mark.parametrize("number", [1, 12])
def test_equal_heads_are_planned_without_waiting(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, decoding with and without events, first ones and later ones; the plan is that of a CPU."""
    kinds = [(30, 0, 30), (30, 30, 31), (21, 34, 35), (40, 45, 46), (9, 9, 10)]
    requests = [kinds[index % len(kinds)] for index in range(number * len(kinds))]
    schedule = EvictionSchedule(Recipe.parse("knorm(keep=10, every=7)"), 0, (0, 1), 2, BLOCK)
    plain = batch_of(requests, posing=False)
    expected = Planner(schedule, (0, 1), 64, 10**4, FreedBlocks()).plan(plain)
    with Gpu(monkeypatch) as gpu:
        batch = batch_of(requests, posing=True)
        gpu.reset()
        plan = Planner(schedule, (0, 1), 64, 10**4, FreedBlocks()).plan(batch)
        assert not gpu.waits
    assert plan.shifted is not None and expected.shifted is not None and plan.events
    for made, there in (
        (plan.slot_mapping, expected.slot_mapping),
        (plan.shifted.block_table, expected.shifted.block_table),
        (plan.shifted.seq_lens, expected.shifted.seq_lens),
        *((one.rows, other.rows) for one, other in zip(plan.events, expected.events, strict=True)),
    ):
        assert torch.equal(made.held, there)  # type: ignore[attr-defined]
