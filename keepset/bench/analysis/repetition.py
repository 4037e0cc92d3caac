"""Repetition: how much of a text has been said before."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from keepset.errors import KeepsetError


def repetition_rate(ids: Int[Tensor, " tokens"], n: int = 4) -> float:
    """Share of a text's n-grams that have occurred in it before; 0 for a text shorter than n.

    Yang and Shen (AMS, Figure 4b, Table 9) give the rate without n or formula; 4 is what is
    usual for degenerate repetition. Give the generated tokens alone: a prompt's repetitions are not the model's.
    """
    if n < 1:
        raise KeepsetError(f"n={n} is not a length of n-grams: use an integer from 1.")
    if ids.shape[0] < n:
        return 0.0
    grams = ids.unfold(0, n, 1)
    return 1 - grams.unique(dim=0).shape[0] / grams.shape[0]
