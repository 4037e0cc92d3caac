"""Statistics of the heads that a process has: they say of these what those of the whole model say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from keepset import KeepsetError, Observation, Recipe
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.statistics import HeadShare
from tests.methods.naive import Shape, random_statistics


def observe(keys: Tensor, values: Tensor, needs: Needs, measured: Any) -> Observation:
    features = dict.fromkeys(needs.of(ModelStatistics), measured)
    return Observation(keys=keys, values=values, features=features, layer=3, layers=(2, 3))


@pytest.mark.parametrize("method", ["distilled", "qfilter", "triattention", "expected_attention"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_heads_have_the_scores_that_they_have_in_the_whole_model(method: str, ranks: int) -> None:
    """Also where two processes have the same KV head, each with half of its query heads."""
    whole, size = random_statistics(Shape((9,), 4, 2, 6, 5), (2, 3)), max(1, 4 // ranks)
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 4, 9, 6, generator=draw), torch.randn(2, 4, 9, 5, generator=draw)
    scorer = Recipe.parse(f"{method}(stats='stats')").method
    right = scorer.score(observe(keys, values, scorer.traits.needs, whole))
    summed = torch.zeros_like(right)
    for rank in range(ranks):
        heads = slice(rank * 4 // ranks, rank * 4 // ranks + size)
        share = whole.of_heads(HeadShare(rank, ranks, 4))
        shown = observe(keys[:, heads], values[:, heads], scorer.traits.needs, share)
        summed[:, heads] += scorer.score(shown) / max(1, ranks // 4)
    if ranks <= 4 or method in ("distilled", "qfilter"):  # which know of KV heads alone
        torch.testing.assert_close(summed, right, rtol=1e-5, atol=1e-6)


def test_heads_of_another_model_are_refused() -> None:
    whole = random_statistics(Shape((9,), 4, 2, 6, 5), (2, 3))
    with pytest.raises(KeepsetError, match="are of another model"):
        whole.of_heads(HeadShare(0, 8, 2))
