"""`StoredObservation`: an observation whose keys and values stay in their store until somebody looks at them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.core.observation import Observation
from keepset.hf.store import EntryStore


class StoredObservation(Observation):
    """An observation of what a store holds, to which nothing is added any more.

    Ragged and 8-bit heads have to be copied to be looked at, so keys and values are copied when a method reads them.

    Args:
        store: the entries.
        parts: the other arguments of an `Observation`.
    """

    store: EntryStore

    def __init__(self, store: EntryStore, **parts: Any) -> None:
        heads, shape = store.heads, parts["valid"].shape
        # They have the right shape and take no memory.
        nothing = torch.empty((), dtype=heads.dtype, device=heads.keys.device)
        keys, values = (nothing.expand(*shape, entries.shape[-1]) for entries in (heads.keys, heads.values))
        super().__init__(keys=keys, values=values, **parts)
        own = vars(self)
        del own["keys"], own["values"]
        own["store"] = store

    @cached_property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:  # type: ignore[override]
        return self.store.keys

    @cached_property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:  # type: ignore[override]
        return self.store.values

    @property
    def dtype(self) -> torch.dtype:
        return self.store.heads.dtype

    @property
    def head_dim(self) -> int:
        return self.store.heads.keys.shape[-1]

    @property
    def entry_bytes(self) -> int:
        heads = self.store.heads
        return (heads.keys.shape[-1] + heads.values.shape[-1]) * heads.dtype.itemsize
