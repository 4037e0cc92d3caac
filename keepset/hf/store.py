"""`EntryStore`: the kept entries of one layer, packed in flat tensors.

Heads follow one another, request after request, each with its own number of entries. Equal neighbours form one run,
of which `[heads, entries, head_dim]` is a view: a dense layer is a single run, a head-ragged one a run per head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.kernels.attention import HeadRun

SLACK = 64
"""Free places per head that a growing store allocates at once."""


@dataclass
class Run:
    """Neighbouring heads with equally many entries: `heads * capacity` places from `start` on."""

    first: int
    heads: int
    start: int
    count: int
    capacity: int

    def view(self, flat: Shaped[Tensor, " places *rest"]) -> Shaped[Tensor, "heads entries *rest"]:
        """This run's part of a flat tensor, without a copy."""
        stop = self.start + self.heads * self.capacity
        return flat[self.start : stop].unflatten(0, (self.heads, self.capacity))[:, : self.count]


class EntryStore:
    """Keys, values, positions and a method's own columns of one layer, for `batch * kv_heads` heads.

    `positions` are int32, counted from each request's first token. What moves an entry moves all of its columns.
    """

    def __init__(self, batch: int, kv_heads: int, runs: list[Run], columns: dict[str, Tensor]) -> None:
        self.batch, self.kv_heads, self._runs, self._columns = batch, kv_heads, runs, columns

    @classmethod
    def pack(
        cls, columns: dict[str, Tensor], indices: Int[Tensor, " kept"], counts: Int[Tensor, "batch kv_heads"]
    ) -> EntryStore:
        """A store with exactly the entries that a KeepSet names, and not a byte more.

        Columns are `[batch, kv_heads, entries, ...]`, indices packed head after head.
        """
        heads = torch.arange(counts.numel(), device=indices.device)
        rows = torch.repeat_interleave(heads, counts.flatten())
        return cls.of({name: _pick(column, rows, indices) for name, column in columns.items()}, counts)

    @classmethod
    def of(cls, columns: dict[str, Tensor], counts: Int[Tensor, "batch kv_heads"]) -> EntryStore:
        """The store of which these are the `packed` columns and the counts."""
        batch, kv_heads = counts.shape
        return cls(batch, kv_heads, _runs(counts.flatten().tolist()), columns)

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

    def spans(self) -> Iterator[HeadRun]:
        """Views for attention."""
        keys, values, positions = (self._columns[name] for name in ("keys", "values", "positions"))
        for run in self._runs:
            yield HeadRun(run.first, run.view(keys), run.view(values), run.view(positions))

    def append(
        self,
        keys: Float[Tensor, "batch kv_heads n head_dim"],
        values: Float[Tensor, "batch kv_heads n value_dim"],
        positions: Int[Tensor, "batch n"],
        valid: Bool[Tensor, "batch n"] | None = None,
    ) -> None:
        """Adds new tokens to every head; those that are not valid (padding) are left out."""
        shape = self.batch, self.kv_heads, (n := keys.shape[2])
        new = {"keys": keys, "values": values, "positions": positions.int()[:, None].expand(shape)}
        new |= {name: column.new_zeros(shape) for name, column in self._columns.items() if name not in new}
        if valid is not None:
            columns, exists = self.padded()
            joined = {name: torch.cat([column, new[name]], 2) for name, column in columns.items()}
            mask = torch.cat([exists, valid[:, None].expand(shape)], 2)
            packed = EntryStore.pack(joined, mask.nonzero()[:, 2], mask.sum(-1))
            self._runs, self._columns = packed._runs, packed._columns
            return
        if any(run.count + n > run.capacity for run in self._runs):
            self._grow(max(n, SLACK))
        for run in self._runs:
            run.count += n
        for name, flat in self._columns.items():
            rows = new[name].flatten(0, 1)
            for run in self._runs:
                run.view(flat)[:, -n:] = rows[run.first : run.first + run.heads]

    def padded(self) -> tuple[dict[str, Tensor], Bool[Tensor, "batch kv_heads entries"]]:
        """All columns as `[batch, kv_heads, entries, ...]` and which entries exist; a view when dense.

        Places that hold nothing are zero, never uninitialised: 0 x NaN is NaN.
        """
        shape = (self.batch, self.kv_heads)
        if len(self._runs) == 1:
            views = {name: self._runs[0].view(flat).unflatten(0, shape) for name, flat in self._columns.items()}
            return views, torch.ones_like(views["positions"], dtype=torch.bool)
        longest = max(run.count for run in self._runs)
        columns = {}
        for name, flat in self._columns.items():
            column = flat.new_zeros(self.batch * self.kv_heads, longest, *flat.shape[1:])
            for run in self._runs:
                column[run.first : run.first + run.heads, : run.count] = run.view(flat)
            columns[name] = column.unflatten(0, shape)
        counts = torch.tensor(self.counts, device=columns["positions"].device)
        exists = torch.arange(longest, device=counts.device) < counts[:, None]
        return columns, exists.unflatten(0, shape)

    def reorder(self, requests: Sequence[int]) -> None:
        """Makes the batch consist of these requests, in this order; any may repeat or be missing."""
        heads, counts = range(self.kv_heads), self.counts
        self.batch = len(requests)
        rows = [request * self.kv_heads + head for request in requests for head in heads]
        self._rebuild([(row, counts[row]) for row in rows])

    def crop(self, removed: Sequence[int]) -> None:
        """Drops each request's newest entries, so many per request, from all of its heads."""
        if len(set(removed)) == 1:
            for run in self._runs:
                run.count -= removed[0]
            return
        self._rebuild([(head, count - removed[head // self.kv_heads]) for head, count in enumerate(self.counts)])

    def fork(self) -> EntryStore:
        """An independent copy, without free places."""
        copy = EntryStore(self.batch, self.kv_heads, self._runs, dict(self._columns))
        copy._rebuild(list(enumerate(self.counts)))
        return copy

    def _grow(self, slack: int) -> None:
        runs, start = [], 0
        for run in self._runs:
            runs.append(replace(run, start=start, capacity=run.count + slack))
            start += run.heads * (run.count + slack)
        for name, flat in self._columns.items():
            grown = flat.new_empty(start, *flat.shape[1:])
            for old, new in zip(self._runs, runs, strict=True):
                new.view(grown).copy_(old.view(flat))
            self._columns[name] = grown
        self._runs = runs

    def _rebuild(self, heads: Sequence[tuple[int, int]]) -> None:
        """Keeps the first `count` entries of each of these heads, in this order."""
        starts = [run.start + i * run.capacity for run in self._runs for i in range(run.heads)]
        for name, flat in self._columns.items():
            self._columns[name] = torch.cat([flat[starts[h] : starts[h] + count] for h, count in heads])
        self._runs = _runs([count for _, count in heads])


def _runs(counts: Sequence[int]) -> list[Run]:
    """Exactly the places that heads with these counts need; equal neighbours share a run."""
    runs: list[Run] = []
    start = 0
    for head, count in enumerate(counts):
        if runs and runs[-1].count == count:
            runs[-1].heads += 1
        else:
            runs.append(Run(head, 1, start, count, count))
        start += count
    return runs


def _pick(column: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
    """`column[rows, indices]` over `[batch, kv_heads, entries, ...]`, gathered row by row.

    Keys and values usually arrive as a transposed view of `[batch, entries, kv_heads, dim]`, or as a view of a
    store with free places; all orders are read in place, because flattening would copy what is about to be dropped.
    """
    batch, heads, entries = column.shape[:3]
    of_request, of_head, of_entry = column.stride()[:3]
    if of_head > entries * of_entry > 0 and of_request == heads * of_head and of_head % of_entry == 0:
        capacity = of_head // of_entry
        places = (batch * heads - 1) * capacity + entries
        flat = column.as_strided((places, *column.shape[3:]), column.stride()[2:])
        return flat.index_select(0, rows * capacity + indices)
    swapped = column.transpose(1, 2)
    if not column.is_contiguous() and swapped.is_contiguous():
        request, head = rows // heads, rows % heads
        return swapped.reshape(batch * entries * heads, *column.shape[3:]).index_select(
            0, (request * entries + indices) * heads + head
        )
    return column.reshape(batch * heads * entries, *column.shape[3:]).index_select(0, rows * entries + indices)
