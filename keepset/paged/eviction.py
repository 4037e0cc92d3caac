"""`EvictionSchedule`: when a recipe compresses a request. `EvictionEvent`: the compression of requests in a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.feature import Accumulators
from keepset.core.keep_set import LayerKeepSet, LazyHostInts
from keepset.core.method import forecast_quotas
from keepset.core.traits import neighbours
from keepset.paged.query_records import QueryRecord
from keepset.recipe import Recipe

_CACHED = 1 << 18
"""How many events are cached: those of about a thousand requests. Each event's count follows from the one before."""
_OTHERS = 256
"""How many schedules of requests with budgets of their own are cached."""
GROUPS = 6
"""The most groups where counts come from the data. More groups hold fewer pages, and cost more per step."""
_PADDING = 0.1
"""The most memory that may be for layers that do not exist, as a share of the layers."""
MAX_ENTRIES = 1 << 20
"""The most entries of all heads that an event reads together, unless they are of one request in one layer."""
_MAX_HEAD_ENTRIES = 1 << 17
"""The most entries of one head that an event reads together."""
Request = TypeVar("Request")


class RequestPlan(NamedTuple):
    """How one request is compressed, if not like all others. It is made where the request enters, and sent as it is.

    Attributes:
        recipe: compresses it, with the same method as the engine's recipe; None if nothing does.
        after_context: whether it begins with a context. Then its length does not say how many entries it has lost.
        prompt: tokens that count as its prompt; None if the engine's number is right.
        next_event: the first event after its context; None if its prompt tells its events.
    """

    recipe: Recipe | None
    after_context: bool = False
    prompt: int | None = None
    next_event: int | None = None


