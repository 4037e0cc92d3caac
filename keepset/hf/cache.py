"""`Cache`: a transformers cache that compresses itself by a recipe."""

from __future__ import annotations

import copy
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.observation import Observation
from keepset.errors import KeepsetError
from keepset.hf import saved
from keepset.hf.layer import KeepLayer
from keepset.hf.prompt_cache import PromptCache
from keepset.recipe import Recipe, check_schedule

if TYPE_CHECKING:
    import transformers


Observer = Callable[[Observation, Budget, KeepSet], None]
"""Is told of every layer at every event: the observation as the method found it, the budget, and what it kept."""


@dataclass(frozen=True, eq=False)
class Event:
    """One compression.

    Attributes:
        length: logical length of the cache at the event, padding included.
        keep_set: what stayed; of events before the newest only where the cache keeps its history.
        entries: entries that there were, over all layers, requests and KV heads.
        kept: how many of them stayed.
        nbytes_before: bytes of their keys and values.
        seconds: time spent on choosing and freeing.
    """

    length: int
    keep_set: KeepSet | None
    entries: int
    kept: int
    nbytes_before: int
    seconds: float


@dataclass
class _Running:
    """An event that some layers have reached and others have not."""

    parts: list[LayerKeepSet] = field(default_factory=list)
    observations: dict[int, Observation] = field(default_factory=dict)
    found: list[Observation] = field(default_factory=list)
    entries: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Cache(PromptCache):
    """A cache for `model.generate(..., past_key_values=cache)` that keeps what a recipe says.

    Creating one sets the model's attention implementation to keepset's, which behaves as `sdpa` for every
    other cache. The prompt is compressed layer by layer while it is prefilled. Tokens after it stay, unless the
    recipe's `every=` says after how many of them all that is there is compressed again; tokens that are fed
    together see what there was before the newest event among them. A cache serves one conversation: further
    `generate` calls continue on it.

    Args:
        model: a decoder-only transformers model.
        recipe: a text such as `"snapkv(keep=0.25)"`, or a `Recipe`.
        task_tokens: for methods with a second pass: the tokens of a question that is known, `[batch, tokens]`, which
            then run instead of the prompt's own; one row, or one for every request. Several questions are a list.
        prompt_length: tokens of the prompt, padding included. Needed only where the first forward is not
            the whole prompt and nothing else: with `prefill_chunk_size` and with assisted generation.
        history: keep the KeepSet of every event; otherwise `events` holds the newest one and, of the others, figures.
        observer: is called with every layer's observation and what was kept of it; its time is not the event's.

    Raises:
        KeepsetError: the recipe or the model cannot be used.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        recipe: str | Recipe,
        *,
        task_tokens: Tensor | Sequence[Tensor] | None = None,
        prompt_length: int | None = None,
        history: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.recipe = (Recipe.parse(recipe) if isinstance(recipe, str) else recipe).require_budget()
        check_schedule(self.recipe)
        needs = self.recipe.method.needs
        tasks = [task_tokens] if isinstance(task_tokens, Tensor) else task_tokens or []
        if task_tokens is not None and not needs.second_passes:
            raise KeepsetError(f"{self.recipe.method.name} is not aware of a task: leave task_tokens out.")
        if task_tokens is not None and not tasks:
            raise KeepsetError("task_tokens has no task: give the tokens of one, or leave it out.")
        super().__init__(model, needs, prompt_length, self.recipe.schedule, tasks)
        self.events: list[Event] = []
        self.history = history
        self._observer = observer
        self._running: defaultdict[int, _Running] = defaultdict(_Running)
        self._model = weakref.ref(model)

    @classmethod
    def load(cls, path: str | Path, model: transformers.PreTrainedModel) -> Cache:
        """The cache that `save` has written, which goes on from there; it serves the same model only.

        Raises:
            KeepsetError: the file is not a saved context, damaged, of another version or of another model.
        """
        context = saved.read(Path(path), model)
        cache = cls(model, context.recipe)
        context.restore(cache.layers)
        if context.event is not None:
            cache.events.append(Event(keep_set=context.keep_set, **context.event))
        if cache.schedule.every is None:
            cache.stop_watching()
        return cache

    @classmethod
    def from_prompt(
        cls,
        model: transformers.PreTrainedModel,
        recipe: str | Recipe,
        prompt: PromptCache,
        observations: Sequence[Observation],
    ) -> Cache:
        """The cache that this recipe would have left of a prompt that another cache has watched.

        Exact, because a prompt is compressed after its attention: one prefill serves any number of recipes.
        The observations stay as they are; they must hold what the recipe's method needs.

        Raises:
            KeepsetError: the recipe cannot be used, or compresses more than the prompt.
        """
        cache = cls(model, recipe)
        if cache.schedule.every is not None:
            raise KeepsetError(
                f"{cache.recipe} compresses while decoding, but a shared prefill serves the prompt's compression "
                "only: leave every= out."
            )
        cache.stop_watching()
        for index, layer in enumerate(prompt.layers):
            if index not in cache.kept_layers:
                cache.layers[index] = copy.deepcopy(layer)
        for observation in map(_as_found, observations):
            layer = cache.kept_layers[observation.layer]
            layer.adopt(observation, prompt.kept_layers[observation.layer])
            cache.received(layer, observation)
        return cache

    @property
    def keep_set(self) -> KeepSet | None:
        """What the newest compression kept; None before the first."""
        return self.events[-1].keep_set if self.events else None

    def fork(self) -> Cache:
        """An independent copy: what is appended to one is not seen by the other."""
        twin = copy.copy(self)
        twin.events, twin._running = list(self.events), defaultdict(_Running)
        twin._tap = copy.deepcopy(self._tap)
        twin._second = None if self._second is None else self._second.fork(twin)
        twin._perplexity = None if self._perplexity is None else self._perplexity.fork(twin)
        twin._waiting = list(self._waiting)
        twin.kept_layers = {index: layer.fork(twin) for index, layer in self.kept_layers.items()}
        twin.layers = [twin.kept_layers.get(index) or copy.deepcopy(layer) for index, layer in enumerate(self.layers)]
        return twin

    def save(self, path: str | Path) -> None:
        """Writes what is cached into one file, whole or not at all; a file that is there is replaced.

        Raises:
            KeepsetError: there is no whole prompt yet, the model has layers of a kind that is not saved, or the place
                cannot be written to.
        """
        model = self._model()
        if model is None:
            raise KeepsetError("The model of this cache is gone: keep it until the cache is saved.")
        saved.save(self, model, Path(path), model.config.name_or_path or "")

    def ask(
        self, input_ids: Int[Tensor, "rows tokens"], attention_mask: Int[Tensor, "rows tokens"] | None = None
    ) -> dict[str, Any]:
        """What `model.generate` takes to go on with these tokens, on a fork: the cache stays as it is.

        A cache of one request takes any number of rows, one with several takes a row for each. The answer begins with
        these tokens; what is cached comes before them, but is not told again, so penalties for repetition do not
        see it.

        Raises:
            KeepsetError: there is no whole prompt yet, or the rows do not fit it.
        """
        progress = saved.progress(self)
        requests, rows = len(progress.lengths), len(input_ids)
        if not input_ids.numel() or requests not in (1, rows):
            raise KeepsetError(
                f"The input has {rows} rows of {input_ids.shape[1]} tokens, and the cache {requests} requests: give at "
                "least one token for each of them."
            )
        twin = self.fork()
        if rows != requests:
            twin.batch_repeat_interleave(rows)
        new = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        before = new.new_ones(1, progress.logical) if progress.seen is None else progress.seen.to(new)
        return {
            "input_ids": input_ids,
            "attention_mask": torch.cat([before.expand(rows, -1), new], 1),
            "past_key_values": twin,
        }

    def reset(self) -> None:
        """Forgets everything that was cached."""
        super().reset()
        self.events.clear()
        self._running.clear()

    def received(self, layer: KeepLayer, observation: Observation) -> None:
        """Compresses the layer now, or all layers once the last one has been observed."""
        assert layer.compressed_at is not None
        event = self._running[layer.compressed_at]
        entries = int(observation.valid.sum())
        event.entries += entries
        event.nbytes += entries * observation.entry_bytes
        if self._observer is not None:
            event.found.append(_as_found(observation))
        keep_set: KeepSet | None = None
        start = time.perf_counter()
        method, budget = self.recipe.method, self.recipe.budget
        if not method.across_layers:
            keep_set = method.select(observation, budget)
            event.parts.append(_execute(layer, observation, keep_set))
        elif layer.compressed_at == layer.prompt != layer.logical:
            raise KeepsetError(
                f"{method.name} looks across layers, so it cannot take drafted tokens together with the prompt: "
                "leave assisted generation out."
            )
        else:
            event.observations[layer.index] = observation
            if len(event.observations) == len(self.kept_layers):
                keep_set = method.select_all(list(event.observations.values()), budget)
                event.parts += [
                    _execute(self.kept_layers[index], seen, keep_set) for index, seen in event.observations.items()
                ]
        event.seconds += time.perf_counter() - start
        if self._observer is not None and keep_set is not None:
            for found in event.found:
                self._observer(found, budget, keep_set)
            event.found.clear()
        if len(event.parts) == len(self.kept_layers):
            del self._running[layer.compressed_at]
            kept = KeepSet(event.parts)
            if self.events and not self.history:
                self.events[-1] = replace(self.events[-1], keep_set=None)
            self.events.append(
                Event(layer.compressed_at, kept, event.entries, kept.entries, event.nbytes, event.seconds)
            )
            if self.schedule.every is None:
                self.stop_watching()


def _as_found(observation: Observation) -> Observation:
    """The observation with the state from before, whatever the method writes into it."""
    found = copy.copy(observation)
    found.state = dict(observation.state)
    return found


def _execute(layer: KeepLayer, observation: Observation, keep_set: KeepSet) -> LayerKeepSet:
    kept = keep_set.layer(layer.index)
    layer.execute(kept)
    return kept.settled()
