"""`EvictionSchedule`: when a request of a recipe is compressed, and how many of its entries are gone by then.

All of it follows from the prompt's length, the tokens so far and the recipe. So the scheduler's process and every
rank know it alone, and nothing is sent between them.
"""

from __future__ import annotations

from keepset.core.accumulators import Accumulators
from keepset.core.quota_forecast import quotas_ahead
from keepset.recipe import Recipe

_CACHED = 1 << 18
"""Events of about a thousand requests: what each leaves is made from what the one before it left."""

_OTHERS = 256
"""Budgets of requests' own that are remembered."""


class EvictionSchedule:
    """The compression events of one layer under one recipe.

    Args:
        off: whether nothing is ever compressed.
        per_head: whether heads are to be attended as if they kept different numbers, whether or not they do.
        counted: whether what is dropped may be counted, if the recipe allows it.

    Attributes:
        recipe: what is executed.
        block_size: tokens per page.
        fixed: False where counts come from the data: then nothing is known about what is dropped.
        ragged: whether heads keep different numbers of entries, or are attended as if they did, because no engine adds
            biases.
        whole_prompt: whether the recipe looks at every token of a prompt.
        layers: all layers of the model that are compressed.
        kv_heads: of each, in this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        layer: int,
        layers: tuple[int, ...],
        kv_heads: int,
        block_size: int,
        *,
        off: bool = False,
        per_head: bool = False,
        counted: bool = True,
    ) -> None:
        self.recipe, self.block_size, self._off = recipe, block_size, off
        self.fixed = recipe.method.fixed_total and counted
        self.ragged = per_head or not (self.fixed and recipe.method.equal_heads) or recipe.method.biased
        self.whole_prompt = bool(Accumulators(recipe.method.needs))
        self._layer, self.layers, self.kv_heads = layer, layers, kv_heads
        self._kept: dict[tuple[int, int], int] = {}
        self._others: dict[tuple[Recipe | None, bool], EvictionSchedule] = {}

    def under(self, recipe: Recipe | None, counted: bool = True) -> EvictionSchedule:
        """That of a request with a budget of its own, by the same method.

        Args:
            recipe: the request's; None: it is never compressed.
            counted: False where what it has lost already is not known from its length.
        """
        if len(self._others) > _OTHERS:
            self._others.clear()
        if (recipe, counted) not in self._others:
            own = recipe or self.recipe, self._layer, self.layers, self.kv_heads, self.block_size
            self._others[recipe, counted] = EvictionSchedule(
                *own, off=recipe is None, per_head=self.ragged, counted=counted
            )
        return self._others[recipe, counted]

    def event(self, prompt: int, length: int) -> int:
        """The newest event at or before `length` tokens; 0 when there was none."""
        schedule = self.recipe.schedule
        if length < prompt or self._off:
            return 0
        if schedule.every is None:
            return prompt
        passed = (length - prompt) // schedule.every
        return prompt + passed * schedule.every if passed or schedule.prefill else 0

    def next_event(self, prompt: int, length: int) -> int | None:
        """The first event after `length` tokens."""
        schedule = self.recipe.schedule
        if self._off:
            return None
        if length < prompt and schedule.prefill:
            return prompt
        if schedule.every is None:
            return None
        return prompt + (max(length - prompt, 0) // schedule.every + 1) * schedule.every

    def upcoming(self, prompt: int, length: int) -> int | None:
        """The first event after `length` tokens, unless it is known that it will drop nothing."""
        event = self.next_event(prompt, length)
        return None if event is None or not self.due(prompt, event - 1, event) else event

    def dropped(self, prompt: int, length: int) -> int:
        """Entries that the average KV head has lost once `length` tokens were processed.

        Heads of different lengths round up to whole pages, each by itself; one spare block absorbs that, so they
        are not compressed before a whole block can go.
        """
        at = self.event(prompt, length)
        if not at or not self.fixed:
            return 0
        dropped = at - self._kept_at(prompt, at)
        return 0 if self.ragged and dropped < self.block_size else dropped

    def compressed(self, prompt: int, length: int) -> int:
        """The newest event at or before `length` tokens that dropped something; 0 when there was none.

        Where a layer's share grows with the text, some events drop nothing; those are not executed.
        """
        at = self.event(prompt, length) if self.dropped(prompt, length) else 0
        while at and self.dropped(prompt, at) == self.dropped(prompt, at - 1):
            at = self.event(prompt, at - 1)
        return at

    def due(self, prompt: int, before: int, after: int) -> int:
        """The event that is executed in a step from `before` to `after` tokens; 0 where nothing is to drop."""
        at = (self.compressed if self.fixed else self.event)(prompt, after)
        return at if at > before else 0

    def was_compressed(self, prompt: int, length: int) -> bool:
        """Whether a request of `length` tokens was compressed, as far as is known here."""
        return (self.dropped if self.fixed else self.event)(prompt, length) > 0

    def freed(self, prompt: int, length: int) -> int:
        """Leading blocks of the request that hold nothing any more."""
        blocks = self.dropped(prompt, length) // self.block_size
        return max(blocks - 1, 0) if self.ragged else blocks

    def num_blocks(self, prompt: int, length: int) -> int:
        """Blocks that a request of `length` tokens needs."""
        return -(-length // self.block_size) - self.freed(prompt, length)

    def untouched(self, prompt: int) -> int | None:
        """First tokens whose pages no compression writes to, so that other requests may share them.

        None where nothing is ever compressed.
        """
        if not self.fixed:
            return 0
        every = self.recipe.schedule.every
        first = self.event(prompt, prompt) or prompt + (every or 0)
        if self.dropped(prompt, first):
            return self.freed(prompt, first) * self.block_size
        return None if every is None else 0

    def shareable(self, prompt: int) -> int | None:
        """First tokens of a prompt that may be taken from another request's pages; None for all of them.

        Of such tokens no queries are seen, so those that the first compression looks at are not shared.
        """
        untouched = self.untouched(prompt)
        if untouched is None:
            return None
        return 0 if self.whole_prompt else max(min(untouched, prompt - self.recipe.method.needs.window), 0)

    def shares(self, prompt: int, length: int) -> bool:
        """Whether other requests may have pages of this one: those of its prompt, until its first compression."""
        return self.untouched(prompt) != 0 and not self.was_compressed(prompt, length)

    def _kept_at(self, prompt: int, event: int) -> int:
        """Entries per head that the event leaves, from those that the event before it left."""
        if len(self._kept) > _CACHED:
            self._kept.clear()
        every = self.recipe.schedule.every or 0
        first = self.event(prompt, prompt) or prompt + every
        known = event
        while known > first and (prompt, known) not in self._kept:
            known -= every
        for at in range(known, event + 1, every or 1):
            if (prompt, at) not in self._kept:
                entries = at if at == first else self._kept[prompt, at - every] + every
                self._kept[prompt, at] = self._quota(entries, prompt, at)
        return self._kept[prompt, event]

    def _quota(self, entries: int, prompt: int, length: int) -> int:
        """Entries that the average head may keep of so many; what they hold plays no part."""
        budget = self.recipe.budget
        if budget.keep is None:
            return entries
        held, of = [[entries] * self.kv_heads], (0, (self._layer,), self.layers)
        quotas = quotas_ahead(self.recipe.method, budget, held, [length], [prompt], *of)
        return -(-int(quotas.sum()) // self.kv_heads)