class EvictionSchedule:
    """The compression events of one layer under one recipe.

    In all methods `prompt` is the tokens of a request's prompt, and `length` the tokens that it has had.

    Args:
        recipe: the recipe.
        layer: the layer, by its index in the model.
        layers: all layers of the model that are compressed.
        kv_heads: KV heads of each layer, in this process.
        head_dim: numbers of a key of this layer.
        block_size: tokens per page.
        value_dim: numbers of a value; None: as many as of a key.
        off: whether nothing is ever compressed.
        per_head: whether heads are attended as if they kept different numbers of entries, even if they do not.
        after_context: whether requests begin with a context. Then lengths do not say how many entries were dropped.
        next_event: the first event after the tokens that a request begins with; None if its prompt tells its events.

    Attributes:
        recipe, layers, kv_heads, block_size, after_context: as given.
        fixed: False if counts come from the data: then it is not known how many entries are dropped.
        ragged: whether heads keep different numbers of entries, or are attended as if they did. The latter is so if
            entries have biases, which no engine adds.
        whole_prompt: whether the recipe looks at every token of a prompt.
    """

    def __init__(
        self,
        recipe: Recipe,
        layer: int,
        layers: tuple[int, ...],
        kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        value_dim: int | None = None,
        off: bool = False,
        per_head: bool = False,
        after_context: bool = False,
        next_event: int | None = None,
    ) -> None:
        self.recipe, self.block_size, self._off = recipe, block_size, off
        self.after_context, self._next_event = after_context, next_event
        # How much is kept between turns, only the layouts say.
        self.fixed = recipe.method.traits.fixed_total and not (after_context or recipe.schedule.turns)
        equal = recipe.method.traits.equal_heads or kv_heads == 1
        self.ragged = per_head or not (self.fixed and equal) or recipe.method.traits.biased
        self.whole_prompt = bool(Accumulators(recipe.method.traits.needs))
        self._layer, self.layers, self.kv_heads, self._head_dim = layer, layers, kv_heads, head_dim
        self._value_dim = value_dim
        self._budget = recipe.budget_of_sizes([(head_dim, head_dim if value_dim is None else value_dim)])
        self._kept: dict[tuple[int, int], int] = {}
        self._others: dict[RequestPlan, EvictionSchedule] = {}

    def of_plan(self, plan: RequestPlan) -> EvictionSchedule:
        """Return the schedule of a request that is compressed by a plan of its own."""
        if len(self._others) > _OTHERS:
            self._others.clear()
        plan = plan._replace(prompt=None)  # requests of all prompts share it
        if plan not in self._others:
            self._others[plan] = EvictionSchedule(
                plan.recipe or self.recipe,
                self._layer,
                self.layers,
                self.kv_heads,
                self._head_dim,
                self.block_size,
                value_dim=self._value_dim,
                off=plan.recipe is None,
                per_head=self.ragged,
                after_context=plan.after_context,
                next_event=plan.next_event,
            )
        return self._others[plan]

    def newest_event(self, prompt: int, length: int) -> int:
        """Return the newest event at or before `length` tokens; 0 if there was none.

        Args:
            prompt: tokens of the request's prompt.
            length: tokens of the request.
        """
        schedule = self.recipe.schedule
        if length < prompt or self._off:
            return 0
        if schedule.every is None:
            return prompt if schedule.prefill else 0
        begin = self._begin(prompt, schedule.every)
        passed = (length - begin) // schedule.every
        return begin + passed * schedule.every if passed or schedule.prefill else 0

    def next_event(self, prompt: int, length: int) -> int | None:
        """Return the first event after `length` tokens, if there is one.

        Args:
            prompt: tokens of the request's prompt.
            length: tokens of the request.
        """
        schedule = self.recipe.schedule
        if self._off:
            return None
        if length < prompt and schedule.prefill:
            return prompt
        if schedule.every is None:
            return None
        begin = self._begin(prompt, schedule.every)
        return begin + (max(length - begin, 0) // schedule.every + 1) * schedule.every

    def _begin(self, prompt: int, every: int) -> int:
        return prompt if self._next_event is None else self._next_event - every

    def upcoming(self, prompt: int, length: int) -> int | None:
        """Return the first event after `length` tokens; None if there is none, or if it is known to drop nothing.

        Args:
            prompt: tokens of the request's prompt.
            length: tokens of the request.
        """
        event = self.next_event(prompt, length)
        return None if event is None or not self.due(prompt, event - 1, event) else event

    def draftable(self, prompt: int, length: int) -> int | None:
        """Return up to how many tokens a request may be drafted after `length` tokens; None if there is no limit.

        Drafted tokens may be taken back, so none of them brings an event due.

        Args:
            prompt: tokens of the request's prompt.
            length: tokens of the request before it is drafted further.
        """
        event = self.next_event(prompt, length)
        return None if event is None else event - 1

    def dropped(self, prompt: int, length: int) -> int:
        """Return how many entries each KV head has lost, on average, once `length` tokens were processed.

        If heads keep different numbers of entries, each of them may leave part of a page empty. So one block of the
        dropped ones is never freed, and a request is not compressed before it drops at least a block.

        Args:
            prompt: tokens of the request's prompt.
            length: tokens of the request that were processed.
        """
        at = self.newest_event(prompt, length)
        if not at or not self.fixed:
            return 0
        dropped = at - self._kept_at(prompt, at)
        return 0 if self.ragged and dropped < self.block_size else dropped

    def newest_effective_event(self, prompt: int, length: int) -> int:
        """Return the newest event at or before `length` tokens that dropped something; 0 if there was none.

        If a layer's share grows with the text, some events drop nothing. They are not executed.

        Args:
            prompt: tokens of the request's prompt.
            length: tokens of the request.
        """
        at = self.newest_event(prompt, length) if self.dropped(prompt, length) else 0
        while at and self.dropped(prompt, at) == self.dropped(prompt, at - 1):
            at = self.newest_event(prompt, at - 1)
        return at

    def due(self, prompt: int, before: int, after: int) -> int:
        """Return the event that a step from `before` to `after` tokens brings due; 0 if it brings none.

        Args:
            prompt: tokens of the request's prompt.
            before: tokens of the request before the step.
            after: tokens of the request after the step.
        """
        at = (self.newest_effective_event if self.fixed else self.newest_event)(prompt, after)
        return at if at > before else 0

    def was_compressed(self, prompt: int, length: int) -> bool:
        """Return whether a request of `length` tokens was compressed, or may have been if counts come from the data.

        Args:
            prompt: tokens of the request's prompt.
            length: tokens of the request.
        """
        return self.after_context or (self.dropped if self.fixed else self.newest_event)(prompt, length) > 0

    def freed(self, prompt: int, length: int) -> int:
        """Return how many leading blocks of the request are empty.

        Args:
            prompt: tokens of the request's prompt.
            length: tokens of the request that were processed.
        """
        blocks = self.dropped(prompt, length) // self.block_size
        return max(blocks - 1, 0) if self.ragged else blocks

    def untouched(self, prompt: int) -> int | None:
        """Return how many of the first tokens lie in pages that no compression writes to; None if nothing is ever
        compressed.

        Requests may share these pages.
        """
        if not self.fixed:
            return 0
        every = self.recipe.schedule.every
        first = self.newest_event(prompt, prompt) or prompt + (every or 0)
        if self.dropped(prompt, first):
            return self.freed(prompt, first) * self.block_size
        return None if every is None else 0

    def shareable(self, prompt: int) -> int | None:
        """Return how many of a prompt's first tokens may be taken from another request's pages; None for all of them.

        The queries of shared tokens are not computed. So tokens whose queries the first compression reads cannot be
        shared.
        """
        untouched = self.untouched(prompt)
        if untouched is None:
            return None
        return 0 if self.whole_prompt else max(min(untouched, prompt - self.recipe.method.traits.needs.window), 0)

    def shares(self, prompt: int, length: int) -> bool:
        """Return whether others may share pages of a request: those of its prompt, before its first compression.

        Args:
            prompt: tokens of the request's prompt.
            length: tokens of the request.
        """
        return self.untouched(prompt) != 0 and not self.was_compressed(prompt, length)

    def _kept_at(self, prompt: int, event: int) -> int:
        """Return the entries per head after an event; they follow from those after the event before it.

        Args:
            prompt: tokens of the request's prompt.
            event: tokens of the request at the event.
        """
        if len(self._kept) > _CACHED:
            self._kept.clear()
        every = self.recipe.schedule.every or 0
        first = self.newest_event(prompt, prompt) or prompt + every
        known_event = event
        while known_event > first and (prompt, known_event) not in self._kept:
            known_event -= every
        for at in range(known_event, event + 1, every or 1):
            if (prompt, at) not in self._kept:
                entries = at if at == first else self._kept[prompt, at - every] + every
                self._kept[prompt, at] = self._quota(entries, prompt, at)
        return self._kept[prompt, event]

    def _quota(self, entries: int, prompt: int, length: int) -> int:
        """Return how many of its entries the average head may keep, whatever they hold.

        Args:
            entries: entries of every head before the event.
            prompt: tokens of the request's prompt.
            length: tokens of the request at the event.
        """
        if self._budget.keep is None:
            return entries
        entry_counts = [[entries] * self.kv_heads]
        quotas = forecast_quotas(
            self.recipe.method, self._budget, entry_counts, [length], [prompt], (self._layer,), self.layers
        )
        return -(-int(quotas.sum()) // self.kv_heads)


def one_table(recipe: Recipe) -> bool:
    """Return whether all layers keep equally many entries, and so can share one block table."""
    return recipe.method.traits.fixed_total and recipe.method.traits.equal_layers


def group_leader(recipe: Recipe, layer: int, layers: tuple[int, ...]) -> int:
    """Return the first of the layers that share a layer's block table.

    Args:
        recipe: the recipe.
        layer: the layer, by its index in the model.
        layers: all layers that are compressed.
    """
    if one_table(recipe):
        return layers[0]
    if recipe.method.traits.fixed_total:
        return layer
    groups = neighbours(len(layers), _groups(len(layers), recipe.method.traits.layer_groups))
    return next(layers[group.start] for group in groups if layers.index(layer) in group)


def _groups(layers: int, wanted: int) -> int:
    """Return into how many groups so many layers are divided.

    Args:
        layers: the number of layers.
        wanted: the number of groups whose layers keep equally many entries; 0 if there are none.
    """
    numbers = [*([wanted] if 0 < wanted <= min(GROUPS, layers) else []), *range(min(GROUPS, layers), 0, -1)]
    return next(number for number in numbers if _room(layers, number) <= (1 + _PADDING) * layers)


def _room(layers: int, groups: int) -> int:
    """Return for how many layers vLLM takes memory if so many are divided into groups.

    It makes all groups as large as the largest or, if the largest is half as large again, divides them into groups as
    large as the smallest.

    Args:
        layers: the number of layers that are compressed.
        groups: the number of groups.
    """
    least, larger = divmod(layers, groups)
    if not larger or least + 1 < 1.5 * least:
        return groups * (least + bool(larger))
    return least * (groups + larger)  # each of the larger ones takes two


class OccupiedPages(NamedTuple):
    """The pages of requests' entries in some layers, layer after layer and request after request.

    Attributes:
        subpages: the sub-pages of each head, in the order of its entries; numbered through all layers of the group.
        packed: how many entries of each head the event before has packed; they come first (see `EntriesInPages`).
        entries: the number of entries of each head.
    """

    subpages: Int[Tensor, "layers_rows kv_heads pages"]
    packed: Int[Tensor, "layers_rows kv_heads"]
    entries: Int[Tensor, "layers_rows kv_heads"]


@dataclass(frozen=True)
class PageAssignment:
    """Pages for the entries that stay of an event's requests in some layers.

    Attributes:
        fits: 1 for each row of each layer whose entries fit its blocks; 0 if they do not, and the row is not changed.
            None if all rows fit.
        take: assigns the pages. Its argument is the number of entries of the largest head; it returns as many
            sub-pages per head as that one needs.
    """

    fits: LazyHostInts | None
    take: Callable[[int], Int[Tensor, "layers_rows kv_heads pages"]]

    @property
    def host_reads(self) -> list[LazyHostInts]:
        """The integers that the host must read before it calls `take`."""
        return [] if self.fits is None else [self.fits]


class EventPages(ABC):
    """The pages of an event's requests in the layers of a group."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of entries of the largest head."""

    @abstractmethod
    def held(self, layer_indices: range) -> Sequence[int]:
        """Return the number of entries of each request in each layer, layer after layer."""

    @abstractmethod
    def occupied(self, layer_indices: range) -> OccupiedPages:
        """Return where the entries lie in these layers."""

    @abstractmethod
    def assign(self, layer_indices: range, counts: Int[Tensor, "layers_rows kv_heads"]) -> PageAssignment:
        """Return pages for the entries that stay in these layers.

        Args:
            layer_indices: the layers, by their places in the group.
            counts: how many entries of each head stay, layer after layer and row after row.
        """


@dataclass(frozen=True)
class EvictionEvent:
    """The compression of some requests by one recipe. Where heads are equal, all requests hold equally many entries.

    The event's point is a number of tokens. Entries that came after it in the same step are not read and stay. (A
    prompt that is computed again after a preemption may end anywhere in a step.)

    Attributes:
        recipe: the recipe of these requests.
        rows: the requests, by their rows of the batch.
        at: the event's point of each request.
        earliest, latest: the least and the greatest of these points.
        prompts: tokens of each request's prompt.
        newer: entries after the point.
        keep: entries that the average head of each request keeps; None if the data decide.
        compressed: whether these requests were compressed before.
        ends_prompt: whether the point is the prompt's end.
        equal_heads: whether all heads have equally many entries.
        pages: where the entries lie before the event, and after it.
        records: the records of the requests, if the recipe looks at queries or whole prompts; else empty.
        slots: the slots of these records.
        first_query: the position of the first query that is known; those before count as missing.
        queries: the newest queries of a turn that ended earlier, after rotation, for each of the group's layers; None
            if they are in the rings, or if the turn's choice needs none any more.
    """

    recipe: Recipe
    rows: Sequence[int]
    at: Int[Tensor, " rows"]
    earliest: int
    latest: int
    prompts: Int[Tensor, " rows"]
    newer: int
    keep: Sequence[int] | None
    compressed: bool
    ends_prompt: bool
    equal_heads: bool
    pages: EventPages
    records: Sequence[QueryRecord]
    slots: Int[Tensor, " recorded"]
    first_query: int = 0
    queries: Float[Tensor, "layers query_heads n head_dim"] | None = None

    def is_counted(self, kept: LayerKeepSet) -> bool:
        """Return whether a layer keeps as many entries as the scheduler counts with."""
        if self.keep is None:
            return True
        sizes, heads = kept.heads.host_values, kept.counts.shape[1]
        sizes_by_row = [sizes[first : first + heads] for first in range(0, len(sizes), heads)]
        rows = zip(sizes_by_row, cycle(self.keep), strict=False)  # layer after layer
        if self.equal_heads:
            return all(set(counts) == {keep} for counts, keep in rows)
        return all(sum(counts) <= keep * heads for counts, keep in rows)


def max_layers_per_event(recipe: Recipe, entries: int, kv_heads: int) -> int:
    """Return how many layers an event may read together: at least one, and more if they have few entries.

    Given the entries of one request in one layer, it is the number of such requests that may be read together.

    Args:
        recipe: the recipe.
        entries: entries of each head of a layer, of all requests together.
        kv_heads: KV heads of a layer.
    """
    numbers = entries * recipe.method.traits.memory_factor
    return max(1, min(_MAX_HEAD_ENTRIES // numbers, MAX_ENTRIES // (numbers * kv_heads)))


def batches_of_similar_length(
    recipe: Recipe, requests: Sequence[Request], entries: Sequence[int], kv_heads: int
) -> Iterator[list[Request]]:
    """Yield the requests in batches that are compressed together, the longest first.

    In a batch every request is padded to the longest one. So a batch has no request with less than half of the longest
    one's entries.

    Args:
        recipe: their recipe.
        requests: the requests.
        entries: entries of each head of each request.
        kv_heads: KV heads of a layer.
    """
    waiting = sorted(zip(entries, requests, strict=True), key=lambda pair: -pair[0])
    while waiting:
        longest = waiting[0][0]
        most = max_layers_per_event(recipe, longest, kv_heads)
        batch = [request for count, request in waiting[:most] if 2 * count >= longest]
        yield batch
        del waiting[: len(batch)]
