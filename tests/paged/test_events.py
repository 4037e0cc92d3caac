"""Events lie between steps: when they are executed, that their workspace is fixed, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keepset.core.rope import RotaryTable
from keepset.core.statistics import save
from keepset.kernels.page_format import PageFormat
from keepset.kernels.predictor import entry_codes
from keepset.paged import event_execution
from keepset.paged.event_execution import EventQueue
from keepset.paged.layer_group import LayerGroup
from keepset.paged.layout_table import EmptiedBlocks
from keepset.paged.query_records import QueryAddition
from keepset.paged.step import StepPlan
from tests.kernels.codes import check_same_codes
from tests.kernels.quantised import format_of, meant, random_rows
from tests.methods.naive import Shape, random_statistics
from tests.paged.engine import Engine, Request
from tests.paged.layers import Allocated, batch_of, layer_group

Executed = list[tuple[int, int]]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executed]:
    """Layers and points of events, as they are executed."""
    execute, done = event_execution.execute, Executed()

    def watched(group: LayerGroup, event: object, entries: object, *rest: object) -> None:
        points = event.at.tolist()  # type: ignore[attr-defined]
        done.extend((group.layers[place], at) for place in entries.places for at in points)  # type: ignore[attr-defined]
        execute(group, event, entries, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(event_execution, "execute", watched)
    yield done


# --- each is executed once, in all layers, before the next step of any of them is planned


@pytest.mark.parametrize("recipe", ["knorm(keep=9)", "pyramid(knorm, keep=9)", "pool(snapkv(window=2), keep=9)"])
def test_they_wait_for_the_next_step(recipe: str, executed: Executed) -> None:
    """There is one group of layers, or one for each layer. The step's own blocks are still there."""
    engine, request = Engine(recipe, 60), Request(0, 30)
    engine.step({0: 30}, {0: request})
    assert not executed
    for _ in range(2):
        engine.step({0: 1}, {0: request})
        assert sorted(executed) == [(0, 30), (1, 30), (2, 30)]


def test_an_event_is_executed_though_its_request_is_gone(executed: Executed) -> None:
    """The pages belong to another request by then, which has not written to them yet."""
    engine, gone, next_one = Engine("snapkv(window=3, kernel=1, keep=9)", 12), Request(0, 30), Request(1, 40)
    engine.step({0: 30}, {0: gone})
    engine.leave(gone)
    for tokens in (40, 1, 1):
        engine.step({1: tokens}, {1: next_one})
    assert sorted(executed) == sorted((layer, at) for layer in range(3) for at in (30, 40))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("recipe", "prompts", "rows"),
    [
        *((each, (20, 27, 34), [[2, 1, 0]]) for each in ("adakv(knorm, keep=9, every=8)", "mass(window=4)")),
        ("adakv(knorm, keep=0.4)", (20, 27, 34), [[2, 1, 0]]),
        ("knorm(keep=9)", (20, 27, 34), [[0], [1], [2]]),
        # None is looked at as if it were three times as long.
        ("adakv(knorm, keep=9)", (60, 20, 33), [[0, 2], [1]]),
    ],
)
def test_requests_of_different_lengths_are_one_event_where_heads_differ(
    recipe: str, prompts: tuple[int, ...], rows: list[list[int]]
) -> None:
    """Each keeps what it would keep alone, which the engine checks."""
    engine, requests = Engine(recipe, 200), {number: Request(number, prompt) for number, prompt in enumerate(prompts)}
    engine.step({number: request.prompt for number, request in requests.items()}, requests)
    for plan in engine.events.steps.values():
        assert [event.rows for event in plan.events] == rows
    for _ in range(9):
        engine.step(dict.fromkeys(requests, 1), requests)
    assert all(request.events for request in requests.values())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": [1]}, "lost count of the requests"),
        ({"keep": [1]}, "kept another number of entries than its quotas say"),
    ],
)
def test_groups_and_the_scheduler_must_mean_the_same(change: dict[str, list[int]], says: str) -> None:
    engine = Engine("pool(snapkv(window=2), keep=9)", 60)
    engine.step({0: 30}, {0: Request(0, 30)})
    for plan in list(engine.events.steps.values())[-1 if "rows" in change else 0 :]:
        plan.events[0] = replace(plan.events[0], **change)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=says):
        engine.events.run()


# --- a workspace is fixed, however long the prompt

LAYERS, HEADS, GROUP, DIM, BLOCK, WIDTH = 2, 3, 2, 8, 4, 40
STEPS = [
    [(30, 0, 33), (53, 0, 53), (21, 0, 21)],  # the first one's prompt ends before its step does
    [(30, 33, 37), (53, 53, 60), (21, 21, 28)],
    [(30, 37, 44), (53, 60, 67), (21, 28, 35)],
]
"""Prompts, and tokens before and after a step."""


def run(group: LayerGroup) -> None:
    """Three steps, whose events are executed; what new tokens write is in the pages already."""
    queue, draw = EventQueue(EmptiedBlocks()), torch.Generator().manual_seed(5)
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


