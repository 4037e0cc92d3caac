"""`EntryStore`: the kept entries of one layer, packed in flat tensors.

Heads follow one another, request after request, each with its own number of entries. Neighbours with equally many
entries form a run, which has a view `[heads, entries, head_dim]`. A dense layer is a single run, a head-ragged layer
has a run per head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.core.keep_set import HeadCounts
from keepset.core.lazy_observation import LazyObservation
from keepset.core.observation import BIAS
from keepset.kernels.attention import append_entries, pack_entries
from keepset.kernels.dispatch import upload
from keepset.kernels.packed import HeadRun, PackedHeads, dequantize, quantize, runs_of

SLACK = 64
"""Free places per head that a store allocates at once when it grows, at least."""
_ENTRIES = ("keys", "values", "positions")
"""The columns that every store has; all others are a method's own."""
_SCALES = {"keys": "key_scale", "values": "value_scale"}
"""Two more columns if keys and values are 8-bit integers: what these are multiplied with."""
_SHARE = 8
"""A growing store allocates at least one free place for so many entries, so growing costs a constant share."""


class EntryStore:
    """Keys, values, positions and a method's own columns of one layer, for `batch * kv_heads` heads.

    Positions are int32, counted from each request's first token. What moves an entry moves all of its columns. A
    method's columns are zero in free places, so a new token writes nothing to them.

    Args:
        batch, kv_heads: number of requests, and of KV heads of each.
        columns: `[entries, ...]`, head after head, without free places.
        sizes: returns the number of entries of each head; called once the host has to know it.
    """

    def __init__(
        self, batch: int, kv_heads: int, columns: dict[str, Tensor], sizes: Callable[[], Sequence[int]]
    ) -> None:
        self.batch, self.kv_heads, self._columns, self._sizes = batch, kv_heads, columns, sizes

    @classmethod
    def pack(cls, columns: dict[str, Tensor], indices: Int[Tensor, " kept"], heads: HeadCounts) -> EntryStore:
        """Return a store with exactly the given entries, and not a byte more.

        Args:
            columns: each `[batch, kv_heads, entries, ...]`.
            indices: the entries that stay, packed head after head.
            heads: how many entries each head keeps; the host asks for it when it has to know.
        """
        batch, kv_heads = heads.device_values.shape
        return cls(batch, kv_heads, pack_entries(columns, indices, heads.device_values), lambda: heads.host_values)

    def kept(self, others: dict[str, Tensor], indices: Int[Tensor, " kept"], heads: HeadCounts) -> EntryStore:
        """Return a store with some of this store's entries, their keys and values as they are stored.

        Args:
            others: all columns but keys and values, each `[batch, kv_heads, entries, ...]`.
            indices: the entries that stay, packed head after head.
            heads: how many entries each head keeps.
        """
        stored = self._stored
        if len(self._runs) == 1:
            views = {name: self._rectangle(flat) for name, flat in stored.items()}
            return EntryStore.pack({**views, **others}, indices, heads)
        packed = EntryStore.pack(others, indices, heads)
        starts = upload(_starts(self._runs), indices.device)
        places = torch.repeat_interleave(starts, heads.device_values.flatten(), output_size=len(indices)) + indices
        as_one_head = {name: flat[None, None] for name, flat in stored.items()}
        packed._columns |= pack_entries(as_one_head, places, upload([[len(indices)]], indices.device))
        return packed

    @classmethod
    def packed_by(cls, columns: dict[str, Tensor], heads: Sequence[Int[Tensor, " _"]]) -> EntryStore:
        """Return a store with the given entries of each head.

        Args:
            columns: each `[batch, kv_heads, entries, ...]`.
            heads: indices of each head's entries, request after request.
        """
        sizes = [len(head) for head in heads]
        batch, kv_heads = columns["keys"].shape[:2]
        counts = upload(sizes, heads[0].device).view(batch, kv_heads)
        return cls(batch, kv_heads, pack_entries(columns, torch.cat(list(heads)), counts), lambda: sizes)

    @classmethod
    def of(cls, columns: dict[str, Tensor], counts: Int[Tensor, "batch kv_heads"]) -> EntryStore:
        """Return a store of columns without free places.

        Args:
            columns: what `packed` has returned of a store.
            counts: number of entries of each head.
        """
        batch, kv_heads = counts.shape
        return cls(batch, kv_heads, columns, lambda: counts.flatten().tolist())

    @cached_property
    def _runs(self) -> list[HeadRun]:
        return runs_of(self._sizes())

    @cached_property
    def heads(self) -> PackedHeads:
        """The entries as attention takes them."""
        keys, values, positions = (self._columns[name] for name in _ENTRIES)
        bias, key_scale, value_scale = (self._columns.get(name) for name in (BIAS, *_SCALES.values()))
        return PackedHeads(keys, values, positions, self._runs, bias, key_scale, value_scale)

    @property
    def packed(self) -> dict[str, Shaped[Tensor, " entries *rest"]]:
        """All columns, head after head and without free places; copied only if there are free places."""
        return self._columns if all(run.count == run.capacity for run in self._runs) else self.fork()._columns

    @property
    def nbytes(self) -> int:
        """Bytes allocated, free places included."""
        return sum(column.nbytes for column in self._columns.values())

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry in one head, over all columns."""
        return sum(column[:1].nbytes for column in self._columns.values())

    @property
    def entries(self) -> int:
        """Number of entries of all heads."""
        return sum(run.heads * run.count for run in self._runs)

    @property
    def counts(self) -> list[int]:
        """Number of entries of each head, request after request."""
        return [run.count for run in self._runs for _ in range(run.heads)]

    def takes(self, keys: Tensor, values: Tensor) -> bool:
        """Return whether new tokens can be added.

        Args:
            keys: of the tokens, `[batch, kv_heads, n, head_dim]`.
            values: of the tokens, `[batch, kv_heads, n, value_dim]`.
        """
        held, held_values = self._columns["keys"], self._columns["values"]
        fits = self.kv_heads == keys.shape[1] and held.shape[-1] == keys.shape[-1]
        return fits and held_values.shape[-1] == values.shape[-1] and held.dtype in (keys.dtype, torch.int8)

    def replace_values(self, values: Float[Tensor, "entries value_dim"]) -> None:
        """Give every entry another value. There must be no free places."""
        scale = self._columns.get(_SCALES["values"])
        if scale is None:
            self._columns["values"] = values.to(self._columns["values"].dtype)
        else:
            self._columns["values"], self._columns[_SCALES["values"]] = quantize(values.to(scale.dtype))
        self._moved()

    def quantize(self) -> None:
        """Store keys and values, also those of tokens to come, as 8-bit integers. There must be no free places."""
        for name, scale in _SCALES.items():
            if scale not in self._columns:
                self._columns[name], self._columns[scale] = quantize(self._columns[name])
        self._moved()

    def append(
        self,
        keys: Float[Tensor, "batch kv_heads n head_dim"],
        values: Float[Tensor, "batch kv_heads n value_dim"],
        positions: Int[Tensor, "batch n"],
        real: Sequence[Int[Tensor, " _"]] | None = None,
        room: int = 0,
    ) -> None:
        """Add new tokens to every head.

        Args:
            keys, values: of the tokens.
            positions: of the tokens, counted from each request's first.
            real: indices of each request's tokens that are not padding; None if all are real.
            room: free places per head to allocate if the store has to grow, unless that is too many; 0 if unknown.
        """
        if real is not None:
            self._append_real(keys, values, positions, real)
            return
        self.make_room(keys.shape[2], room)
        append_entries([self.heads], keys, values, positions)
        self.count_appended(keys.shape[2])

    def _append_real(
        self,
        keys: Float[Tensor, "batch kv_heads n head_dim"],
        values: Float[Tensor, "batch kv_heads n value_dim"],
        positions: Int[Tensor, "batch n"],
        real: Sequence[Int[Tensor, " _"]],
    ) -> None:
        """Add those of some new tokens that are not padding; everything is packed anew."""
        shape = self.batch, self.kv_heads, keys.shape[2]
        new = {"keys": keys, "values": values, "positions": positions.int()[:, None].expand(shape)}
        columns, _ = self.padded()
        others = {name: column for name, column in columns.items() if name not in new}
        new |= {name: column.new_zeros(*shape, *column.shape[3:]) for name, column in others.items()}
        joined = {name: torch.cat([column, new[name]], 2) for name, column in columns.items()}
        before = torch.arange(columns["keys"].shape[2], device=keys.device)
        heads = [(before[:count], real[head // self.kv_heads]) for head, count in enumerate(self.counts)]
        packed = EntryStore.packed_by(joined, [torch.cat([old, len(before) + added]) for old, added in heads])
        if self.heads.key_scale is not None:
            packed.quantize()
        self._columns, self._runs = packed._columns, packed._runs
        self._moved()

    def make_room(self, n: int, room: int = 0) -> None:
        """Make sure that every head has free places for new tokens.

        Args:
            n: how many tokens.
            room: as for `append`.
        """
        for run in self._runs:
            if run.count + n > run.capacity:
                most = max(SLACK, max(run.count for run in self._runs) // _SHARE)
                self._grow(max(n, min(room, most) if room else most))
                return

    def column(self, name: str, shape: tuple[int, ...] = ()) -> Float[Tensor, "places *rest"]:
        """Return a column to write to, which is made of zeros if there is none.

        Args:
            name: of the column.
            shape: of what it holds for one entry.
        """
        if name not in self._columns:
            positions = self._columns["positions"]
            self._columns[name] = torch.zeros(*positions.shape, *shape, device=positions.device)
        return self._columns[name]

    def write_newest(
        self,
        name: str,
        numbers: Float[Tensor, "batch kv_heads n"],
        real: Sequence[Int[Tensor, " _"]] | None = None,
    ) -> None:
        """Write a column's numbers of the newest tokens, which every head holds.

        Args:
            name: of the column.
            numbers: of the tokens.
            real: indices of each request's tokens that are not padding; None if all are real.
        """
        column, rows = self.column(name), numbers.flatten(0, 1)
        if real is None:
            for run in self._runs:
                run.view(column)[:, run.count - rows.shape[1] :] = rows[run.first : run.first + run.heads]
            return
        for head, (start, count) in enumerate(zip(_starts(self._runs), self.counts, strict=True)):
            own = real[head // self.kv_heads]
            column[start + count - len(own) : start + count] = rows[head, own]

    def forget(self, name: str) -> None:
        """Drop a column if there is one of this name."""
        self._columns.pop(name, None)

    def trim(self) -> None:
        """Free the places that hold no entry."""
        if any(run.count < run.capacity for run in self._runs):
            self._rebuild(list(enumerate(self.counts)))

    def padded(self) -> tuple[dict[str, Tensor], Bool[Tensor, "batch kv_heads entries"]]:
        """Return all columns, each `[batch, kv_heads, entries, ...]`, and which entries exist.

        Columns are views if all heads have equally many entries. Keys and values are as attention takes them: copies if
        they are stored as 8-bit integers. Places without an entry are zero, never uninitialised: 0 x NaN is NaN.
        """
        columns = {name: self._rectangle(flat) for name, flat in self._columns.items()}
        return dequantized(columns), self.exists

    @property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:
        """Keys as in `padded`."""
        return self._looked_at("keys")

    @property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:
        """Values as in `padded`."""
        return self._looked_at("values")

    def take(
        self, index: Int[Tensor, "batch kv_heads n"]
    ) -> tuple[Float[Tensor, "batch kv_heads n head_dim"], Float[Tensor, "batch kv_heads n value_dim"]]:
        """Return the keys and values of some entries of each head, as attention takes them.

        Args:
            index: the entries, as `padded` counts them; what lies behind a head's own is of no use.
        """
        starts = upload(_starts(self._runs), index.device).view(self.batch, self.kv_heads, 1)
        places = (starts + index).flatten().clamp(max=len(self._columns["positions"]) - 1)
        rows = dequantized({name: flat.index_select(0, places) for name, flat in self._stored.items()})
        return rows["keys"].unflatten(0, index.shape), rows["values"].unflatten(0, index.shape)

    @property
    def _stored(self) -> dict[str, Shaped[Tensor, "places *rest"]]:
        """Keys and values as they are stored, with their scales."""
        return {name: self._columns[name] for name in (*_SCALES, *_SCALES.values()) if name in self._columns}

    @property
    def others(self) -> dict[str, Shaped[Tensor, "batch kv_heads entries *rest"]]:
        """Columns other than keys and values, as in `padded`."""
        stored = self._stored
        return {name: self._rectangle(flat) for name, flat in self._columns.items() if name not in stored}

    @property
    def exists(self) -> Bool[Tensor, "batch kv_heads entries"]:
        """Mask of the places of `padded` that hold an entry."""
        shape, device = (self.batch, self.kv_heads), self._columns["positions"].device
        longest = max(run.count for run in self._runs)
        if len(self._runs) == 1:
            return torch.ones(*shape, longest, dtype=torch.bool, device=device)
        return (torch.arange(longest, device=device) < upload(self.counts, device)[:, None]).unflatten(0, shape)

    def _looked_at(self, name: str) -> Tensor:
        columns = {each: self._columns[each] for each in (name, _SCALES[name]) if each in self._columns}
        return dequantized({each: self._rectangle(flat) for each, flat in columns.items()})[name]

    def _rectangle(self, flat: Shaped[Tensor, "places *rest"]) -> Shaped[Tensor, "batch kv_heads entries *rest"]:
        """Return a column head by head; a view if all heads have equally many entries."""
        shape = (self.batch, self.kv_heads)
        if len(self._runs) == 1:
            return self._runs[0].view(flat).unflatten(0, shape)
        longest = max(run.count for run in self._runs)
        column = flat.new_zeros(self.batch * self.kv_heads, longest, *flat.shape[1:])
        for run in self._runs:
            column[run.first : run.first + run.heads, : run.count] = run.view(flat)
        return column.unflatten(0, shape)

    def reorder(self, requests: Sequence[int]) -> None:
        """Make the batch consist of these requests, in this order. Any may repeat or be missing."""
        heads, counts = range(self.kv_heads), self.counts
        self.batch = len(requests)
        rows = [request * self.kv_heads + head for request in requests for head in heads]
        self._rebuild([(row, counts[row]) for row in rows])

    def crop(self, removed: Sequence[int]) -> None:
        """Drop the newest entries of every head.

        Args:
            removed: how many, for each request.
        """
        if len(set(removed)) == 1:
            self.count_appended(-removed[0])
            for name in self._columns.keys() - set(_ENTRIES):
                for run in self._runs:
                    run.behind(self._columns[name], removed[0]).zero_()
            return
        self._rebuild([(head, count - removed[head // self.kv_heads]) for head, count in enumerate(self.counts)])

    def fork(self) -> EntryStore:
        """Return an independent copy, without free places."""
        copy = EntryStore(self.batch, self.kv_heads, dict(self._columns), lambda: self.counts)
        copy._runs = self._runs
        copy._rebuild(list(enumerate(self.counts)))
        return copy

    def _grow(self, slack: int) -> None:
        self._moved()  # or it would hold all columns until the last is copied
        runs, start = [], 0
        for run in self._runs:
            runs.append(replace(run, start=start, capacity=run.count + slack))
            start += run.heads * (run.count + slack)
        for name, flat in self._columns.items():
            make = flat.new_empty if name in _ENTRIES else flat.new_zeros
            grown = make((start, *flat.shape[1:]))
            for old, new in zip(self._runs, runs, strict=True):
                new.view(grown).copy_(old.view(flat))
            self._columns[name] = grown
        self._runs = runs

    def _moved(self) -> None:
        """Forget where heads lay, because they lie elsewhere from now on."""
        vars(self).pop("heads", None)

    def count_appended(self, n: int) -> None:
        """Count `n` entries more in every head, which were written behind those of each."""
        for run in self._runs:
            run.count += n
        self.heads.grown += n

    def _rebuild(self, heads: Sequence[tuple[int, int]]) -> None:
        """Make the store consist of some heads, in this order."""
        self._moved()  # as in _grow
        starts = _starts(self._runs)
        for name, flat in self._columns.items():
            self._columns[name] = torch.cat([flat[starts[h] : starts[h] + count] for h, count in heads])
        self._runs = runs_of([count for _, count in heads])


def _starts(runs: Sequence[HeadRun]) -> list[int]:
    """Return the first place of every head."""
    return [run.start + i * run.capacity for run in runs for i in range(run.heads)]


def dequantized(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace 8-bit integers and their scales by keys and values as attention takes them."""
    for name, scale in _SCALES.items():
        if scale in columns:
            columns[name] = dequantize(columns[name], columns.pop(scale))
    return columns


class StoredObservation(LazyObservation):
    """An observation of what a store holds, to which nothing is added any more.

    Ragged and 8-bit heads have to be copied to be looked at, so keys and values are copied when a method reads them.

    Args:
        store: the entries.
        parts: the other arguments of an `Observation`.
    """

    store: EntryStore

    def __init__(self, store: EntryStore, **parts: Any) -> None:
        heads, shape = store.heads, parts["valid"].shape
        sizes = heads.keys.shape[-1], heads.values.shape[-1]
        super().__init__(shape, *sizes, heads.dtype, heads.keys.device, **parts)
        vars(self)["store"] = store

    @cached_property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:  # type: ignore[override]
        return self.store.keys

    @cached_property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:  # type: ignore[override]
        return self.store.values
