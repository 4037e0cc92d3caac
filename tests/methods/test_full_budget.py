"""A budget of `keep=1.0` under every registered method, and what the guide says about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from keepset import METHODS, Budget, Recipe
from keepset.core.features.queries import PaddedQueries, ReferenceQueries
from keepset.core.method import Allocator
from tests.methods.naive import Shape, observe

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
LENGTH, HEADS, LAYERS = 200, 2, (0, 1, 4)


def is_the_full_cache(text: str, keep: int | float) -> bool:
    """Return whether everything stays, every number as it was, under a method with its own defaults."""
    method, shape = Recipe.parse(text).method, Shape((LENGTH,), HEADS, 2, 8, 8)
    # Attention that is sharp, or all entries are wanted by some query.
    sharp = [observe(shape, window=64, layer=layer, layers=LAYERS, seed=layer, scaling=2.0) for layer in LAYERS]
    asked = PaddedQueries(sharp[0].newest_queries(64)[0], torch.ones(1, 64, dtype=torch.bool))
    observations = [each.with_features({ReferenceQueries(128): asked}) for each in sharp]
    answer = method.select_all(observations, Budget(keep, method.traits.sinks, method.traits.recent))
    for each in observations:
        kept = answer.layer(each.layer)
        whole = kept.counts.tolist() == [[LENGTH] * HEADS] and kept.entry_bytes == each.entry_bytes
        if not whole:
            return False
        # What `match` has fitted is a solution of linear equations in float32.
        bias = kept.state.get("bias", torch.zeros(1))
        torch.testing.assert_close(bias, torch.zeros_like(bias), atol=1e-3, rtol=0)
        if kept.values is not None:
            torch.testing.assert_close(kept.values, each.values.flatten(0, 2), atol=1e-3, rtol=0)
    return True


def excepted() -> set[str]:
    """Return the methods that the guide names in its paragraph about `keep=1.0`."""
    (paragraph,) = (
        part for part in GUIDE.read_text(encoding="utf-8").split("\n\n") if part.startswith("With `keep=1.0`")
    )
    return set(re.findall(r"`(\w+)`", paragraph)) & METHODS.keys()


@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
@pytest.mark.parametrize("name", METHODS)
def test_a_full_budget_is_the_full_cache_unless_the_guide_says_otherwise(name: str) -> None:
    text = f"{name}(snapkv)" if issubclass(METHODS[name], Allocator) else name
    assert [is_the_full_cache(text, keep) for keep in (1.0, LENGTH)] == [name not in excepted()] * 2
