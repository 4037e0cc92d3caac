"""Launches of an event on a GPU: as many for 8 layers as for two; and it keeps what a CPU keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from keepset.core import statistics, tables
from keepset.core.rope import RotaryTable
from keepset.paged.event_queue import EventQueue
from keepset.paged.freed_blocks import FreedBlocks
from keepset.paged.layer_group import LayerGroup

pytest.importorskip("triton")
from keepset.kernels.triton import paged_window
from tests.methods.naive import Shape, random_statistics
from tests.paged.layers import layer_group
from tests.paged.test_waits import BLOCK, WIDTH, batch_of
from tests.posing import Gpu, Posing

HEADS, DIM, ROWS = 2, 8, 2
FIRST, AGAIN = [(18, 0, 18), (13, 0, 13)], [(18, 18, 25), (13, 13, 20)]


def group(recipe: str, caches: list[Tensor]) -> LayerGroup:
    angles = torch.arange(64.0)[:, None] / 10.0 ** torch.arange(DIM // 2)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    rotary = RotaryTable(table if caches[0].device.type == "cpu" else Posing(table), halves=True)
    return layer_group(recipe, caches, 1, rotary=rotary)


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        *[("knorm(keep=10, every=7)", 120), ("keydiff(keep=10, every=7)", 130)],
        *[("adakv(knorm, keep=10, every=7)", 330), ("pool(knorm, keep=10, every=7)", 350)],
        ("composite(knorm, keep=10, every=7)", 390),
    ],
)
def test_an_event_launches_the_same_for_any_number_of_layers(recipe: str, most: int, triton_interpreted: None) -> None:
    counted = []
    for layers in (2, 8):
        draw = torch.Generator().manual_seed(layers)
        there = torch.randn(layers, ROWS * WIDTH, HEADS, BLOCK, 2 * DIM, generator=draw)
        here = there.clone()
        plain, queue = group(recipe, list(here)), EventQueue(FreedBlocks())
        for step in (FIRST, AGAIN, []):
            queue.plan(plain, batch_of(step, posing=False)) if step else queue.run()
        with pytest.MonkeyPatch.context() as patch, Gpu(patch) as gpu:
            posing, queue = group(recipe, list(map(Posing, there))), EventQueue(FreedBlocks())
            for step in (FIRST, AGAIN):
                gpu.reset()
                plan = queue.plan(posing, batch_of(step, posing=True))
                assert not gpu.waits
                gpu.reset()
                queue.run()
                counted.append((gpu.launches.total(), gpu.waits.total(), len(plan.events)))
        assert torch.equal(here, there)
    first, again, *many = counted
    assert many == [first, again]
    # Of two lengths are two events where heads are equal; the host asks for nothing but how many entries heads keep.
    assert all(0 < waits == events and launches <= most * events for launches, waits, events in (first, again))


class Projection:
    """A projection of a layer that does not rotate, so that its queries follow from hidden states alone."""

    def __init__(self, weights: Tensor) -> None:
        self._weights, self.hidden = weights, None

    def queries(self, hidden: Tensor) -> Tensor:
        return (hidden @ self._weights).unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def prompts_end(recipe: str, layers: int, gpu: Gpu | None) -> tuple[LayerGroup, Tensor, list[Projection]]:
    """Two prompts of some layers have come to their ends."""
    statistics._read.cache_clear()  # which know what lies on the device already
    put, draw = (lambda each: each) if gpu is None else Posing, torch.Generator().manual_seed(0)
    caches = put(torch.randn(layers, ROWS * WIDTH, HEADS, BLOCK, 2 * DIM, generator=draw))
    rotary = RotaryTable(put(torch.ones(64, DIM).masked_fill(torch.arange(DIM) >= DIM // 2, 0.0)), halves=True)
    projections = [Projection(put(torch.randn(6, HEADS * DIM, generator=draw))) for _ in range(layers)]
    made = layer_group(recipe, list(caches), 1, rotary=rotary, projections=projections)
    return made, caches, projections


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """Recipes whose files are of a model with so many layers."""
    folder = tmp_path_factory.mktemp("files")

    def recipe(text: str, layers: int) -> str:
        measured, compiled = (folder / f"{layers}.{kind}" for kind in ("stats", "tables"))
        if not measured.exists():
            of = random_statistics(Shape((1,), HEADS, 1, DIM, DIM), tuple(range(layers)))
            statistics.save(replace(of, provenance={"model": {"layers": list(range(layers))}}), measured)
            tables.save(tables.neutral(layers, HEADS, 0.5), compiled)
        return text.replace("stats", f"stats='{measured}'").replace("tables", f"tables='{compiled}'")

    return recipe


BY_LAYER = [
    *("random(keep=10)", "adakv(random, keep=10)", "qfilter(stats, keep=10)"),
    *("triattention(stats, horizon=8, keep=10)", "expected_attention(stats, future=4, keep=10)"),
    *("duo_attention(stats, keep=0.6, sinks=1, recent=2)", "gvote(samples=3, future=4)"),
    "compilerkv(tables, window=5, elastic=False, keep=10)",
]
"""Methods that depend on the layer."""


@pytest.mark.parametrize("many", [8, pytest.param(32, marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", [*BY_LAYER, "adakv(snapkv(window=5), keep=10)"])
def test_what_depends_on_the_layer_launches_the_same(
    recipe: str, many: int, files: Callable[[str, int], str], triton_interpreted: None
) -> None:
    """And waits once. Counted, not computed; the products of layers' own weights apart, which are one each."""
    counted = []
    for layers in (2, many):
        text = files(recipe, layers)
        with pytest.MonkeyPatch.context() as patch, Gpu(patch, computes=False) as gpu:
            made, _, projections = prompts_end(text, layers, gpu)
            queue = EventQueue(FreedBlocks())
            plan = queue.plan(made, batch_of(FIRST, posing=True))
            hidden = Posing(torch.randn(31, 6))
            for projection in projections:
                projection.hidden = hidden
            queries = torch.stack([each.queries(hidden[None])[0].transpose(0, 1) for each in projections])
            if plan.in_layers:
                made.record(range(layers), plan, queries)
            gpu.reset()
            queue.run()
            assert not recipe.startswith("gvote") or gpu.launches.pop("mm") == layers
            counted.append((gpu.launches.total(), gpu.waits.total(), len(plan.events)))
    few, more = counted
    assert few == more and few[1] == few[2] and 0 < few[0] < 500, gpu.launches


