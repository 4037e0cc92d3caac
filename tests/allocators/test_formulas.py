"""Allocators against their formulas in loops (`formulas.py`): exactly the same entries, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, Method
from tests.allocators.formulas import FORMULAS, Formula, budgets
from tests.methods.naive import Shape, observe, sets_of
from tests.tiers import examples


@pytest.mark.parametrize(
    ("method", "formula"), [pytest.param(*each, id=f"{each[0].name}-{index}") for index, each in enumerate(FORMULAS)]
)
@examples(60)
@given(
    budget=budgets(),
    lengths=st.lists(st.integers(1, 18), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    values=st.sampled_from([1, 4, 1000]),
    seed=st.integers(0, 10**6),
)
def test_keeps_what_the_formula_keeps(
    method: Method, formula: Formula, budget: Budget, lengths: list[int], sizes: tuple[int, int], values: int, seed: int
) -> None:
    """Scores are few whole numbers: many are equal, and no mean is rounded."""
    heads, layers = sizes
    shape, draw = Shape(tuple(lengths), heads, 1, 1, 1), torch.Generator().manual_seed(seed)
    size = (layers, shape.batch, heads, shape.entries)
    scores = torch.randint(0, values, size, generator=draw).float() - values // 2
    observations = [
        observe(shape, layer=layer, layers=range(layers), state={"scores": scores[layer]}) for layer in range(layers)
    ]
    for request, length in enumerate(lengths):
        expected = formula(scores[:, request, :, :length].tolist(), budget, method)
        assert sets_of(method, observations, budget, request) == expected
