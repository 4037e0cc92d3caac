"""Collects, while a prompt runs, what a method declared that it needs."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.observation import HiddenMoments, Needs, QueryMoments
from keepset.hf.attention_hooks import LayerInput, Rotation
from keepset.hf.window import QueryWindow
from keepset.kernels.columns import ColumnAccumulator
from keepset.kernels.mean_square import mean_square_attention
from keepset.kernels.moments import Moments


@dataclass(frozen=True)
class Chunk:
    """What one forward brings to one layer: `n` new tokens after those that came before.

    Attributes:
        queries: after rotation.
        rows: for every request the keys of its valid entries so far, this chunk's included,
            `[kv_heads, entries, head_dim]`, and which of this chunk's queries are its own.
        positions, valid: of the new tokens; valid is None when all are.
        lse: log-sum-exp of every query's logits where attention computed it already.
    """

    queries: Float[Tensor, "batch query_heads n head_dim"]
    rows: list[tuple[Tensor, Tensor | slice]]
    positions: Int[Tensor, "batch n"]
    valid: Bool[Tensor, "batch n"] | None
    scaling: float
    lse: list[Tensor] | None = None
    layer_input: LayerInput | None = None


class Accumulators:
    """Everything that `needs` names, of one layer, over one or more chunks of a prompt.

    `seconds` holds the time that each kind of statistic took, so that a prefill which collects for many
    methods at once can say what each of them would have cost.
    """

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._window = QueryWindow()
        self._columns: list[ColumnAccumulator] = []
        self._queries = {skip: Moments() for skip in needs.query_moments}
        self._hidden = {skip: Moments() for skip in needs.hidden_moments}
        self._asked: dict[int, list[list[Tensor]]] = {stride: [] for stride in needs.echoes}
        self._newest: Chunk | None = None
        self._input: LayerInput | None = None

    def add(self, chunk: Chunk) -> None:
        """Takes one chunk in."""
        if self.needs.window:
            with self._timed("window"):
                self._window.add(chunk.queries, chunk.positions, chunk.valid, self.needs.window)
                self._window.keep(self.needs.window)
        if self.needs.columns:
            with self._timed("columns"):
                self._add_columns(chunk)
        if self.needs.hidden_states:
            assert chunk.layer_input is not None
            self._input = chunk.layer_input
            with self._timed("moments"):
                self._add_moments(chunk, chunk.layer_input)
        if self.needs.echoes:
            assert chunk.layer_input is not None
            self._newest = chunk
            with self._timed("echoes"):
                self._add_asked(chunk, chunk.layer_input)

    def fork(self) -> Accumulators:
        """An independent copy."""
        twin = copy.copy(self)
        twin.seconds, twin._window = self.seconds.copy(), self._window.fork()
        twin._columns = [copy.copy(row) for row in self._columns]
        twin._queries = {skip: copy.copy(moments) for skip, moments in self._queries.items()}
        twin._hidden = {skip: copy.copy(moments) for skip, moments in self._hidden.items()}
        twin._asked = {stride: list(parts) for stride, parts in self._asked.items()}
        return twin

    def parts(self, lengths: Int[Tensor, " batch"]) -> dict[str, Any]:
        """The collected part of an Observation, as its keyword arguments."""
        parts: dict[str, Any] = {}
        newest = self._window.newest(self.needs.window)
        if newest is not None:
            parts["queries"], parts["query_positions"] = newest.queries, newest.positions
        if self._columns:
            for name in self.needs.columns:
                columns = [row.statistics[name] for row in self._columns]
                longest = max(column.shape[-1] for column in columns)
                parts[f"column_{name}"] = torch.stack([_widen(column, longest) for column in columns])
        layer_input = self._input
        if layer_input is not None:
            ahead: dict[int, Any] = {}

            def rotation(future: int) -> Any:
                if future not in ahead:
                    ahead[future] = layer_input.future_rotation(lengths, future)
                return ahead[future]

            def rotate(rows: Tensor, future: int) -> Tensor:
                return layer_input.rotate(rows, rotation(future))

            def future_queries(hidden: Tensor, future: int) -> Tensor:
                return layer_input.replay(hidden, rotation(future))

            parts["future_queries"] = future_queries
            parts["query_moments"] = {
                skip: QueryMoments(moments.mean, moments.covariance, rotate) for skip, moments in self._queries.items()
            }
            parts["hidden_moments"] = {
                skip: HiddenMoments(moments.mean[:, 0], moments.covariance[:, 0])
                for skip, moments in self._hidden.items()
            }
            if self._newest is not None:
                with self._timed("echoes"):
                    parts["echoes"] = self._echoes(layer_input, self._newest, rotation(1))
        return parts

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def _add_columns(self, chunk: Chunk) -> None:
        self._columns = self._columns or [ColumnAccumulator(self.needs.columns) for _ in chunk.rows]
        for row, (columns, (keys, own)) in enumerate(zip(self._columns, chunk.rows, strict=True)):
            lse = None if chunk.lse is None else chunk.lse[row]
            columns.add(chunk.queries[row][:, own], keys, chunk.scaling, lse)

    def _add_moments(self, chunk: Chunk, layer_input: LayerInput) -> None:
        if self._queries:
            rows = layer_input.unrotate(chunk.queries)
            for skip, moments in self._queries.items():
                moments.add(rows, _counted(chunk, skip), full=True)
        if self._hidden:
            hidden = layer_input.hidden[:, None, : chunk.queries.shape[2]].float()
            for skip, moments in self._hidden.items():
                moments.add(hidden, _counted(chunk, skip), full=False)

    def _add_asked(self, chunk: Chunk, layer_input: LayerInput) -> None:
        rows = layer_input.unrotate(chunk.queries)
        for stride, parts in self._asked.items():
            # By position, so that neither chunks nor padding change who is asked; the first token always is.
            chosen = _counted(chunk, 0) & (chunk.positions % stride == 0)
            parts.append([row[:, own] for row, own in zip(rows, chosen, strict=True)])

    def _echoes(self, layer_input: LayerInput, newest: Chunk, rotation: Rotation | None) -> dict[int, Tensor]:
        """What every entry would receive of the queries that are asked again, all right after the prompt."""
        longest = max(keys.shape[1] for keys, _ in newest.rows)
        echoes: dict[int, Tensor] = {}
        for stride, parts in self._asked.items():
            columns = []
            for request, (keys, _) in enumerate(newest.rows):
                asked = torch.cat([part[request] for part in parts], 1)
                one = slice(request, request + 1)
                rows = layer_input.rotate(asked[None], rotation and (rotation[0][one], rotation[1][one]))[0]
                columns.append(_widen(mean_square_attention(rows, keys, newest.scaling), longest))
            echoes[stride] = torch.stack(columns)
        return echoes


def _counted(chunk: Chunk, skip: int) -> Bool[Tensor, "batch n"]:
    counted = chunk.positions >= skip
    return counted if chunk.valid is None else counted & chunk.valid


def _widen(column: Tensor, entries: int) -> Tensor:
    return torch.nn.functional.pad(column, (0, entries - column.shape[-1]))
