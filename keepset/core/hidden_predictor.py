"""Modules that compute an entry's score from the hidden state that enters the layer (`kvzap`, `fast_kvzip`)."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keepset.kernels.dispatch import upload

_BLOCK = 2**12
"""The most tokens that a module reads at a time."""
_EPSILON = 1e-6
"""The number added to the mean square inside the root of a gate's norms."""


@dataclass(frozen=True, eq=False)
class HiddenPredictor(ABC):
    """The module of one layer. Its weights stay in the type in which they were published; it computes in float32.

    Attributes:
        kind: the name of this kind of module, in files and in `Statistics.hidden`.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def kv_heads(self) -> int:
        """Return how many KV heads it scores."""

    @property
    @abstractmethod
    def inputs(self) -> int:
        """Return the size of the hidden states that it reads."""

    @abstractmethod
    def _read(self, hidden: Float[Tensor, "batch n inputs"]) -> Float[Tensor, "batch kv_heads n"]: ...

    def scores(self, hidden: Float[Tensor, "batch n inputs"]) -> Float[Tensor, "batch kv_heads n"]:
        """Return the score of each token's entry in each KV head, in float32, from hidden states of any type."""
        return torch.cat([self._read(block.float()) for block in hidden.split(_BLOCK, 1)], 2)

    def on(self, device: torch.device) -> Self:
        """Return the module on a device."""
        return type(self)(**{name: upload(weights, device) for name, weights in self.tensors.items()})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by their names."""
        each = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: weights for name, weights in each.items() if weights is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the module with weights of these names.

        Raises:
            ValueError: if weights are missing or superfluous, do not fit each other, or are not finite numbers.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not set(tensors) <= names or not all(each.is_floating_point() for each in tensors.values()):
            raise ValueError("not the weights of such a module")
        try:
            made = cls(**tensors)
        except TypeError:
            raise ValueError("weights are missing") from None
        if not made._fits() or not all(bool(each.isfinite().all()) for each in tensors.values()):
            raise ValueError("the weights do not fit each other, or are not finite")
        return made

    @abstractmethod
    def _fits(self) -> bool:
        """Return whether the weights' shapes fit each other."""


@dataclass(frozen=True, eq=False)
class HiddenNetwork(HiddenPredictor):
    """KVzap's module (arXiv:2601.07891): one linear map, or two with an exact GELU (no tanh) between them.

    Attributes:
        weight: the weights of the last map.
        bias: its biases.
        hidden_weight: the weights of the first of two maps; None if there is one.
        hidden_bias: its biases; None if there is one map.
    """

    kind = "kvzap"

    weight: Float[Tensor, "kv_heads width"]
    bias: Float[Tensor, " kv_heads"]
    hidden_weight: Float[Tensor, "width inputs"] | None = None
    hidden_bias: Float[Tensor, " width"] | None = None

    @property
    def kv_heads(self) -> int:
        return len(self.weight)

    @property
    def inputs(self) -> int:
        return (self.weight if self.hidden_weight is None else self.hidden_weight).shape[1]

    def _read(self, hidden: Float[Tensor, "batch n inputs"]) -> Float[Tensor, "batch kv_heads n"]:
        if self.hidden_weight is not None and self.hidden_bias is not None:
            hidden = F.gelu(F.linear(hidden, self.hidden_weight.float(), self.hidden_bias.float()))
        return F.linear(hidden, self.weight.float(), self.bias.float()).transpose(1, 2)

    def _fits(self) -> bool:
        first, second = self.hidden_weight, self.hidden_bias
        if self.weight.ndim != 2 or self.bias.shape != self.weight.shape[:1]:
            return False
        if first is None or second is None:
            return first is second
        return first.ndim == 2 and second.shape == first.shape[:1] == self.weight.shape[1:]


@dataclass(frozen=True, eq=False)
class HiddenGate(HiddenPredictor):
    """Fast KVzip's gate (arXiv:2601.17668).

    A hidden state gives one low-dimensional key and a few queries for each KV head, both with an RMS norm. A query q
    compares the token's own key k with the head's base keys b, as an attention over them would:
    1 / (1 + sum over b of exp(q.b / sqrt(d) - q.k / sqrt(d) - offset)). A score is the mean over the head's queries.

    Attributes:
        query_weight: the weights from hidden states to queries, `[kv_heads * group * dim, inputs]`.
        query_bias: the biases of queries.
        key_weight: the weights from hidden states to keys, `[kv_heads * dim, inputs]`.
        query_norm: the weights of the queries' norm.
        key_norm: the weights of the keys' norm.
        base: the base keys.
        offset: the number added to the logit of a token's own key.
    """

    kind = "fast_kvzip"

    query_weight: Float[Tensor, "query_outputs inputs"]
    query_bias: Float[Tensor, " query_outputs"]
    key_weight: Float[Tensor, "key_outputs inputs"]
    query_norm: Float[Tensor, " dim"]
    key_norm: Float[Tensor, " dim"]
    base: Float[Tensor, "kv_heads bases dim"]
    offset: Float[Tensor, "kv_heads group"]

    @property
    def kv_heads(self) -> int:
        return len(self.base)

    @property
    def inputs(self) -> int:
        return self.query_weight.shape[1]

    def _read(self, hidden: Float[Tensor, "batch n inputs"]) -> Float[Tensor, "batch kv_heads n"]:
        group, dim = self.offset.shape[1], len(self.key_norm)
        queries = F.linear(hidden, self.query_weight.float(), self.query_bias.float())
        queries = _normed(queries.unflatten(-1, (self.kv_heads, group, dim)), self.query_norm)
        keys = _normed(F.linear(hidden, self.key_weight.float()).unflatten(-1, (self.kv_heads, 1, dim)), self.key_norm)
        own = (queries * keys).sum(-1, keepdim=True) / math.sqrt(dim) + self.offset.float()[..., None]
        bases = queries @ self.base.float().transpose(-1, -2) / math.sqrt(dim)
        # 1 / (1 + sum of exp(x)) without overflow.
        return torch.sigmoid(-torch.logsumexp(bases - own, -1)).mean(-1).transpose(1, 2)

    def _fits(self) -> bool:
        if self.base.ndim != 3 or self.offset.ndim != 2 or self.query_weight.ndim != 2 or not self.base.shape[1]:
            return False
        (heads, _, dim), group = self.base.shape, self.offset.shape[1]
        shapes = {
            "query_weight": (heads * group * dim, self.inputs),
            "query_bias": (heads * group * dim,),
            "key_weight": (heads * dim, self.inputs),
            "query_norm": (dim,),
            "key_norm": (dim,),
            "offset": (heads, group),
        }
        return all(getattr(self, name).shape == shape for name, shape in shapes.items())


def _normed(rows: Float[Tensor, "*rows dim"], weight: Float[Tensor, " dim"]) -> Float[Tensor, "*rows dim"]:
    return rows * (rows.square().mean(-1, keepdim=True) + _EPSILON).rsqrt() * weight.float()


PREDICTOR_KINDS: Mapping[str, type[HiddenPredictor]] = {kind.kind: kind for kind in (HiddenNetwork, HiddenGate)}
