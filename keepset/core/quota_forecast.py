"""The number of entries that will stay, computed on the host from lengths alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keepset.core.budget import Budget
from keepset.core.feature import Feature
from keepset.core.method import Method
from keepset.core.shapes import Quotas
from keepset.core.sizes import Sizes


def forecast_quotas(
    method: Method,
    budget: Budget,
    entries: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prompts: Sequence[int],
    layer_ids: Sequence[int],
    layers: tuple[int, ...],
    features: Mapping[Feature[Any], Any] | None = None,
) -> Quotas:
    """Return how many entries each head will keep, for neighbouring layers that hold equally many.

    Args:
        method: a method whose traits have `fixed_total` or `count_known_on_host`.
        budget: the recipe's budget.
        entries: entries that each head of each request holds, `[requests][kv_heads]`. Under `fixed_total` the average
            of a request's heads, given for each of them, leads to the same total.
        lengths: tokens that each request has had.
        prompts: tokens of each request's prompt.
        layer_ids: indices of the layers.
        layers: indices of all layers that are compressed.
        features: features that were read from files.

    Returns:
        Quotas `[len(layer_ids) * requests, kv_heads]` on the CPU, layer after layer.
    """
    repeats = len(layer_ids)
    held = torch.tensor(entries).repeat(repeats, 1)
    tokens, prompt_tokens = (torch.tensor(numbers).repeat(repeats) for numbers in (lengths, prompts))
    sizes = Sizes(held, tokens, prompt_tokens, tuple(layer_ids), layers, features or {})
    return method.quotas(sizes, budget).minimum(held)
