"""Events of a generation: `Tracer` notes them, `figures` and `EventFigures` are their diagnostics."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.allocators.ams import Segments
from keepset.bench.analysis.diagnostics import (
    REGION,
    Snapshot,
    by_depth,
    gone,
    longest_run,
    middle_retention,
    proxy_segments,
    repetition_rate,
    wipeout_rate,
)
from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.hf.cache import Cache
from keepset.recipe import Recipe


class HeadSegments(NamedTuple):
    """One head's segments, as Figure 3 of Yang and Shen (AMS) draws them.

    Attributes:
        mass: mass of every entry.
        ends: one past the last entry of every segment.
        quotas: how many entries every segment was to keep.
    """

    mass: Float[Tensor, " entries"]
    ends: Int[Tensor, " segments"]
    quotas: Int[Tensor, " segments"]

    def length_by_mass(self) -> float | None:
        """Return the correlation of the segments' lengths with their mass per entry; None if either is the same in all.

        It is below 0 if regions of high mass are cut into shorter segments (Figure 3).
        """
        lengths = self.ends.diff(prepend=self.ends.new_zeros(1)).double()
        filled = self.mass.double().cumsum(0)[self.ends - 1]
        density = filled.diff(prepend=filled.new_zeros(1)) / lengths
        if len(lengths) < 2 or float(lengths.std()) == 0 or float(density.std()) == 0:
            return None
        return float(torch.corrcoef(torch.stack([lengths, density]))[0, 1])


def head_segments(method: Method, observation: Observation, budget: Budget) -> list[HeadSegments] | None:
    """Return the first request's segments, head by head; None if the method has no segments.

    Only the outermost method is asked: a method inside another divides what that one leaves it, which it cannot know.
    Segments without entries are left out.
    """
    if not hasattr(method, "segments"):
        return None
    segments: Segments = method.segments(observation, budget)
    heads = []
    for head, valid in enumerate(observation.valid[0]):
        quotas = segments.quotas[0, head]
        sizes = segments.segment[0, head][valid].long().bincount(minlength=quotas.shape[0])
        real = sizes > 0
        heads.append(HeadSegments(segments.mass[0, head][valid].float(), sizes.cumsum(0)[real], quotas[real]))
    return heads


@dataclass(frozen=True, eq=False)
class TraceEvent(Snapshot):
    """One event of a trace: with the number of entries before it, and the segments by layer and head if it has any."""

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
        ids: the tokens, of which the first `prompt` are the prompt's.
        tokens_per_second: speed after the first token, without the time of observing; None for a text that was only
            followed.
    """

    recipe: str
    ids: Int[Tensor, " tokens"]
    prompt: int
    events: Sequence[TraceEvent]
    tokens_per_second: float | None


class Tracer:
    """Run one text of one request under a recipe, and call `on_token` with the number of new tokens.

    `trace` may be read at any time, also after Ctrl-C.
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
        """Feed a text that exists already, as if the model had generated what follows the first `prompt` tokens.

        Tokens between two events see the same entries whether they come one by one or together, so they come together.
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


_MEASURES = ("wipeout", "iou", "survived", "middle", "longest_gap")


def measures(snapshot: Snapshot, before: KeepSet | None, region: int) -> dict[str, Float[Tensor, "layers kv_heads"]]:
    """Return what an event of one request did, by the names of `FIGURES`.

    Regions have `region` tokens. Two figures compare it with the event before, if there is one: `iou`, the intersection
    over union of the entries that both kept (Yang and Shen, AMS, Table 14), and `survived`, the share of the earlier
    event's entries that the later one kept.
    """
    found = {"wipeout": wipeout_rate(snapshot, region), "middle": middle_retention(snapshot)}
    found["longest_gap"] = longest_run(gone(snapshot)).float()
    if before is not None:
        found |= {"iou": before.iou(snapshot.keep_set), "survived": before.overlap(snapshot.keep_set)}
    return {name: values[:, 0] for name, values in found.items()}


