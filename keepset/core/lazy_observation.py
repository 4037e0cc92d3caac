"""`LazyObservation`: an observation whose keys and values are copied out of a cache when a method reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.core.observation import Observation


class LazyObservation(Observation):
    """An observation without keys and values of its own. A subclass overrides `keys_of` and `values_of`, or `keys` too.

    Args:
        shape: requests, KV heads and entries.
        head_dim: numbers per key.
        value_dim: numbers per value.
        dtype: the type of keys and values.
        device: where the entries lie.
        parts: the other arguments of an `Observation`.
    """

    _form: tuple[int, int, torch.dtype]

    def __init__(
        self,
        shape: Sequence[int],
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        **parts: Any,
    ) -> None:
        # Tensors of the right shape that take no memory.
        nothing = torch.empty((), dtype=dtype, device=device)
        super().__init__(keys=nothing.expand(*shape, head_dim), values=nothing.expand(*shape, value_dim), **parts)
        own = vars(self)
        del own["keys"], own["values"]
        own["_form"] = head_dim, value_dim, dtype

    @cached_property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:  # type: ignore[override]
        return self.keys_of(slice(None))

    @cached_property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:  # type: ignore[override]
        return self.values_of(slice(None))

    @property
    def head_dim(self) -> int:
        return self._form[0]

    @property
    def value_dim(self) -> int:
        return self._form[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._form[2]

    @property
    def entry_bytes(self) -> int:
        own = (self.head_dim + self.value_dim) * self.dtype.itemsize
        return own if self.stored_bytes is None else self.stored_bytes
