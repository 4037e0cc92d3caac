"""`Forward`: what one call of the model brings to one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from keepset.hf.attention_hooks import Rotation
from keepset.hf.store import EntryStore


@dataclass(frozen=True, eq=False)
class Forward:
    """Queries, keys and values of `n` new tokens, after rotation.

    Attributes:
        module: the attention module under way.
        positions: counted from each request's first token; see `token_positions`.
        valid: which tokens are no padding; None when all are.
        rotation: of the queries, where somebody looks at it.
    """

    module: nn.Module
    query: Float[Tensor, "batch query_heads n head_dim"]
    key: Float[Tensor, "batch kv_heads n head_dim"]
    value: Float[Tensor, "batch kv_heads n value_dim"]
    positions: Int[Tensor, "batch n"]
    valid: Bool[Tensor, "batch n"] | None
    scaling: float
    rotation: Rotation | None = None

    @property
    def length(self) -> int:
        """Tokens, padding included."""
        return self.query.shape[2]

    def tokens(self, part: slice) -> Forward:
        """Some of the tokens."""
        return replace(
            self,
            query=self.query[:, :, part],
            key=self.key[:, :, part],
            value=self.value[:, :, part],
            positions=self.positions[:, part],
            valid=None if self.valid is None else self.valid[:, part],
            rotation=None if self.rotation is None else (self.rotation[0][:, part], self.rotation[1][:, part]),
        )

    def counts(self) -> Int[Tensor, " batch"]:
        """Real tokens of each request."""
        if self.valid is None:
            return torch.full_like(self.positions[:, 0], self.length)
        return self.valid.sum(-1)

    def columns(self) -> dict[str, Tensor]:
        """Keys, values and positions as a store's columns; views, nothing is copied."""
        per_head = self.positions[:, None].expand(-1, self.key.shape[1], -1).int()
        return {"keys": self.key, "values": self.value, "positions": per_head}

    def pack(self) -> EntryStore:
        """A store of all real tokens."""
        exists = torch.ones_like(self.positions, dtype=torch.bool) if self.valid is None else self.valid
        mask = exists[:, None].expand(-1, self.key.shape[1], -1)
        return EntryStore.pack(self.columns(), mask.nonzero()[:, 2], mask.sum(-1))
