"""Host syncs and launches of a step's plan, and of layers with ragged heads, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from keepset.kernels.page_entries import addresses_of
from keepset.kernels.paged import append_to_pages, paged_attention
from keepset.paged.query_records import QueryRecord
from keepset.paged.request_table import RequestState
from keepset.paged.step import ScheduledRequest, StepBatch

pytest.importorskip("triton")
from tests.paged import layers
from tests.posing import Gpu, Posing

BLOCK, WIDTH = 4, 30


def batch_of(requests: list[tuple[int, int, int]], posing: bool) -> StepBatch:
    return layers.batch_of(requests, WIDTH, BLOCK, *[Posing] * posing)


@pytest.mark.parametrize("number", [1, 12])
def test_equal_heads_are_planned_without_waiting(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, decoding with and without events, first ones and later ones; the plan is that of a CPU."""
    kinds = [(30, 0, 30), (30, 30, 31), (21, 34, 35), (40, 45, 46), (9, 9, 10)]
    requests = [kinds[index % len(kinds)] for index in range(number * len(kinds))]
    plain = batch_of(requests, posing=False)
    expected = layers.planner_of("knorm(keep=10, every=7)").plan(plain)
    with Gpu(monkeypatch) as gpu:
        batch = batch_of(requests, posing=True)
        gpu.reset()
        plan = layers.planner_of("knorm(keep=10, every=7)").plan(batch)
        assert not gpu.waits
    assert plan.shifted is not None and expected.shifted is not None and plan.events
    for made, there in (
        (plan.slot_mapping, expected.slot_mapping),
        (plan.shifted.block_table, expected.shifted.block_table),
        (plan.shifted.seq_lens, expected.shifted.seq_lens),
        *((one.at, other.at) for one, other in zip(plan.events, expected.events, strict=True)),
    ):
        assert torch.equal(made.held, there)  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [1, 12])
