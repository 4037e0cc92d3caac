"""`LayerBarrier`: events of recipes that look across layers, chosen once all layers have reached them.

Until then each layer's entries stay in their pages: nothing else writes there within a step.
"""

from __future__ import annotations

import time

import torch

from keepset.paged.compaction import Compactor, LayerEvent, as_counted


class LayerBarrier:
    """The events of one step, layer by layer, in whatever order the layers come."""

    def __init__(self) -> None:
        self._reached: dict[int, tuple[Compactor, list[LayerEvent]]] = {}

    def add(self, compactor: Compactor, events: list[LayerEvent]) -> None:
        """A layer has reached all of the step's events; the last one that does has them executed."""
        if compactor.layer in self._reached:
            raise RuntimeError("keepset lost a layer of an event that looks across layers.")
        self._reached[compactor.layer] = compactor, events
        if len(self._reached) == len(compactor.layers):
            compactors, reached = zip(*(self._reached[layer] for layer in compactor.layers), strict=True)
            self._reached = {}
            for parts in zip(*reached, strict=True):
                _compress(compactors, parts)


def _compress(compactors: tuple[Compactor, ...], reached: tuple[LayerEvent, ...]) -> None:
    """Executes one event in all layers."""
    start = time.perf_counter()
    event, recipe = reached[0].event, compactors[0].recipe
    if not all(torch.equal(event.rows, other.event.rows) for other in reached):
        raise RuntimeError("keepset lost count of the requests of an event that looks across layers.")
    entries = [compactor.read(layer) for compactor, layer in zip(compactors, reached, strict=True)]
    kept = recipe.method.select_all([layer.observation for layer in entries], recipe.budget)
    for compactor, layer, held in zip(compactors, reached, entries, strict=True):
        mine = kept.layer(compactor.layer)
        if not as_counted(mine, event, recipe.method.equal_heads):
            raise RuntimeError(f"{recipe} kept another number of entries than its quotas say.")
        compactor.execute(layer, held, mine, start)
        start = time.perf_counter()
