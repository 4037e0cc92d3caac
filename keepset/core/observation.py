"""`Observation`: what a method may look at, one layer at one compression event, or several as rows of one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.core.feature import Feature, Value
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.shapes import Queries, QueryHeadScores, Scores
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import upload
from keepset.kernels.group_reduction import GroupReduction
from keepset.kernels.window import first_unseen, masked_softmax, received_attention


@dataclass(frozen=True, eq=False, init=False)
class Observation:
    """What a method may look at: one layer at one compression event, for all requests of a batch.

    A runtime may show several layers as one batch, each with all requests, one behind another. Then a row is a request
    in a layer, and what depends on the layer is looked up for each row (`depths`, `indices`, `of_rows`).

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
        layer: this layer's index in the model, where it is the only one here.
        layers: indices of all layers that are compressed; for methods that depend on depth.
        state: the method's own numbers per entry, `[batch, kv_heads, entries]`, that it remembered at the event
            before (`Method.remember`).
        count: entries of all requests and heads; a runtime that knows it need not ask the device.
        longest: likewise the tokens of the longest request, or any number above that.
        layer_ids: indices of the layers whose requests are the batch's rows, neighbours among `layers`; `layer` alone,
            unless said otherwise.
        num_kept: likewise how many entries of every head will stay, request after request and head after head, where
            lengths alone say so; where heads differ, their average.

    Raises:
        KeepsetError: the layers that are here are no neighbours among all of them.
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
    layer_ids: tuple[int, ...]
    layers: tuple[int, ...]
    state: Mapping[str, Tensor]
    num_kept: Sequence[int] | None

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
        layer_ids: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        state: Mapping[str, Tensor] | None = None,
        count: int | None = None,
        longest: int | None = None,
        num_kept: Sequence[int] | None = None,
    ) -> None:
        shape, device, whole = keys.shape[:3], keys.device, valid is None
        layer_ids = (layer,) if layer_ids is None else tuple(layer_ids)
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
            layer_ids=layer_ids,
            layers=layer_ids if layers is None else tuple(layers),
            state=state or {},
            num_kept=num_kept,
        )
        if count is not None or whole:
            vars(self)["count"] = keys.shape[:3].numel() if count is None else count
        if longest is not None:
            vars(self)["longest"] = longest
        if layer_ids[0] not in self.layers:
            raise KeepsetError(f"Layer {layer_ids[0]} is not among the observed layers {self.layers}.")
        if self.layers[self.first :][: len(layer_ids)] != layer_ids:
            raise KeepsetError(f"The layers {layer_ids} are no neighbours among the observed layers {self.layers}.")

    @cached_property
    def count(self) -> int:
        """Entries of all requests and heads."""
        return int(self.valid.sum())

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, or more."""
        return int(self.lengths.max())

    def __getitem__(self, feature: Feature[Value]) -> Value:
        """What was collected of it, or what it is by the newest queries.

        Raises:
            KeepsetError: there is neither.
        """
        return self.features[feature] if feature in self.features else feature.of(self)

    def with_features(self, features: Mapping[Feature[Any], Any]) -> Observation:
        """The same observation with more features."""
        more = copy.copy(self)
        vars(more)["features"] = {**self.features, **features}
        return more

    def keys_of(self, heads: slice) -> Float[Tensor, "batch heads entries head_dim"]:
        """Keys of some KV heads."""
        return self.keys[:, heads]

    def values_of(self, heads: slice) -> Float[Tensor, "batch heads entries value_dim"]:
        """Values of some KV heads."""
        return self.values[:, heads]

    def over_heads(self, look: Callable[[slice], Tensor]) -> Tensor:
        """What is made of keys or values, of a few KV heads at a time where entries are many.

        A method that looks at them through this needs no second copy of all keys, nor does a paged runtime a first one.

        Args:
            look: of some KV heads, `[batch, heads, ...]`, by `keys_of` and `values_of`.

        Returns:
            The same of all of them.
        """
        batch, kv_heads, entries = self.valid.shape
        at_once = max(1, _AT_ONCE // max(batch * entries * self.head_dim, 1))
        parts = [look(slice(first, first + at_once)) for first in range(0, kv_heads, at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.keys.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.keys.dtype

    @property
    def layer(self) -> int:
        """This layer's index in the model.

        Raises:
            KeepsetError: several are here.
        """
        if len(self.layer_ids) > 1:
            raise KeepsetError(
                f"This observation shows the layers {self.layer_ids} as one batch: a method that depends on the layer "
                "asks for that of each row, observation.indices or observation.depths."
            )
        return self.layer_ids[0]

    @property
    def first(self) -> int:
        """How many compressed layers come before those that are here."""
        return self.layers.index(self.layer_ids[0])

    @cached_property
    def indices(self) -> Int[Tensor, " batch"]:
        """The index in the model of each row's layer."""
        return self.repeat_per_request(upload(self.layer_ids, self.valid.device))

    @cached_property
    def depths(self) -> Int[Tensor, " batch"]:
        """How many compressed layers come before each row's."""
        return self.repeat_per_request(
            torch.arange(self.first, self.first + len(self.layer_ids), device=self.valid.device)
        )

    def split_layers(self, statistic: Shaped[Tensor, "layers_batch *rest"]) -> Shaped[Tensor, "batch layers *rest"]:
        """Something of every row, request by request: a view."""
        return statistic.unflatten(0, (len(self.layer_ids), -1)).transpose(0, 1)

    def merge_layers(self, statistic: Shaped[Tensor, "batch layers *rest"]) -> Shaped[Tensor, "layers_batch *rest"]:
        """Something of every request and layer, row by row, which undoes `split_layers`."""
        return statistic.transpose(0, 1).flatten(0, 1)

    def repeat_per_request(self, statistic: Shaped[Tensor, "layers *rest"]) -> Shaped[Tensor, "layers_batch *rest"]:
        """Something of every observed layer, row by row: a view of one layer or of one request."""
        requests = self.valid.shape[0] // len(self.layer_ids)
        return self.merge_layers(statistic.expand(requests, *statistic.shape))

    def repeat_per_layer(self, statistic: Shaped[Tensor, "batch *rest"]) -> Shaped[Tensor, "layers_batch *rest"]:
        """Something of every request, row by row: a view likewise."""
        return self.merge_layers(statistic[:, None].expand(-1, len(self.layer_ids), *statistic.shape[1:]))

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
        first = first_unseen(self.positions, at[:, None], self.valid)
        batch, kv_heads, entries = self.valid.shape
        folded = (queries * self.scaling).reshape(batch, kv_heads, -1, self.head_dim)
        product = self.over_heads(lambda heads: (folded[:, heads] @ self.keys_of(heads).transpose(-1, -2)).float())
        logits = product.view(batch, kv_heads, -1, queries.shape[2], entries)
        if self.bias is not None:
            logits += self.bias[:, :, None, None]
        visible = self.valid[:, :, None, first:] & (self.positions[:, :, None, first:] <= at[:, None, :, None])
        attention = masked_softmax(logits, visible[:, :, None])
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
        return self.attention_sums(newest, at).flatten(1, 2)

    def attention_sums(
        self, queries: Queries, last_visible: Int[Tensor, "batch n"], sums_of: GroupReduction = GroupReduction.EACH
    ) -> Float[Tensor, "batch kv_heads _ entries"]:
        """What every entry receives of some queries: their attention, summed over them, in float32.

        Args:
            queries: after rotation.
            last_visible: the last position that each sees; below 0 where it gives nothing.
            sums_of: as in `received_attention`.

        Returns:
            For every query head of a group, or for one where it is the largest logit that counts.
        """
        queries = self.by_query_group(queries)

        def look(heads: slice) -> Tensor:
            everything = queries[:, heads], self.keys_of(heads), self.positions[:, heads], self.valid[:, heads]
            grouped, keys, positions, valid = (part.flatten(0, 1) for part in everything)
            last = last_visible[:, None].expand(*self.valid[:, heads].shape[:2], -1).flatten(0, 1)
            bias = None if self.bias is None else self.bias[:, heads].flatten(0, 1)
            sums = received_attention(grouped, keys, positions, last, self.scaling, valid, sums_of, bias)
            return sums.unflatten(0, self.valid[:, heads].shape[:2])

        return self.over_heads(look)

    def by_query_group(
        self, statistic: Float[Tensor, "batch query_heads *rest"]
    ) -> Float[Tensor, "batch kv_heads group *rest"]:
        """Query heads sorted under the KV head that they share (grouped-query attention).

        Args:
            statistic: of every query head; neighbours share a KV head.

        Returns:
            The same with an axis for the KV head and one for the query heads of its group; a view.
        """
        return statistic.unflatten(1, (self.valid.shape[1], -1))

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
        return KeepSet([self.kept(mask, self.state)])

    def kept(self, mask: Bool[Tensor, "batch kv_heads entries"], state: Mapping[str, Tensor]) -> LayerKeepSet:
        """Some entries of this layer.

        Args:
            mask: true where an entry stays; holes are left out in any case.
            state: the method's own numbers per entry.
        """
        total = None if self.num_kept is None else sum(self.num_kept)
        valid = mask & self.valid
        return LayerKeepSet.from_mask(self.layer_ids[0], valid, self.positions, self.entry_bytes, state, total)


_AT_ONCE = 2**24
"""Numbers of keys that are looked at at a time, if not of one head: 64 MiB in float32."""

BIAS = "bias"
"""The one number per entry that attention looks at too, among those that methods remember: added to its logits."""
