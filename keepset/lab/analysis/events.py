"""What each event of a generation kept, in figures; and how much a text repeats itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.allocators.ams import Segments
from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.hf.cache import Cache

REGION = 16
"""Tokens of a region: the shortest segment of AMS's Table 15."""


Kept = Bool[Tensor, "layers kv_heads positions"]
"""Whether each position of one request's text so far is kept after an event."""


def wipeout_rate(kept: Kept, region: int = REGION) -> Float[Tensor, "layers kv_heads"]:
    """Return the share of the text's regions from which an event has kept nothing (Yang and Shen, AMS, appendix C).

    The paper gives the rate without a definition. In keepset, regions of `region` tokens are counted from the first
    token of the text so far, so a region that an earlier event wiped out stays wiped out. A shorter last region counts.

    Args:
        kept: whether each position of the text so far is kept.
        region: tokens of a region.
    """
    regions = F.pad(kept, (0, -kept.shape[-1] % region)).unflatten(-1, (-1, region))
    return 1 - regions.any(-1).float().mean(-1)


def middle_retention(kept: Kept) -> Float[Tensor, "layers kv_heads"]:
    """Return the share of the middle third of the text so far that is kept (Yang and Shen, AMS, Figure 4a).

    The paper does not say where the middle begins. In keepset, a third of the positions, rounded down, is left out at
    either end.
    """
    edge = kept.shape[-1] // 3
    middle = kept[..., edge : kept.shape[-1] - edge]
    return middle.float().mean(-1)


def longest_run(flags: Bool[Tensor, "*rows positions"]) -> Int[Tensor, "*rows"]:
    """Return the length of the longest stretch of neighbours that are all true."""
    count = torch.arange(1, flags.shape[-1] + 1, device=flags.device)
    last_false = count.expand_as(flags).masked_fill(flags, 0).cummax(-1).values
    runs = count - last_false
    return torch.cat([runs, runs.new_zeros(*flags.shape[:-1], 1)], -1).amax(-1)


def proxy_segments(kept: Kept) -> tuple[Float[Tensor, "layers kv_heads"], Float[Tensor, "layers kv_heads"]]:
    """Return the number of runs of consecutive kept tokens, and their mean length in tokens.

    They replace segments if a method has none (Yang and Shen, AMS, Figure 5: "consecutive retained tokens are grouped
    as proxy segments").
    """
    begins = kept & ~F.pad(kept, (1, 0))[..., :-1]
    runs = begins.sum(-1)
    return runs.float(), kept.sum(-1).float() / runs.clamp(min=1)


def by_depth(values: Float[Tensor, " layers *rest"]) -> dict[str, float]:
    """Return means over the early, middle and late layers (AMS, Table 14).

    The paper cuts its 28 layers into 8, 12 and 8 and gives no rule. In keepset, early and late are two sevenths of the
    layers each, rounded, and the middle is the rest. Stages without layers are left out.
    """
    edge = round(values.shape[0] * 2 / 7)
    stages = zip(
        ("early", "middle", "late"), torch.split(values, [edge, values.shape[0] - 2 * edge, edge]), strict=True
    )
    return {name: float(part.mean()) for name, part in stages if part.shape[0]}


def repetition_rate(ids: Int[Tensor, " tokens"], n: int = 4) -> float:
    """Return the share of a text's n-grams that have occurred in it before; 0 for a text shorter than n.

    Yang and Shen (AMS, Figure 4b, Table 9) give the rate without n or formula; 4 is usual for degenerate repetition.

    Args:
        ids: the text.
        n: tokens of an n-gram.
    """
    if ids.shape[0] < n:
        return 0.0
    grams = ids.unfold(0, n, 1)
    return 1 - grams.unique(dim=0).shape[0] / grams.shape[0]


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

    Args:
        method: the outermost method.
        observation: one layer at the event.
        budget: the budget under which the layer was compressed.
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
        """Note how many segments a head of this layer has, and how long they are.

        Args:
            observation: one layer at the event.
            budget: the budget under which it was compressed.
            keep_set: what stayed.
        """
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
            number, length = torch.tensor(self._segments, dtype=torch.float32).unbind(-1)
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
    return {name: float(values.mean()), **{f"{name}_{stage}": value for stage, value in by_depth(values).items()}}