@pytest.mark.few(4)
@pytest.mark.parametrize("recipe", RECIPES)
def test_heads_one_by_one_are_as_all_together(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where entries have come after the event, in its own step."""
    together, apart = random_caches(), random_caches()
    run(layer_group(recipe, list(together), GROUP))
    monkeypatch.setattr("keepset.paged.pages.WORKSPACE", 1)
    monkeypatch.setattr("keepset.paged.event_execution.WORKSPACE", 1)
    monkeypatch.setattr("keepset.core.observation._AT_ONCE", 1)
    run(layer_group(recipe, list(apart), GROUP))
    assert not torch.equal(together, random_caches()) and torch.equal(together, apart)


FORMATS = [("fp8", True), ("fp8_e5m2", True), ("fp8", False), ("int8", False)]
"""Kinds of numbers, and whether a layer has one scale for all keys and one for all values."""
SCALES = [(5e-5, 0.25), (3e-5, 2.0)]


def quantised(kind: str, per_layer: bool) -> tuple[list[PageFormat], Tensor, Callable[[Tensor], Tensor]]:
    """The formats of layers, caches of them, and what such caches mean in float32."""
    formats = [format_of(kind, DIM, torch.float32, scales if per_layer else None) for scales in SCALES]
    draw = torch.Generator().manual_seed(3)
    places = LAYERS, len(STEPS[0]) * WIDTH, HEADS, BLOCK, 2
    held = random_rows(*places, kind=kind, head_dim=DIM, own_scales=not per_layer, draw=draw).flatten(-2)

    def floats(caches: Tensor) -> Tensor:
        layers = [
            [meant(part, kind, DIM, scale if per_layer else None) for part, scale in zip(parts, scales, strict=True)]
            for parts, scales in zip((cache.chunk(2, -1) for cache in caches), SCALES, strict=True)
        ]
        return torch.stack([torch.cat(parts, -1).float() for parts in layers])

    return formats, held, floats


@pytest.mark.cross
@pytest.mark.parametrize(("kind", "per_layer"), FORMATS)
@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_quantised_entries_are_those_that_they_stand_for(recipe: str, kind: str, per_layer: bool) -> None:
    """Moved bit for bit with their scales; chosen as if a cache in float32 held what they mean."""
    formats, held, floats = quantised(kind, per_layer)
    whole, before = floats(held), held.clone()
    run(layer_group(recipe, list(held), GROUP, formats))
    run(layer_group(recipe, list(whole), GROUP))
    assert not torch.equal(held, before) and torch.equal(floats(held), whole)
    known = {tuple(row) for row in before.flatten(0, -2).tolist()}
    assert {tuple(row) for row in held.flatten(0, -2).tolist()} <= known


def rotation(dim: int) -> RotaryTable:
    angles = torch.arange(80)[:, None] * torch.logspace(0, -2, dim // 2)
    return RotaryTable(torch.cat([angles.cos(), angles.sin()], 1), halves=True)


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "per_layer"), FORMATS)
def test_fitted_values_are_rounded_once(kind: str, per_layer: bool) -> None:
    """All others are moved, and keys as well."""
    formats, held, floats = quantised(kind, per_layer)
    whole, recipe = floats(held), "match(adakv(snapkv(window=4)), biases=False, keep=11)"
    before = whole.clone()
    rotary = rotation(DIM)
    run(layer_group(recipe, list(held), GROUP, formats, rotary=rotary))
    run(layer_group(recipe, list(whole), GROUP, rotary=rotary))
    (keys, values), (right, fitted) = (caches.chunk(2, -1) for caches in (floats(held), whole))
    assert torch.equal(keys, right)
    changed = (fitted[..., None, :] != before.chunk(2, -1)[1].flatten(1, 3)[:, None, None, None]).any(-1).all(-1)
    assert changed.any() and torch.equal(values[~changed], fitted[~changed])
    for layer, how in enumerate(formats):
        scale = None if how.value_scale is None else how.value_scale.expand(int(changed[layer].sum()))
        rounded = how.decode(how.encode(fitted[layer][changed[layer]], scale), scale)
        found = values[layer][changed[layer]]
        # Mixed rows are read in float32, and here in float64: of what is fitted to them the fifth digit differs, and
        # decides between two steps that are as near.
        if kind == "int8":
            assert how.mixing is not None
            right, found = (how.mixing.mixed(rows) for rows in (fitted[layer][changed[layer]], found))
            assert ((found - right).abs() <= 0.51 / 127 * right.abs().amax(-1, keepdim=True)).all()
        else:
            torch.testing.assert_close(found, rounded, rtol=0, atol=0)


CHEAP = ["knorm(keep=0.25)", "keydiff(keep=0.5)", "tova(keep=0.25)", "streaming_llm(keep=0.5)"]


@pytest.mark.full
# A window's attention takes most of the time: of all its queries once.
@pytest.mark.parametrize("recipe", ["adakv(snapkv, keep=0.25)", "chunkkv(snapkv(window=8), keep=0.25)", *CHEAP])
def test_a_prompt_of_131072_tokens(recipe: str) -> None:
    """A layer of an 8B model, whose keys and values of it weigh 512 MiB: no more than 160 of 256 MiB besides.

    Queries of 64 requests take 80 more (`test_bytes`).
    """
    length, size, heads, dim = 131072, 16, 8, 128
    blocks = length // size
    few = torch.randn(64, heads, size, 2 * dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    group = layer_group(recipe, [few.repeat(blocks // 64, 1, 1, 1)], 4)
    _ = group.columns
    queue = EventQueue(EmptiedBlocks())
    plan = queue.plan(group, batch_of([(length, length - 64, length)], blocks, size))
    queries = torch.randn(1, 64, heads * 4, dim).bfloat16()
    with Allocated() as allocated:
        if plan.in_layers:
            group.record(range(1), plan, queries)
        queue.run()
    # Where heads differ all that stays is out of the pages at a time: here an eighth of a gigabyte.
    assert plan.events and 0 < allocated.peak < 160 * 2**20, allocated.peak / 2**20


# --- what is added up before an event


def test_codes_that_are_remembered_are_those_that_would_be_made_again(tmp_path: Path) -> None:
    """After four events of a request, of each entry that has one, at the position that it came from."""
    indices, path = tuple(range(3)), tmp_path / "stats"
    measured = random_statistics(Shape((1,), 2, 1, 8, 8), indices)
    save(replace(measured, provenance={"model": {"layers": list(indices)}}), path)
    caches = list(torch.randn(3, 30, 2, 4, 16, generator=torch.Generator().manual_seed(3)))
    group = layer_group(f"adakv(distilled(stats='{path}'), recent=2, keep=10, every=3)", caches, 1)
    queue = EventQueue(EmptiedBlocks())
    for before, after in ((0, 18), (18, 21), (21, 24), (24, 27), (27, 28)):
        queue.plan(group, batch_of([(18, before, after)], 30, 4))
    queue.run()
    counts = []
    for index, left in group.export_request(list(range(30)), 28).items():
        starts = [0, *left["counts"].cumsum(0).tolist()]
        networks = measured.networks(caches[0].device).of_layers(slice(index, index + 1))
        for head, (first, end) in enumerate(pairwise(starts)):
            own = {name: left[name][None, None, first:end] for name in ("keys", "values", "positions", "code")}
            codes = own.pop("code")
            again = entry_codes(**own, new=codes != 0, networks=networks.of_heads(slice(head, head + 1)))
            check_same_codes(codes, again, 0.8)
            assert int((codes != 0).sum()) == end - first - 1  # all but the token after the event
            counts.append(end - first)
    assert sum(counts) == 6 * 11 and len(set(counts)) > 1


def additions(plan: StepPlan) -> list[QueryAddition]:
    return [operation for operation in plan.in_layers if isinstance(operation, QueryAddition)]


def test_sums_are_a_requests_own_only_where_its_pages_are_anothers_too() -> None:
    """Three windows open in one step: two prompts begin alike, and the third has a later page of the first."""
    group, queue = layer_group("snapkv(window=8, keep=15)", list(random_caches()), GROUP), EventQueue(EmptiedBlocks())
    queries = torch.randn(LAYERS, 159, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(5))
    for shared, owners in ((), [0, 0, 0]), (((1, 0), (2, 5)), [0, 1, 1]):
        batch = batch_of([(53, 0, 53)] * 3, WIDTH, BLOCK)
        for row, place in shared:
            batch.block_table[row, place] = batch.block_table[0, place]
        plan = queue.plan(group, batch)
        assert [len(addition.owners) for addition in additions(plan)] == owners
        group.record(range(LAYERS), plan, queries)
        assert bool(group.columns._private) == bool(shared)
        for (slot, name), column in list(group.columns._private.items()):  # which may have to grow
            entries = column.shape[2]
            assert column.any() and torch.equal(group.columns.private(slot, name, entries + 1)[:, :, :entries], column)
        queue.run()
        assert not group.columns._private


def test_requests_of_any_phase_are_added_up_together() -> None:
    """Four of them, each a token behind the one before, so that one by one their rings are full in four steps."""
    caches = torch.randn(1, 4 * 60, 2, BLOCK, 2 * DIM)
    group, queue = layer_group("snapkv(window=64, keep=100, every=64)", list(caches), 2), EventQueue(EmptiedBlocks())
    assert group.planner.recording.waiting == 4
    added = []
    for step in range(30):
        before = [40 + step - behind for behind in range(4) if step >= behind]
        batch = batch_of([(40, n if n > 40 else 0, n + 1) for n in before], 60, BLOCK)
        plan = queue.plan(group, batch)
        added.append([len(addition.slots) for addition in plan.before_events])
        group.record(range(1), plan, torch.randn(1, len(batch.slot_mapping), 4, DIM))
    assert added[6:] == [[4] if step % 4 == added[:10].index([4]) % 4 else [] for step in range(6, 30)], added
