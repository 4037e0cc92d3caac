"""`Observation`: everything that a method may read at one compression event.

A `LazyObservation` copies keys and values out of a cache when a method reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.core.feature import Feature, Value
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.shapes import Queries, QueryHeadScores, Scores
from keepset.core.sizes import Sizes
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import upload
from keepset.kernels.packed import BIAS
from keepset.kernels.predictor import Networks, entry_codes
from keepset.kernels.softmax import GroupReduction, Softmax
from keepset.kernels.window import first_unseen, masked_softmax, received_attention

_AT_ONCE = 2**24
"""The most numbers of keys that are read at a time, unless one head has more: 64 MiB in float32."""


class Observation:
    """One layer at one compression event, for all requests of a batch: everything that a method may read.

    A runtime may show several layers as one batch, layer after layer, each with all requests. A row is then a request
    in a layer, and values that depend on the layer are given per row (`depths`, `indices`, `repeat_per_request`).

    Entries are in the order of their positions. Entries where `valid` is false are holes, because a request or a head
    has fewer entries; they are never kept. Positions count from each request's own first token; padding has none. An
    observation is complete when a method gets it, and does not change.

    Args:
        keys: keys after rotation, as cached.
        values: values, as cached.
        queries: the newest `W` queries after rotation, right-aligned; None if no method needs them.
        positions: the original position of every entry; 0, 1, ... by default.
        valid: whether each entry exists; all do by default.
        lengths: tokens that each request has had so far, dropped ones included.
        prompts: tokens of each request's prompt; by default all that it has had.
        query_positions: the position of every query; negative where the request is shorter than W.
        features: the values of the other features that the method needs; `observation[feature]` is one.
        softmax: how the model makes attention of query-key products; by default it scales them by head_dim ** -0.5. Its
            sinks, if it has some, are `[query_heads]`, of all layers of the batch.
        layer: the layer's index in the model, if there is one layer.
        layer_ids: indices of the layers in the batch's rows, neighbours among `layers`; by default only `layer`.
        layers: indices of all layers that are compressed; for methods that depend on depth.
        state: the recipe's own numbers per entry, `[batch, kv_heads, entries]`, as they were after the previous event
            (`Method.remember`).
        count: entries of all requests and heads, if the host knows the number without asking the device.
        longest: tokens of the longest request, or any larger number, if the host knows it.
        num_kept: how many entries of every head will stay, request after request and head after head, if only lengths
            and files decide it. If heads differ, their average.
        entry_bytes: bytes of one entry as it is stored in one KV head; by default those of its key and its value.
        entry_sizes: the numbers that an entry holds of a key and of a value, of which one may be part of the other; by
            default those of both.

    Raises:
        KeepsetError: if the observation's layers are no neighbours among all layers.
    """

    moved_as_stored: ClassVar[bool] = False
    """Whether entries are moved as stored. `keys` are then those that attention will read, also in few bits."""

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
        softmax: Softmax | None = None,
        layer: int = 0,
        layer_ids: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        state: Mapping[str, Tensor] | None = None,
        count: int | None = None,
        longest: int | None = None,
        num_kept: Sequence[int] | None = None,
        entry_bytes: int | None = None,
        entry_sizes: tuple[int, int] | None = None,
    ) -> None:
        shape, device, whole = keys.shape[:3], keys.device, valid is None
        self.keys, self.values, self.queries = keys, values, queries
        self.valid = torch.ones(shape, dtype=torch.bool, device=device) if valid is None else valid
        self.positions = torch.arange(shape[2], device=device).expand(shape) if positions is None else positions
        self.lengths = self.positions.masked_fill(~self.valid, -1).amax((1, 2)) + 1 if lengths is None else lengths
        self.prompts = self.lengths if prompts is None else prompts
        if queries is not None and query_positions is None:
            window = queries.shape[2]
            query_positions = self.lengths[:, None] - window + torch.arange(window, device=device)
        self.query_positions = query_positions
        self.features: Mapping[Feature[Any], Any] = features or {}
        self.softmax = Softmax(keys.shape[-1] ** -0.5) if softmax is None else softmax
        self.layer_ids = (layer,) if layer_ids is None else tuple(layer_ids)
        self.layers = self.layer_ids if layers is None else tuple(layers)
        self.state: Mapping[str, Tensor] = state or {}
        self.num_kept = num_kept
        if entry_bytes is None:
            entry_bytes = keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size()
        self.entry_bytes = entry_bytes
        self.entry_sizes = (keys.shape[-1], values.shape[-1]) if entry_sizes is None else entry_sizes
        if count is not None or whole:
            self.count = shape.numel() if count is None else count
        if longest is not None:
            self.longest = longest
        if self.layer_ids[0] not in self.layers:
            raise KeepsetError(f"Layer {self.layer_ids[0]} is not among the observed layers {self.layers}.")
        if self.layers[self.observed] != self.layer_ids:
            raise KeepsetError(
                f"The layers {self.layer_ids} are no neighbours among the observed layers {self.layers}."
            )

    @cached_property
    def count(self) -> int:
        """Return the number of entries of all requests and heads."""
        return int(self.valid.sum())

    @cached_property
    def longest(self) -> int:
        """Return the tokens of the longest request, or a larger number."""
        return int(self.lengths.max())

    @cached_property
    def sizes(self) -> Sizes:
        """Return the lengths and entry counts that decide how many entries stay."""
        entries = self.valid.sum(-1)
        return Sizes(entries, self.lengths, self.prompts, self.layer_ids, self.layers, self.features)

    def __getitem__(self, feature: Feature[Value]) -> Value:
        """Return a feature's collected value, or else compute it from the newest queries.

        Raises:
            KeepsetError: if there is neither.
        """
        return self.features[feature] if feature in self.features else feature.of(self)

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make`, which is called once for this observation: `score` and `remember` share it.

        Args:
            key: names the result; a method's own keys begin with the method.
            make: computes it.
        """
        computed: dict[Hashable, Tensor] = vars(self).setdefault("_made", {})
        if key not in computed:
            computed[key] = make()
        return computed[key]

    def with_features(self, features: Mapping[Feature[Any], Any]) -> Observation:
        """Return the same observation with more features."""
        extended = copy.copy(self)
        vars(extended).pop("_made", None)
        extended.features = {**self.features, **features}
        return extended

    def keys_of(self, heads: slice) -> Float[Tensor, "batch heads entries head_dim"]:
        """Return the keys of some KV heads."""
        return self.keys[:, heads]

    def values_of(self, heads: slice) -> Float[Tensor, "batch heads entries value_dim"]:
        """Return the values of some KV heads."""
        return self.values[:, heads]

    def take(
        self, index: slice | Int[Tensor, "batch kv_heads n"]
    ) -> tuple[Float[Tensor, "batch kv_heads n head_dim"], Float[Tensor, "batch kv_heads n value_dim"]]:
        """Return the keys and values of some entries of each head; a slice takes the same ones of each head."""
        if isinstance(index, slice):
            return self.keys[:, :, index], self.values[:, :, index]
        rows = torch.arange(len(index), device=index.device)[:, None, None]
        heads = torch.arange(index.shape[1], device=index.device)[:, None]
        return self.keys[rows, heads, index], self.values[rows, heads, index]

    def over_heads(self, look: Callable[[slice], Tensor]) -> Tensor:
        """Compute something from keys or values, for a few KV heads at a time if there are many entries.

        So a method never holds a second copy of all keys, and a paged runtime not even a first one.

        Args:
            look: computes `[batch, heads, ...]` for a slice of KV heads, by `keys_of` and `values_of`.
        """
        batch, kv_heads, entries = self.valid.shape
        at_once = max(1, _AT_ONCE // max(batch * entries * self.head_dim, 1))
        parts = [look(slice(first, first + at_once)) for first in range(0, kv_heads, at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def codes_by(self, networks: Networks, earlier_codes: Scores | None = None) -> Scores:
        """Return the code of every entry by the networks of its layer and head, in float32; 0 for holes.

        Args:
            networks: of the observed layers.
            earlier_codes: the codes that were computed before, 0 for entries that have none; only the latter are read.
        """
        new = self.valid if earlier_codes is None else self.valid & (earlier_codes == 0)
        codes = self._codes_in_place(new, networks, earlier_codes)
        if codes is not None:
            return codes

        def look(heads: slice) -> Tensor:
            coded = None if earlier_codes is None else earlier_codes[:, heads]
            parts = self.keys_of(heads), self.values_of(heads), self.positions[:, heads], new[:, heads]
            return entry_codes(*parts, networks.of_heads(heads), coded)

        return self.over_heads(look)

    def _codes_in_place(
        self, new: Bool[Tensor, "batch kv_heads entries"], networks: Networks, earlier_codes: Scores | None
    ) -> Scores | None:
        """Return the result of `codes_by` if entries can be read where they lie, without a copy; else None.

        Args:
            new: which entries have no code yet.
            networks, earlier_codes: as in `codes_by`.
        """
        return None

    @cached_property
    def head_dim(self) -> int:
        """Return the numbers per key."""
        return self.keys.shape[-1]

    @cached_property
    def value_dim(self) -> int:
        """Return the numbers per value."""
        return self.values.shape[-1]

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the type of keys and values."""
        return self.keys.dtype

    @property
    def layer(self) -> int:
        """Return this layer's index in the model.

        Raises:
            KeepsetError: if the observation shows several layers.
        """
        if len(self.layer_ids) > 1:
            raise KeepsetError(
                f"This observation shows the layers {self.layer_ids} as one batch: a method that depends on the layer "
                "asks for that of each row, observation.indices or observation.depths."
            )
        return self.layer_ids[0]

    @property
    def observed(self) -> slice:
        """Return where the observed layers are among the compressed ones."""
        first = self.layers.index(self.layer_ids[0])
        return slice(first, first + len(self.layer_ids))

    @cached_property
    def indices(self) -> Int[Tensor, " batch"]:
        """Return the index in the model of each row's layer."""
        return self.repeat_per_request(upload(self.layer_ids, self.valid.device))

    @cached_property
    def depths(self) -> Int[Tensor, " batch"]:
        """Return how many compressed layers come before each row's layer."""
        return self.sizes.depths

    def split_layers(self, statistic: Shaped[Tensor, "layers_batch *rest"]) -> Shaped[Tensor, "batch layers *rest"]:
        """Return a view of a per-row statistic, with one axis for requests and one for layers."""
        return statistic.unflatten(0, (len(self.layer_ids), -1)).transpose(0, 1)

    def merge_layers(self, statistic: Shaped[Tensor, "batch layers *rest"]) -> Shaped[Tensor, "layers_batch *rest"]:
        """Return a statistic per request and layer as one per row; undoes `split_layers`."""
        return statistic.transpose(0, 1).flatten(0, 1)

    def repeat_per_request(self, statistic: Shaped[Tensor, "layers *rest"]) -> Shaped[Tensor, "layers_batch *rest"]:
        """Return a statistic per observed layer as one per row; a view for one layer or one request."""
        requests = self.valid.shape[0] // len(self.layer_ids)
        return self.merge_layers(statistic.expand(requests, *statistic.shape))

    def repeat_per_layer(self, statistic: Shaped[Tensor, "batch *rest"]) -> Shaped[Tensor, "layers_batch *rest"]:
        """Return a statistic per request as one per row; a view for one layer or one request."""
        return self.merge_layers(statistic[:, None].expand(-1, len(self.layer_ids), *statistic.shape[1:]))

    @property
    def bias(self) -> Scores | None:
        """Return what attention adds to each entry's logits since an earlier event (`match`); None if nothing."""
        return self.state.get(BIAS)

    def newest_queries(self, window: int) -> tuple[Queries, Int[Tensor, "batch n"]]:
        """Return the newest queries.

        Args:
            window: how many, at most as many as the method declared with `RecentQueries`.

        Returns:
            The queries after rotation, fewer if there are fewer, and their positions. Queries at negative positions do
            not exist.

        Raises:
            KeepsetError: if no queries were collected.
        """
        if self.queries is None or self.query_positions is None:
            raise KeepsetError(
                "This method looks at the newest queries, which its traits do not name: put RecentQueries(window) into "
                "their needs, or give Observation(queries=...)."
            )
        return self.queries[:, :, -window:], self.query_positions[:, -window:]

    def window_attention(self, window: int) -> Float[Tensor, "batch query_heads window entries"]:
        """Return the causal attention of the newest queries, at most those declared, over all entries, in float32.

        Returns:
            A row for each query, fewer if there are fewer queries. Rows of queries that do not exist, because the
            request is shorter than the window, are zero.

        Raises:
            KeepsetError: if no queries were collected.
        """
        queries, at = self.newest_queries(window)
        first = first_unseen(self.positions, at[:, None], self.valid)
        batch, kv_heads, entries = self.valid.shape
        folded = (queries * self.scaling).reshape(batch, kv_heads, -1, self.head_dim)
        product = self.over_heads(lambda heads: (folded[:, heads] @ self.keys_of(heads).transpose(-1, -2)).float())
        logits = self.softmax.capped(product).view(batch, kv_heads, -1, queries.shape[2], entries)
        if self.bias is not None:
            logits += self.bias[:, :, None, None]
        visible = self.valid[:, :, None, first:] & (self.positions[:, :, None, first:] <= at[:, None, :, None])
        sinks = self.sinks
        attention = masked_softmax(logits, visible[:, :, None], None if sinks is None else sinks[..., None])
        return attention.view(batch, -1, queries.shape[2], entries)

    def window_usage(self, window: int) -> QueryHeadScores:
        """Return the attention that entries receive from the newest queries, summed over them, in float32.

        The attention is computed and summed in blocks that stay in a core's cache; it never exists as a whole.

        Raises:
            KeepsetError: if no queries were collected.
        """
        newest, at = self.newest_queries(window)
        return self.attention_sums(newest, at).flatten(1, 2)

    def attention_sums(
        self, queries: Queries, last_visible: Int[Tensor, "batch n"], sums_of: GroupReduction = GroupReduction.EACH
    ) -> Float[Tensor, "batch kv_heads _ entries"]:
        """Return the attention that every entry receives from some queries, summed over them, in float32.

        Args:
            queries: queries after rotation.
            last_visible: the last position that each query sees; below 0 for queries that attend to nothing.
            sums_of: as in `received_attention`.

        Returns:
            A sum for every query head of a group, or one for the group if only its largest logit counts.
        """
        queries, sinks = self.by_query_group(queries), self.sinks

        def look(heads: slice) -> Tensor:
            everything = queries[:, heads], self.keys_of(heads), self.positions[:, heads], self.valid[:, heads]
            grouped, keys, positions, valid = (part.flatten(0, 1) for part in everything)
            last = last_visible[:, None].expand(*self.valid[:, heads].shape[:2], -1).flatten(0, 1)
            bias = None if self.bias is None else self.bias[:, heads].flatten(0, 1)
            query_sinks = None if sinks is None else sinks[heads].repeat(len(queries), 1)
            softmax = replace(self.softmax, sinks=query_sinks)
            sums = received_attention(grouped, keys, positions, last, softmax, valid, sums_of, bias)
            return sums.unflatten(0, self.valid[:, heads].shape[:2])

        return self.over_heads(look)

    @property
    def scaling(self) -> float:
        """Return the factor of query-key products in the model."""
        return self.softmax.scaling

    @property
    def sinks(self) -> Float[Tensor, "kv_heads group"] | None:
        """Return the logits of the softmax's sinks, grouped by KV head; None if there are none."""
        return self.softmax.by_query_group(1, self.valid.shape[1]).sinks

    def by_query_group(
        self, statistic: Float[Tensor, "batch query_heads *rest"]
    ) -> Float[Tensor, "batch kv_heads group *rest"]:
        """Return a view of a per-query-head statistic, grouped by the KV head that they share."""
        return statistic.unflatten(1, (self.valid.shape[1], -1))

    @property
    def heads_alike(self) -> Bool[Tensor, " batch"]:
        """Return whether all heads of a request hold the same entries."""
        same_entries = ((self.positions == self.positions[:, :1]) | ~self.valid) & (self.valid == self.valid[:, :1])
        return same_entries.flatten(1).all(1)

    def mean_over_heads(self, statistic: Scores) -> Scores:
        """Return each entry's mean over the KV heads; its own number if a request's heads hold different entries."""
        return statistic.mean(1, keepdim=True).where(self.heads_alike[:, None, None], statistic)

    def keep(self, mask: Bool[Tensor, "batch kv_heads entries"]) -> KeepSet:
        """Return the KeepSet of the entries of this layer where a mask is true; holes never stay."""
        return KeepSet([self.kept(mask)])

    def kept(
        self, mask: Bool[Tensor, "batch kv_heads entries"], state: Mapping[str, Tensor] | None = None
    ) -> LayerKeepSet:
        """Return the keep set of this layer: the entries where a mask is true, and their numbers.

        Args:
            mask: true where an entry stays; holes never do.
            state: numbers per entry, `[batch, kv_heads, entries]`, that replace those of the same name. All others
                stay as they are: one step of a recipe does not know what another remembers.
        """
        total = None if self.num_kept is None else sum(self.num_kept)
        valid, state = mask & self.valid, {**self.state, **(state or {})}
        return LayerKeepSet.from_mask(self.layer_ids[0], valid, self.positions, self.entry_bytes, state, total)


class LazyObservation(Observation):
    """An observation without keys and values of its own. A subclass overrides `keys_of` and `values_of`, or `keys` too.

    Args:
        shape: requests, KV heads and entries.
        head_dim: numbers per key.
        value_dim: numbers per value.
        dtype: the type of keys and values.
        device: where the entries lie.
        parts: the other arguments of an `Observation`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        **parts: Any,
    ) -> None:
        # Tensors of the right shape that take no memory.
        nothing = torch.empty((), dtype=dtype, device=device)
        super().__init__(keys=nothing.expand(*shape, head_dim), values=nothing.expand(*shape, value_dim), **parts)
        del vars(self)["keys"], vars(self)["values"]
        self.head_dim, self.value_dim, self.dtype = head_dim, value_dim, dtype

    @cached_property
    def keys(self) -> Float[Tensor, "batch kv_heads entries head_dim"]:  # type: ignore[override]
        return self.keys_of(slice(None))

    @cached_property
    def values(self) -> Float[Tensor, "batch kv_heads entries value_dim"]:  # type: ignore[override]
        return self.values_of(slice(None))
