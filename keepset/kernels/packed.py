"""Heads of any lengths, packed one after another in flat tensors, and where the host and kernels find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int, Int8, Shaped
from torch import Tensor

from keepset.kernels.dispatch import CACHE_BLOCK

LARGEST = 127
"""The integer for a row's largest magnitude; -128 has no counterpart and is not used."""


def quantize(rows: Float[Tensor, "*places dim"]) -> tuple[Int8[Tensor, "*places dim"], Float[Tensor, "*places"]]:
    """Return rows as 8-bit integers, and each row's scale.

        scale = max(|row|) / 127     integers = round(row / scale)

    The output of `dequantize` is mapped to itself, up to the last bit of the scale. A row with NaN or infinity gets
    such a scale, and is NaN as a whole when it is read.

    Returns:
        The integers, and the scales in the rows' dtype.
    """
    largest = torch.linalg.vector_norm(rows, torch.inf, -1, dtype=torch.float32)
    scale = (largest / LARGEST).to(rows.dtype)
    steps = rows / scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]  # of nothing but zeros none
    return steps.round_().clamp_(-LARGEST, LARGEST).char(), scale


def dequantize(rows: Int8[Tensor, "*places dim"], scale: Float[Tensor, "*places"]) -> Float[Tensor, "*places dim"]:
    """Return `rows * scale` in the scales' dtype."""
    return rows.to(scale.dtype).mul_(scale[..., None])


@dataclass
class HeadRun:
    """Neighbouring heads with equally many entries: `heads * capacity` places from `start` on.

    Attributes:
        first: the first head.
        heads: how many heads.
        start: place of the first head's first entry.
        count: entries of each head.
        capacity: places of each head.
    """

    first: int
    heads: int
    start: int
    count: int
    capacity: int

    def view(self, flat: Shaped[Tensor, " places *rest"]) -> Shaped[Tensor, "heads entries *rest"]:
        """Return this run's entries of a flat tensor, without a copy."""
        stop = self.start + self.heads * self.capacity
        return flat[self.start : stop].unflatten(0, (self.heads, self.capacity))[:, : self.count]

    def behind(self, flat: Shaped[Tensor, " places *rest"], n: int) -> Shaped[Tensor, "heads n *rest"]:
        """Return the `n` free places after each head's entries, without a copy."""
        stop = self.start + self.heads * self.capacity
        return flat[self.start : stop].unflatten(0, (self.heads, self.capacity))[:, self.count : self.count + n]


def runs_of(counts: Sequence[int]) -> list[HeadRun]:
    """Return runs of heads with these counts and no free places; equal neighbours share a run."""
    runs: list[HeadRun] = []
    start = 0
    for head, count in enumerate(counts):
        if runs and runs[-1].count == count:
            runs[-1].heads += 1
        else:
            runs.append(HeadRun(head, 1, start, count, count))
        start += count
    return runs