def figures(trace: Trace, region: int = REGION) -> dict[str, Any]:
    """Return the `measures` of every event, and their means over the events by layer and by depth, for JSON."""
    befores = [None, *(event.keep_set for event in trace.events)]
    events = [measures(event, before, region) for event, before in zip(trace.events, befores, strict=False)]
    rows = [
        {
            "length": event.length,
            "entries": event.entries,
            "kept": event.keep_set.entries,
            **{name: float(found[name].mean()) if name in found else None for name in _MEASURES},
        }
        for event, found in zip(trace.events, events, strict=True)
    ]
    known = {name: [found[name] for found in events if name in found] for name in _MEASURES}
    some = {name: torch.stack(values) for name, values in known.items() if values}
    return {
        "recipe": trace.recipe,
        "prompt_tokens": trace.prompt,
        "tokens": len(trace.ids),
        "region": region,
        "repetition": repetition_rate(trace.ids[trace.prompt :]),
        "tokens_per_second": trace.tokens_per_second,
        "layers": list(trace.events[0].keep_set.layers) if trace.events else [],
        "kv_heads": trace.events[0].keep_set.counts.shape[2] if trace.events else 0,
        "events": rows,
        "mean": {name: float(values.mean()) for name, values in some.items()},
        "by_layer": {name: values.mean((0, 2)).tolist() for name, values in some.items()},
        "by_depth": {name: by_depth(values.mean(0)) for name, values in some.items()},
        "segments": _segments(trace),
    }


def _segments(trace: Trace) -> dict[str, float] | None:
    """Return the mean number and length of the segments (Table 14) over all events, layers and heads."""
    heads = [head for event in trace.events for layer in event.segments.values() for head in layer]
    if not heads:
        return None
    count = sum(len(head.ends) for head in heads)
    return {"count": count / len(heads), "length": sum(len(head.mass) for head in heads) / count}


class EventFigures:
    """Means over the events, layers and KV heads of one answer, whose cache holds one request.

    Call `look` after every token; it does nothing without a new event. Give `observe` to the cache as its observer, for
    methods that cut texts into segments. No event's KeepSet is kept.
    """

    def __init__(self, method: Method) -> None:
        self._method, self._length = method, 0
        self._before: KeepSet | None = None
        self._segments: list[tuple[float, float]] = []
        self._length_by_mass: list[float] = []
        self._events: list[dict[str, float]] = []

    def observe(self, observation: Observation, budget: Budget, keep_set: KeepSet) -> None:
        """Note how many segments a head of this layer has, and how long they are."""
        if heads := head_segments(self._method, observation, budget):
            numbers = [len(head.ends) for head in heads]
            lengths = [len(head.mass) / number for head, number in zip(heads, numbers, strict=True)]
            self._segments.append((fmean(numbers), fmean(lengths)))
            self._length_by_mass += [value for head in heads if (value := head.length_by_mass()) is not None]

    def look(self, cache: Cache) -> None:
        """Note the newest event if it is new; do nothing for a recipe that compresses only the prompt."""
        if cache.schedule.every is None or not cache.events or cache.events[-1].length == self._length:
            return
        event = cache.events[-1]
        assert event.keep_set is not None
        self._length = event.length
        snapshot = Snapshot(event.keep_set, event.keep_set.counts.new_tensor([event.length]))
        found = measures(snapshot, self._before, REGION)
        figures = {name: float(values.mean()) for name, values in found.items()}
        if "iou" in found:
            figures |= _with_depths("iou", found["iou"])
        if self._segments:
            number, length = torch.tensor(self._segments).unbind(-1)
            self._segments.clear()
        else:
            number, length = (part.flatten(1).mean(1) for part in proxy_segments(snapshot))
        figures |= _with_depths("segments", number) | _with_depths("segment_length", length)
        if self._length_by_mass:
            figures["length_by_mass"] = fmean(self._length_by_mass)
            self._length_by_mass.clear()
        self._before = event.keep_set
        self._events.append(figures)

    @property
    def means(self) -> Mapping[str, float]:
        """Means by the names of `FIGURES`; names without a value are left out."""
        names = dict.fromkeys(name for figures in self._events for name in figures)
        return {name: fmean(figures[name] for figures in self._events if name in figures) for name in names}


def _with_depths(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean of a figure over all layers, and over the layers of each stage."""
    return {name: float(values.mean()), **{f"{name}_{stage}": value for stage, value in by_depth(values).items()}}
