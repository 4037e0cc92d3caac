"""`Tracer`: one generation under a recipe, with a note of every event."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.allocators.ams import Segments
from keepset.bench.analysis.diagnostics import Snapshot
from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.hf.cache import Cache
from keepset.recipe import Recipe


@runtime_checkable
class _Segmented(Protocol):
    def segments(self, observation: Observation, budget: Budget) -> Segments: ...


class HeadSegments(NamedTuple):
    """One head's segments, as Figure 3 of Yang and Shen (AMS) draws them.

    Attributes:
        mass: mass of every entry, `[entries]`.
        ends: one past the last entry of every segment, `[segments]`.
        quotas: how many entries every segment was to keep, `[segments]`.
    """

    mass: Float[Tensor, " entries"]
    ends: Int[Tensor, " segments"]
    quotas: Int[Tensor, " segments"]


def head_segments(method: Method, observation: Observation, budget: Budget) -> list[HeadSegments] | None:
    """Return the first request's segments, head by head; None if the method has no segments.

    Only the outermost method is asked: a method inside another divides what that one leaves it, which it cannot know.
    Segments without entries are left out.
    """
    if not isinstance(method, _Segmented):
        return None
    segments = method.segments(observation, budget)
    heads = []
    for head, valid in enumerate(observation.valid[0]):
        quotas = segments.quotas[0, head]
        sizes = segments.segment[0, head][valid].long().bincount(minlength=quotas.shape[0])
        real = sizes > 0
        heads.append(HeadSegments(segments.mass[0, head][valid].float(), sizes.cumsum(0)[real], quotas[real]))
    return heads


@dataclass(frozen=True, eq=False)
class TraceEvent(Snapshot):
    """One event of a trace.

    Attributes:
        entries: number of entries before the event, over all layers and KV heads.
        segments: the segments by layer, head by head; empty if the method has none.
    """

    entries: int
    segments: dict[int, list[HeadSegments]]

    @property
    def length(self) -> int:
        """Tokens of the text at the event."""
        return int(self.lengths[0])


@dataclass(frozen=True, eq=False)
class Trace:
    """One generation and its events.

    Attributes:
        recipe: the recipe's text.
        ids: the tokens, the prompt's first, `[tokens]`.
        prompt: number of the prompt's tokens.
        events: the events in their order.
        tokens_per_second: speed after the first token, without the time of observing; None for a text that was only
            followed.
    """

    recipe: str
    ids: Int[Tensor, " tokens"]
    prompt: int
    events: Sequence[TraceEvent]
    tokens_per_second: float | None


class Tracer:
    """Run one text of one request under a recipe.

    `trace` may be read at any time, also after Ctrl-C.

    Args:
        model: the model.
        recipe: the recipe.
        on_token: called with the number of new tokens.
    """

    def __init__(
        self, model: PreTrainedModel, recipe: Recipe, on_token: Callable[[int], None] = lambda _: None
    ) -> None:
        self._model, self._recipe, self.on_token = model, recipe, on_token
        self._segments: defaultdict[int, dict[int, list[HeadSegments]]] = defaultdict(dict)
        self._cache = Cache(model, recipe, history=True, observer=self._observe)
        self._ids: list[int] = []
        self._prompt = 0
        self._observing = 0.0
        self._clock: list[float] = []

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the compressed layers."""
        return self._cache.compressed_layers

    @torch.no_grad()
    def generate(self, ids: Int[Tensor, "1 prompt"], **options: Any) -> None:
        """Let the model continue a prompt, `[1, prompt]`, with the options of `model.generate`."""
        self._begin(ids[0], ids.shape[1])
        generate: Any = self._model.generate
        generate(ids, attention_mask=torch.ones_like(ids), past_key_values=self._cache, streamer=self, **options)

    @torch.no_grad()
    def follow(self, ids: Int[Tensor, " tokens"], prompt: int) -> None:
        """Feed a text that exists already, as if the model had generated what follows the prompt.

        Tokens between two events see the same entries whether they come one by one or together, so they come together.

        Args:
            ids: the text, `[tokens]`.
            prompt: number of the prompt's tokens.
        """
        self._begin(ids, prompt)
        step = self._recipe.schedule.every or len(ids)
        there = ids.to(self._model.device)
        for part in (there[:prompt], *torch.split(there[prompt:], step)):
            if len(part):
                self._model(part[None], past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            self.on_token(len(part))

    def put(self, value: Tensor) -> None:
        """Take what `model.generate` streams: the prompt, then one token after another."""
        self._clock.append(time.perf_counter() - self._observing)
        if len(self._clock) > 1:
            self._ids += value.flatten().tolist()
            self.on_token(1)

    def end(self) -> None:
        """Do nothing when the last token has been streamed."""

    @property
    def trace(self) -> Trace:
        """The trace so far."""
        events = [
            TraceEvent(event.keep_set, torch.tensor([event.length]), event.entries, self._segments[event.length])
            for event in self._cache.events
            if event.keep_set is not None
        ]
        speed = (len(self._clock) - 2) / (self._clock[-1] - self._clock[1]) if len(self._clock) > 2 else None
        return Trace(str(self._recipe), torch.tensor(self._ids), self._prompt, events, speed)

    def _begin(self, ids: Tensor, prompt: int) -> None:
        self._cache.reset()
        self._ids, self._prompt = ids.tolist(), prompt
        self._segments.clear()
        self._clock.clear()

    def _observe(self, observation: Observation, budget: Budget, keep_set: KeepSet) -> None:
        start = time.perf_counter()
        segments = head_segments(self._recipe.method, observation, budget)
        if segments is not None:
            self._segments[int(observation.lengths[0])][observation.layer] = segments
        self._observing += time.perf_counter() - start
