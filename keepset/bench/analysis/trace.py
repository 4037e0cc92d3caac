"""Events of a generation: `EventFigures` measures what each event kept, `Tracer` runs and watches a generation."""

import time
from collections.abc import Callable, Mapping
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
    by_depth,
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
    """One head's segments: the mass of every entry, and the end of every segment (exclusive)."""

    mass: Float[Tensor, " entries"]
    ends: Int[Tensor, " segments"]

    def length_by_mass(self) -> float | None:
        """Return the correlation of the segments' lengths with their mass per entry; None if either is constant.

        It is below 0 if regions of high mass are cut into shorter segments (Yang and Shen, AMS, Figure 3).
        """
        lengths = self.ends.diff(prepend=self.ends.new_zeros(1)).double()
        filled = self.mass.double().cumsum(0)[self.ends - 1]
        density = filled.diff(prepend=filled.new_zeros(1)) / lengths
        if len(lengths) < 2 or float(lengths.std()) == 0 or float(density.std()) == 0:
            return None
        return float(torch.corrcoef(torch.stack([lengths, density]))[0, 1])


def head_segments(method: Method, observation: Observation, budget: Budget) -> list[HeadSegments] | None:
    """Return the first request's segments, head by head; None if the method has no segments.

    Only the outermost method counts, because a method inside another divides a budget that it cannot know. Segments
    without entries are left out.
    """
    if not hasattr(method, "segments"):
        return None
    segments: Segments = method.segments(observation, budget)
    heads = []
    for head, valid in enumerate(observation.valid[0]):
        sizes = segments.segment[0, head][valid].long().bincount()
        heads.append(HeadSegments(segments.mass[0, head][valid].float(), sizes.cumsum(0)[sizes > 0]))
    return heads


@dataclass(frozen=True)
class EventRow:
    """One event: the tokens of the text by then, entries before and after it in all heads, and its figures.

    The figures are means over layers and KV heads, by the names of `FIGURES`. Two of them compare the event with the
    one before, if there is one: `iou`, the intersection over union of the entries that both kept (Yang and Shen, AMS,
    Table 14), and `survived`, the share of the earlier event's entries that the later one kept.
    """

    length: int
    entries: int
    kept: int
    figures: Mapping[str, float]


class EventFigures:
    """Measures the events of one answer, whose cache holds one request; `events` has a row for each.

    Call `look` after every token; it does nothing without a new event. Give `observe` to the cache as its observer, for
    methods that cut texts into segments. No event's KeepSet is kept.
    """

    def __init__(self, method: Method) -> None:
        self.events: list[EventRow] = []
        self._method = method
        self._before: KeepSet | None = None
        self._segments: list[tuple[float, float]] = []
        self._length_by_mass: list[float] = []

    def observe(self, observation: Observation, budget: Budget, keep_set: KeepSet) -> None:
        """Note how many segments a head of this layer has, and how long they are."""
        if heads := head_segments(self._method, observation, budget):
            numbers = [len(head.ends) for head in heads]
            lengths = [len(head.mass) / number for head, number in zip(heads, numbers, strict=True)]
            self._segments.append((fmean(numbers), fmean(lengths)))
            self._length_by_mass += [value for head in heads if (value := head.length_by_mass()) is not None]

    def look(self, cache: Cache) -> None:
        """Measure the newest event if it is new."""
        if not cache.events or (self.events and cache.events[-1].length == self.events[-1].length):
            return
        event = cache.events[-1]
        assert event.keep_set is not None
        kept = event.keep_set.mask(event.length)[:, 0]
        figures = {
            "wipeout": float(wipeout_rate(kept).mean()),
            "middle": float(middle_retention(kept).mean()),
            "longest_gap": float(longest_run(~kept).float().mean()),
        }
        if self._before is not None:
            figures["survived"] = float(self._before.overlap(event.keep_set).mean())
            figures |= _with_depths("iou", self._before.iou(event.keep_set))
        if self._segments:
            number, length = torch.tensor(self._segments).unbind(-1)
            self._segments.clear()
        else:
            number, length = (part.mean(1) for part in proxy_segments(kept))
        figures |= _with_depths("segments", number) | _with_depths("segment_length", length)
        if self._length_by_mass:
            figures["length_by_mass"] = fmean(self._length_by_mass)
            self._length_by_mass.clear()
        self._before = event.keep_set
        self.events.append(EventRow(event.length, event.entries, event.kept, figures))

    @property
    def means(self) -> Mapping[str, float]:
        """Means over the events by the names of `FIGURES`; names without a value are left out."""
        of_events = [event.figures for event in self.events]
        names = dict.fromkeys(name for figures in of_events for name in figures)
        return {name: fmean(figures[name] for figures in of_events if name in figures) for name in names}


def _with_depths(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean of a figure over all layers, and over the layers of each stage."""
    return {name: float(values.mean()), **{f"{name}_{stage}": value for stage, value in by_depth(values).items()}}


class Tracer:
    """Runs one generation under a recipe, and measures its events.

    Attributes:
        ids: the tokens so far, of which the first `prompt` are the prompt's.
        events: the figures so far; they may be read at any time, also after Ctrl-C.
    """

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        self.ids: list[int] = []
        self.prompt = 0
        self.events = EventFigures(recipe.method)
        self._model, self._cache = model, Cache(model, recipe, observer=self._observe)
        self._watching = 0.0
        self._clock: list[float] = []

    @torch.no_grad()
    def generate(self, ids: Int[Tensor, "1 prompt"], on_token: Callable[[], None], **options: Any) -> None:
        """Continue a prompt with the options of `model.generate`; call `on_token` after each token."""
        self.ids, self.prompt, self._on_token = ids[0].tolist(), ids.shape[1], on_token
        generate: Any = self._model.generate
        generate(ids, attention_mask=torch.ones_like(ids), past_key_values=self._cache, streamer=self, **options)

    def put(self, value: Tensor) -> None:
        """Receive the stream of `model.generate`: the prompt, then one token after another."""
        now = time.perf_counter()
        self._clock.append(now - self._watching)
        if len(self._clock) > 1:
            self.ids += value.flatten().tolist()
            self.events.look(self._cache)
            self._on_token()
        self._watching += time.perf_counter() - now

    def end(self) -> None:
        """Do nothing when the last token has been streamed."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures so far, as `keepset trace --json` prints them.

        The speed covers the tokens after the first, without the time of measuring.
        """
        clock, keep_set = self._clock, self._cache.keep_set
        return {
            "recipe": str(self._cache.recipe),
            "prompt_tokens": self.prompt,
            "tokens": len(self.ids),
            "region": REGION,
            "repetition": repetition_rate(torch.tensor(self.ids[self.prompt :], dtype=torch.long)),
            "tokens_per_second": (len(clock) - 2) / (clock[-1] - clock[1]) if len(clock) > 2 else None,
            "heads": 0 if keep_set is None else keep_set.counts[:, 0].numel(),
            "events": [
                {"length": event.length, "entries": event.entries, "kept": event.kept, **event.figures}
                for event in self.events.events
            ],
            "mean": self.events.means,
        }

    def _observe(self, observation: Observation, budget: Budget, keep_set: KeepSet) -> None:
        start = time.perf_counter()
        self.events.observe(observation, budget, keep_set)
        self._watching += time.perf_counter() - start
