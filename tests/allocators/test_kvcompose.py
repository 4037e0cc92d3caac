"""KVCompose against equations 14 to 24 in loops, what it is made of, and recipes under their own names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, Method, Recipe
from keepset.allocators.pool import Composite, Pool
from keepset.allocators.presets import KVCompose, Preset
from keepset.methods.second_pass import SecondPassAttention
from tests.allocators.formulas import budgets, composite, given_scores, pool
from tests.methods.formulas import naive_scores, observed
from tests.methods.naive import Given, Shape, sets_of
from tests.tiers import examples

SWITCHES = dict(
    task=["context", "self"],
    **dict.fromkeys(("aggregate_task", "aggregate_group", "aggregate_head"), ("max", "mean")),
    **dict.fromkeys(("mean_term", "structured"), (True, False)),
    values=["none", "norm", "projected"],
    floor=[0.0, 0.3, 1.0],
)
options_of_kvcompose = st.fixed_dictionaries({name: st.sampled_from(of) for name, of in SWITCHES.items()})


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
