"""KVCompose against equations 14 to 24 in loops, what it is made of, and recipes under their own names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, Method, Observation, Recipe
from keepset.allocators.pool import Composite, Pool
from keepset.allocators.presets import Glance, KVCompose, Preset, Reread
from keepset.core.features.attention import PromptQueryAttention
from keepset.methods.prompt_queries import PromptQueries
from keepset.methods.second_pass import SecondPassAttention
from tests.allocators.formulas import budgets, composite, given_scores, pool
from tests.methods.formulas import naive_scores, observed
from tests.methods.naive import Given, Shape, observe, sets_of
from tests.tiers import examples

options_of_kvcompose = st.fixed_dictionaries(
    dict(
        task=st.sampled_from(["context", "self"]),
        aggregate_task=st.sampled_from(["max", "mean"]),
        aggregate_group=st.sampled_from(["max", "mean"]),
        aggregate_head=st.sampled_from(["max", "mean"]),
        mean_term=st.booleans(),
        values=st.sampled_from(["none", "norm", "projected"]),
        structured=st.booleans(),
        floor=st.sampled_from([0.0, 0.3, 1.0]),
    )
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    lengths = draw(st.lists(st.integers(10, 18), min_size=1, max_size=2))
    return Shape(tuple(lengths), *draw(st.sampled_from([(1, 8), (3, 1), (2, 3)])), 4, 5)


@examples(60)
@given(
    budget=budgets(), shape=shapes(), layers=st.integers(1, 4), options=options_of_kvcompose, seed=st.integers(0, 99)
)
def test_equations_14_to_24(budget: Budget, shape: Shape, layers: int, options: dict[str, Any], seed: int) -> None:
    method = KVCompose(**options)
    names = ("task", "aggregate_task", "aggregate_group", "mean_term", "values")
    scorer = SecondPassAttention(*(options[name] for name in names), chunk=0)
    observations = [observed(scorer, shape, seed=seed + i, layer=i, layers=range(layers)) for i in range(layers)]
    for request in range(shape.batch):
        scores = [naive_scores(scorer, observation, request) for observation in observations]
        composition: Any = method.composition
        expected = (composite if options["structured"] else pool)(scores, budget, composition)
        assert sets_of(method, observations, budget, request) == expected


@examples(40)
@given(
    budget=budgets(),
    shape=shapes(),
    layers=st.integers(1, 4),
    seed=st.integers(0, 99),
    recipe=st.sampled_from([(Glance(), PromptQueries(stride=4)), (Reread(), PromptQueries(second_pass=True))]),
)
def test_glance_and_reread_are_one_pool_of_prompt_queries(
    budget: Budget, shape: Shape, layers: int, seed: int, recipe: tuple[Preset, PromptQueries]
) -> None:
    method, scorer = recipe
    size = (layers, shape.batch, shape.kv_heads * shape.group, shape.entries)
    squares = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    asked = PromptQueryAttention(scorer.stride)
    observations = [
        observe(shape, seed=seed + i, layer=i, layers=range(layers), features={asked: squares[i]})
        for i in range(layers)
    ]
    for request in range(shape.batch):
        scores = [naive_scores(scorer, observation, request) for observation in observations]
        assert sets_of(method, observations, budget, request) == pool(scores, budget, Pool(scorer))


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("glance(keep=0.5)", "pool(prompt_queries(stride=4), keep=0.5)"),
        ("reread(keep=0.5)", "pool(prompt_queries(second_pass=True), keep=0.5)"),
        ("kvcompose(keep=0.5)", "composite(second_pass(mean_term=True, chunk=0), keep=0.5)"),
        ("kvcompose(structured=False, floor=0.1)", "pool(second_pass(mean_term=True, chunk=0), floor=0.1)"),
    ],
)
def test_a_name_stands_for_what_it_is_made_of(name: str, whole: str) -> None:
    named: Any = Recipe.parse(name)
    made = Recipe.parse(whole)
    assert isinstance(named.method, Preset) and named.method.composition == made.method
    assert named.budget == made.budget and named.method.traits.needs == made.method.traits.needs


def test_the_papers_example_in_words() -> None:
    """Heads may keep different tokens, but as many; the layer with better composite tokens keeps more."""
    observations = given_scores(
        [[9.0, 1.0, 8.0, 1.0], [1.0, 9.0, 1.0, 8.0]], [[3.0, 2.0, 2.0, 1.0], [1.0, 2.0, 2.0, 3.0]]
    )
    assert sets_of(Composite(Given()), observations, Budget(1)) == [[[0], [1]], [[0], [3]]]
    assert sets_of(Composite(Given()), observations, Budget(2)) == [[[0, 2], [1, 3]], [[0, 2], [2, 3]]]
    assert sets_of(Composite(Given()), observations, Budget(0.75))[0] == [[0, 2, 3], [1, 2, 3]]


RICH, POOR, ALIKE = [[5.0 + i for i in range(10)]], [[0.1 * i for i in range(10)]], [[1.0] * 12, [1.0] * 12]


@pytest.mark.parametrize(
    ("method", "layers", "keep", "counts"),
    [
        # Without a floor what scores low is starved.
        (Composite(Given()), (RICH, POOR), 5, [9, 1]),
        (Composite(Given(), floor=0.5), (RICH, POOR), 5, [7, 3]),
        (Pool(Given(), floor=0.5), (RICH, POOR), 5, [8, 2]),
        (Pool(Given(), floor=0.0), (RICH, POOR), 5, [9, 1]),
        # Of equal scores all layers get as many.
        *((method, (ALIKE,) * 3, 4, [4, 4, 4]) for method in (Composite(Given()), Pool(Given()))),
        (Composite(Given(), floor=0.5), (ALIKE,) * 3, 4, [4, 4, 4]),
    ],
    ids=range(7),
)
def test_what_layers_get(method: Method, layers: tuple[list[list[float]], ...], keep: int, counts: list[int]) -> None:
    found = method.select_all(given_scores(*layers), Budget(keep)).counts[:, 0]
    assert found.tolist() == [[count] * found.shape[1] for count in counts]


@examples(60)
@given(
    held=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    keep=st.integers(1, 40),
    floor=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_heads_that_hold_different_numbers_share_what_there_is(
    held: list[tuple[int, int]], seed: int, keep: int, floor: float
) -> None:
    """At an event after others heads hold different numbers of entries."""
    length, observations = 20, []
    for layer, numbers in enumerate(held):
        most = max(numbers)
        places = torch.arange(most).expand(1, 2, -1)
        valid = places < torch.tensor(numbers)[:, None]
        plain = observe(Shape((most,), 2, 2, 3, 3), layer=layer, layers=range(len(held)), seed=seed)
        observations.append(
            Observation(
                keys=plain.keys,
                values=plain.values,
                positions=(places + length - torch.tensor(numbers)[:, None]).where(valid, 0),
                valid=valid,
                lengths=torch.tensor([length]),
                layer=layer,
                layers=range(len(held)),
                state={"scores": torch.randn(1, 2, most, generator=torch.Generator().manual_seed(seed + layer))},
            )
        )
    budget = Budget(keep, recent=min(keep, 3))
    pooled, tokens = (
        kind(Given(), floor=floor).select_all(observations, budget).counts[:, 0].tolist() for kind in (Pool, Composite)
    )
    assert sum(map(sum, pooled)) == min(2 * keep * len(held), sum(map(sum, held)))
    assert sum(map(max, tokens)) <= min(keep * len(held), sum(-(-sum(numbers) // 2) for numbers in held))
    for in_pool, of_tokens, numbers in zip(pooled, tokens, held, strict=True):
        assert of_tokens[0] == of_tokens[1] or min(of_tokens) == min(numbers)
        for found in (in_pool, of_tokens):
            assert all(1 <= count <= number for count, number in zip(found, numbers, strict=True))


def test_a_layer_alone_keeps_what_it_was_asked_for() -> None:
    for method in (KVCompose(), KVCompose(structured=False), Pool(SecondPassAttention(chunk=0))):
        observation = observed(SecondPassAttention(chunk=0), Shape((30, 21), 2, 3, 4, 4))
        assert method.select(observation, Budget(7)).counts.sum(-1).tolist() == [[14, 14]]
