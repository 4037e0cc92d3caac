"""Heads of any lengths, packed one after another in flat tensors, and tables of their places for host and kernels.

Heads follow one another, request after request, each with its own number of entries. Neighbours with equally many
entries form a run, which has a view `[heads, entries, ...]`. A dense layer is a single run, a head-ragged layer has a
run per head.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepset.kernels.dispatch import CACHE_BLOCK, upload, uses_triton
from keepset.kernels.entry_format import EntryFormat, format_of

ENTRIES = ("keys", "values", "positions")
"""The columns that every layer has; all others are a method's own."""
SCALES = {"keys": "key_scale", "values": "value_scale"}
"""Two more columns if keys and values are stored in few bits: their scales."""
BIAS = "bias"
"""The name of the one remembered number per entry that attention reads too: it is added to the logits."""


SLACK = 64
"""Free places per head that are allocated at once when columns grow, at least."""
_SHARE = 8
"""Growing columns get at least one free place per this many entries, so growth costs constant time per entry."""


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

    def view(
        self, flat: Shaped[Tensor, " places *rest"], first: int = 0, n: int | None = None
    ) -> Shaped[Tensor, "heads n *rest"]:
        """Return a view of `n` places of each head in a flat tensor.

        Args:
            first: the first of these places, counted from the head's first entry; those from `count` on are free.
            n: how many places; None: up to the head's last entry.
        """
        n = self.count - first if n is None else n
        # One call of PyTorch, because every token of every layer makes such views.
        entry_stride, *number_strides = flat.stride()
        begin = flat.storage_offset() + (self.start + first) * entry_stride
        return flat.as_strided(
            (self.heads, n, *flat.shape[1:]), (self.capacity * entry_stride, entry_stride, *number_strides), begin
        )


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
    """Heads of one or several requests, as attention sees them, and for kernels a table of their addresses.

    The table is written only when heads move. Since then all heads have grown by the same number of tokens, which the
    host knows.

    Attributes:
        keys, values, positions: those of all heads, flat and contiguous; positions count from a request's first token.
        runs: places of the heads, in the order `request * kv_heads + head`.
        bias: added to the logit of each entry; None if there is none.
        key_scale, value_scale: scale of each quantised key and value; None if they are not quantised.
        residual: rounding errors of the same heads' newest entries, which are added to their rows; None if not kept.
        grown: entries that every head has beyond the table's count.
    """

    keys: Shaped[Tensor, "places key_width"]
    values: Shaped[Tensor, "places value_width"]
    positions: Int[Tensor, " places"]
    runs: Sequence[HeadRun]
    bias: Float[Tensor, " places"] | None = None
    key_scale: Float[Tensor, " places"] | None = None
    value_scale: Float[Tensor, " places"] | None = None
    residual: PackedHeads | None = None
    grown: int = 0

    @classmethod
    def of(cls, columns: Mapping[str, Tensor], runs: Sequence[HeadRun], residual: PackedHeads | None) -> PackedHeads:
        """Return the heads of a layer's columns.

        Args:
            columns: `[entries, ...]` each; of the optional ones a bias and the scales are taken.
            runs: where the heads are in the columns.
            residual: the rounding errors of the newest entries of every head; None if there are none.
        """
        keys, values, positions = (columns[name] for name in ENTRIES)
        bias, key_scale, value_scale = (columns.get(name) for name in (BIAS, *SCALES.values()))
        return cls(keys, values, positions, runs, bias, key_scale, value_scale, residual)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which attention takes keys and values."""
        return self.keys.dtype if self.key_scale is None else self.key_scale.dtype

    @cached_property
    def in_triton(self) -> bool:
        """Return whether the Triton kernels read these heads, not those in PyTorch."""
        return uses_triton(self.keys.device)

    @cached_property
    def format(self) -> EntryFormat | None:
        """Return the format of keys and values; None if they are not quantised."""
        return format_of(self.keys.dtype)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """The numbers of a key and of a value."""
        key_size, value_size = self.keys.shape[1], self.values.shape[1]
        return (self.format.size(key_size), self.format.size(value_size)) if self.format else (key_size, value_size)

    @property
    def pieces(self) -> Sequence[HeadRun]:
        """The runs; quantised heads are cut into pieces whose dequantised copies stay in a core's cache."""
        if self.format is None:
            return self.runs
        pieces = []
        for run in self.runs:
            most = max(1, CACHE_BLOCK // max(run.count * self.sizes[0], 1))
            for i in range(0, run.heads, most):
                heads = min(most, run.heads - i)
                pieces.append(replace(run, first=run.first + i, heads=heads, start=run.start + i * run.capacity))
        return pieces

    def rows(self, run: HeadRun, name: Literal["keys", "values"]) -> Float[Tensor, "heads entries size"]:
        """Return a run's keys or values for attention: a view, or a dequantised, mixed copy if they are quantised.

        Args:
            run: one of `runs`, or a part of one.
            name: which of the two.
        """
        stored, scale = (self.keys, self.key_scale) if name == "keys" else (self.values, self.value_scale)
        if self.format is None or scale is None:
            return run.view(stored)
        rows = self.format.dequantize(run.view(stored), run.view(scale))
        for part in () if self.residual is None else self.residual.runs:
            first, last = max(run.first, part.first), min(run.first + run.heads, part.first + part.heads)
            if first < last and part.count:
                assert self.residual is not None
                start = part.start + (first - part.first) * part.capacity
                part_run = replace(part, first=first, heads=last - first, start=start)
                newest = rows[first - run.first : last - run.first, run.count - part.count :]
                newest += self.residual.rows(part_run, name)
        return rows

    def whole(self) -> PackedHeads:
        """Return the same heads with dequantised keys and values, for kernels that do not read the format."""
        if self.format is None:
            return self
        rows = [torch.zeros(len(self.keys), size, dtype=self.dtype, device=self.keys.device) for size in self.sizes]
        for run in self.runs:
            run.view(rows[0]).copy_(self.rows(run, "keys"))
            run.view(rows[1]).copy_(self.rows(run, "values"))
        keys, values = map(self.format.unmix, rows)
        return replace(self, keys=keys, values=values, key_scale=None, value_scale=None, residual=None)

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
    def host_table(self) -> Int[Tensor, "7 heads"]:
        """The addresses of each head's first key, value, position, bias and two scales, and its count; on the host."""
        starts = torch.tensor(
            [run.start + i * run.capacity for run in self.runs for i in range(run.heads)], dtype=torch.long
        )
        counts = torch.tensor([run.count - self.grown for run in self.runs for _ in range(run.heads)], dtype=torch.long)
        columns = (self.keys, self.values, self.positions, self.bias, self.key_scale, self.value_scale)
        none = torch.zeros_like(starts)
        addresses = [none if c is None else c.data_ptr() + starts * (c[:1].numel() * c.itemsize) for c in columns]
        return torch.stack([*addresses, counts])

    @cached_property
    def _device_table(self) -> Int[Tensor, "7 heads"]:
        return self.host_table.to(self.keys.device, non_blocking=True)

    @cached_property
    def _aligned(self) -> bool:
        return not (self.host_table[:2] % 16).any()


class HeadTable:
    """Addresses of the heads of several stores, so that one launch serves all of them.

    Stores are separate tensors, so a head is found by its address. The caller of a kernel keeps the stores alive until
    the launch; memory that is released later is reused only after the kernel.

    Args:
        stores: packed heads, in order.

    Attributes:
        addresses: for each head the addresses of its first key, value, position, bias, key scale and value scale (0 if
            it has none), and its number of entries less `grown`; on the device.
        grown: entries that all heads have beyond the table's count.
        aligned: whether every head's keys and values begin at a multiple of 16 bytes, which a GPU loads at once.

    Raises:
        ValueError: the stores' entries differ in dtype or width.
    """

    def __init__(self, stores: Sequence[PackedHeads]) -> None:
        kinds = {(s.keys.dtype, s.keys.shape[1], s.values.dtype, s.values.shape[1], s.dtype) for s in stores}
        if len(kinds) > 1:
            raise ValueError(f"All stores' entries must have one dtype and width, but have {kinds}.")
        self.aligned = all(store._aligned for store in stores)
        self.grown = 0
        if len(stores) == 1:
            self.addresses, self.grown = stores[0]._device_table, stores[0].grown
            return
        joined = torch.cat([store.host_table for store in stores], 1)
        joined[-1] += torch.tensor([store.grown for store in stores for _ in range(store.heads)], dtype=torch.long)
        self.addresses = joined.to(stores[0].keys.device, non_blocking=True)


class HeadColumns:
    """Columns of the entries of some heads, each a flat tensor: head after head, with free places behind each head.

    All columns of an entry move together. Columns other than keys, values and positions are zero in free places, so a
    new token writes nothing to them.

    Args:
        tensors: `[entries, ...]` by name, head after head, without free places.
        counts: returns the number of entries of each head; called once the host needs it.

    Attributes:
        free: free places behind the entries of each head.
    """

    def __init__(self, tensors: dict[str, Tensor], counts: Callable[[], Sequence[int]]) -> None:
        self.tensors, self._counts, self.free = tensors, counts, 0

    @cached_property
    def runs(self) -> list[HeadRun]:
        """Where the heads are."""
        return runs_of(self._counts())

    @property
    def counts(self) -> list[int]:
        """Number of entries of each head."""
        return [run.count for run in self.runs for _ in range(run.heads)]

    @property
    def entries(self) -> int:
        """Number of entries of all heads."""
        return sum(run.heads * run.count for run in self.runs)

    @property
    def longest(self) -> int:
        """Number of entries of the longest head."""
        return max(run.count for run in self.runs)

    @property
    def starts(self) -> list[int]:
        """The first place of every head."""
        return [run.start + i * run.capacity for run in self.runs for i in range(run.heads)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, free places included."""
        return sum(column.nbytes for column in self.tensors.values())

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one head, over all columns."""
        return sum(column[:1].nbytes for column in self.tensors.values())

    def rectangle(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a column head by head: a view if all heads have equally many entries, else a copy, zero behind them.

        Args:
            name: the column.
            shape: the heads, such as `[batch, kv_heads]`.

        Returns:
            The column, `[*shape, entries, ...]`.
        """
        flat = self.tensors[name]
        if len(self.runs) == 1:
            return self.runs[0].view(flat).unflatten(0, shape)
        column = flat.new_zeros(math.prod(shape), self.longest, *flat.shape[1:])
        for run in self.runs:
            column[run.first : run.first + run.heads, : run.count] = run.view(flat)
        return column.unflatten(0, shape)

    def places(self, index: Int[Tensor, "heads n"]) -> Int[Tensor, " heads_n"]:
        """Return where entries of each head are in the flat tensors; any place for entries after a head's last."""
        starts = upload(self.starts, index.device)[:, None]
        return (starts + index).flatten().clamp(max=len(self.tensors["positions"]) - 1)

    def append(self, new: Mapping[str, Shaped[Tensor, "heads n ..."]], indices: Sequence[Int[Tensor, " _"]]) -> None:
        """Add some new entries to each head; everything is packed again.

        Args:
            new: columns of the new entries; the other columns' numbers are zero.
            indices: which of them are added to each head.
        """
        longest, n, device = self.longest, new["positions"].shape[1], new["positions"].device
        present = torch.arange(longest, device=device)
        rows = [
            head * (longest + n) + torch.cat([present[:count], longest + real])
            for head, (count, real) in enumerate(zip(self.counts, indices, strict=True))
        ]
        row_indices, counts = torch.cat(rows), [len(head) for head in rows]
        for name, flat in self.tensors.items():
            column = self.rectangle(name, [len(rows)])
            added = new[name] if name in new else flat.new_zeros(len(rows), n, *flat.shape[1:])
            self.tensors[name] = torch.cat([column, added], 1).flatten(0, 1).index_select(0, row_indices)
        self.runs, self.free = runs_of(counts), 0

    def grow(self, n: int, room: int) -> None:
        """Move the heads to where new tokens have free places.

        Args:
            n: tokens of each head.
            room: free places per head to allocate, within limits; 0 if unknown.
        """
        most = max(SLACK, self.longest // _SHARE)
        slack = max(n, min(room, most) if room else most)
        runs, start = [], 0
        for run in self.runs:
            runs.append(replace(run, start=start, capacity=run.count + slack))
            start += run.heads * (run.count + slack)
        for name, flat in self.tensors.items():
            make = flat.new_empty if name in ENTRIES else flat.new_zeros
            grown = make((start, *flat.shape[1:]))
            for old, new in zip(self.runs, runs, strict=True):
                new.view(grown).copy_(old.view(flat))
            self.tensors[name] = grown
        self.runs, self.free = runs, slack

    def crop(self, removed: Sequence[int]) -> None:
        """Drop the newest entries: a given number of each head."""
        if len(set(removed)) > 1:
            self.rebuild([(head, count - removed[head]) for head, count in enumerate(self.counts)])
            return
        self.free += removed[0]
        for run in self.runs:
            run.count -= removed[0]
            for name in self.tensors.keys() - set(ENTRIES):
                run.view(self.tensors[name], run.count, removed[0]).zero_()

    def rebuild(self, heads: Sequence[tuple[int, int]]) -> None:
        """Make new columns without free places, of these heads with so many entries each, in this order.

        Args:
            heads: each head to take, which may repeat or be missing, and how many of its first entries.
        """
        starts = self.starts
        for name, flat in self.tensors.items():
            self.tensors[name] = torch.cat([flat[starts[head] : starts[head] + count] for head, count in heads])
        self.runs, self.free = runs_of([count for _, count in heads]), 0

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Drop the entries at some spans of positions, `(first, end)` without `end`; no free places are left."""
        positions, stays = self.tensors["positions"], torch.ones_like(self.tensors["positions"], dtype=torch.bool)
        for first, end in spans:
            stays &= (positions < first) | (positions >= end)
        heads = [
            start + stays[start : start + count].nonzero()[:, 0]
            for start, count in zip(self.starts, self.counts, strict=True)
        ]
        row_indices, counts = torch.cat(heads), [len(head) for head in heads]
        self.tensors = {name: column.index_select(0, row_indices) for name, column in self.tensors.items()}
        self.runs, self.free = runs_of(counts), 0

    def packed(self) -> HeadColumns:
        """Return a copy without free places."""
        copied = copy.copy(self)
        copied.tensors = dict(self.tensors)
        copied.rebuild(list(enumerate(self.counts)))
        return copied
