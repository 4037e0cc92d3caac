"""`KeepSet`: the entries of the cache that stay. Every runtime, diagnostic and report reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.shapes import Mask, Quotas
from keepset.errors import KeepsetError


class Layout(StrEnum):
    """The dimensions in which numbers of kept entries may differ."""

    DENSE = "dense"
    LAYER_RAGGED = "layer-ragged"
    HEAD_RAGGED = "head-ragged"


@dataclass(eq=False)
class LazyHostInts:
    """Whole numbers on a device that the host copies when it first needs them.

    Attributes:
        device_values: the numbers, on the device.
    """

    device_values: Int[Tensor, "*shape"]

    @cached_property
    def host_values(self) -> list[int]:
        """Return the numbers one after another; waits for the device the first time."""
        return self.device_values.flatten().tolist()

    @staticmethod
    def read(many: Iterable[LazyHostInts]) -> None:
        """Copy all numbers that the host does not know yet, with one wait for each device."""
        by_device = defaultdict(list)
        for counts in many:
            if "host_values" not in vars(counts):
                by_device[counts.device_values.device].append(counts)
        for unknown in by_device.values():
            numbers = torch.cat([counts.device_values.flatten() for counts in unknown]).tolist()
            for counts in unknown:
                size = counts.device_values.numel()
                vars(counts)["host_values"], numbers = numbers[:size], numbers[size:]


NAN_NOTICED: ContextVar[list[LazyHostInts] | None] = ContextVar("NAN_NOTICED", default=None)
"""A list to which `ranked_scores` adds whether any of the scores is NaN; None if nobody asks.

