"""`EntryStore`: the kept entries of one layer, packed in flat tensors, perhaps in few bits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
from keepset.kernels.packed import ENTRIES, SCALES, HeadColumns, PackedHeads

_RESIDUAL_COLUMNS = (*ENTRIES, *SCALES.values())


class EntryStore:
    """Keys, values, positions and a method's own columns of one layer, for `batch * kv_heads` heads.

    Positions are int32, counted from each request's first token.

    Args:
        batch, kv_heads: number of requests, and of KV heads of each.
        columns: the entries.

    Attributes:
        residual: the rounding errors of the newest entries of every head, if their format is refined: keys, values and
            scales, which are added to those of the entries. An event drops it.
    """

    def __init__(self, batch: int, kv_heads: int, columns: HeadColumns) -> None:
        self.batch, self.kv_heads, self.columns = batch, kv_heads, columns
        self.residual: HeadColumns | None = None

    @classmethod
    def pack(cls, columns: dict[str, Tensor], indices: Int[Tensor, " kept"], heads: HeadCounts) -> EntryStore:
        """Return a store with exactly the given entries, without free places.

        Args:
            columns: each `[batch, kv_heads, entries, ...]`.
            indices: the entries that stay, packed head after head.
            heads: how many entries each head keeps; the host reads it when it needs it.
        """
        batch, kv_heads = heads.device_values.shape
        packed = pack_entries(columns, indices, heads.device_values)
        return cls(batch, kv_heads, HeadColumns(packed, lambda: heads.host_values))

    def kept(self, columns: dict[str, Tensor], indices: Int[Tensor, " kept"], heads: HeadCounts) -> EntryStore:
        """Return a store with some of this store's entries, their keys and values as they are stored.

        Args:
            columns: all columns but keys and values, each `[batch, kv_heads, entries, ...]`.
            indices: the entries that stay, packed head after head.
            heads: how many entries each head keeps.
        """
        tensors, shape = self.columns.tensors, (self.batch, self.kv_heads)
        if len(self.columns.runs) == 1:
            views = {name: self.columns.rectangle(name, shape) for name in STORED if name in tensors}
            return type(self).pack({**views, **columns}, indices, heads)
        kept = type(self).pack(columns, indices, heads)
        starts = upload(self.columns.starts, indices.device)
        row_indices = torch.repeat_interleave(starts, heads.device_values.flatten(), output_size=len(indices)) + indices
        as_one_head = {name: tensors[name][None, None] for name in STORED if name in tensors}
        kept.columns.tensors |= pack_entries(as_one_head, row_indices, upload([[len(indices)]], indices.device))
        return kept

    @classmethod
    def packed_by(cls, columns: dict[str, Tensor], heads: Sequence[Int[Tensor, " _"]]) -> EntryStore:
        """Return a store with the given entries of each head.

        Args:
            columns: each `[batch, kv_heads, entries, ...]`.
            heads: indices of the entries of each head, request after request.
        """
        counts = [len(head) for head in heads]
        batch, kv_heads = columns["keys"].shape[:2]
        shaped = upload(counts, heads[0].device).view(batch, kv_heads)
        packed = pack_entries(columns, torch.cat(list(heads)), shaped)
        return cls(batch, kv_heads, HeadColumns(packed, lambda: counts))

    @classmethod
    def of(cls, columns: dict[str, Tensor], counts: Int[Tensor, "batch kv_heads"]) -> EntryStore:
        """Return a store of columns without free places, as `packed` returns them.

        Args:
            columns: each `[entries, ...]`, head after head; perhaps those of a residual, too.
            counts: number of entries of each head.
        """
        batch, kv_heads = counts.shape
        entry_columns, lost = split_residual(columns)
        store = cls(batch, kv_heads, HeadColumns(entry_columns, lambda: counts.flatten().tolist()))
        if lost:
            lost_counts = lost.pop("counts")
            store.residual = HeadColumns(lost, lambda: lost_counts.flatten().tolist())
        return store

    @cached_property
    def heads(self) -> PackedHeads:
        """The entries as attention takes them; made again after they or the residual's have moved (`_moved`)."""
        lost = None if self.residual is None else PackedHeads.of(self.residual.tensors, self.residual.runs, None)
        return PackedHeads.of(self.columns.tensors, self.columns.runs, lost)

    def _moved(self) -> None:
        """Forget where heads are, because they or those of the residual have moved or will."""
        vars(self).pop("heads", None)

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
        """Return keys and values in the form in which they are stored.

        Args:
            keys, values: as attention takes them.
        """
        return keys, values

    @classmethod
    def read(cls, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return stored keys and values in the form in which they are read.

        Args:
            keys, values: as they are stored.
        """
        return keys, values

    @property
    def _format(self) -> EntryFormat | None:
        return format_of(self.columns.tensors["keys"].dtype)

    @property
    def _parts(self) -> list[HeadColumns]:
        return [self.columns] if self.residual is None else [self.columns, self.residual]

    @property
    def packed(self) -> dict[str, Shaped[Tensor, " entries *rest"]]:
        """Return all columns, head after head and without free places; copies only if there are free places.

        If there is a residual, its columns and the `counts` of its heads are included.
        """
        columns, *lost = [(part.packed() if part.free else part).tensors for part in self._parts]
        if self.residual is None:
            return columns
        counts = torch.tensor(self.residual.counts, dtype=torch.long).view(self.batch, self.kv_heads)
        return columns | {RESIDUAL + name: column for name, column in {**lost[0], "counts": counts}.items()}

    @property
    def nbytes(self) -> int:
        """Bytes allocated, free places included."""
        return sum(part.nbytes for part in self._parts)

    @property
    def entries_nbytes(self) -> int:
        """Bytes of all entries, without free places."""
        return sum(part.entries * part.entry_bytes for part in self._parts)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry in one head, over all columns, without a residual."""
        return self.columns.entry_bytes

    @property
    def pair_bytes(self) -> int:
        """Bytes of the key and value of one entry in one head, with their scales."""
        tensors, nbytes = self.columns.tensors, 0
        for name in STORED:
            if name in tensors:
                nbytes += tensors[name][:1].nbytes
        return nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one new token takes in one head, with its residual."""
        lost = _RESIDUAL_COLUMNS if self._format is not None and self._format.refined else ()
        return self.entry_bytes + sum(self.columns.tensors[name][:1].nbytes for name in lost)

    @property
    def entries(self) -> int:
        """Number of entries of all heads."""
        return self.columns.entries

    @property
    def counts(self) -> list[int]:
        """Number of entries of each head, request after request."""
        return self.columns.counts

    def replace_values(self, values: Float[Tensor, "entries value_dim"]) -> None:
        """Give every entry another value. There must be no free places."""
        tensors, format = self.columns.tensors, self._format
        scale = tensors.get(SCALES["values"])
        if scale is None or format is None:
            tensors["values"] = values.to(tensors["values"].dtype)
        else:
            rows = format.mix(values.to(scale.dtype))
            tensors["values"], tensors[SCALES["values"]] = format.quantize(rows, scale.dtype)
        self._moved()

    def quantize(self, bits: int) -> None:
        """Store keys and values, also those of later tokens, in few bits (`FORMATS`). There must be no free places."""
        if self._format is None:
            format, tensors = FORMATS[bits], self.columns.tensors
            for name, scale in SCALES.items():
                rows = tensors[name]
                tensors[name], tensors[scale] = format.quantize(format.mix(rows), rows.dtype)
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
            keys, values: those of the tokens, in the form in which they are stored, not quantised.
            positions: of the tokens, counted from each request's first.
            real: indices of each request's tokens that are not padding; None if all are real.
            room: free places per head to allocate if the store has to grow, within limits; 0 if unknown.
        """
        n = keys.shape[2]
        if real is not None:
            self._append_real(keys, values, positions, real)
            return
        if self.columns.free < n or (self.residual is not None and self.residual.free < n):
            self.make_room(n, room)
        append_entries([self.heads], keys, values, positions)
        self.count_appended(n)

    def _append_real(
        self,
        keys: Float[Tensor, "batch kv_heads n head_dim"],
        values: Float[Tensor, "batch kv_heads n value_dim"],
        positions: Int[Tensor, "batch n"],
        real: Sequence[Int[Tensor, " _"]],
    ) -> None:
        format = self._format
        by_head = [indices for indices in real for _ in range(self.kv_heads)]
        new = {"positions": positions.int().repeat_interleave(self.kv_heads, 0)}
        lost = dict(new)
        for name, part in (("keys", keys), ("values", values)):
            rows, scale = part.flatten(0, 1), self.columns.tensors.get(SCALES[name])
            if format is None or scale is None:
                new[name] = rows
                continue
            rows = format.mix(rows)
            new[name], new[SCALES[name]] = format.quantize(rows, scale.dtype)
            if format.refined:
                errors = rows - format.dequantize(new[name], new[SCALES[name]])
                lost[name], lost[SCALES[name]] = format.quantize(errors, scale.dtype)
        self._moved()
        if format is not None and format.refined:
            self._begin_residual().append(lost, by_head)
        self.columns.append(new, by_head)

    def _begin_residual(self) -> HeadColumns:
        """Return the residual of a refined format, which begins with the first new tokens."""
        if self.residual is None:
            nothing = {name: torch.empty_like(self.columns.tensors[name][:0]) for name in _RESIDUAL_COLUMNS}
            counts = [0] * self.batch * self.kv_heads
            self.residual = HeadColumns(nothing, lambda: counts)
        return self.residual

    def make_room(self, n: int, room: int = 0) -> None:
        """Make sure that every head has free places for `n` new tokens.

        Args:
            n: tokens of each request.
            room: as for `append`.
        """
        if self.residual is None and self._format is not None and self._format.refined:
            self._begin_residual()
            self._moved()
        for part in self._parts:
            if part.free < n:
                self._moved()  # else it would hold all columns until the last is copied
                part.grow(n, room)

    def count_appended(self, n: int) -> None:
        """Count `n` more entries in every head, which were written after its last one."""
        for columns, heads in ((self.columns, self.heads), (self.residual, self.heads.residual)):
            if columns is not None and heads is not None:
                for run in columns.runs:
                    run.count += n
                columns.free -= n
                heads.grown += n

    def column(self, name: str, shape: tuple[int, ...] = ()) -> Float[Tensor, "places *rest"]:
        """Return a column to write to; if there is none, make one of zeros with this shape per entry.

        Args:
            name: of the column.
            shape: of one entry's numbers, if the column is new.

        Returns:
            The column with its free places; writing to it changes the store.
        """
        tensors = self.columns.tensors
        if name not in tensors:
            positions = tensors["positions"]
            tensors[name] = torch.zeros(*positions.shape, *shape, dtype=torch.float32, device=positions.device)
        return tensors[name]

    def forget(self, name: str) -> None:
        """Drop a column if there is one of this name."""
        self.columns.tensors.pop(name, None)

    def trim(self) -> None:
        """Free the places that hold no entry."""
        for part in self._parts:
            if part.free:
                self._moved()
                part.rebuild(list(enumerate(part.counts)))

    def reorder(self, requests: Sequence[int]) -> None:
        """Make the batch consist of these requests, in this order. Any may repeat or be missing."""
        self._moved()
        self.batch = len(requests)
        rows = [request * self.kv_heads + head for request in requests for head in range(self.kv_heads)]
        for part in self._parts:
            counts = part.counts
            part.rebuild([(row, counts[row]) for row in rows])

    def crop(self, removed: Sequence[int]) -> None:
        """Drop the newest entries of every head, a given number for each request."""
        self._crop([count for count in removed for _ in range(self.kv_heads)])

    def crop_to(self, lengths: Int[Tensor, " batch"]) -> None:
        """Drop the entries of tokens behind each request's first `lengths`, of which a head need not have all."""
        positions = self.columns.rectangle("positions", (self.batch, self.kv_heads))
        gone = self.exists & (positions >= lengths.to(positions.device)[:, None, None])
        self._crop(gone.sum(-1).flatten().tolist())

    def _crop(self, by_head: list[int]) -> None:
        self.columns.crop(by_head)
        if self.residual is None and len(set(by_head)) == 1:
            self.heads.grown -= by_head[0]
            return
        self._moved()
        if self.residual is not None:
            self.residual.crop(list(map(min, self.residual.counts, by_head)))

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Drop the entries at some spans of positions, `(first, end)` without `end`, from every head."""
        self._moved()
        for part in self._parts:
            part.leave_out(spans)

    def fork(self) -> EntryStore:
        """Return an independent copy, without free places."""
        copied = copy.copy(self)
        copied._moved()
        copied.columns = self.columns.packed()
        copied.residual = None if self.residual is None else self.residual.packed()
        return copied

    # --- the entries as an observation has them

    def padded(self) -> tuple[dict[str, Tensor], Bool[Tensor, "batch kv_heads entries"]]:
        """Return all columns, each `[batch, kv_heads, entries, ...]`, and which entries exist.

        Columns are views if all heads have equally many entries. Keys and values are as the model made them: copies if
        they are stored in few bits. Places without an entry are zero, never uninitialised: 0 x NaN is NaN.
        """
        return {"keys": self.keys, "values": self.values, **self.other_columns}, self.exists

    @property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:
        """Keys as in `padded`."""
        return self._dequantized("keys")

    @property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:
        """Values as in `padded`."""
        return self._dequantized("values")

    @property
    def other_columns(self) -> dict[str, Shaped[Tensor, "batch kv_heads entries *rest"]]:
        """Columns other than keys and values, as in `padded`."""
        columns, shape = self.columns, (self.batch, self.kv_heads)
        return {name: columns.rectangle(name, shape) for name in columns.tensors if name not in STORED}

    @property
    def exists(self) -> Bool[Tensor, "batch kv_heads entries"]:
        """Mask of the places of `padded` that hold an entry."""
        shape, device = (self.batch, self.kv_heads), self.columns.tensors["positions"].device
        if len(self.columns.runs) == 1:
            return torch.ones(*shape, self.columns.runs[0].count, dtype=torch.bool, device=device)
        order = torch.arange(self.columns.longest, device=device)
        return (order < upload(self.counts, device)[:, None]).unflatten(0, shape)

    def _dequantized(self, name: Literal["keys", "values"]) -> Tensor:
        heads, runs, shape = self.heads, self.columns.runs, (self.batch, self.kv_heads)
        if self._format is None:
            return self.columns.rectangle(name, shape)
        if len(runs) == 1:
            return self._format.unmix(heads.rows(runs[0], name)).unflatten(0, shape)
        scales, size = self.columns.tensors[SCALES[name]], heads.sizes[name == "values"]
        rows = scales.new_zeros(self.batch * self.kv_heads, self.columns.longest, size)
        for run in runs:
            rows[run.first : run.first + run.heads, : run.count] = heads.rows(run, name)
        return self._format.unmix(rows).unflatten(0, shape)

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
            order = torch.arange(self.columns.longest, device=self.columns.tensors["positions"].device)
            index = order[index].expand(self.batch, self.kv_heads, -1)
        rows = self._rows_at(self.columns, index)
        if self._format is None:
            return self.read(rows["keys"], rows["values"])
        if self.residual is not None and self.residual.entries:
            before = upload(self.counts, index.device) - upload(self.residual.counts, index.device)
            lost_index = index - before.view(self.batch, self.kv_heads, 1)
            for name, lost in self._rows_at(self.residual, lost_index.clamp(min=0)).items():
                rows[name] += lost.masked_fill_(lost_index[..., None] < 0, 0.0)
        return self.read(*(self._format.unmix(rows[name]) for name in SCALES))

    def _rows_at(
        self, columns: HeadColumns, index: Int[Tensor, "batch kv_heads n"]
    ) -> dict[str, Float[Tensor, "batch kv_heads n size"]]:
        """Return some keys and values of columns, mixed if they are quantised.

        Args:
            columns: those of the entries, or the residual.
            index: of entries in their heads.
        """
        row_indices = columns.places(index.flatten(0, 1))
        rows = {
            name: columns.tensors[name].index_select(0, row_indices).unflatten(0, index.shape)
            for name in STORED
            if name in columns.tensors
        }
        if self._format is None:
            return rows
        return {name: self._format.dequantize(rows[name], rows[scale]) for name, scale in SCALES.items()}


class StoredObservation(LazyObservation):
    """An observation of the entries of a store that does not change any more.

    Ragged heads and heads in few bits have to be copied for reading, so keys and values are copied when a method reads
    them.

    Args:
        store: the entries.
        parts: the other arguments of an `Observation`.
    """

    def __init__(self, store: EntryStore, **parts: Any) -> None:
        heads, shape = store.heads, parts["valid"].shape
        super().__init__(shape, *store.sizes, heads.dtype, heads.keys.device, **parts)
        self.store = store

    @cached_property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:  # type: ignore[override]
        return self.store.keys

    @cached_property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:  # type: ignore[override]
        return self.store.values
