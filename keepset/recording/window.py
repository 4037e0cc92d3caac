"""`QueryWindow`: the newest queries of a batch. It grows by what is recorded, and can be cropped and reordered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class QueryWindow:
    """Queries after rotation with their positions and, if it is recorded with them, their rotation.

    They are recorded in slices, which are joined when somebody looks at them. A slice is a copy: a view would keep a
    whole forward alive.

    Args:
        parts: columns `[batch, n, ...]` by name, right-aligned. A part never changes, so copies share it.
        holes: whether some of their queries may not exist.

    Attributes:
        holes: whether some of the queries may not exist (position -1) by now.
    """

    def __init__(self, parts: Sequence[dict[str, Tensor]] = (), holes: bool = False) -> None:
        self._parts, self.holes = list(parts), holes

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(column.nbytes for part in self._parts for column in part.values())

    @property
    def size(self) -> int:
        """The number of queries of each request, holes included."""
        return sum(part["positions"].shape[1] for part in self._parts)

    @property
    def columns(self) -> dict[str, Tensor]:
        """Return all that is recorded as one part; empty if nothing is."""
        if len(self._parts) > 1:
            joined = {name: torch.cat([part[name] for part in self._parts], 1) for name in self._parts[0]}
            self._parts = [_right_aligned(joined, joined["positions"].shape[1]) if self.holes else joined]
        return self._parts[0] if self._parts else {}

    def add(
        self,
        queries: Float[Tensor, "batch query_heads n head_dim"],
        positions: Int[Tensor, "batch n"],
        valid: Bool[Tensor, "batch n"] | None,
        size: int,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Record the newest `size` of these queries of each request."""
        part = {"queries": queries.transpose(1, 2), "positions": positions}
        if rotation is not None:
            part |= {"cos": rotation[0].expand(len(queries), -1, -1), "sin": rotation[1].expand(len(queries), -1, -1)}
        if valid is not None:
            part["positions"], self.holes = positions.masked_fill(~valid, -1), True
            self._parts.append(_right_aligned(part, size))
        else:
            self._parts.append({name: column[:, -size:].clone() for name, column in part.items()})

    def newest(self, size: int) -> dict[str, Tensor]:
        """Return the newest `size` queries, or as many as there are, as keyword arguments of an Observation."""
        if not size or not self._parts:
            return {}
        newest = {name: self.columns[name][:, -size:] for name in ("queries", "positions")}
        return {"queries": newest["queries"].transpose(1, 2), "query_positions": newest["positions"]}

    def rotation(self, size: int) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines of the newest `size` queries, or None if they were not recorded."""
        columns = self.columns
        return (columns["cos"][:, -size:], columns["sin"][:, -size:]) if "cos" in columns else None

    def keep(self, size: int) -> None:
        """Forget all but the newest `size` queries of each request."""
        if size <= 0:
            self._parts = []
        elif self.size > size:
            self._parts = [{name: column[:, -size:].clone() for name, column in self.columns.items()}]

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        if self._parts:
            self._parts = [{name: column[rows.to(column.device)] for name, column in self.columns.items()}]

    def crop(self, lengths: Int[Tensor, " batch"]) -> None:
        """Forget the queries that each request has beyond its length."""
        if columns := self.columns:
            gone = columns["positions"] >= lengths[:, None]
            cropped = {**columns, "positions": columns["positions"].masked_fill(gone, -1)}
            self._parts, self.holes = [_right_aligned(cropped, gone.shape[1])], True

    def fork(self) -> QueryWindow:
        """Return an independent copy."""
        return QueryWindow(self._parts, self.holes)


def _right_aligned(columns: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return the newest `size` queries, with the holes on the left."""
    exists = columns["positions"] >= 0
    order = exists.int().argsort(dim=-1, stable=True)[:, -size:]
    rows = torch.arange(len(order), device=order.device)[:, None]
    return {name: column[rows, order] for name, column in columns.items()}
