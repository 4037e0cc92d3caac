"""Events of recipes that look across layers: chosen once, when the last layer comes, whichever that is."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepset import Recipe
from keepset.allocators.pool import Pool
from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation
from keepset.methods.snapkv import SnapKV
from keepset.paged.layer_barrier import LayerBarrier
from keepset.paged.step import EvictionEvent

LAYERS = (2, 5, 7)


@dataclass
class Layer:
    """A layer whose entries are those of an observation."""

    layer: int
    recipe: Recipe
    keep: int | None = None
    layers: tuple[int, ...] = LAYERS
    kept: list[list[list[int]]] = field(default_factory=list)
    looked: int = 0

    def reach(self, rows: list[int]) -> Any:
        at = torch.full((len(rows),), 9)
        event = EvictionEvent(
            rows=torch.tensor(rows),
            at=at,
            prompts=at,
            newer=0,
            width=9,
            keep=self.keep,
            compressed=False,
            ends_prompt=True,
            equal_heads=False,
            occupied=_no_pages,
            reassign=_no_pages,
            records=[],
            slots=at[:0],
        )
        return SimpleNamespace(event=event)

    def read(self, reached: Any) -> Any:
        self.looked += 1
        draw = torch.Generator().manual_seed(10 * self.layer + int(reached.event.rows[0]))
        shape = (len(reached.event.rows), 2, 9, 4)
        observation = Observation(
            keys=torch.randn(shape, generator=draw) * self.layer,
            values=torch.randn(shape, generator=draw),
            queries=torch.randn(shape[0], 4, 3, 4, generator=draw),
            layer=self.layer,
            layers=LAYERS,
        )
        return SimpleNamespace(observation=observation)

    def execute(self, reached: Any, entries: Any, kept: LayerKeepSet, start: float) -> None:
        rows = range(len(reached.event.rows))
        self.kept += [[kept.positions(row, head).tolist() for head in range(2)] for row in rows]


def _no_pages(*_: Any) -> Any:
    raise AssertionError("A barrier looks into no pages.")


RECIPE = Recipe.of(Pool(SnapKV(window=3)), keep=4, recent=0)


@pytest.mark.parametrize("order", permutations(LAYERS))
def test_whichever_layer_is_last(order: tuple[int, ...]) -> None:
    barrier = LayerBarrier()
    layers = {index: Layer(index, RECIPE) for index in LAYERS}
    for place, index in enumerate(order):
        assert not any(layer.looked for layer in layers.values())
        barrier.add(layers[index], [layers[index].reach(rows) for rows in ([0, 3], [1])])  # type: ignore[arg-type]
        assert place == 2 or not any(layer.kept for layer in layers.values())
    for number, rows in enumerate(([0, 3], [1])):
        seen = [layers[index].read(layers[index].reach(rows)).observation for index in LAYERS]
        expected = RECIPE.method.select_all(seen, RECIPE.budget)
        for index in LAYERS:
            for row in range(len(rows)):
                heads = [expected.positions(index, row, head).tolist() for head in range(2)]
                assert layers[index].kept[2 * number + row] == heads
    for row in range(3):
        assert sum(len(head) for layer in layers.values() for head in layer.kept[row]) == 4 * 2 * 3


def test_a_step_that_ended_early_is_not_mixed_with_the_next() -> None:
    barrier, layer = LayerBarrier(), Layer(2, RECIPE)
    barrier.add(layer, [layer.reach([0])])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="lost a layer"):
        barrier.add(layer, [layer.reach([0])])  # type: ignore[arg-type]


def test_layers_must_mean_the_same_requests() -> None:
    barrier, layers = LayerBarrier(), [Layer(index, RECIPE) for index in LAYERS]
    with pytest.raises(RuntimeError, match="lost count of the requests"):
        for layer, row in zip(layers, (0, 0, 1), strict=True):
            barrier.add(layer, [layer.reach([row])])  # type: ignore[arg-type]


def test_a_number_that_the_scheduler_does_not_expect() -> None:
    barrier, layers = LayerBarrier(), [Layer(index, RECIPE, keep=1) for index in LAYERS]
    with pytest.raises(RuntimeError, match="kept another number of entries than its quotas say"):
        for layer in layers:
            barrier.add(layer, [layer.reach([0])])  # type: ignore[arg-type]