def decoded(recipe: str, caches: list[Tensor], gpu: Gpu | None) -> tuple[LayerGroup, list[tuple[int, int, bool]]]:
    """A step of prompts and some of one token; launches and waits between steps, and whether there was an event."""
    layers, queue, counted = group(recipe, caches), EventQueue(FreedBlocks()), []
    put = (lambda tensor: tensor) if gpu is None else Posing
    for token in range(9):
        step = FIRST if token == 0 else [(prompt, prompt + token - 1, prompt + token) for prompt, _, _ in FIRST]
        batch = batch_of(step, posing=gpu is not None)
        draw, tokens = torch.Generator().manual_seed(token), len(batch.slot_mapping)
        # Of all layers the same, so that 2 of them say what 8 do.
        queries = torch.randn(tokens, HEADS, DIM, generator=draw).expand(len(caches), -1, -1, -1).contiguous()
        plan = queue.plan(layers, batch)
        layers.record(range(len(caches)), plan, put(queries))
        if gpu is not None:
            gpu.reset()
        queue.run()
        if gpu is not None:
            counted.append((gpu.launches.total(), gpu.waits.total(), bool(plan.events)))
    return layers, counted


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    [
        "snapkv(window=5, keep=10, every=7)",
        "ams(tova, window=6, recent=4, sinks=1, min_segment=2, max_segment=4, keep=10, every=7)",
        "expected_attention(buffer=7, future=4, skip=1, prefill=False, keep=10, every=7)",
        "adakv(snapkv(window=5), keep=10, every=7)",
    ],
)
def test_adding_up_launches_the_same_for_any_number_of_layers(recipe: str, triton_interpreted: None) -> None:
    """And waits for nothing; what is added up is what a CPU adds up. Of many layers it is counted, and not computed.

    So do events.
    """
    counted = []
    for layers in (2, 8):
        draw = torch.Generator().manual_seed(0)
        there = torch.randn(1, ROWS * WIDTH, HEADS, BLOCK, 2 * DIM, generator=draw).repeat(layers, 1, 1, 1, 1)
        here = there.clone()
        with pytest.MonkeyPatch.context() as patch, Gpu(patch) as gpu:
            if layers > 2:
                for name in ("_paged_lse", "_add_in_pages"):
                    patch.setattr(getattr(paged_window, name), "_kernel", Nothing())
            posing, steps = decoded(recipe, list(map(Posing, there)), gpu)
        counted.append(steps)
        if layers == 2:
            plain, _ = decoded(recipe, list(here), None)
            for feature in plain.planner.recording.sums:
                column = plain.columns[feature.column]
                torch.testing.assert_close(posing.columns[feature.column].held, column)  # type: ignore[attr-defined]
                assert column.any()
            assert torch.equal(here, there)
    assert counted[0] == counted[1] and not any(waits for _, waits, event in counted[0] if not event)
    assert max(launches for launches, _, event in counted[0] if not event) > 0


@pytest.mark.full
def test_requests_that_share_pages_are_added_up_in_the_same_launches(triton_interpreted: None) -> None:
    """Three as five, of which the last shares none; sums are those that a CPU adds up."""
    counted = []
    for rows in (3, 5):
        draw = torch.Generator().manual_seed(0)
        there = torch.randn(2, rows * WIDTH, HEADS, BLOCK, 2 * DIM, generator=draw)
        queries = torch.randn(2, rows, HEADS, DIM, generator=draw)
        sums: list[list[Tensor]] = []
        for posing in (False, True):
            with pytest.MonkeyPatch.context() as patch, Gpu(patch) as gpu:
                put = Posing if posing else lambda tensor: tensor
                layers = group("snapkv(window=5, keep=10, every=7, prefill=False)", list(map(put, there)))
                queue = EventQueue(FreedBlocks())
                for token in range(6):  # the window opens with the third, and then four wait
                    batch = batch_of([(12, 12 + token, 13 + token)] * rows, posing=posing)
                    table = batch.block_table.held if posing else batch.block_table  # type: ignore[attr-defined]
                    table[1:-1, 0] = table[0, 0]
                    plan = queue.plan(layers, batch)
                    layers.record(range(2), plan, put(queries))
                    gpu.reset()
                    queue.run()
                own, columns = layers.columns._private.values(), [layers.columns["received of 5"]]
                assert len(own) == rows - 2
                sums.append([each.held if posing else each for each in (*columns, *own)])  # type: ignore[attr-defined]
                counted.append((gpu.launches.total(), gpu.waits.total()))
        torch.testing.assert_close(*sums)
    assert counted[1] == counted[3] and counted[1][1] == 0 < counted[1][0]


class Nothing:
    """A kernel that is not run."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None