These numbers are on the scores' devices, so the host waits for none of them before it reads one.
"""


@dataclass(eq=False)
class HeadCounts(LazyHostInts):
    """The number of entries that each head keeps.

    Attributes:
        device_values: the counts, `[batch, kv_heads]`, on the device.
        expected: their sum, if the host knows it beforehand.
    """

    expected: int | None = None

    @property
    def total(self) -> int:
        """Return the entries that all heads keep; waits for the device only if the host does not know the number."""
        return sum(self.host_values) if self.expected is None else self.expected


@dataclass(eq=False)
class KeptIndices:
    """The index and position of every entry that stays, packed head after head; computed when first needed.

    Attributes:
        make: returns indices and positions.
    """

    make: Callable[[], tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, indices: Tensor, positions: Tensor) -> KeptIndices:
        """Return an object for indices and positions that are known already.

        Args:
            indices: of the entries that stay, packed head after head.
            positions: theirs, counted from each request's first token.
        """
        return cls(lambda: (indices, positions))

    @cached_property
    def packed(self) -> tuple[Int[Tensor, " kept"], Int[Tensor, " kept"]]:
        """Return indices and positions."""
        packed = self.make()
        self.make = lambda: packed  # frees what they were computed from
        return packed


@dataclass(frozen=True, eq=False)
class LayerKeepSet:
    """The entries that one layer keeps, packed head after head and request after request, each head's part sorted.

    Attributes:
        layer: the layer's index in the model.
        heads: how many entries each head keeps, on the device and on the host.
        places: the entries that stay.
        entry_bytes: bytes of one entry of one KV head, its key and its value.
        state: the recipe's own numbers for every entry of the observation, `[batch, kv_heads, entries]`. Those of kept
            entries are part of the next observation.
        values: new values of the kept entries; None if they do not change.
        bits: of each number of keys and values as they are stored from now on; None if that does not change.
    """

    layer: int
    heads: HeadCounts
    places: KeptIndices
    entry_bytes: int
    state: Mapping[str, Tensor] = field(default_factory=dict)
    values: Float[Tensor, "kept value_dim"] | None = None
    bits: int | None = None

    @classmethod
    def from_mask(
        cls,
        layer: int,
        mask: Mask,
        positions: Int[Tensor, "batch kv_heads entries"],
        entry_bytes: int,
        state: Mapping[str, Tensor] | None = None,
        total: int | None = None,
    ) -> LayerKeepSet:
        """Return the keep set of one layer that keeps the entries where a mask is true.

        Args:
            mask: true where an entry of an observation stays.
            positions: the original position of every entry.
            entry_bytes: bytes of one entry of one KV head, its key and its value.
            state: the method's own numbers per entry, before anything is dropped.
            total: how many entries stay, if the host knows it without waiting for a device.
        """
        heads = HeadCounts(mask.sum(-1), total)

        def make() -> tuple[Tensor, Tensor]:
            kept = _true_places(mask.flatten(), heads)
            return kept % mask.shape[-1], positions.flatten().index_select(0, kept).int()

        return cls(layer, heads, KeptIndices(make), entry_bytes, state or {})

    @property
    def counts(self) -> Quotas:
        """Return the number of kept entries of every request and KV head."""
        return self.heads.device_values

    @property
    def indices(self) -> Int[Tensor, " kept"]:
        """Return the index of every kept entry along the observation's entry axis, for the runtime to gather."""
        return self.places.packed[0]

    @property
    def packed_positions(self) -> Int[Tensor, " kept"]:
        """Return the original position of every kept entry, counted from its request's first token."""
        return self.places.packed[1]

    def to_record(self) -> LayerKeepSet:
        """Return the record that a runtime keeps after the event: only positions, in four bytes per entry."""
        _, positions = self.places.packed
        return replace(self, places=KeptIndices(lambda: (positions, positions)), state={}, values=None)

    @property
    def cu_seqlens(self) -> Int[Tensor, " heads_plus_1"]:
        """Return where each head begins in the packed tensors, and at last their length: `[batch * kv_heads + 1]`."""
        return F.pad(self.counts.flatten().cumsum(0), (1, 0))

    @property
    def rows(self) -> Int[Tensor, " kept"]:
        """Return which of the `batch * kv_heads` heads each packed entry belongs to."""
        heads = torch.arange(self.counts.numel(), device=self.counts.device)
        return torch.repeat_interleave(heads, self.counts.flatten(), output_size=len(self.indices))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the kept keys and values."""
        return self.heads.total * self.entry_bytes

    def positions(self, request: int, head: int) -> Int[Tensor, " kept"]:
        """Return the sorted original positions that one KV head of one request keeps.

        Args:
            request: the row of the batch.
            head: the KV head.

        Raises:
            KeepsetError: if there is no such request or head.
        """
        batch, heads = self.counts.shape
        if not (0 <= request < batch and 0 <= head < heads):
            raise KeepsetError(
                f"This keep set has requests 0 to {batch - 1} and KV heads 0 to {heads - 1}: "
                f"there is no request {request}, head {head}."
            )
        row = request * heads + head
        offsets = self.cu_seqlens
        return self.packed_positions[int(offsets[row]) : int(offsets[row + 1])]

    def mask(self, length: int) -> Bool[Tensor, "batch kv_heads length"]:
        """Return a mask over the positions from 0 on: true at every kept one."""
        batch, heads = self.counts.shape
        mask = torch.zeros(batch * heads, length, dtype=torch.bool, device=self.counts.device)
        inside = self.packed_positions < length
        mask[self.rows[inside], self.packed_positions[inside]] = True
        return mask.view(batch, heads, length)


class KeepSet:
    """The sorted original positions that stay, for every layer, request and KV head.

    Counts may be equal everywhere (dense), differ between layers (layer-ragged) or between heads (head-ragged).

    Args:
        layers: the parts of different layers, in any order.

    Raises:
        KeepsetError: if there is none, or two are of one layer.
    """

    def __init__(self, layers: Sequence[LayerKeepSet]) -> None:
        if not layers:
            raise KeepsetError("A KeepSet needs at least one layer.")
        by_layer = {kept.layer: kept for kept in layers}
        if len(by_layer) < len(layers):
            raise KeepsetError("A KeepSet holds each layer once; two parts are of the same layer.")
        self._layers = dict(sorted(by_layer.items()))

    def __repr__(self) -> str:
        return f"KeepSet({len(self._layers)} layers, {self.entries} entries, layout='{self.layout}')"

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the indices in the model of this set's layers, ascending."""
        return tuple(self._layers)

    def layer(self, index: int) -> LayerKeepSet:
        """Return the part of the layer with this index in the model.

        Raises:
            KeepsetError: if this set does not have that layer.
        """
        if index not in self._layers:
            raise KeepsetError(f"This keep set has no layer {index}; it has {list(self._layers)}.")
        return self._layers[index]

    def positions(self, layer: int, request: int, head: int) -> Int[Tensor, " kept"]:
        """Return the sorted original positions that one KV head of one request keeps in one layer.

        Args:
            layer: the layer's index in the model.
            request: the row of the batch.
            head: the KV head.

        Raises:
            KeepsetError: if there is no such layer, request or head.
        """
        return self.layer(layer).positions(request, head)

    def mask(self, length: int) -> Bool[Tensor, "layers batch kv_heads length"]:
        """Return a mask over the positions from 0 on: true at every kept one, layers in the order of `layers`."""
        return torch.stack([kept.mask(length) for kept in self._layers.values()])

    def count(self, numbers: Sequence[LazyHostInts] = ()) -> KeepSet:
        """Return this set once the host knows how many entries each head keeps; wait at most once per device.

        Args:
            numbers: more numbers that the host reads in the same wait.

        Raises:
            KeepsetError: if a method has kept more or fewer entries than its quotas say.
        """
        heads = [kept.heads for kept in self._layers.values()]
        LazyHostInts.read([*heads, *numbers, *(NAN_NOTICED.get() or ())])
        if any(counts.expected not in (None, sum(counts.host_values)) for counts in heads):
            raise KeepsetError(
                "A method kept another number of entries than its quotas say: its traits must say that counts come "
                "from the data (counts_from_data)."
            )
        return self

    @property
    def counts(self) -> Int[Tensor, "layers batch kv_heads"]:
        """Return the number of kept entries of every layer, request and KV head; layers in the order of `layers`."""
        return torch.stack([kept.counts for kept in self._layers.values()])

    @property
    def entries(self) -> int:
        """Return the number of kept entries in total."""
        return sum(kept.heads.total for kept in self._layers.values())

    @property
    def nbytes(self) -> int:
        """Return the bytes of the kept keys and values."""
        return sum(kept.nbytes for kept in self._layers.values())

    @property
    def layout(self) -> Layout:
        """Return the simplest layout that the counts allow."""
        counts = self.counts
        if bool((counts != counts[:, :, :1]).any()):
            return Layout.HEAD_RAGGED
        return Layout.LAYER_RAGGED if bool((counts != counts[:1]).any()) else Layout.DENSE

    def union(self, other: KeepSet) -> KeepSet:
        """Return the entries that at least one of two sets of the same observations keeps.

        Raises:
            KeepsetError: if its layers, requests or KV heads are others.
        """
        return KeepSet([_merge(left, right) for left, right in self._pairs(other)])

    def overlap(self, other: KeepSet) -> Float[Tensor, "layers batch kv_heads"]:
        """Return the share of this set's entries that a set of the same layers, requests and KV heads keeps too.

        Returns:
            Numbers from 0 to 1; 1 where this set is empty. Layers are in the order of `layers`.

        Raises:
            KeepsetError: if its layers, requests or KV heads are others.
        """
        return torch.stack([_share(a & b, a) for a, b in self._masks(other)])

    def iou(self, other: KeepSet) -> Float[Tensor, "layers batch kv_heads"]:
        """Return the intersection over union of two sets of positions, of the same layers, requests and KV heads.

        Returns:
            Numbers from 0 to 1; 1 where both are empty. Layers are in the order of `layers`.

        Raises:
            KeepsetError: if its layers, requests or KV heads are others.
        """
        return torch.stack([_share(a & b, a | b) for a, b in self._masks(other)])

    def _pairs(self, other: KeepSet) -> list[tuple[LayerKeepSet, LayerKeepSet]]:
        if self.layers != other.layers or self.counts.shape != other.counts.shape:
            raise KeepsetError("Only keep sets with the same layers, requests and KV heads can be compared.")
        return list(zip(self._layers.values(), other._layers.values(), strict=True))

    def _masks(self, other: KeepSet) -> Iterator[tuple[Mask, Mask]]:
        for pair in self._pairs(other):
            length = 1 + max((int(kept.packed_positions.max()) for kept in pair if kept.indices.numel()), default=-1)
            yield pair[0].mask(length), pair[1].mask(length)


