"""Bins of risk, and drawing contexts from them as evenly as possible."""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.tables import ENTROPY_BINS, PERPLEXITY_BINS, Tables, neutral

_TAIL = 0.05
"""The share of all contexts in the outermost bin of each side."""


def with_edges(tables: Tables, risks: Float[Tensor, "contexts 2"]) -> Tables:
    """Return tables with bins for the entropy and perplexity of contexts.

    Bins of entropy have equal width in nats; bins of perplexity have equal width of its logarithm. The paper gives the
    number of bins but not their edges.
    """
    entropy = _edges(risks[:, 0], ENTROPY_BINS)
    perplexity = _edges(risks[:, 1].log(), PERPLEXITY_BINS).exp()
    return dataclasses.replace(tables, entropy_edges=entropy.float(), perplexity_edges=perplexity.float())


def risk_bins(tables: Tables, risks: Float[Tensor, "contexts 2"]) -> Int[Tensor, " contexts"]:
    """Return each context's bin: PERPLEXITY_BINS times the bin of its entropy, plus the bin of its perplexity."""
    of_entropy, of_perplexity = tables.bins(risks[:, 0], risks[:, 1])
    return of_entropy * PERPLEXITY_BINS + of_perplexity


def stratified(bins: Sequence[int], count: int) -> list[int]:
    """Return the rising indices of `count` contexts: one of every bin, then a second of each, and so on."""
    rounds: dict[int, int] = {}
    turns = []
    for index, bin_ in enumerate(bins):
        rounds[bin_] = rounds.get(bin_, 0) + 1
        turns.append((rounds[bin_], index))
    return sorted(index for _, index in sorted(turns)[:count])


def empty(layers: int, query_heads: int, budgets: Sequence[int]) -> Tables:
    """Return neutral tables, which decide nothing yet."""
    one, rows = neutral(layers, query_heads, 1.0), len(budgets)
    weights, gate = one.weights.repeat(rows, 1, 1), one.gate.repeat(rows, 1, 1, 1)
    return dataclasses.replace(one, weights=weights, gate=gate, budgets=torch.tensor(budgets))


def _edges(risk: Float[Tensor, " contexts"], bins: int) -> Float[Tensor, " _"]:
    known = risk[risk.isfinite()].double()
    low, high = known.quantile(torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64)).tolist() if len(known) else (0, 0)
    if high - low < 1e-3:  # all alike
        low, high = low - 0.5, high + 0.5
    return torch.linspace(low, high, bins - 1, dtype=torch.float64)
