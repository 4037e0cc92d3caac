"""What `match` is compared with: attention over all entries, and over kept ones, head by head."""

from __future__ import annotations

import torch
from torch import Tensor

from keepset import Observation
from keepset.core.features.queries import PaddedQueries, Reference, ReferenceQueries
from keepset.core.keep_set import LayerKeepSet
from keepset.kernels.packed import BIAS


def with_reference(observation: Observation) -> Observation:
    """The observation whose newest queries are what a fit after the prompt refers to."""
    assert observation.queries is not None and observation.query_positions is not None
    newest = PaddedQueries(observation.queries, observation.query_positions >= 0)
    none = PaddedQueries(newest.queries[:, :, :0], newest.exists[:, :0])
    return observation.with_features({ReferenceQueries(1, 1): Reference(none, newest)})


def squared_errors(observation: Observation, kept: LayerKeepSet) -> Tensor:
    """How far attention over what stays is from that over all: as it was fitted, and with what was there."""
    assert kept.values is not None
    assert observation.queries is not None and observation.query_positions is not None
    batch, kv_heads, _ = observation.valid.shape
    errors = torch.zeros(2, dtype=torch.float64)
    for row in range(batch * kv_heads):
        request, head = divmod(row, kv_heads)
        exists = observation.query_positions[request] >= 0
        group = observation.queries.unflatten(1, (kv_heads, -1))[request, head][:, exists].flatten(0, 1).double()
        length = int(observation.lengths[request])
        keys, values = (part[request, head, :length].double() for part in (observation.keys, observation.values))
        part = slice(*kept.cu_seqlens[row : row + 2].tolist())
        chosen = kept.indices[part]
        products = group @ keys.T * observation.scaling
        target = products.softmax(-1) @ values
        biases = kept.state[BIAS][request, head][chosen].double()
        fitted = (products[:, chosen] + biases).softmax(-1) @ kept.values[part].double()
        untouched = products[:, chosen].softmax(-1) @ values[chosen]
        errors += torch.stack([(fitted - target).square().sum(), (untouched - target).square().sum()])
    return errors
