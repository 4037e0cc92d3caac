"""How many entries stay, said ahead of looking at any: by lengths alone, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keepset.core.budget import Budget
from keepset.core.feature import Feature
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.shapes import Quotas


def quotas_ahead(
    method: Method,
    budget: Budget,
    entries: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prompts: Sequence[int],
    head_dim: int,
    layer_ids: Sequence[int],
    layers: tuple[int, ...],
    features: Mapping[Feature[Any], Any] | None = None,
) -> Quotas:
    """What `Method.quotas` says of requests whose heads hold so many entries, whatever these are, layer after layer.

    Args:
        method, budget: of a recipe whose `fixed_total` holds, or `count_known_on_host`.
        entries: of each head of each request; under `fixed_total` their average says the same of a layer.
        lengths, prompts: tokens that each request has had, and those of its prompt.
        head_dim: of the layers.
        layer_ids, layers: indices of the layers, neighbours, which hold the same, and of all that are compressed.
        features: out of files.
    """
    held = torch.tensor(entries).repeat(len(layer_ids), 1)
    least, most = int(held.min()), int(held.max())
    shape = (*held.shape, most)
    nothing = torch.empty(()).expand(*shape, head_dim)
    outline = Observation(
        keys=nothing,
        values=nothing,
        valid=None if least == most else torch.arange(most) < held[..., None],
        lengths=torch.tensor(lengths).repeat(len(layer_ids)),
        prompts=torch.tensor(prompts).repeat(len(layer_ids)),
        scaling=1.0,
        layer_ids=layer_ids,
        layers=layers,
        features=features,
    )
    return method.quotas(outline, budget).minimum(held)
