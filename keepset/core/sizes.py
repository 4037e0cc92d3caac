"""`Sizes`: the lengths and counts that decide how many entries stay, whatever the entries hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.feature import Feature, Value
from keepset.core.shapes import Quotas


@dataclass(frozen=True, eq=False)
class Sizes:
    """Lengths of requests, and how many entries their heads hold.

    A row is a request in a layer, as in an observation.

    Attributes:
        entries: how many entries each KV head of each row holds.
        lengths: tokens that each row's request has had so far, dropped ones included.
        prompts: tokens of each row's prompt.
        layer_ids: indices in the model of the layers in these rows, layer after layer.
        layers: indices of all layers that are compressed.
        features: features that were read from files; for methods whose traits have `counts_from_files`.
    """

    entries: Quotas
    lengths: Int[Tensor, " batch"]
    prompts: Int[Tensor, " batch"]
    layer_ids: tuple[int, ...]
    layers: tuple[int, ...]
    features: Mapping[Feature[Any], Any] = field(default_factory=dict)

    def __getitem__(self, feature: Feature[Value]) -> Value:
        """Return the value of a feature that was read from a file.

        Raises:
            KeepsetError: if nobody gave it.
        """
        if feature not in self.features:
            raise feature.missing()
        return self.features[feature]

    @cached_property
    def depths(self) -> Int[Tensor, " batch"]:
        """Return how many compressed layers come before each row's layer."""
        first, requests = self.layers.index(self.layer_ids[0]), len(self.lengths) // len(self.layer_ids)
        depths = torch.arange(first, first + len(self.layer_ids), device=self.lengths.device)
        return depths.repeat_interleave(requests)
