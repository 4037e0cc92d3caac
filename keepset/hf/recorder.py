"""`Recorder`: runs one full prefill and keeps its Observations, for any number of recipes to choose from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.core.feature import Needs
from keepset.core.observation import Observation
from keepset.hf.forward import Forward
from keepset.hf.layer import KeepLayer
from keepset.hf.phases import LayerEvent
from keepset.hf.prompt_cache import PromptCache


class Recorder(PromptCache):
    """Watches one prompt and drops nothing.

    Args:
        on_layer: is called when a layer is done.

    Attributes:
        observations: one per layer, once `prefill` has run; they hold the layers' entries.
        logits: what the prompt's last tokens predict, once it has run.
        seconds: of the prefill alone, collecting not counted.
    """

    def __init__(self, model: PreTrainedModel, needs: Needs, on_layer: Callable[[], None] = lambda: None) -> None:
        super().__init__(model, needs)
        self._model, self._on_layer = model, on_layer
        self.observations: list[Observation] = []
        self._collecting: Counter[Hashable] = Counter()

    @torch.no_grad()
    def prefill(self, ids: Int[Tensor, "batch tokens"]) -> None:
        """Runs the prompt."""
        start = time.perf_counter()
        try:
            output = self._model(ids, past_key_values=self, use_cache=True, logits_to_keep=1)
        finally:
            self.stop_watching()
        if self._second is not None:
            self._collecting.update(self._second.seconds)
        self.seconds = time.perf_counter() - start - self._collecting.total()
        self.logits: Float[Tensor, "batch vocabulary"] = output.logits[:, -1]

    @property
    def nbytes_full(self) -> int:
        """Bytes of the whole prompt's keys and values in the layers that can be compressed."""
        return sum(int(o.valid.sum()) * o.entry_bytes for o in self.observations)

    def seconds_for(self, needs: Needs) -> float:
        """Seconds that a prefill takes which collects only for these needs."""
        return self.seconds + sum(self._collecting[cost] for cost in {feature.cost for feature in needs})

    def _reached(self, layer: KeepLayer, forward: Forward, event: LayerEvent) -> None:
        self._on_layer()
        self._collecting.update(event.seconds)
        super()._reached(layer, forward, event)

    def _choose(self, observations: list[Observation]) -> None:
        self.observations += observations
