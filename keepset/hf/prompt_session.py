"""`Recorder` and `PromptSession`: one prefill of a prompt, from which any number of recipes choose what they keep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.core.feature import Needs
from keepset.core.observation import Observation
from keepset.errors import KeepsetError
from keepset.hf.attention import AttentionInput
from keepset.hf.cache import Cache
from keepset.hf.layer import LayerState
from keepset.hf.model_support import check_logits
from keepset.hf.observed_cache import ObservedCache
from keepset.hf.progress import Event
from keepset.methods.positions import StreamingLLM
from keepset.recipe import Recipe

_KEEP_ALL = Recipe.of(StreamingLLM(), keep=1.0)


@dataclass(frozen=True, eq=False)
class CachedPrompt:
    """A prompt in the cache of one recipe.

    Attributes:
        model: the model that has run it.
        cache: the cache after the prompt; later tokens go there, or to forks of it.
        logits: after the prompt's last token, before anything was dropped.
        prefill_seconds: time of a prefill with this recipe alone, without its selection.
        prefill_seconds_full: time of a prefill that collects nothing.
        kv_bytes_full: see `Recorder.nbytes_full`; None if the recipe had a prefill of its own.
        is_full: whether nothing was dropped, so that this is the full cache.
    """

    model: PreTrainedModel
    cache: Cache
    logits: Float[Tensor, "1 vocabulary"]
    prefill_seconds: float
    prefill_seconds_full: float
    kv_bytes_full: int | None
    is_full: bool

    @property
    def event(self) -> Event:
        """The one event, at the prompt's end."""
        (event,) = self.cache.events
        return event

    @torch.no_grad()
    def follow(self, ids: Int[Tensor, "1 n"]) -> Float[Tensor, "n vocabulary"]:
        """Return the logits after each of these tokens, fed to a fork: the cache stays as it is."""
        return self.model(ids, past_key_values=self.cache.fork(), use_cache=True).logits[0]


class Recorder(ObservedCache):
    """Watches one prompt and drops nothing.

    Args:
        model: a decoder-only transformers model.
        needs: what to collect.
        on_layer: called when a layer is done.
        task_tokens: as for a `Cache`.

    Attributes:
        observations: one per layer, once `prefill` has run; they hold the layers' entries.
        logits: after each prompt's last token, once `prefill` has run.
        seconds: time of the prefill alone, without collecting.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        needs: Needs,
        on_layer: Callable[[], None] = lambda: None,
        task_tokens: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(model, needs, tasks=task_tokens)
        self._model, self._on_layer = model, on_layer
        self.observations: list[Observation] = []
        self._collecting: Counter[Hashable] = Counter()

    @torch.no_grad()
    def prefill(
        self, ids: Int[Tensor, "batch tokens"], images: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Recorder:
        """Run the prompt, with the model's inputs for its images, and return this recorder.

        Args:
            ids: the prompt.
            images: the model's further inputs by name.

        Raises:
            KeepsetError: the model predicts NaN, or cannot be observed.
        """
        start = time.perf_counter()
        try:
            output = self._model(ids, **images, past_key_values=self, use_cache=True, logits_to_keep=1)
        finally:
            self.stop_watching()
        if self._second is not None:
            self._collecting.update(self._second.seconds)
        self.seconds = time.perf_counter() - start - self._collecting.total()
        self.logits: Float[Tensor, "batch vocabulary"] = output.logits[:, -1]
        check_logits(self.logits)
        return self

    @property
    def nbytes_full(self) -> int:
        """Bytes of the whole prompt's keys and values, and of the windows and states of other layers."""
        return self.nbytes_fixed + sum(int(o.valid.sum()) * o.entry_bytes for o in self.observations)

    def seconds_for(self, needs: Needs) -> float:
        """Return the seconds of a prefill that collects only for these needs."""
        return self.seconds + sum(self._collecting[cost] for cost in {feature.cost for feature in needs})

    def _observe_event(self, layer: LayerState, up_to_event: AttentionInput) -> None:
        self._on_layer()
        super()._observe_event(layer, up_to_event)
        self._collecting.update(layer.collector.seconds)

    def _choose(self, observations: list[Observation]) -> None:
        self.observations += observations


class PromptSession:
    """The prefill of one prompt, run once for all recipes that compress its end.

    Sharing it is exact, because a prompt is compressed after its attention. It runs when it is first needed.

    Args:
        model: a decoder-only transformers model.
        ids: the prompt, `[1, tokens]`.
        recipes: all recipes that will be asked for; their inputs are collected together.
        on_layer: called after each layer of a prefill.
        task_tokens: known questions, as for a `Cache`. Then all recipes must use them, or need no second pass.
        images: the model's inputs for the prompt's images, by name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Int[Tensor, "1 tokens"],
        recipes: Sequence[Recipe] = (),
        on_layer: Callable[[], None] = lambda: None,
        task_tokens: Sequence[Tensor] = (),
        images: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._images = images
        self._model, self._ids, self._recipes, self._on_layer = model, ids, recipes, on_layer
        self._tasks = task_tokens
        self._shared: Recorder | None = None
        self._shares = True

    def prefill(self) -> Recorder:
        """Return the recorder of the shared prefill, which runs at the first call.

        Raises:
            KeepsetError: a recipe cannot be used on this model.
        """
        if self._shared is None:
            self._shared = self._record(self._recipes)
        return self._shared

    def compress(self, recipe: Recipe | None) -> CachedPrompt:
        """Return the prompt under a recipe that compresses only the prompt; None for the full cache.

        If the inputs of one recipe make the shared prefill fail, each recipe gets its own prefill.
        """
        chosen = recipe or _KEEP_ALL
        recorder = self._recorded(chosen)
        cache = Cache.from_prompt(self._model, chosen, recorder, recorder.observations)
        seconds, alone = recorder.seconds, recorder.seconds_for(chosen.method.traits.needs)
        return CachedPrompt(self._model, cache, recorder.logits, alone, seconds, recorder.nbytes_full, recipe is None)

    @torch.no_grad()
    def compress_alone(self, recipe: Recipe) -> CachedPrompt:
        """Return the prompt after a prefill with this recipe alone, which may also compress while decoding."""
        cache = Cache(self._model, recipe, task_tokens=self._tasks or None)
        began = time.perf_counter()
        try:
            inputs = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            logits = self._model(self._ids, **self._images, **inputs).logits[:, -1]
        except BaseException:
            cache.stop_watching()
            raise
        check_logits(logits)
        seconds = time.perf_counter() - began - sum(event.seconds for event in cache.events)
        return CachedPrompt(self._model, cache, logits, seconds, seconds, None, False)

    def _recorded(self, recipe: Recipe) -> Recorder:
        if self._shares:
            try:
                return self.prefill()
            except KeepsetError:
                self._shares = False
        return self._record([recipe])

    def _record(self, recipes: Sequence[Recipe]) -> Recorder:
        needs = reduce(or_, (recipe.method.traits.needs for recipe in recipes), Needs())
        return Recorder(self._model, needs, self._on_layer, self._tasks).prefill(self._ids, self._images)


def warm_up(model: PreTrainedModel, ids: Int[Tensor, "1 tokens"]) -> None:
    """Run a prompt's first tokens, so that cold caches and allocators do not count for the first timed prefill.

    Args:
        model: any model.
        ids: the prompt.
    """
    with torch.no_grad():
        model(ids[:, :64])
