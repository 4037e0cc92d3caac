"""Events and freed blocks of a request in a few lines, for references that know nothing of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keepset import Budget, Recipe


def budget_of(recipe: Recipe, size: int) -> Budget:
    """The budget in entries of 16 bits whose keys and values have `size` numbers: each has a position, and columns."""
    budget, full = recipe.budget, 2 * 2 * size
    if budget.bytes is None:
        return budget
    beside = 4 + 4 * len(recipe.method.traits.state_names)
    return replace(budget, bytes=None, keep=budget.bytes * full / (full + beside))


def newest_event(recipe: Recipe, prompt: int, start: int, stop: int) -> int:
    """The newest event point in (start, stop]; 0 where there is none."""
    every, points = recipe.schedule.every, [prompt] if recipe.schedule.prefill else []
    if every is not None:
        points += range(prompt + every, stop + 1, every)
    return max((point for point in points if start < point <= stop), default=0)


def is_executed(
    recipe: Recipe, block_size: int, at: int, old: list[list[int]], kept: list[list[int]], per_head: bool = False
) -> bool:
    """Return whether a layer with fixed counts drops enough to be compressed: ragged heads must free a block."""
    average = -(-sum(map(len, kept)) // len(kept))
    equal = recipe.method.traits.equal_heads and not per_head
    return at - average >= (1 if equal else block_size) and kept != old


def blocks_gone(block_size: int, kept: Sequence[int], at: int, length: int) -> int:
    """How many leading blocks a layer does not need, now and with every token to come.

    A block is one page of each head, and a page belongs to one head. `kept` is what heads have of the first `at`
    tokens.
    """
    size, heads = block_size, len(kept)
    return min(
        -(-(length + more) // size) - -(-sum(-(-(count + length - at + more) // size) for count in kept) // heads)
        for more in range(2 * size)
    )
