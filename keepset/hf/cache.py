"""`Cache`: a transformers cache that compresses itself by a recipe."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicCache, DynamicLayer

from keepset.errors import KeepsetError
from keepset.hf import attention
from keepset.hf.layer import KeepLayer
from keepset.hf.support import check_model
from keepset.hf.tap import LayerInput, Tap
from keepset.keep_set import KeepSet, LayerKeepSet
from keepset.observation import Needs, Observation
from keepset.recipe import Recipe

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True, eq=False)
class Event:
    """One compression.

    Attributes:
        length: logical length of the cache at the event, padding included.
        keep_set: what stayed.
        entries: entries that there were, over all layers, requests and KV heads.
        nbytes_before: bytes of their keys and values.
        seconds: time spent on choosing and freeing.
    """

    length: int
    keep_set: KeepSet
    entries: int
    nbytes_before: int
    seconds: float


class Cache(TransformersCache):
    """A cache for `model.generate(..., past_key_values=cache)` that keeps what a recipe says.

    Creating one sets the model's attention implementation to keepset's, which behaves as `sdpa` for every
    other cache. The prompt is compressed layer by layer while it is prefilled; tokens after it stay. A cache
    serves one conversation: further `generate` calls continue on it.

    Args:
        model: a decoder-only transformers model.
        recipe: a text such as `"snapkv(keep=0.25)"`, or a `Recipe`.
        task_tokens: the question's tokens, for methods that are aware of a task.
        prompt_length: tokens of the prompt, padding included. Needed only where the first forward is not
            the whole prompt and nothing else: with `prefill_chunk_size` and with assisted generation.

    Raises:
        KeepsetError: the recipe or the model cannot be used.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        recipe: str | Recipe,
        *,
        task_tokens: Int[Tensor, "batch tokens"] | None = None,
        prompt_length: int | None = None,
    ) -> None:
        self.recipe = (Recipe.parse(recipe) if isinstance(recipe, str) else recipe).require_budget()
        if self.recipe.schedule.every is not None:
            raise KeepsetError(f"{self.recipe}: compression while decoding (every=...) is not available yet.")
        if task_tokens is not None:
            raise KeepsetError(f"{self.recipe.method.name} is not aware of a task: leave task_tokens out.")
        if prompt_length is not None and prompt_length < 1:
            raise KeepsetError(
                f"prompt_length={prompt_length} is not a number of tokens: use an integer from 1."
            )
        config = model.config.get_text_config(decoder=True)
        check_model(model, config)
        model.set_attn_implementation(attention.NAME)

        # transformers decides each layer's kind; only those that would grow without end are replaced.
        layers = DynamicCache(config=config).layers
        self._kept = {
            index: KeepLayer(self, index) for index, layer in enumerate(layers) if type(layer) is DynamicLayer
        }
        super().__init__(layers=[self._kept.get(index, layer) for index, layer in enumerate(layers)])

        self.prompt_length = prompt_length
        self.needs: Needs = self.recipe.method.needs
        self.compressed_layers = tuple(self._kept)
        self.events: list[Event] = []
        self._tap = Tap(model) if self.needs.hidden_states else None
        self._attending: KeepLayer | None = None
        self._checked_rotation = False
        self._start_event()

    @property
    def nbytes(self) -> int:
        """Bytes allocated, those of layers that keepset leaves alone included."""
        return sum(layer.nbytes if isinstance(layer, KeepLayer) else _nbytes(layer) for layer in self.layers)

    @property
    def keep_set(self) -> KeepSet | None:
        """What the newest compression kept; None before the first."""
        return self.events[-1].keep_set if self.events else None

    def reset(self) -> None:
        """Forgets everything; the cache can then take another prompt."""
        super().reset()
        self.events.clear()
        self._start_event()

    # --- what its layers ask for

    def updating(self, layer: KeepLayer) -> None:
        """Notes that this layer's attention must follow."""
        if self._attending is not None:
            raise KeepsetError(
                f"keepset.Cache needs the attention implementation {attention.NAME!r}, but another one ran: "
                f"do not change it after creating the cache, or call model.set_attn_implementation({attention.NAME!r})."
            )
        self._attending = layer

    def attended(self, layer: KeepLayer) -> None:
        """Notes that it did."""
        self._attending = None

    def layer_input(self, module: nn.Module, query: Tensor) -> LayerInput:
        """The input of the attention module under way."""
        assert self._tap is not None
        layer_input = self._tap.layer_input(module)
        if not self._checked_rotation:
            layer_input.check_rotation(query)
            self._checked_rotation = True
        return layer_input

    def observed(self, layer: KeepLayer, observation: Observation) -> None:
        """Compresses the layer now, or all layers once the last one has been observed."""
        self._entries += int(observation.valid.sum())
        self._nbytes += int(observation.valid.sum()) * observation.entry_bytes
        start = time.perf_counter()
        method, budget = self.recipe.method, self.recipe.budget
        if not method.across_layers:
            self._execute(layer, observation, method.select(observation, budget))
        else:
            self._observations[layer.index] = observation
            if len(self._observations) == len(self._kept):
                keep_set = method.select_all(list(self._observations.values()), budget)
                for index, seen in self._observations.items():
                    self._execute(self._kept[index], seen, keep_set)
                self._observations.clear()
        self._seconds += time.perf_counter() - start
        if len(self._parts) == len(self._kept):
            assert layer.compressed_at is not None
            self.events.append(
                Event(layer.compressed_at, KeepSet(self._parts), self._entries, self._nbytes, self._seconds)
            )
            if self._tap is not None:
                self._tap.close()
            self._start_event()

    def _execute(self, layer: KeepLayer, observation: Observation, keep_set: KeepSet) -> None:
        kept = keep_set.layer(layer.index)
        layer.execute(kept, observation.state)
        self._parts.append(kept)

    def _start_event(self) -> None:
        self._parts: list[LayerKeepSet] = []
        self._observations: dict[int, Observation] = {}
        self._entries, self._nbytes, self._seconds = 0, 0, 0.0
        self._checked_rotation = False


def _nbytes(layer: Any) -> int:
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
