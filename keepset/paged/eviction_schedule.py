"""`EvictionSchedule`: when a recipe compresses a request, and how many of its entries are dropped by then.

All of it follows from the prompt's length, the tokens so far and the recipe. So the scheduler's process and every
rank compute it by themselves, without messages.
"""

from __future__ import annotations

from keepset.core.feature import Accumulators
from keepset.core.method import forecast_quotas
from keepset.recipe import Recipe

_CACHED = 1 << 18
"""How many events are cached: those of about a thousand requests. Each event's count follows from the one before."""

_OTHERS = 256
"""How many schedules of requests with budgets of their own are cached."""


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
        counted: False if the number of dropped entries does not follow from lengths, whatever the recipe.

    Attributes:
        recipe, layers, kv_heads, block_size: as given.
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
        counted: bool = True,
    ) -> None:
        self.recipe, self.block_size, self._off = recipe, block_size, off
        self.fixed = recipe.method.traits.fixed_total and counted
        equal = recipe.method.traits.equal_heads or kv_heads == 1
        self.ragged = per_head or not (self.fixed and equal) or recipe.method.traits.biased
        self.whole_prompt = bool(Accumulators(recipe.method.traits.needs))
        self._layer, self.layers, self.kv_heads, self._head_dim = layer, layers, kv_heads, head_dim
        self._value_dim = value_dim
        self._budget = recipe.budget_of_sizes([(head_dim, head_dim if value_dim is None else value_dim)])
        self._kept: dict[tuple[int, int], int] = {}
        self._others: dict[tuple[Recipe | None, bool], EvictionSchedule] = {}

    def with_recipe(self, recipe: Recipe | None, counted: bool = True) -> EvictionSchedule:
        """Return the schedule of a request with a recipe of its own.

        Args:
            recipe: the request's recipe, with the same method as the group's; None if the request is never compressed.
            counted: False if the number of dropped entries does not follow from the request's length.
        """
        if len(self._others) > _OTHERS:
            self._others.clear()
        if (recipe, counted) not in self._others:
            own = recipe or self.recipe, self._layer, self.layers, self.kv_heads, self._head_dim, self.block_size
            self._others[recipe, counted] = EvictionSchedule(
                *own, value_dim=self._value_dim, off=recipe is None, per_head=self.ragged, counted=counted
            )
        return self._others[recipe, counted]

    def newest_event(self, prompt: int, length: int) -> int:
        """Return the newest event at or before `length` tokens; 0 if there was none."""
        schedule = self.recipe.schedule
        if length < prompt or self._off:
            return 0
        if schedule.every is None:
            return prompt
        passed = (length - prompt) // schedule.every
        return prompt + passed * schedule.every if passed or schedule.prefill else 0

    def next_event(self, prompt: int, length: int) -> int | None:
        """Return the first event after `length` tokens, if there is one."""
        schedule = self.recipe.schedule
        if self._off:
            return None
        if length < prompt and schedule.prefill:
            return prompt
        if schedule.every is None:
            return None
        return prompt + (max(length - prompt, 0) // schedule.every + 1) * schedule.every

    def upcoming(self, prompt: int, length: int) -> int | None:
        """Return the first event after `length` tokens; None if there is none, or if it is known to drop nothing."""
        event = self.next_event(prompt, length)
        return None if event is None or not self.due(prompt, event - 1, event) else event

    def draftable(self, prompt: int, length: int) -> int | None:
        """Return up to how many tokens a request may be drafted after `length` tokens; None if there is no limit.

        Drafted tokens may be taken back, so none of them brings an event due.
        """
        event = self.next_event(prompt, length)
        return None if event is None else event - 1

    def dropped(self, prompt: int, length: int) -> int:
        """Return how many entries each KV head has lost, on average, once `length` tokens were processed.

        If heads keep different numbers of entries, each of them may leave part of a page empty. So one block of the
        dropped ones is never freed, and a request is not compressed before it drops at least a block.
        """
        at = self.newest_event(prompt, length)
        if not at or not self.fixed:
            return 0
        dropped = at - self._kept_at(prompt, at)
        return 0 if self.ragged and dropped < self.block_size else dropped

    def newest_effective_event(self, prompt: int, length: int) -> int:
        """Return the newest event at or before `length` tokens that dropped something; 0 if there was none.

        If a layer's share grows with the text, some events drop nothing. They are not executed.
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
        """Return whether a request of `length` tokens was compressed, or may have been if counts come from the data."""
        return (self.dropped if self.fixed else self.newest_event)(prompt, length) > 0

    def freed(self, prompt: int, length: int) -> int:
        """Return how many leading blocks of the request are empty."""
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
        """Return whether others may share pages of a request: those of its prompt, before its first compression."""
        return self.untouched(prompt) != 0 and not self.was_compressed(prompt, length)

    def _kept_at(self, prompt: int, event: int) -> int:
        """Return the entries per head after an event; they follow from those after the event before it."""
        if len(self._kept) > _CACHED:
            self._kept.clear()
        every = self.recipe.schedule.every or 0
        first = self.newest_event(prompt, prompt) or prompt + every
        known = event
        while known > first and (prompt, known) not in self._kept:
            known -= every
        for at in range(known, event + 1, every or 1):
            if (prompt, at) not in self._kept:
                entries = at if at == first else self._kept[prompt, at - every] + every
                self._kept[prompt, at] = self._quota(entries, prompt, at)
        return self._kept[prompt, event]

    def _quota(self, entries: int, prompt: int, length: int) -> int:
        """Return how many of its entries the average head may keep, whatever they hold."""
        if self._budget.keep is None:
            return entries
        held = [[entries] * self.kv_heads]
        quotas = forecast_quotas(
            self.recipe.method, self._budget, held, [length], [prompt], (self._layer,), self.layers
        )
        return -(-int(quotas.sum()) // self.kv_heads)


GROUPS = 6
"""The number of groups where counts come from the data. More groups hold fewer pages, and cost more per step."""


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
    place, groups = layers.index(layer), min(GROUPS, len(layers))
    first = -(-(place * groups // len(layers)) * len(layers) // groups)
    return layers[first]
