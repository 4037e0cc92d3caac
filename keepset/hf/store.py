"""`EntryStore`: the kept entries of one layer, packed in flat tensors.

Heads follow one another, request after request, each with its own number of entries. Equal neighbours form one run,
of which `[heads, entries, head_dim]` is a view: a dense layer is a single run, a head-ragged one a run per head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.core.keep_set import HeadCounts
from keepset.core.observation import BIAS
from keepset.kernels.attention import append_entries
from keepset.kernels.compaction import pack_entries
from keepset.kernels.dispatch import upload
from keepset.kernels.int8 import dequantize, quantize
from keepset.kernels.packed import HeadRun, PackedHeads, runs_of

SLACK = 64
"""Free places per head that a growing store allocates at once, at least."""
_ENTRIES = ("keys", "values", "positions")
"""The columns that every store has; others are a method's own."""
_SCALES = {"keys": "key_scale", "values": "value_scale"}
"""Two more where keys and values are 8-bit integers."""
_SHARE = 8
"""Of the entries that there are, one in so many is allocated beside them: what is copied stays in proportion."""


class EntryStore:
    """Keys, values, positions and a method's own columns of one layer, for `batch * kv_heads` heads.

    `positions` are int32, counted from each request's first token. What moves an entry moves all of its columns. A
    method's columns are zero where there is no entry yet, so a new token writes nothing to them.

    Args:
        batch, kv_heads: how many there are.
        columns: head after head, without free places.
        sizes: answers with how many entries each head has.
    """

    def __init__(
        self, batch: int, kv_heads: int, columns: dict[str, Tensor], sizes: Callable[[], Sequence[int]]
    ) -> None:
        self.batch, self.kv_heads, self._columns, self._sizes = batch, kv_heads, columns, sizes

    @classmethod
    def pack(cls, columns: dict[str, Tensor], indices: Int[Tensor, " kept"], heads: HeadCounts) -> EntryStore:
        """A store with exactly the entries that a KeepSet names, and not a byte more.

        Columns are `[batch, kv_heads, entries, ...]`, indices packed head after head. How many each head has the store
        asks when it needs to know.
        """
        batch, kv_heads = heads.device_values.shape
        return cls(batch, kv_heads, pack_entries(columns, indices, heads.device_values), lambda: heads.host_values)

    def kept(self, others: dict[str, Tensor], indices: Int[Tensor, " kept"], heads: HeadCounts) -> EntryStore:
        """Likewise of the entries here, as they are stored; `others` are all columns but keys and values."""
        stored = {name: self._columns[name] for name in (*_SCALES, *_SCALES.values()) if name in self._columns}
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
        """A store with these entries of each head, of columns `[batch, kv_heads, entries, ...]`."""
        sizes = [len(head) for head in heads]
        batch, kv_heads = columns["keys"].shape[:2]
        counts = upload(sizes, heads[0].device).view(batch, kv_heads)
        return cls(batch, kv_heads, pack_entries(columns, torch.cat(list(heads)), counts), lambda: sizes)

    @classmethod
    def of(cls, columns: dict[str, Tensor], counts: Int[Tensor, "batch kv_heads"]) -> EntryStore:
        """The store of which these are the `packed` columns and the counts."""
        batch, kv_heads = counts.shape
        return cls(batch, kv_heads, columns, lambda: counts.flatten().tolist())

    @cached_property
    def _runs(self) -> list[HeadRun]:
        return runs_of(self._sizes())

    @cached_property
    def heads(self) -> PackedHeads:
        """What attention looks at."""
        keys, values, positions = (self._columns[name] for name in _ENTRIES)
        bias, key_scale, value_scale = (self._columns.get(name) for name in (BIAS, *_SCALES.values()))
        return PackedHeads(keys, values, positions, self._runs, bias, key_scale, value_scale)

    @property
    def packed(self) -> dict[str, Shaped[Tensor, " entries *rest"]]:
        """All columns, head after head and without free places; copied only if there are such."""
        return self._columns if all(run.count == run.capacity for run in self._runs) else self.fork()._columns

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(column.nbytes for column in self._columns.values())

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry, all its columns."""
        return sum(column[:1].nbytes for column in self._columns.values())

    @property
    def entries(self) -> int:
        """Entries stored, free places not counted."""
        return sum(run.heads * run.count for run in self._runs)

    @property
    def counts(self) -> list[int]:
        """Entries of every head, request after request."""
        return [run.count for run in self._runs for _ in range(run.heads)]

    def takes(self, keys: Tensor, values: Tensor) -> bool:
        """Return whether tokens with these keys and values, `[batch, kv_heads, n, size]`, can be added to it."""
        held, held_values = self._columns["keys"], self._columns["values"]
        fits = self.kv_heads == keys.shape[1] and held.shape[-1] == keys.shape[-1]
        return fits and held_values.shape[-1] == values.shape[-1] and held.dtype in (keys.dtype, torch.int8)

    def replace_values(self, values: Float[Tensor, "entries value_dim"]) -> None:
        """Gives every entry another value; there must be no free places."""
        scale = self._columns.get(_SCALES["values"])
        if scale is None:
            self._columns["values"] = values.to(self._columns["values"].dtype)
        else:
            self._columns["values"], self._columns[_SCALES["values"]] = quantize(values.to(scale.dtype))
        self._moved()

    def quantize(self) -> None:
        """Stores keys and values, also those to come, as 8-bit integers; there must be no free places."""
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
        """Adds new tokens to every head; of each request only the `real` ones, where there is padding.

        A store that must grow gets place for `room` tokens in all where that is known, if that is not too many.
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
        """Sees to free places for `n` tokens; a store that must grow gets them for `room` as `append` does."""
        for run in self._runs:
            if run.count + n > run.capacity:
                most = max(SLACK, max(run.count for run in self._runs) // _SHARE)
                self._grow(max(n, min(room, most) if room else most))
                return

    def column(self, name: str, shape: tuple[int, ...] = ()) -> Float[Tensor, "places *rest"]:
        """A column beside the entries, of numbers of this shape, to be written to; zero where it is new."""
        if name not in self._columns:
            positions = self._columns["positions"]
            self._columns[name] = torch.zeros(*positions.shape, *shape, device=positions.device)
        return self._columns[name]

    def forget(self, name: str) -> None:
        """Drops a column, if there is one of this name."""
        self._columns.pop(name, None)

    def trim(self) -> None:
        """Gives free places back."""
        if any(run.count < run.capacity for run in self._runs):
            self._rebuild(list(enumerate(self.counts)))

    def padded(self) -> tuple[dict[str, Tensor], Bool[Tensor, "batch kv_heads entries"]]:
        """All columns as `[batch, kv_heads, entries, ...]` and which entries exist; a view when dense.

        Keys and values are as attention takes them: of 8-bit integers and their scales a copy.

        Places that hold nothing are zero, never uninitialised: 0 x NaN is NaN.
        """
        columns = {name: self._rectangle(flat) for name, flat in self._columns.items()}
        return _dequantized(columns), self.exists

    @property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:
        """As in `padded`."""
        return self._looked_at("keys")

    @property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:
        """As in `padded`."""
        return self._looked_at("values")

    @property
    def others(self) -> dict[str, Shaped[Tensor, "batch kv_heads entries *rest"]]:
        """All columns but keys and values, as in `padded`."""
        stored = {*_SCALES, *_SCALES.values()}
        return {name: self._rectangle(flat) for name, flat in self._columns.items() if name not in stored}

    @property
    def exists(self) -> Bool[Tensor, "batch kv_heads entries"]:
        """Which entries of `padded` do."""
        shape, device = (self.batch, self.kv_heads), self._columns["positions"].device
        longest = max(run.count for run in self._runs)
        if len(self._runs) == 1:
            return torch.ones(*shape, longest, dtype=torch.bool, device=device)
        return (torch.arange(longest, device=device) < upload(self.counts, device)[:, None]).unflatten(0, shape)

    def _looked_at(self, name: str) -> Tensor:
        columns = {each: self._columns[each] for each in (name, _SCALES[name]) if each in self._columns}
        return _dequantized({each: self._rectangle(flat) for each, flat in columns.items()})[name]

    def _rectangle(self, flat: Shaped[Tensor, "places *rest"]) -> Shaped[Tensor, "batch kv_heads entries *rest"]:
        """A column head by head; a view when dense."""
        shape = (self.batch, self.kv_heads)
        if len(self._runs) == 1:
            return self._runs[0].view(flat).unflatten(0, shape)
        longest = max(run.count for run in self._runs)
        column = flat.new_zeros(self.batch * self.kv_heads, longest, *flat.shape[1:])
        for run in self._runs:
            column[run.first : run.first + run.heads, : run.count] = run.view(flat)
        return column.unflatten(0, shape)

    def reorder(self, requests: Sequence[int]) -> None:
        """Makes the batch consist of these requests, in this order; any may repeat or be missing."""
        heads, counts = range(self.kv_heads), self.counts
        self.batch = len(requests)
        rows = [request * self.kv_heads + head for request in requests for head in heads]
        self._rebuild([(row, counts[row]) for row in rows])

    def crop(self, removed: Sequence[int]) -> None:
        """Drops each request's newest entries, so many per request, from all of its heads."""
        if len(set(removed)) == 1:
            self.count_appended(-removed[0])
            for name in self._columns.keys() - set(_ENTRIES):
                for run in self._runs:
                    run.behind(self._columns[name], removed[0]).zero_()
            return
        self._rebuild([(head, count - removed[head // self.kv_heads]) for head, count in enumerate(self.counts)])

    def fork(self) -> EntryStore:
        """An independent copy, without free places."""
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
        """Heads lie elsewhere from now on."""
        vars(self).pop("heads", None)

    def count_appended(self, n: int) -> None:
        """Count `n` entries more in every head, which were written behind those of each."""
        for run in self._runs:
            run.count += n
        self.heads.grown += n

    def _rebuild(self, heads: Sequence[tuple[int, int]]) -> None:
        """Keeps the first `count` entries of each of these heads, in this order."""
        self._moved()  # as in _grow
        starts = _starts(self._runs)
        for name, flat in self._columns.items():
            self._columns[name] = torch.cat([flat[starts[h] : starts[h] + count] for h, count in heads])
        self._runs = runs_of([count for _, count in heads])


def _starts(runs: Sequence[HeadRun]) -> list[int]:
    """The first place of every head."""
    return [run.start + i * run.capacity for run in runs for i in range(run.heads)]


def _dequantized(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys and values as attention takes them, instead of 8-bit integers and their scales."""
    for name, scale in _SCALES.items():
        if scale in columns:
            columns[name] = dequantize(columns[name], columns.pop(scale))
    return columns
