"""Recipes under names of their own against their formulas in loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, Recipe
from keepset.allocators.pool import Pool
from keepset.allocators.presets import Glance, Preset, Reread
from keepset.core.features.attention import PromptQueryAttention
from keepset.methods.prompt_queries import PromptQueries
from tests.allocators.formulas import budgets, pool, sets_of
from tests.methods.formulas import naive_scores
from tests.methods.naive import Shape, observe
from tests.tiers import examples


@examples(40)
@given(
    budget=budgets(),
    lengths=st.lists(st.integers(10, 18), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 8), (3, 1), (2, 3)]),
    layers=st.integers(1, 4),
    seed=st.integers(0, 99),
    recipe=st.sampled_from([(Glance(), PromptQueries(stride=4)), (Reread(), PromptQueries(second_pass=True))]),
)
def test_one_pool_of_prompt_queries(
    budget: Budget,
    lengths: list[int],
    heads: tuple[int, int],
    layers: int,
    seed: int,
    recipe: tuple[Preset, PromptQueries],
) -> None:
    method, scorer = recipe
    shape = Shape(tuple(lengths), *heads, 4, 5)
    draw = torch.Generator().manual_seed(seed)
    squares = torch.rand(layers, shape.batch, heads[0] * heads[1], shape.entries, generator=draw)
    observations = [
        observe(
            shape,
            seed=seed + layer,
            layer=layer,
            layers=range(layers),
            features={PromptQueryAttention(scorer.stride): squares[layer]},
        )
        for layer in range(layers)
    ]
    for request in range(shape.batch):
        scores = [naive_scores(scorer, observation, request) for observation in observations]
        assert sets_of(method, observations, budget, request) == pool(scores, budget, Pool(scorer))


@pytest.mark.parametrize(
    "name, whole", [("glance", "pool(prompt_queries(stride=4))"), ("reread", "pool(prompt_queries(second_pass=True))")]
)
def test_a_name_stands_for_what_it_is_made_of(name: str, whole: str) -> None:
    named: Any = Recipe.parse(f"{name}(keep=0.5)")
    made = Recipe.parse(f"{whole[:-1]}, keep=0.5)")
    assert isinstance(named.method, Preset) and named.method.composition == made.method
    assert named.budget == made.budget == Budget(0.5, sinks=4, recent=8)
    assert named.method.traits.needs == made.method.traits.needs
