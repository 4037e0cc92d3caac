"""Every scorer against its paper's formula (`formulas.py`), number by number."""

from __future__ import annotations

import pytest
import torch

from keepset import METHODS, Method
from keepset.allocators.presets import Preset
from keepset.core.method import Allocator
from tests.methods.formulas import FORMULAS, naive_scores, observed
from tests.methods.naive import DTYPES, SHAPES, Shape, check_scores
from tests.tiers import FULL

BY_THEMSELVES = {"random", "gvote", "duo_attention", "compilerkv"}
"""Scorers whose tests write out more than scores, or other things: chance, votes, quotas, and a choice for all layers
together."""

every_scorer = pytest.mark.parametrize(
    "method", [pytest.param(method, id=str(method)) for each in FORMULAS.values() for method in each.methods]
)
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_every_scorer_has_a_formula() -> None:
    scorers = {name for name, kind in METHODS.items() if not issubclass(kind, Allocator | Preset)}
    assert FORMULAS.keys() | BY_THEMSELVES == scorers


def check(method: Method, shape: Shape, dtype: torch.dtype, positions: torch.Tensor | None = None) -> None:
    observation = observed(method, shape, dtype=dtype, layer=5, layers=(2, 5, 7), positions=positions)
    expected = [naive_scores(method, observation, request) for request in range(shape.batch)]
    formula = FORMULAS[method.name]
    check_scores(method, observation, expected, **(formula.exact if dtype == torch.float32 else formula.rounded))


@pytest.mark.few
@every_type
@every_scorer
def test_scores_are_the_papers(method: Method, dtype: torch.dtype) -> None:
    for shape in SHAPES if FULL or dtype == torch.float32 else SHAPES[1:2]:
        check(method, shape, dtype)


@every_scorer
def test_scores_after_an_event_that_dropped_entries(method: Method) -> None:
    """Heads hold the same entries, or other ones."""
    first, different = [0, 1, 4, 5, 9, 12, 13, 14, 15], [0, 2, 3, 5, 6, 11, 13, 14, 15]
    for second in (first, different):
        positions = torch.tensor([[first, second], [different, different if second is first else first]])
        positions[1, :, 7:] = 0
        check(method, Shape((9, 7), 2, 2, 6, 6), torch.float32, positions)
