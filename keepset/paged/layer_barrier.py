"""`LayerBarrier`: events of recipes that look across layers, chosen once all layers have reached them.

Until then each layer's entries stay in their pages: nothing else writes there within a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # a layer has its barrier, which has the layers
    from keepset.paged.layer import LayerEvent, PagedLayer


class LayerBarrier:
    """The events of one step, layer by layer, in whatever order the layers come."""

    def __init__(self) -> None:
        self._reached: dict[int, tuple[PagedLayer, list[LayerEvent]]] = {}

    def add(self, layer: PagedLayer, events: list[LayerEvent]) -> None:
        """A layer has reached all of the step's events; the last one that does has them executed."""
        if layer.layer in self._reached:
            raise RuntimeError("keepset lost a layer of an event that looks across layers.")
        self._reached[layer.layer] = layer, events
        if len(self._reached) == len(layer.layers):
            layers, reached = zip(*(self._reached[index] for index in layer.layers), strict=True)
            self._reached = {}
            for event in zip(*reached, strict=True):
                _compress(layers, event)


def _compress(layers: Sequence[PagedLayer], reached: Sequence[LayerEvent]) -> None:
    """Executes one event in all layers."""
    start = time.perf_counter()
    event, recipe = reached[0].event, layers[0].recipe
    if not all(torch.equal(event.rows, other.event.rows) for other in reached):
        raise RuntimeError("keepset lost count of the requests of an event that looks across layers.")
    entries = [layer.read(own) for layer, own in zip(layers, reached, strict=True)]
    kept = recipe.method.select_all([own.observation for own in entries], recipe.budget)
    for layer, own, held in zip(layers, reached, entries, strict=True):
        mine = kept.layer(layer.layer)
        if not event.is_counted(mine):
            raise RuntimeError(f"{recipe} kept another number of entries than its quotas say.")
        layer.execute(own, held, mine, start)
        start = time.perf_counter()
