from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import KeepsetError
from keepset.bench.analysis.diagnostics import repetition_rate
from tests.tiers import examples


@examples(60, derandomize=False)
@given(ids=st.lists(st.integers(0, 3), max_size=30), n=st.integers(1, 5))
def test_share_of_ngrams_that_occurred_before(ids: list[int], n: int) -> None:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    again = sum(gram in grams[:i] for i, gram in enumerate(grams))
    expected = again / len(grams) if grams else 0.0
    assert repetition_rate(torch.tensor(ids, dtype=torch.long), n) == pytest.approx(expected)


def test_four_is_the_default() -> None:
    ids = torch.tensor([7, 8, 9, 7, 8, 9, 7, 8])
    assert repetition_rate(ids) == repetition_rate(ids, 4) == pytest.approx(2 / 5)
    with pytest.raises(KeepsetError, match="n=0 is not a length of n-grams"):
        repetition_rate(ids, 0)
