"""`Observation`: what a method may look at, one layer at one compression event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.feature import Feature, Value
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.shapes import Queries, QueryHeadScores, Scores
from keepset.errors import KeepsetError


@dataclass(frozen=True, eq=False, init=False)
class Observation:
    """What a method may look at: one layer at one compression event, for all requests of a batch.

    Entries are in the order of their positions; entries where `valid` is false are holes (shorter requests
    of a batch) and are never kept. Positions count from each request's own first token: padding does not
    exist here. An observation is complete when a method gets it, and does not change.

    Args:
        keys, values: after rotation, as cached.
        queries: the newest `W` queries, after rotation, right-aligned; None when nobody needs them.
        positions: original position of every entry; 0, 1, ... unless said otherwise.
        valid: whether the entry exists; all do, unless said otherwise.
        lengths: tokens that each request has had so far, dropped ones included.
        prompts: tokens of each request's prompt; all that it has had, unless said otherwise.
        query_positions: position of every window query; negative where the request is shorter than W.
        features: what was collected of everything else that the method needs; `observation[feature]` is its value.
        scaling: what the model multiplies query-key products with; head_dim ** -0.5, unless said otherwise.
        layer: this layer's index in the model.
        layers: indices of all layers that are compressed; for methods that depend on depth.
        state: the method's own numbers per entry, `[batch, kv_heads, entries]`, that it remembered at the event
            before (`Method.remember`).
        count: entries of all requests and heads; a runtime that knows it need not ask the device.

    Raises:
        KeepsetError: the layer is not among the layers.
    """

    keys: Float[Tensor, "batch kv_heads entries head_dim"]
    values: Float[Tensor, "batch kv_heads entries value_dim"]
    queries: Float[Tensor, "batch query_heads window head_dim"] | None
    positions: Int[Tensor, "batch kv_heads entries"]
    valid: Bool[Tensor, "batch kv_heads entries"]
    lengths: Int[Tensor, " batch"]
    prompts: Int[Tensor, " batch"]
    query_positions: Int[Tensor, "batch window"] | None
    features: Mapping[Feature[Any], Any]
    scaling: float
    layer: int
    layers: tuple[int, ...]
    state: Mapping[str, Tensor]

    def __init__(
        self,
        *,
        keys: Float[Tensor, "batch kv_heads entries head_dim"],
        values: Float[Tensor, "batch kv_heads entries value_dim"],
        queries: Float[Tensor, "batch query_heads window head_dim"] | None = None,
        positions: Int[Tensor, "batch kv_heads entries"] | None = None,
        valid: Bool[Tensor, "batch kv_heads entries"] | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        prompts: Int[Tensor, " batch"] | None = None,
        query_positions: Int[Tensor, "batch window"] | None = None,
        features: Mapping[Feature[Any], Any] | None = None,
        scaling: float | None = None,
        layer: int = 0,
        layers: Sequence[int] | None = None,
        state: Mapping[str, Tensor] | None = None,
        count: int | None = None,
    ) -> None:
        shape, device, whole = keys.shape[:3], keys.device, valid is None
        valid = torch.ones(shape, dtype=torch.bool, device=device) if valid is None else valid
        positions = torch.arange(shape[2], device=device).expand(shape) if positions is None else positions
        lengths = positions.masked_fill(~valid, -1).amax((1, 2)) + 1 if lengths is None else lengths
        if queries is not None and query_positions is None:
            window = queries.shape[2]
            query_positions = lengths[:, None] - window + torch.arange(window, device=device)
        vars(self).update(
            keys=keys,
            values=values,
            queries=queries,
            positions=positions,
            valid=valid,
            lengths=lengths,
            prompts=lengths if prompts is None else prompts,
            query_positions=query_positions,
            features=features or {},
            scaling=keys.shape[-1] ** -0.5 if scaling is None else scaling,
            layer=layer,
            layers=(layer,) if layers is None else tuple(layers),
            state=state or {},
        )
        if count is not None or whole:
            vars(self)["count"] = keys.shape[:3].numel() if count is None else count
        if self.layer not in self.layers:
            raise KeepsetError(f"Layer {layer} is not among the observed layers {self.layers}.")

    @cached_property
    def count(self) -> int:
        """Entries of all requests and heads."""
        return int(self.valid.sum())

    def __getitem__(self, feature: Feature[Value]) -> Value:
        """What was collected of it.

        Raises:
            KeepsetError: nothing was.
        """
        if feature not in self.features:
            raise KeepsetError(f"This method looks at {feature.name}: give Observation(features={{{feature!r}: ...}}).")
        return self.features[feature]

    @property
    def depth(self) -> int:
        """How many compressed layers come before this one."""
        return self.layers.index(self.layer)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's key and value in one KV head."""
        return self.keys.shape[-1] * self.keys.element_size() + self.values.shape[-1] * self.values.element_size()

    @property
    def bias(self) -> Scores | None:
        """What attention adds to the logits of each entry, where an event before has told it to (`match`)."""
        return self.state.get(BIAS)

    def newest_queries(self, window: int) -> tuple[Queries, Int[Tensor, "batch n"]]:
        """The newest queries.

        Args:
            window: how many of the newest queries, at most as many as the method declared with `RecentQueries`.

        Returns:
            Queries after rotation, or as many as there are, and their positions; negative ones do not exist.

        Raises:
            KeepsetError: none were collected.
        """
        if self.queries is None or self.query_positions is None:
            raise KeepsetError("This method looks at the newest queries: give Observation(queries=...).")
        return self.queries[:, :, -window:], self.query_positions[:, -window:]

    def window_attention(self, window: int) -> Float[Tensor, "batch query_heads window entries"]:
        """Causal attention of the newest `window` queries over all entries, in float32.

        Args:
            window: how many of the newest queries, at most as many as the method declared with `RecentQueries`.

        Returns:
            A row for each query, or for as many as there are; those that do not exist (of requests shorter than the
            window) are zero.

        Raises:
            KeepsetError: no queries were collected.
        """
        queries, at = self.newest_queries(window)
        first = self._first_unseen(at)
        batch, kv_heads, entries, head_dim = self.keys.shape
        folded = (queries * self.scaling).reshape(batch, kv_heads, -1, head_dim)
        logits = (folded @ self.keys.transpose(-1, -2)).float().view(batch, kv_heads, -1, queries.shape[2], entries)
        if self.bias is not None:
            logits += self.bias[:, :, None, None]
        visible = self.valid[:, :, None, first:] & (self.positions[:, :, None, first:] <= at[:, None, :, None])
        attention = _softmax(logits, visible[:, :, None])
        return attention.view(batch, -1, queries.shape[2], entries)

    def window_usage(self, window: int) -> QueryHeadScores:
        """What every entry receives of the newest `window` queries: their attention, summed over them, in float32.

        The attention is made and summed in blocks that stay in a core's cache; it is never there as a whole.

        Args:
            window: how many of the newest queries, at most as many as the method declared with `RecentQueries`.

        Raises:
            KeepsetError: no queries were collected.
        """
        newest, at = self.newest_queries(window)
        first = self._first_unseen(at)
        grouped = self.by_query_group(newest)
        batch, kv_heads, group, window, size = grouped.shape
        entries = self.keys.shape[2]
        usage = torch.zeros(batch * kv_heads, group, entries, device=self.keys.device)
        most = BLOCK if self.keys.device.type == "cpu" else DEVICE_BLOCK
        # A block is several heads or, of one head, several queries.
        heads = max(1, most // (entries * max(group * window, size)))
        rows = max(1, most // (entries * group))
        at = at[:, None].expand(-1, kv_heads, -1).flatten(0, 1)
        everything = self.keys, self.valid, self.positions, grouped
        keys, valid, positions, grouped = (part.flatten(0, 1) for part in everything)
        for head in range(0, batch * kv_heads, heads):
            part = slice(head, head + heads)
            visible = valid[part, None, first:] & (positions[part, None, first:] <= at[part, :, None])
            few = grouped[part].float() * self.scaling
            facing = keys[part].float().transpose(1, 2)
            for queries, seen in zip(few.split(rows, 2), visible.split(rows, 1), strict=True):
                logits = (queries.flatten(1, 2) @ facing).unflatten(1, (group, -1))
                if self.bias is not None:
                    logits += self.bias.flatten(0, 1)[part, None, None]
                usage[part] += _softmax(logits, seen[:, None]).sum(2)
        return usage.view(batch, kv_heads * group, entries)

    def by_query_group(
        self, statistic: Float[Tensor, "batch query_heads *rest"]
    ) -> Float[Tensor, "batch kv_heads group *rest"]:
        """Query heads sorted under the KV head that they share (grouped-query attention).

        Args:
            statistic: of every query head; neighbours share a KV head.

        Returns:
            The same with an axis for the KV head and one for the query heads of its group; a view.
        """
        return statistic.unflatten(1, (self.keys.shape[1], -1))

    @property
    def heads_alike(self) -> Bool[Tensor, " batch"]:
        """Whether all heads of a request hold the same entries."""
        alike = ((self.positions == self.positions[:, :1]) | ~self.valid) & (self.valid == self.valid[:, :1])
        return alike.flatten(1).all(1)

    def mean_over_heads(self, statistic: Scores) -> Scores:
        """A layer's mean over its KV heads.

        Args:
            statistic: of every entry.

        Returns:
            The mean for each head; a head's own where heads of a request hold different entries.
        """
        return statistic.mean(1, keepdim=True).where(self.heads_alike[:, None, None], statistic)

    def keep(self, mask: Bool[Tensor, "batch kv_heads entries"]) -> KeepSet:
        """The KeepSet of some entries of this layer.

        Args:
            mask: true where an entry stays; holes are left out in any case.
        """
        kept = LayerKeepSet.from_mask(self.layer, mask & self.valid, self.positions, self.entry_bytes, self.state)
        return KeepSet([kept])

    def _first_unseen(self, at: Int[Tensor, "batch window"]) -> int:
        """The first entry that a query at one of these positions does not see."""
        if self.keys.device.type != "cpu":
            return 0  # to look for it would wait for the device
        hidden = ~self.valid | (self.positions > at[:, None, :1])
        return int(F.pad(hidden.flatten(0, 1).any(0), (0, 1), value=True).int().argmax())


BIAS = "bias"
"""The one number per entry that attention looks at too, among those that methods remember: added to its logits."""

BLOCK = 2**18
"""Numbers of attention at a time: half of what a core's cache holds, or less."""

DEVICE_BLOCK = 2**27
"""The same where operations are launched: few of them, in half a gigabyte."""


def _softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Attention from logits, of which `visible` says for the last entries which count; none counts: zero."""
    if visible.shape[-1]:
        # Masking what all queries see would cost as much as the softmax.
        logits[..., -visible.shape[-1] :].masked_fill_(~visible, float("-inf"))
    attention = logits.softmax(-1)
    if visible.shape[-1] == logits.shape[-1]:
        attention.masked_fill_(~visible.any(-1, keepdim=True), 0.0)
    return attention
