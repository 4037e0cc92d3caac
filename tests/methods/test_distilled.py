"""`distilled`: what it remembers, its threshold, and keys far into a text; `formulas.py` has its formula."""

from __future__ import annotations

import math

import pytest
import torch

from keepset import Budget, Observation, Recipe
from keepset.core.features.runtime_features import ModelStatistics
from keepset.errors import RecipeError
from keepset.methods.distilled import Distilled
from tests.kernels.codes import check_same_codes
from tests.methods.naive import Shape, observe
from tests.observations import changed

STATISTICS = ModelStatistics("", predictors=True)
SHAPE = Shape((20, 13), 2, 3, 6, 4)


def test_what_was_scored_once_is_not_scored_again() -> None:
    observation, method = observe(SHAPE), Distilled()
    scores = method.score(observation)
    state = {name: column.clone() for name, column in method.remember(observation, scores).items()}
    (column,) = state.values()
    assert column.isfinite().all() and (column[1, :, 13:] == 0).all()
    column[:, :, :9] += 512 * 1024  # as nothing that is computed now: all logarithms are larger by 1
    column[:, 0, 11:] = 0  # not scored yet, in one head
    again = method.score(changed(observation, state=state))
    expected = torch.cat([math.e * scores[:, :, :9], scores[:, :, 9:]], 2)
    torch.testing.assert_close(again[observation.valid], expected[observation.valid])


@pytest.mark.parametrize("keep", [None, 5])
def test_a_threshold_keeps_what_reaches_it(keep: int | None) -> None:
    """And what always stays, however low; a budget is a cap."""
    observation = observe(SHAPE)
    scores = Distilled().score(observation)
    threshold = float(scores[0, 0].quantile(0.6))
    kept = Distilled(threshold=threshold).select(observation, Budget(keep, sinks=1, recent=2))
    for request, length in enumerate(SHAPE.lengths):
        for head in range(2):
            always = {0, length - 2, length - 1}
            row = {entry: float(scores[request, head, entry]) for entry in range(length) if entry not in always}
            best = sorted((entry for entry in row if row[entry] >= threshold), key=lambda entry: -row[entry])
            expected = sorted(always | set(best if keep is None else best[: keep - 3]))
            assert kept.positions(0, request, head).tolist() == expected


def test_what_divides_budgets_wraps_it_unless_it_has_a_threshold() -> None:
    """With a threshold it says itself how many entries a head keeps."""
    for name in ("adakv", "ams", "chunkkv"):
        assert Recipe.parse(f"{name}(distilled, keep=64)").method.scorer == Distilled()  # type: ignore[attr-defined]
    for name in ("ams", "chunkkv"):
        with pytest.raises(RecipeError, match="distilled"):
            Recipe.parse(f"{name}(distilled(threshold=0.5), keep=64)")


def test_a_keys_place_does_not_matter() -> None:
    """The same key and value, rotated for other positions, up to ones far beyond what any network was fitted to.

    Angles of so far are less exact: a number that is between two steps may be rounded to the other one.
    """
    near = observe(SHAPE)
    codes = [
        Distilled().remember(observation, Distilled().score(observation))["code"]
        for observation in (near, rotated_by(near, 131_000))
    ]
    check_same_codes(*codes, 0.9)


def rotated_by(observation: Observation, distance: int) -> Observation:
    """All entries so many positions later."""
    layer = observation[STATISTICS].layers[0]
    angles = distance * layer.frequency.double()
    keys = observation.keys.double()
    keys = keys * angles.cos() + keys[..., layer.partner] * angles.sin()
    return changed(
        observation,
        keys=keys.float(),
        positions=observation.positions + distance,
        lengths=observation.lengths + distance,
    )