def test_equal_heads_decode_after_one_upload_and_one_kernel(
    number: int, triton_interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention gets the same addresses in every step, and the numbers that a CPU computes."""
    plain, addresses = layers.planner_of("knorm(keep=10, every=7)"), []
    with Gpu(monkeypatch) as gpu:
        planner = layers.planner_of("knorm(keep=10, every=7)")
        for before in (30, 31, 38, 39):
            requests = [(30, before, before + 1), (21, before, before + 1), (23, before, before + 1)] * number
            batch, there = batch_of(requests, posing=True), batch_of(requests, posing=False)
            gpu.reset()
            told = planner.plan(batch).shifted
            if not plain.schedule.due(30, before, before + 1):
                assert not gpu.waits
                assert before == 30 or gpu.launches == {"_to_copy": 1, "_shift": 1}
            assert told is not None
            addresses.append((told.block_table.data_ptr(), told.seq_lens.data_ptr()))
            right = plain.plan(there).shifted
            assert right is not None and torch.equal(batch.slot_mapping.held, there.slot_mapping)  # type: ignore[attr-defined]
            assert torch.equal(told.seq_lens.held, right.seq_lens)  # type: ignore[attr-defined]
            for row, entries in enumerate(right.seq_lens.tolist()):
                made = told.block_table.held[row, : -(-entries // BLOCK)]  # type: ignore[attr-defined]
                assert torch.equal(made, right.block_table[row, : len(made)])
    assert len(set(addresses)) == 1


RAGGED = "adakv(knorm, keep=10, every=50)"
PROMPTS, DECODING = [(30, 0, 30), (21, 0, 21)], [(30, 30, 31), (21, 21, 22)]


def planned(steps: list[list[tuple[int, int, int]]], put: Any, gpu: Gpu | None = None) -> list[Any]:
    """Plans of these steps, counted one by one; at events first heads keep 6 entries, second ones 14."""
    planner, plans = layers.planner_of(RAGGED, blocks=10**3), []
    for requests in steps:
        batch = batch_of(requests, posing=put is Posing)
        if gpu is not None:
            gpu.reset()
        plans.append(planner.plan(batch))
        if gpu is not None and not plans[-1].events:
            assert not gpu.waits
            # Lengths there, layouts, and back whether one was lost; beside prompts also places, and what is hidden.
            assert sum(gpu.launches.values()) <= (3 if plans[-1].shifted is None else 9), gpu.launches
        for event in plans[-1].events:
            assignment = event.pages.assign(range(2), put(torch.tensor([[6, 14]] * len(event.rows) * 2)))
            assert all(assignment.fits.host_values)
            assignment.take(14)
    return plans


@pytest.mark.full
def test_ragged_heads_are_planned_without_waiting(triton_interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of decoding alone, and one with a prompt beside it; all are those of a CPU."""
    steps = [PROMPTS, DECODING, [(30, 31, 32), (21, 22, 23), (40, 0, 17)]]
    plain = planned(steps, lambda tensor: tensor)
    with Gpu(monkeypatch) as gpu:
        plans = planned(steps, Posing, gpu)
    for made, there in zip(plans[1:], plain[1:], strict=True):
        for part, other in zip(made.ragged.layout, there.ragged.layout, strict=True):
            assert torch.equal(part.held.long(), other.long())
        assert torch.equal(made.slot_mapping.held, there.slot_mapping)
        tokens, others = made.ragged.tokens, there.ragged.tokens
        assert torch.equal(tokens.lengths.held.long(), others.lengths.long())
    prompt = range(2 * WIDTH * BLOCK, 2 * WIDTH * BLOCK + 17)
    assert plans[2].slot_mapping.held.tolist() == [-1, -1, *prompt]


def test_a_ragged_layer_decodes_in_three_launches(triton_interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with Gpu(monkeypatch) as gpu:
        plan = planned([PROMPTS, DECODING], Posing)[1]
        cache = Posing(torch.randn(2 * WIDTH, 2, BLOCK, 32))
        queries, keys, values = (Posing(torch.randn(2, heads, 16)) for heads in (6, 2, 2))
        # Of a length that is worth several parts.
        tokens = plan.ragged.tokens._replace(longest=1000)
        output = Posing(torch.zeros(2, 6, 16))
        addresses_of([cache, cache])  # which are uploaded once
        gpu.reset()
        append_to_pages(keys, values, cache, tokens, plan.ragged.of_layer(1))
        paged_attention(queries, [cache, cache], 1, tokens, plan.ragged.of_layer(1), 0.25, output)
        assert gpu.launches == {"_append_to_pages": 1, "_attend_pages": 1, "_merge_parts": 1}
        assert not gpu.waits


class Allocated(TorchDispatchMode):
    """Bytes that operators make, of what is not a view."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        for each in output if isinstance(output, tuple | list) else [output]:
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.nbytes += each.untyped_storage().nbytes()
        return output


@pytest.mark.full
def test_a_long_prompt_beside_compressed_requests_takes_no_tables() -> None:
    """There are 32 layers with 8 KV heads and blocks of 16, and 63 other requests. Tables would take 3.6 GiB."""
    places, size, prompt = range(32), 16, 131072
    planner = layers.planner_of("adakv(knorm, keep=256)", len(places), 8, size, 4, 128, 2, blocks=64 * prompt // size)
    for event in planner.plan(layers.batch_of([(500, 0, 500)] * 63, prompt // size, size)).events:
        assignment = event.pages.assign(places, torch.full((len(event.rows) * 32, 8), 256))
        assert assignment.fits is not None and all(assignment.fits.host_values)
        assignment.take(256)
    mixed = layers.batch_of([(500, 500, 501)] * 63 + [(prompt, prompt - 8192, prompt)], prompt // size, size)
    with Allocated() as allocated:
        plan = planner.plan(mixed)
    assert plan.ragged is not None and plan.ragged.others
    # All that was made, one after another. The blocks of the request whose prompt ends are its event's.
    assert allocated.nbytes < 2**22


@pytest.mark.parametrize("recipe", ["snapkv(window=5, keep=10, every=7)", "ams(tova, window=9, keep=40, every=7)"])
@pytest.mark.parametrize("number", [1, 12])
def test_recorded_queries_are_planned_with_one_look(number: int, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One host sync reads all pages, by which requests are known; there is none if no window is open."""
    kinds = [(60, 0, 60), (60, 60, 61), (53, 66, 67), (70, 76, 77)]
    with Gpu(monkeypatch) as gpu:
        for open_windows, some in ((True, kinds * number), (False, [(90, 0, 50)] * number)):
            batch = batch_of(some, posing=True)
            planner = layers.planner_of(recipe)
            planner.requests._claim = recorded_so_far  # type: ignore[method-assign]
            gpu.reset()
            plan = planner.plan(batch)
            assert sum(gpu.waits.values()) == open_windows, gpu.waits
            assert bool(plan.in_layers) == open_windows


@pytest.mark.parametrize("keep", [10, 73, 74, 1000])
def test_nothing_is_recorded_for_events_that_drop_nothing(keep: int) -> None:
    """A window before the events at 60 tokens, of a prompt, and at 74 is open."""
    for request, event in (((60, 0, 58), 60), ((60, 69, 70), 74)):
        planner = layers.planner_of(f"snapkv(window=7, keep={keep}, every=7)")
        plan = planner.plan(batch_of([request], posing=False))
        assert bool(plan.in_layers) == (event > keep)


def recorded_so_far(page: int, request: ScheduledRequest) -> RequestState:
    """A state as if all queries had been recorded so far."""
    return RequestState(page, request.before, request.prompt, record=QueryRecord(0, 0, request.before))