@dataclass(eq=False)
class PackedHeads:
    """What attention sees: heads of one or several requests, and for kernels a table of where each head lies.

    The table is written only when heads move. All heads grow by the same tokens, so how much they have grown since then
    is one number, which the host knows.

    Attributes:
        keys, values, positions: flat and contiguous, of all heads; positions count from each request's first token.
        runs: where the heads lie, in the order `request * kv_heads + head`.
        bias: added to the logit of each entry; None if there is none.
        key_scale, value_scale: factor of each 8-bit key and value; None if these are not 8-bit integers.
        grown: entries that every head has beyond the table's count.
    """

    keys: Shaped[Tensor, "places head_dim"]
    values: Shaped[Tensor, "places value_dim"]
    positions: Int[Tensor, " places"]
    runs: Sequence[HeadRun]
    bias: Float[Tensor, " places"] | None = None
    key_scale: Float[Tensor, " places"] | None = None
    value_scale: Float[Tensor, " places"] | None = None
    grown: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values as attention takes them."""
        return self.keys.dtype if self.key_scale is None else self.key_scale.dtype

    @property
    def pieces(self) -> Sequence[HeadRun]:
        """The runs; 8-bit heads in pieces whose dequantised copies stay in a core's cache."""
        if self.key_scale is None:
            return self.runs
        pieces = []
        for run in self.runs:
            most = max(1, CACHE_BLOCK // max(run.count * self.keys.shape[1], 1))
            for i in range(0, run.heads, most):
                heads = min(most, run.heads - i)
                pieces.append(replace(run, first=run.first + i, heads=heads, start=run.start + i * run.capacity))
        return pieces

    def keys_of(self, run: HeadRun) -> Float[Tensor, "heads entries head_dim"]:
        """Return a run's keys as attention takes them: a view, or a copy if they are 8-bit integers."""
        keys = run.view(self.keys)
        return keys if self.key_scale is None else dequantize(keys, run.view(self.key_scale))

    def values_of(self, run: HeadRun) -> Float[Tensor, "heads entries value_dim"]:
        """Return a run's values, in the same way as `keys_of`."""
        values = run.view(self.values)
        return values if self.value_scale is None else dequantize(values, run.view(self.value_scale))

    @cached_property
    def heads(self) -> int:
        """The number of heads of all requests."""
        return sum(run.heads for run in self.runs)

    @property
    def longest(self) -> int:
        """The number of entries of the longest head."""
        return max(run.count for run in self.runs)

    @property
    def entries(self) -> int:
        """The number of entries of all heads."""
        return sum(run.heads * run.count for run in self.runs)

    @cached_property
    def _table(self) -> Int[Tensor, "7 heads"]:
        """Addresses of each head's first key, value, position, bias and two scales, and its count; on the host."""
        starts = torch.tensor([run.start + i * run.capacity for run in self.runs for i in range(run.heads)])
        counts = torch.tensor([run.count - self.grown for run in self.runs for _ in range(run.heads)])
        columns = (self.keys, self.values, self.positions, self.bias, self.key_scale, self.value_scale)
        none = torch.zeros_like(starts)
        addresses = [none if c is None else c.data_ptr() + starts * (c[:1].numel() * c.itemsize) for c in columns]
        return torch.stack([*addresses, counts])

    @cached_property
    def _device_table(self) -> Int[Tensor, "7 heads"]:
        return self._table.to(self.keys.device, non_blocking=True)

    @cached_property
    def _aligned(self) -> bool:
        return not (self._table[:2] % 16).any()


class HeadTable:
    """Where the heads of several stores lie, so that one launch serves all of them.

    Stores are separate tensors, so a head is found by its address. Whoever launches a kernel holds the stores; memory
    that is released later is reused only after the launch.

    Args:
        stores: packed heads, in order.

    Attributes:
        addresses: on the device, for each head the addresses of its first key, value, position, bias, key scale and
            value scale (0 if it has none), and its number of entries less `grown`.
        grown: entries that all heads have beyond the table's count.
        aligned: whether every head's keys and values begin at a multiple of 16 bytes, which a GPU loads at once.

    Raises:
        ValueError: the stores' entries differ in dtype or width.
    """

    def __init__(self, stores: Sequence[PackedHeads]) -> None:
        kinds = {(s.keys.dtype, s.keys.shape[1], s.values.dtype, s.values.shape[1], s.dtype) for s in stores}
        if len(kinds) > 1:
            raise ValueError(f"Entries of one kind are attended together, not {kinds}.")
        self.aligned = all(store._aligned for store in stores)
        self.grown = 0
        if len(stores) == 1:
            self.addresses, self.grown = stores[0]._device_table, stores[0].grown
            return
        joined = torch.cat([store._table for store in stores], 1)
        joined[-1] += torch.tensor([store.grown for store in stores for _ in range(store.heads)])
        self.addresses = joined.to(stores[0].keys.device, non_blocking=True)
