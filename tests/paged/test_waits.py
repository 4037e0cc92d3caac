"""Host syncs and launches of steps and events on a GPU: few, as many for 8 layers as for two; and the CPU's numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset.core import statistics, tables
from keepset.core.rope import RotaryTable
from keepset.kernels.page_entries import addresses_of
from keepset.kernels.paged import append_to_pages, paged_attention
from keepset.kernels.softmax import Softmax
from keepset.paged.event_execution import EventQueue
from keepset.paged.layer_group import LayerGroup
from keepset.paged.layout_table import EmptiedBlocks
from keepset.paged.query_records import QueryRecord
from keepset.paged.request_table import RequestState
from keepset.paged.step import ScheduledRequest, StepBatch

pytest.importorskip("triton")
from keepset.kernels.triton import paged_window
from tests.kernels.codes import check_same_codes
from tests.kernels.interpreter import Noted
from tests.methods.naive import Shape, random_statistics
from tests.paged import layers
from tests.posing import Gpu, Posing

BLOCK, WIDTH = 4, 30
Put = Callable[[Tensor], Tensor]


def batch_of(requests: list[tuple[int, int, int]], posing: bool) -> StepBatch:
    return layers.batch_of(requests, WIDTH, BLOCK, *[Posing] * posing)


def held(tensor: Any) -> Tensor:
    """What a tensor on the make-believe GPU holds."""
    return tensor.held


# --- plans of steps


@pytest.mark.parametrize("number", [1, 5])
def test_equal_heads_are_planned_without_waiting(
    number: int, triton_interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decoding with and without events, first ones and later ones; then decoding, after one upload and one
    kernel. Nothing is uploaded if no request has lost entries since the step before.
    Attention gets the same addresses in every step, and the numbers that a CPU computes."""
    steps = [[(30, 0, 30), (30, 30, 31), (21, 34, 35), (40, 45, 46), (9, 9, 10)]]
    steps += [[(prompt, before, before + 1) for prompt in (30, 21, 23)] for before in (30, 31, 38, 39)]
    plain, addresses, right = layers.planner_of("knorm(keep=10, every=7)"), set(), None
    with Gpu(monkeypatch) as gpu:
        planner = layers.planner_of("knorm(keep=10, every=7)")
        for place, step in enumerate(steps):
            batch, there = batch_of(step * number, posing=True), batch_of(step * number, posing=False)
            gpu.reset()
            plan = planner.plan(batch)
            assert not gpu.waits
            launches, before, right = dict(gpu.launches), right, plain.plan(there)
            if place >= 2 and not plan.events:
                same = right.shifted.dropped.tolist() == before.shifted.dropped.tolist()
                assert launches == {"_shift": 1} | ({} if same else {"_to_copy": 1})
            told, shifted = plan.shifted, right.shifted
            assert told is not None and shifted is not None and (place or plan.events)
            assert torch.equal(held(batch.slot_mapping), there.slot_mapping)
            assert torch.equal(held(plan.slot_mapping), right.slot_mapping)
            assert torch.equal(held(told.seq_lens), shifted.seq_lens)
            for row, entries in enumerate(shifted.seq_lens.tolist()):
                made = held(told.block_table)[row, : -(-entries // BLOCK)]
                assert torch.equal(made, shifted.block_table[row, : len(made)])
            for made, of in zip(plan.events, right.events, strict=True):
                assert torch.equal(held(made.at), of.at)
            addresses.add((told.block_table.data_ptr(), told.seq_lens.data_ptr()))
    assert len(addresses) == 1


PROMPTS, DECODING = [(30, 0, 30), (21, 0, 21)], [(30, 30, 31), (21, 21, 22)]


def planned(steps: list[list[tuple[int, int, int]]], put: Any, gpu: Gpu | None = None) -> list[Any]:
    """Plans of these steps, counted one by one; at events first heads keep 6 entries, second ones 14."""
    planner, plans = layers.planner_of("adakv(knorm, keep=10, every=50)", blocks=10**3), []
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
            assert torch.equal(held(part).long(), other.long())
        assert torch.equal(held(made.slot_mapping), there.slot_mapping)
        assert torch.equal(held(made.ragged.tokens.lengths).long(), there.ragged.tokens.lengths.long())
    prompt = range(2 * WIDTH * BLOCK, 2 * WIDTH * BLOCK + 17)
    assert held(plans[2].slot_mapping).tolist() == [-1, -1, *prompt]


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
        paged_attention(queries, [cache, cache], 1, tokens, plan.ragged.of_layer(1), Softmax(0.25), output)
        assert gpu.launches == {"_append_to_pages": 1, "_attend_pages": 1, "_merge_parts": 1}
        assert not gpu.waits


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
    with layers.Allocated() as allocated:
        plan = planner.plan(mixed)
    assert plan.ragged is not None and plan.ragged.others
    # The blocks of the request whose prompt ends are its event's.
    assert allocated.total < 2**22


@pytest.mark.parametrize("recipe", ["snapkv(window=5, keep=10, every=7)", "ams(tova, window=9, keep=40, every=7)"])
@pytest.mark.parametrize("number", [1, 12])
def test_recorded_queries_are_planned_with_one_look(number: int, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One host sync reads all pages, by which requests are known; there is none if no window is open."""

    def recorded_so_far(page: int, request: ScheduledRequest) -> RequestState:
        return RequestState(page, request.before, request.prompt, record=QueryRecord(0, 0, request.before))

    kinds = [(60, 0, 60), (60, 60, 61), (53, 66, 67), (70, 76, 77)]
    with Gpu(monkeypatch) as gpu:
        for open_windows, some in ((True, kinds * number), (False, [(90, 0, 50)] * number)):
            batch, planner = batch_of(some, posing=True), layers.planner_of(recipe)
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
        assert bool(planner.plan(batch_of([request], posing=False)).in_layers) == (event > keep)


# --- events

HEADS, DIM, ROWS = 2, 8, 2
FIRST, AGAIN = [(18, 0, 18), (13, 0, 13)], [(18, 18, 25), (13, 13, 20)]


def random_caches(number: int, rows: int = ROWS, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(number, rows * WIDTH, HEADS, BLOCK, 2 * DIM, generator=draw)


def group_of(recipe: str, caches: Tensor, put: Put) -> tuple[LayerGroup, EventQueue]:
    """Layers with these caches, which an event writes to."""
    angles = torch.arange(64.0)[:, None] / 10.0 ** torch.arange(DIM // 2)
    rotary = RotaryTable(put(torch.cat((angles.cos(), angles.sin()), 1)), halves=True)
    return layers.layer_group(recipe, list(map(put, caches)), 1, rotary=rotary), EventQueue(EmptiedBlocks())


def plain(tensor: Tensor) -> Tensor:
    return tensor


class Projection:
    """A projection of a layer that does not rotate, so that its queries follow from hidden states alone."""

    def __init__(self, weights: Tensor, hidden: Tensor) -> None:
        self._weights, self.hidden = weights, hidden

    def queries(self, hidden: Tensor) -> Tensor:
        return (hidden @ self._weights).unflatten(-1, (HEADS, DIM)).transpose(1, 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """Recipes whose files are of a model with so many layers."""
    folder = tmp_path_factory.mktemp("files")

    def recipe(text: str, number: int) -> str:
        measured, compiled = (folder / f"{number}.{kind}" for kind in ("stats", "tables"))
        if not measured.exists():
            of = random_statistics(Shape((1,), HEADS, 1, DIM, DIM), tuple(range(number)))
            statistics.save(replace(of, provenance={"model": {"layers": list(range(number))}}), measured)
            tables.save(tables.neutral(number, HEADS, 0.5), compiled)
        return text.replace("stats", f"stats='{measured}'").replace("tables", f"tables='{compiled}'")

    return recipe


BY_LAYER = [
    *("random(keep=10)", "adakv(random, keep=10)", "qfilter(stats, keep=10)"),
    *("triattention(stats, horizon=8, keep=10)", "expected_attention(stats, future=4, keep=10)"),
    *("duo_attention(stats, keep=0.6, sinks=1, recent=2)", "gvote(samples=3, future=4)"),
    *("compilerkv(tables, window=5, elastic=False, keep=10)", "adakv(distilled(stats), recent=2, keep=10)"),
]
"""Methods that depend on the layer."""


@pytest.mark.few(6)
@pytest.mark.parametrize("recipe", [*BY_LAYER, "adakv(snapkv(window=5), keep=10)"])
def test_what_depends_on_the_layer_launches_the_same(
    recipe: str, files: Callable[[str, int], str], triton_interpreted: None
) -> None:
    """And waits once. Counted, not computed; the products of layers' own weights apart, which are one each."""
    counted = []
    for number in (2, 8):
        text = files(recipe, number)
        with pytest.MonkeyPatch.context() as patch, Gpu(patch, computes=False) as gpu:
            statistics._read.cache_clear()  # which know what lies on the device already
            rotary = RotaryTable(Posing(torch.ones(64, DIM).masked_fill(torch.arange(DIM) >= DIM // 2, 0.0)), True)
            hidden = Posing(torch.randn(31, 6))
            projections = [Projection(Posing(torch.randn(6, HEADS * DIM)), hidden) for _ in range(number)]
            caches = list(Posing(random_caches(number)))
            group = layers.layer_group(text, caches, 1, rotary=rotary, projections=projections)
            queue = EventQueue(EmptiedBlocks())
            plan = queue.plan(group, batch_of(FIRST, posing=True))
            queries = torch.stack([each.queries(hidden[None])[0].transpose(0, 1) for each in projections])
            if plan.in_layers:
                group.record(range(number), plan, queries)
            gpu.reset()
            queue.run()
            assert not recipe.startswith("gvote") or gpu.launches.pop("mm") == number
            counted.append((gpu.launches.total(), gpu.waits.total(), len(plan.events)))
    few, more = counted
    assert few == more and few[1] == few[2] and 0 < few[0] < 500, gpu.launches


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "recipe", ["distilled(stats, recent=2, keep=10, every=7)", "adakv(distilled(stats), recent=2, keep=10, every=7)"]
)
def test_new_entries_are_scored_in_one_launch(
    recipe: str, files: Callable[[str, int], str], triton_interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers, at the first event and at a later one; what stays, and what is remembered, is the CPU's."""
    text, right = files(recipe, 3), random_caches(3)
    there = right.clone()
    group, queue = group_of(text, right, plain)
    for step in (FIRST, AGAIN):
        queue.plan(group, batch_of(step, posing=False))
    queue.run()
    with Gpu(monkeypatch) as gpu:
        statistics._read.cache_clear()  # which know what lies on the device already
        posing, queue = group_of(text, there, Posing)
        for step in (FIRST, AGAIN):
            plan = queue.plan(posing, batch_of(step, posing=True))
            gpu.reset()
            queue.run()
            assert gpu.launches["_entry_codes"] == len(plan.events) == gpu.waits.total()
            assert "_read_pages" not in gpu.launches
    assert torch.equal(right, there)
    check_same_codes(held(posing.columns["code"]), group.columns["code"], 0.9)


DECODED = [FIRST, *([(prompt, prompt + n, prompt + n + 1) for prompt, _, _ in FIRST] for n in range(8))]
"""A step of prompts and some of one token."""


def decoded(
    recipe: str, caches: Tensor, gpu: Gpu | None, steps: list[list[tuple[int, int, int]]], shared: bool = False
) -> tuple[LayerGroup, list[tuple[int, int, int]]]:
    """What these steps leave, and launches, waits and events after each; all but the last request may share a page."""
    put, counted = plain if gpu is None else Posing, []
    group, queue = group_of(recipe, caches, put)
    for number, step in enumerate(steps):
        batch = batch_of(step, posing=gpu is not None)
        table = batch.block_table if gpu is None else held(batch.block_table)
        table[1:-1, 0] = table[0, 0] if shared else table[1:-1, 0]
        draw, tokens = torch.Generator().manual_seed(number), len(batch.slot_mapping)
        # Of all layers the same, so that 2 of them say what 8 do.
        queries = torch.randn(tokens, HEADS, DIM, generator=draw).expand(len(caches), -1, -1, -1).contiguous()
        plan = queue.plan(group, batch)
        group.record(range(len(caches)), plan, put(queries))
        if gpu is not None:
            gpu.reset()
        queue.run()
        if gpu is not None:
            counted.append((gpu.launches.total(), gpu.waits.total(), len(plan.events)))
    return group, counted


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        *[("knorm(keep=10, every=7)", 120), ("keydiff(keep=10, every=7)", 130)],
        *[("adakv(knorm, keep=10, every=7)", 330), ("pool(knorm, keep=10, every=7)", 350)],
        *[("composite(knorm, keep=10, every=7)", 390), ("snapkv(window=5, keep=10, every=7)", 150)],
        ("ams(tova, window=6, recent=4, sinks=1, min_segment=2, max_segment=4, keep=10, every=7)", 390),
        ("expected_attention(buffer=7, future=4, skip=1, prefill=False, keep=10, every=7)", 270),
        ("adakv(snapkv(window=5), keep=10, every=7)", 370),
    ],
)
def test_steps_launch_the_same_for_any_number_of_layers(recipe: str, most: int, triton_interpreted: None) -> None:
    """Only events wait, once each, for how many entries heads keep; all is what a CPU makes.

    Events are of two lengths where heads are equal. What is added up of many layers is counted, and not computed.
    """
    counted = []
    for number in (2, 8):
        there = random_caches(number, seed=number)
        right = there.clone()
        group, _ = decoded(recipe, right, None, DECODED)
        sums = group.planner.recording.sums
        with pytest.MonkeyPatch.context() as patch, Gpu(patch) as gpu:
            for name in ("_paged_lse", "_add_in_pages") if number > 2 else ():
                patch.setattr(getattr(paged_window, name), "_kernel", Noted())
            posing, steps = decoded(recipe, there, gpu, DECODED)
        counted.append(steps)
        for feature in sums if number == 2 else ():
            column = group.columns[feature.column]
            torch.testing.assert_close(held(posing.columns[feature.column]), column)
            assert column.any()
        assert torch.equal(right, there) or (sums and number > 2)
    assert counted[0] == counted[1] and any(events for *_, events in counted[0])
    assert all(waits == events and launches <= most * events for launches, waits, events in counted[0] if events)
    assert not any(waits for _, waits, events in counted[0] if not events)
    assert not sums or max(launches for launches, _, events in counted[0] if not events) > 0


@pytest.mark.full
def test_requests_that_share_pages_are_added_up_in_the_same_launches(triton_interpreted: None) -> None:
    """Three as five, of which the last shares none; sums are those that a CPU adds up."""
    recipe, counted = "snapkv(window=5, keep=10, every=7, prefill=False)", []
    for rows in (3, 5):
        # The window opens with the third step, and then four queries wait.
        there, steps = random_caches(2, rows), [[(12, 12 + n, 13 + n)] * rows for n in range(6)]
        right, _ = decoded(recipe, there, None, steps, shared=True)
        with pytest.MonkeyPatch.context() as patch, Gpu(patch) as gpu:
            made, launches = decoded(recipe, there, gpu, steps, shared=True)
        both = [[group.columns["received of 5"], *group.columns._private.values()] for group in (right, made)]
        assert len(both[0]) == len(both[1]) == 1 + rows - 2
        torch.testing.assert_close([held(column) for column in both[1]], both[0])
        counted.append(launches[-1])
    assert counted[0] == counted[1] and counted[0][1] == 0 < counted[0][0]