def _share(part: Mask, whole: Mask) -> Float[Tensor, "batch kv_heads"]:
    return part.sum(-1).float() / whole.sum(-1).clamp(min=1) + (whole.sum(-1) == 0).float()


def _merge(a: LayerKeepSet, b: LayerKeepSet) -> LayerKeepSet:
    rows = torch.cat([a.rows, b.rows])
    positions = torch.cat([a.packed_positions, b.packed_positions])
    indices = torch.cat([a.indices, b.indices])
    length = int(positions.max()) + 1 if positions.numel() else 1
    keys, order = (rows * length + positions).sort(stable=True)
    first = order[F.pad(keys[1:] != keys[:-1], (1, 0), value=True)[: keys.numel()]]
    counts = rows[first].bincount(minlength=a.counts.numel()).view_as(a.counts)
    kept_indices = KeptIndices.of(indices[first], positions[first])
    return LayerKeepSet(a.layer, HeadCounts(counts), kept_indices, a.entry_bytes)


def _true_places(mask: Bool[Tensor, " places"], heads: HeadCounts) -> Int[Tensor, " total"]:
    """Return the indices where a mask is true; their known number avoids a wait for the device.

    Args:
        mask: any.
        heads: how many are true in each head.
    """
    if mask.device.type == "cpu":
        return mask.nonzero()[:, 0]
    total = heads.total
    # All indices where it is false are written to one last element, which is cut off.
    rank = (mask.cumsum(0) - 1).where(mask, total)
    token_indices = torch.arange(len(mask), device=mask.device)
    return token_indices.new_empty(total + 1).scatter_(0, rank, token_indices)[:total]
