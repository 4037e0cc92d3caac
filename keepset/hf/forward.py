"""`Forward`: what one call of the model brings to one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.hf.attention import AttentionCall
from keepset.hf.attention_hooks import LayerInput
from keepset.hf.mask import RealTokens
from keepset.hf.rotation import Rotation
from keepset.hf.store import EntryStore


@dataclass(frozen=True, eq=False)
class Forward:
    """Queries, keys and values of `n` new tokens, after rotation.

    Attributes:
        call: of the attention function, which may have brought more tokens than these.
        positions: counted from each request's first token; see `Progress`.
        real: which tokens are no padding; None when all are.
        start: logical length of the cache before them.
        padded: whether the cache has any padding, theirs included.
        layer_input, rotation: of the whole call and of the queries, where somebody looks at them.
        lse: log-sum-exp of every query's logits, request by request, where attention has made it.
    """

    call: AttentionCall
    query: Float[Tensor, "batch query_heads n head_dim"]
    key: Float[Tensor, "batch kv_heads n head_dim"]
    value: Float[Tensor, "batch kv_heads n value_dim"]
    positions: Int[Tensor, "batch n"]
    real: RealTokens | None
    start: int
    padded: bool
    layer_input: LayerInput | None = None
    rotation: Rotation | None = None
    lse: list[Tensor] | None = None

    @property
    def valid(self) -> Bool[Tensor, "batch n"] | None:
        """Which tokens are no padding; None when all are."""
        return None if self.real is None else self.real.mask

    @property
    def length(self) -> int:
        """Tokens, padding included."""
        return self.query.shape[2]

    @property
    def end(self) -> int:
        """Logical length of the cache after them."""
        return self.start + self.length

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens of each request after them, padding left out."""
        return self.positions[:, -1] + 1

    @property
    def counts(self) -> list[int]:
        """Tokens of each request among them, padding left out."""
        return [self.length] * len(self.query) if self.real is None else self.real.counts

    def split(self, end: int) -> tuple[Forward, Forward | None]:
        """The tokens up to this logical length, and those beyond it where there are any."""
        if end >= self.end:
            return self, None
        return self.tokens(slice(0, end - self.start)), self.tokens(slice(end - self.start, None))

    def tokens(self, part: slice) -> Forward:
        """Some of the tokens."""
        return replace(
            self,
            query=self.query[:, :, part],
            key=self.key[:, :, part],
            value=self.value[:, :, part],
            positions=self.positions[:, part],
            real=None if self.real is None else self.real.part(part),
            start=self.start + (part.start or 0),
            rotation=None if self.rotation is None else (self.rotation[0][:, part], self.rotation[1][:, part]),
        )

    def pack(self) -> EntryStore:
        """A store of all real tokens."""
        batch, kv_heads, n, _ = self.key.shape
        everything = torch.arange(n, device=self.key.device)
        rows = [everything] * batch if self.real is None else self.real.indices
        positions = self.positions.int()[:, None].expand(-1, kv_heads, -1)
        columns = {"keys": self.key, "values": self.value, "positions": positions}
        return EntryStore.packed_by(columns, [row for row in rows for _ in range(kv_heads)])
