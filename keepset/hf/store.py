"""`EntryStore`: the kept entries of one layer, packed in flat tensors.

Heads follow one another, request after request, each with its own number of entries. Neighbours with equally many
entries form a run, which has a view `[heads, entries, head_dim]`. A dense layer is a single run, a head-ragged layer
has a run per head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.contexts.columns import RESIDUAL, STORED, split_residual
from keepset.core.keep_set import HeadCounts
from keepset.core.observation import LazyObservation
from keepset.kernels.attention import append_entries, pack_entries
from keepset.kernels.dispatch import upload
from keepset.kernels.entry_format import FORMATS, EntryFormat, format_of
from keepset.kernels.packed import ENTRIES, SCALES, HeadRun, PackedHeads, runs_of

SLACK = 64
"""Free places per head that a store allocates at once when it grows, at least."""
_SHARE = 8
"""A growing store allocates at least one free place per this many entries, so growth costs constant time per entry."""


class EntryStore:
    """Keys, values, positions and a method's own columns of one layer, for `batch * kv_heads` heads.

    Positions are int32, counted from each request's first token. All columns of an entry move together. A method's
    columns are zero in free places, so a new token writes nothing to them.

    Args:
        batch, kv_heads: number of requests, and of KV heads of each.
        columns: `[entries, ...]`, head after head, without free places.
        sizes: returns the number of entries of each head; called once the host needs it.

    Attributes:
        residual: a store of the rounding errors of the newest entries of every head, if their format is refined; its
            rows are added to theirs. An event drops it.
    """

    def __init__(
        self, batch: int, kv_heads: int, columns: dict[str, Tensor], sizes: Callable[[], Sequence[int]]
    ) -> None:
        self.batch, self.kv_heads, self._columns, self._sizes = batch, kv_heads, columns, sizes
        self.residual: EntryStore | None = None
        self._free = 0
        """Free places behind the entries of each head."""

    @classmethod
    def pack(cls, columns: dict[str, Tensor], indices: Int[Tensor, " kept"], heads: HeadCounts) -> EntryStore:
        """Return a store with exactly the given entries, without free places.

        Args:
            columns: each `[batch, kv_heads, entries, ...]`.
            indices: the entries that stay, packed head after head.
            heads: how many entries each head keeps; the host reads it when it needs it.
        """
        batch, kv_heads = heads.device_values.shape
        return cls(batch, kv_heads, pack_entries(columns, indices, heads.device_values), lambda: heads.host_values)

    def kept(self, others: dict[str, Tensor], indices: Int[Tensor, " kept"], heads: HeadCounts) -> EntryStore:
        """Return a store with some of this store's entries, their keys and values as they are stored.

        Args:
            others: all columns but keys and values, each `[batch, kv_heads, entries, ...]`.
            indices: the entries that stay, packed head after head.
        """
        stored = self._stored
        if len(self._runs) == 1:
            views = {name: self._rectangle(flat) for name, flat in stored.items()}
            return type(self).pack({**views, **others}, indices, heads)
        packed = type(self).pack(others, indices, heads)
        starts = upload(_starts(self._runs), indices.device)
        row_indices = torch.repeat_interleave(starts, heads.device_values.flatten(), output_size=len(indices)) + indices
        as_one_head = {name: flat[None, None] for name, flat in stored.items()}
        packed._columns |= pack_entries(as_one_head, row_indices, upload([[len(indices)]], indices.device))
        return packed

    @classmethod
    def packed_by(cls, columns: dict[str, Tensor], heads: Sequence[Int[Tensor, " _"]]) -> EntryStore:
        """Return a store with the given entries of each head."""
        sizes = [len(head) for head in heads]
        batch, kv_heads = columns["keys"].shape[:2]
        counts = upload(sizes, heads[0].device).view(batch, kv_heads)
        return cls(batch, kv_heads, pack_entries(columns, torch.cat(list(heads)), counts), lambda: sizes)

    @classmethod
    def of(cls, columns: dict[str, Tensor], counts: Int[Tensor, "batch kv_heads"]) -> EntryStore:
        """Return a store of columns without free places."""
        batch, kv_heads = counts.shape
        store_columns, residual = split_residual(columns)
        store = cls(batch, kv_heads, store_columns, lambda: counts.flatten().tolist())
        if residual:
            store.residual = cls.of(residual, residual.pop("counts"))
        return store

    @cached_property
    def _runs(self) -> list[HeadRun]:
        return runs_of(self._sizes())

    @cached_property
    def heads(self) -> PackedHeads:
        """The entries as attention takes them; recomputed after they or the residual's have moved (`_moved`)."""
        return PackedHeads.of(self._columns, self._runs, None if self.residual is None else self.residual.heads)

    @property
    def attended(self) -> PackedHeads:
        """The entries as queries attend to them."""
        return self.heads

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of a key and of a value, as they are read."""
        return self.heads.sizes

    @classmethod
    def stored(
        cls, keys: Float[Tensor, "*rows head_dim"], values: Float[Tensor, "*rows value_dim"]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values in the form in which they are stored."""
        return keys, values

    @classmethod
    def read(cls, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return stored keys and values in the form in which they are read."""
        return keys, values

    @property
    def _format(self) -> EntryFormat | None:
        return format_of(self._columns["keys"].dtype)

    @property
    def packed(self) -> dict[str, Shaped[Tensor, " entries *rest"]]:
        """Return all columns, head after head and without free places; copies only if there are free places.

        If there is a residual, its columns and the `counts` of its heads are included.
        """
        columns = self._packed_again()._columns if self._free else self._columns
        if self.residual is None:
            return columns
        counts = torch.tensor(self.residual.counts, dtype=torch.long).view(self.batch, self.kv_heads)
        residual = {**self.residual.packed, "counts": counts}
        return columns | {RESIDUAL + name: column for name, column in residual.items()}

    @property
    def nbytes(self) -> int:
        """Bytes allocated, free places included."""
        return sum(column.nbytes for column in self._columns.values()) + (self.residual.nbytes if self.residual else 0)

    @property
    def entries_nbytes(self) -> int:
        """Bytes of all entries, without free places."""
        return self.entries * self.entry_bytes + (self.residual.entries_nbytes if self.residual else 0)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry in one head, over all columns, without a residual."""
        return sum(column[:1].nbytes for column in self._columns.values())

    @property
    def token_bytes(self) -> int:
        """Bytes that one new token takes in one head, with its residual."""
        twice = (*ENTRIES, *SCALES.values()) if self._format is not None and self._format.refined else ()
        return self.entry_bytes + sum(self._columns[name][:1].nbytes for name in twice)

    @property
    def entries(self) -> int:
        """Number of entries of all heads."""
        return sum(run.heads * run.count for run in self._runs)

    @property
    def counts(self) -> list[int]:
        """Number of entries of each head, request after request."""
        return [run.count for run in self._runs for _ in range(run.heads)]

    def replace_values(self, values: Float[Tensor, "entries value_dim"]) -> None:
        """Give every entry another value. There must be no free places."""
        scale, format = self._columns.get(SCALES["values"]), self._format
        if scale is None or format is None:
            self._columns["values"] = values.to(self._columns["values"].dtype)
        else:
            rows = format.mix(values.to(scale.dtype))
            self._columns["values"], self._columns[SCALES["values"]] = format.quantize(rows, scale.dtype)
        self._moved()

    def quantize(self, bits: int) -> None:
        """Store keys and values, also those of later tokens, in few bits (`FORMATS`). There must be no free places."""
        if self._format is None:
            format = FORMATS[bits]
            for name, scale in SCALES.items():
                rows = self._columns[name]
                self._columns[name], self._columns[scale] = format.quantize(format.mix(rows), rows.dtype)
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
            positions: of the tokens, counted from each request's first.
            real: indices of each request's tokens that are not padding; None if all are real.
            room: free places per head to allocate if the store has to grow, within limits; 0 if unknown.
        """
        n = keys.shape[2]
        if real is None:
            if self._free < n or (self.residual is not None and self.residual._free < n):
                self.make_room(n, room)
            append_entries([self.heads], keys, values, positions)
            self.count_appended(n)
        elif self._format is None:
            self._append_real(keys, values, positions, real)
        else:
            if self._format.refined:
                self._begin_residual()
            self._append_real(self._format.mix(keys), self._format.mix(values), positions, real)

    def _append_real(
        self,
        keys: Float[Tensor, "batch kv_heads n head_dim"],
        values: Float[Tensor, "batch kv_heads n value_dim"],
        positions: Int[Tensor, "batch n"],
        real: Sequence[Int[Tensor, " _"]],
    ) -> None:
        """Add the new tokens that are not padding, whose rows are mixed already; everything is packed again."""
        shape = self.batch, self.kv_heads, keys.shape[2]
        new: dict[str, Tensor] = {"positions": positions.int()[:, None].expand(shape)}
        lost: list[Tensor] = []
        for name, rows in (("keys", keys), ("values", values)):
            scale = self._columns.get(SCALES[name])
            if self._format is None or scale is None:
                new[name] = rows
                continue
            new[name], new[SCALES[name]] = self._format.quantize(rows, scale.dtype)
            lost.append(rows - self._format.dequantize(new[name], new[SCALES[name]]))
        columns = {name: self._rectangle(flat) for name, flat in self._columns.items()}
        missing = {name: column for name, column in columns.items() if name not in new}
        new |= {name: column.new_zeros(*shape, *column.shape[3:]) for name, column in missing.items()}
        joined = {name: torch.cat([column, new[name]], 2) for name, column in columns.items()}
        before = torch.arange(columns["keys"].shape[2], device=keys.device)
        heads = [(before[:count], real[head // self.kv_heads]) for head, count in enumerate(self.counts)]
        packed = EntryStore.packed_by(joined, [torch.cat([old, len(before) + added]) for old, added in heads])
        self._columns, self._runs, self._free = packed._columns, packed._runs, 0
        self._moved()
        if self.residual is not None:
            lost_keys, lost_values = lost
            self.residual._append_real(lost_keys, lost_values, positions, real)

    def _begin_residual(self) -> None:
        """Begin the residual of a refined format, with the first new tokens."""
        if self.residual is None:
            names = (*ENTRIES, *SCALES.values())
            nothing = {name: torch.empty_like(self._columns[name][:0]) for name in names}
            self.residual = EntryStore(self.batch, self.kv_heads, nothing, lambda: [0] * self.batch * self.kv_heads)
            self._moved()

    def make_room(self, n: int, room: int = 0) -> None:
        """Make sure that every head has free places for `n` new tokens; `room` is as for `append`."""
        format = self.heads.format
        if format is not None and format.refined:
            self._begin_residual()
        if self.residual is not None and self.residual._free < n:
            self._moved()
            self.residual._grow(n, room)
        if self._free < n:
            self._grow(n, room)

    def column(self, name: str, shape: tuple[int, ...] = ()) -> Float[Tensor, "places *rest"]:
        """Return a column to write to; if there is none, make one of zeros with this shape per entry."""
        if name not in self._columns:
            positions = self._columns["positions"]
            self._columns[name] = torch.zeros(*positions.shape, *shape, dtype=torch.float32, device=positions.device)
        return self._columns[name]

    def forget(self, name: str) -> None:
        """Drop a column if there is one of this name."""
        self._columns.pop(name, None)

    def trim(self) -> None:
        """Free the places that hold no entry."""
        if self._free:
            self._rebuild(list(enumerate(self.counts)))
        if self.residual is not None:
            self._moved()
            self.residual.trim()

    def padded(self) -> tuple[dict[str, Tensor], Bool[Tensor, "batch kv_heads entries"]]:
        """Return all columns, each `[batch, kv_heads, entries, ...]`, and which entries exist.

        Columns are views if all heads have equally many entries. Keys and values are as the model made them: copies if
        they are stored in few bits. Places without an entry are zero, never uninitialised: 0 x NaN is NaN.
        """
        return {"keys": self.keys, "values": self.values, **self.other_columns}, self.exists

    @property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:
        """Keys as in `padded`."""
        return self._looked_at("keys")

    @property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:
        """Values as in `padded`."""
        return self._looked_at("values")

    def take(
        self, index: slice | Int[Tensor, "batch kv_heads n"]
    ) -> tuple[Float[Tensor, "batch kv_heads n head_dim"], Float[Tensor, "batch kv_heads n value_dim"]]:
        """Return the keys and values of some entries of each head, as attention takes them.

        Args:
            index: the entries, as `padded` counts them. A slice takes the same ones of each head. Results after a
                head's last entry are meaningless.
        """
        if isinstance(index, slice):
            if self._format is None:
                return self.keys[:, :, index], self.values[:, :, index]
            entry_indices = torch.arange(self._longest, device=self._columns["positions"].device)[index]
            index = entry_indices.expand(self.batch, self.kv_heads, -1)
        rows = self._take(index)
        if self._format is None:
            return self.read(rows["keys"], rows["values"])
        if self.residual is not None and self.residual.entries:
            before = upload(self.counts, index.device) - upload(self.residual.counts, index.device)
            residual_index = index - before.view(self.batch, self.kv_heads, 1)
            for name, residual in self.residual._take(residual_index.clamp(min=0)).items():
                rows[name] += residual.masked_fill_(residual_index[..., None] < 0, 0.0)
        return self.read(*(self._format.unmix(rows[name]) for name in SCALES))

    def _take(self, index: Int[Tensor, "batch kv_heads n"]) -> dict[str, Float[Tensor, "batch kv_heads n size"]]:
        """Return the keys and values of some entries of each head, mixed and without the residual."""
        starts = upload(_starts(self._runs), index.device).view(self.batch, self.kv_heads, 1)
        row_indices = (starts + index).flatten().clamp(max=len(self._columns["positions"]) - 1)
        taken = {
            name: flat.index_select(0, row_indices).unflatten(0, index.shape) for name, flat in self._stored.items()
        }
        if self._format is None:
            return taken
        return {name: self._format.dequantize(taken[name], taken[scale]) for name, scale in SCALES.items()}

    @property
    def _stored(self) -> dict[str, Shaped[Tensor, "places *rest"]]:
        """Keys and values as they are stored, with their scales."""
        return {name: self._columns[name] for name in STORED if name in self._columns}

    @property
    def other_columns(self) -> dict[str, Shaped[Tensor, "batch kv_heads entries *rest"]]:
        """Columns other than keys and values, as in `padded`."""
        return {name: self._rectangle(flat) for name, flat in self._columns.items() if name not in STORED}

    @property
    def _longest(self) -> int:
        return max(run.count for run in self._runs)

    @property
    def exists(self) -> Bool[Tensor, "batch kv_heads entries"]:
        """Mask of the places of `padded` that hold an entry."""
        shape, device = (self.batch, self.kv_heads), self._columns["positions"].device
        if len(self._runs) == 1:
            return torch.ones(*shape, self._runs[0].count, dtype=torch.bool, device=device)
        return (torch.arange(self._longest, device=device) < upload(self.counts, device)[:, None]).unflatten(0, shape)

    def _looked_at(self, name: Literal["keys", "values"]) -> Tensor:
        if self._format is None:
            return self._rectangle(self._columns[name])
        heads, size = self.heads, self.heads.sizes[name == "values"]
        if len(self._runs) == 1:
            return self._format.unmix(heads.rows(self._runs[0], name)).unflatten(0, (self.batch, self.kv_heads))
        rows = self._columns[SCALES[name]].new_zeros(self.batch * self.kv_heads, self._longest, size)
        for run in self._runs:
            rows[run.first : run.first + run.heads, : run.count] = heads.rows(run, name)
        return self._format.unmix(rows).unflatten(0, (self.batch, self.kv_heads))

    def _rectangle(self, flat: Shaped[Tensor, "places *rest"]) -> Shaped[Tensor, "batch kv_heads entries *rest"]:
        """Return a column head by head; a view if all heads have equally many entries."""
        shape = (self.batch, self.kv_heads)
        if len(self._runs) == 1:
            return self._runs[0].view(flat).unflatten(0, shape)
        column = flat.new_zeros(self.batch * self.kv_heads, self._longest, *flat.shape[1:])
        for run in self._runs:
            column[run.first : run.first + run.heads, : run.count] = run.view(flat)
        return column.unflatten(0, shape)

    def reorder(self, requests: Sequence[int]) -> None:
        """Make the batch consist of these requests, in this order. Any may repeat or be missing."""
        heads, counts = range(self.kv_heads), self.counts
        self.batch = len(requests)
        rows = [request * self.kv_heads + head for request in requests for head in heads]
        self._rebuild([(row, counts[row]) for row in rows])
        if self.residual is not None:
            self.residual.reorder(requests)

    def crop(self, removed: Sequence[int]) -> None:
        """Drop the newest entries of every head, a given number for each request."""
        if self.residual is not None:
            self._moved()
            residual_counts = self.residual.counts[:: self.kv_heads]
            self.residual.crop([min(pair) for pair in zip(residual_counts, removed, strict=True)])
        if len(set(removed)) == 1:
            for run in self._runs:
                run.count -= removed[0]
                for name in self._columns.keys() - set(ENTRIES):
                    run.view(self._columns[name], run.count, removed[0]).zero_()
            self.heads.grown -= removed[0]
            self._free += removed[0]
            return
        self._rebuild([(head, count - removed[head // self.kv_heads]) for head, count in enumerate(self.counts)])

    def fork(self) -> EntryStore:
        """Return an independent copy, without free places."""
        copy = self._packed_again()
        copy.residual = None if self.residual is None else self.residual.fork()
        return copy

    def _packed_again(self) -> EntryStore:
        """Return a copy without free places and without the residual."""
        copy = type(self)(self.batch, self.kv_heads, dict(self._columns), lambda: self.counts)
        copy._runs = self._runs
        copy._rebuild(list(enumerate(self.counts)))
        return copy

    def _grow(self, n: int, room: int) -> None:
        """Move the heads to where `n` tokens have free places; `room` is as for `append`."""
        self._moved()  # else it would hold all columns until the last is copied
        most = max(SLACK, self._longest // _SHARE)
        slack = max(n, min(room, most) if room else most)
        runs, start = [], 0
        for run in self._runs:
            runs.append(replace(run, start=start, capacity=run.count + slack))
            start += run.heads * (run.count + slack)
        for name, flat in self._columns.items():
            make = flat.new_empty if name in ENTRIES else flat.new_zeros
            grown = make((start, *flat.shape[1:]))
            for old, new in zip(self._runs, runs, strict=True):
                new.view(grown).copy_(old.view(flat))
            self._columns[name] = grown
        self._runs, self._free = runs, slack

    def _moved(self) -> None:
        """Forget the places of heads, because they or those of the residual have moved."""
        vars(self).pop("heads", None)

    def count_appended(self, n: int) -> None:
        """Count `n` more entries in every head, which were written after its last one."""
        for run in self._runs:
            run.count += n
        self.heads.grown += n
        self._free -= n
        if self.residual is not None:
            self.residual.count_appended(n)

    def _rebuild(self, heads: Sequence[tuple[int, int]]) -> None:
        """Make the store consist of some heads, in this order."""
        self._moved()  # as in _grow
        starts = _starts(self._runs)
        for name, flat in self._columns.items():
            self._columns[name] = torch.cat([flat[starts[h] : starts[h] + count] for h, count in heads])
        self._runs, self._free = runs_of([count for _, count in heads]), 0


def _starts(runs: Sequence[HeadRun]) -> list[int]:
    """Return the first place of every head."""
    return [run.start + i * run.capacity for run in runs for i in range(run.heads)]


class StoredObservation(LazyObservation):
    """An observation of the entries of a store that does not change any more.

    Ragged heads and heads in few bits have to be copied for reading, so keys and values are copied when a method reads
    them.

    Args:
        store: the entries.
        parts: the other arguments of an `Observation`.
    """

    store: EntryStore

    def __init__(self, store: EntryStore, **parts: Any) -> None:
        heads, shape = store.heads, parts["valid"].shape
        super().__init__(shape, *store.sizes, heads.dtype, heads.keys.device, **parts)
        vars(self)["store"] = store

    @cached_property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:  # type: ignore[override]
        return self.store.keys

    @cached_property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:  # type: ignore[override]
        return self.store.values
