"""`KeepSet`: which entries of the cache stay. Every runtime, diagnostic and report reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """Where counts of kept entries may differ."""

    DENSE = "dense"
    LAYER_RAGGED = "layer-ragged"
    HEAD_RAGGED = "head-ragged"


class LazyHostInts:
    """Whole numbers of a device; the host asks for them when it wants to know, for those of many at once.

    Attributes:
        device_values: the integers, on the device.
    """

    def __init__(self, device_values: Int[Tensor, "*shape"]) -> None:
        self.device_values = device_values

    @cached_property
    def host_values(self) -> list[int]:
        """One after another."""
        return self.device_values.flatten().tolist()

    @staticmethod
    def read(many: Iterable[LazyHostInts]) -> None:
        """Asks for all that the host does not know yet, with one wait for each device."""
        by_device = defaultdict(list)
        for each in many:
            if "host_values" not in vars(each):
                by_device[each.device_values.device].append(each)
        for unknown in by_device.values():
            numbers = torch.cat([each.device_values.flatten() for each in unknown]).tolist()
            for each in unknown:
                vars(each)["host_values"], numbers = (
                    numbers[: each.device_values.numel()],
                    numbers[each.device_values.numel() :],
                )


class HeadCounts(LazyHostInts):
    """How many entries each head keeps, head after head and request after request.

    Args:
        device_values: the counts, on the device.
        total: their sum, where the host knows it beforehand.
    """

    def __init__(self, device_values: Quotas, total: int | None = None) -> None:
        super().__init__(device_values)
        self._total = total

    @property
    def total(self) -> int:
        """Of all heads; the device is not asked where that is known."""
        return sum(self.host_values) if self._total is None else self._total

    @staticmethod
    def check(layers: Sequence[HeadCounts]) -> None:
        """Asks for all that the host does not know yet.

        Raises:
            KeepsetError: a method has kept more or less than its quotas say.
        """
        LazyHostInts.read(layers)
        if any(sum(counts.host_values) != counts.total for counts in layers):
            raise KeepsetError(
                "A method kept another number of entries than its quotas say: its class must say that counts come from "
                "the data (counts_from_data)."
            )


class KeptIndices:
    """Index and position of every entry that stays, packed head after head; made when somebody looks.

    Args:
        heads: how many each head keeps.
        make: answers with both, of so many entries in all.
    """

    def __init__(self, heads: HeadCounts, make: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        self.heads, self._make = heads, make

    @classmethod
    def of(cls, indices: Tensor, positions: Tensor, heads: HeadCounts) -> KeptIndices:
        """Those that are known."""
        return cls(heads, lambda total: (indices, positions))

    @classmethod
    def where(cls, mask: Mask, positions: Int[Tensor, "batch kv_heads entries"], total: int | None) -> KeptIndices:
        """Those of a mask."""

        def make(total: int) -> tuple[Tensor, Tensor]:
            kept = _true_places(mask.flatten(), total)
            return kept % mask.shape[-1], positions.flatten().index_select(0, kept).int()

        return cls(HeadCounts(mask.sum(-1), total), make)

    @cached_property
    def packed(self) -> tuple[Int[Tensor, " kept"], Int[Tensor, " kept"]]:
        """Indices and positions."""
        packed = self._make(self.heads.total)
        self._make = lambda total: packed  # what they were made of goes
        return packed


@dataclass(frozen=True, eq=False)
class LayerKeepSet:
    """What one layer keeps, packed head after head and request after request, each head's part sorted.

    Attributes:
        layer: the layer's index in the model.
        places: what stays.
        entry_bytes: bytes of one entry of one KV head, its key and its value.
        state: the method's own numbers for every entry of the observation, `[batch, kv_heads, entries]`, which move
            with those that stay: the next observation has them.
        values: of every kept entry, where they are not those that it had.
        int8: whether keys and values are stored as 8-bit integers from here on.
    """

    layer: int
    places: KeptIndices
    entry_bytes: int
    state: Mapping[str, Tensor] = field(default_factory=dict)
    values: Float[Tensor, "kept value_dim"] | None = None
    int8: bool = False

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
        """The entries where `mask` is true.

        Args:
            layer: the layer's index in the model.
            mask: of an observation's entries.
            positions: original position of every entry.
            entry_bytes: of one entry of one KV head, its key and its value.
            state: the method's own numbers per entry, before anything is dropped.
            total: how many entries stay, where that is known: a device is not waited for then.
        """
        return cls(layer, KeptIndices.where(mask, positions, total), entry_bytes, state or {})

    @property
    def heads(self) -> HeadCounts:
        """How many entries each head keeps, there and here."""
        return self.places.heads

    @property
    def counts(self) -> Quotas:
        """Kept entries of every request and KV head."""
        return self.heads.device_values

    @property
    def indices(self) -> Int[Tensor, " kept"]:
        """Index of every kept entry along the observation's entry axis, for the runtime to gather."""
        return self.places.packed[0]

    @property
    def packed_positions(self) -> Int[Tensor, " kept"]:
        """Original position of every kept entry, counted from its request's first token."""
        return self.places.packed[1]

    def to_record(self) -> LayerKeepSet:
        """The same for the records, once a runtime has executed it: four bytes an entry, indices into the text."""
        positions = self.packed_positions
        return replace(self, places=KeptIndices.of(positions, positions, self.heads), state={}, values=None)

    @property
    def cu_seqlens(self) -> Int[Tensor, " heads_plus_1"]:
        """Where each head's part begins in the packed tensors: `[batch * kv_heads + 1]`, starting with 0."""
        return F.pad(self.counts.flatten().cumsum(0), (1, 0))

    @property
    def rows(self) -> Int[Tensor, " kept"]:
        """Which of the `batch * kv_heads` heads each packed entry belongs to."""
        heads = torch.arange(self.counts.numel(), device=self.counts.device)
        return torch.repeat_interleave(heads, self.counts.flatten(), output_size=len(self.indices))

    @property
    def nbytes(self) -> int:
        """Bytes of the kept keys and values."""
        return self.indices.numel() * self.entry_bytes

    def positions(self, request: int, head: int) -> Int[Tensor, " kept"]:
        """Sorted original positions that one KV head of one request keeps.

        Args:
            request, head: counted from 0.

        Raises:
            KeepsetError: there is no such request or head.
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
        """The same as a mask over positions.

        Args:
            length: how many positions, from 0 on.

        Returns:
            True at every kept position below `length`.
        """
        batch, heads = self.counts.shape
        mask = torch.zeros(batch * heads, length, dtype=torch.bool, device=self.counts.device)
        inside = self.packed_positions < length
        mask[self.rows[inside], self.packed_positions[inside]] = True
        return mask.view(batch, heads, length)


class KeepSet:
    """For every layer, request and KV head the sorted original positions that stay.

    Counts may be equal everywhere (dense), one per layer (layer-ragged) or one per head (head-ragged).

    Args:
        layers: parts of different layers, in any order.

    Raises:
        KeepsetError: there is none, or two are of one layer.
    """

    def __init__(self, layers: Sequence[LayerKeepSet]) -> None:
        if not layers:
            raise KeepsetError("A KeepSet needs at least one layer.")
        if len({kept.layer for kept in layers}) < len(layers):
            raise KeepsetError("A KeepSet holds each layer once; two parts are of the same layer.")
        self._layers = {kept.layer: kept for kept in sorted(layers, key=lambda kept: kept.layer)}

    def __repr__(self) -> str:
        return f"KeepSet({len(self._layers)} layers, {self.entries} entries, layout='{self.layout}')"

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the model's layers that this set speaks of, ascending."""
        return tuple(self._layers)

    def layer(self, index: int) -> LayerKeepSet:
        """One layer's part.

        Args:
            index: the layer's, in the model.

        Raises:
            KeepsetError: this set does not speak of it.
        """
        if index not in self._layers:
            raise KeepsetError(f"This keep set has no layer {index}; it has {list(self._layers)}.")
        return self._layers[index]

    def positions(self, layer: int, request: int, head: int) -> Int[Tensor, " kept"]:
        """Sorted original positions that one KV head of one request keeps in one layer.

        Args:
            layer: the layer's index in the model.
            request, head: counted from 0.

        Raises:
            KeepsetError: there is no such layer, request or head.
        """
        return self.layer(layer).positions(request, head)

    def mask(self, length: int) -> Bool[Tensor, "layers batch kv_heads length"]:
        """The same as a mask over positions.

        Args:
            length: how many positions, from 0 on.

        Returns:
            True at every kept position below `length`; layers in the order of `layers`.
        """
        return torch.stack([kept.mask(length) for kept in self._layers.values()])

    def count(self) -> KeepSet:
        """The same, of which the host knows how many entries each head keeps; it has waited for a device at most once.

        Raises:
            KeepsetError: a method has kept more or less than its quotas say.
        """
        HeadCounts.check([kept.heads for kept in self._layers.values()])
        return self

    @property
    def counts(self) -> Int[Tensor, "layers batch kv_heads"]:
        """Kept entries of every layer, request and KV head; layers in the order of `layers`."""
        return torch.stack([kept.counts for kept in self._layers.values()])

    @property
    def entries(self) -> int:
        """Kept entries in all."""
        return sum(kept.indices.numel() for kept in self._layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the kept keys and values."""
        return sum(kept.nbytes for kept in self._layers.values())

    @property
    def layout(self) -> Layout:
        """The simplest that the counts allow."""
        counts = self.counts
        if bool((counts != counts[:, :, :1]).any()):
            return Layout.HEAD_RAGGED
        return Layout.LAYER_RAGGED if bool((counts != counts[:1]).any()) else Layout.DENSE

    def union(self, other: KeepSet) -> KeepSet:
        """Entries that either set keeps.

        Args:
            other: a set of the same observations.

        Raises:
            KeepsetError: its layers, requests or KV heads are others.
        """
        return KeepSet([_merge(mine, theirs) for mine, theirs in self._pairs(other)])

    def overlap(self, other: KeepSet) -> Float[Tensor, "layers batch kv_heads"]:
        """Share of this set's entries that another one keeps too.

        Args:
            other: a set of the same layers, requests and KV heads.

        Returns:
            From 0 to 1; 1 where this set is empty. Layers in the order of `layers`.

        Raises:
            KeepsetError: its layers, requests or KV heads are others.
        """
        return torch.stack([_share(a & b, a) for a, b in self._masks(other)])

    def iou(self, other: KeepSet) -> Float[Tensor, "layers batch kv_heads"]:
        """Intersection over union of two sets of positions.

        Args:
            other: a set of the same layers, requests and KV heads.

        Returns:
            From 0 to 1; 1 where both are empty. Layers in the order of `layers`.

        Raises:
            KeepsetError: its layers, requests or KV heads are others.
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
    """How much of a mask this part is; all of it where there is nothing."""
    return part.sum(-1) / whole.sum(-1).clamp(min=1) + (whole.sum(-1) == 0).float()


def _merge(a: LayerKeepSet, b: LayerKeepSet) -> LayerKeepSet:
    rows = torch.cat([a.rows, b.rows])
    positions = torch.cat([a.packed_positions, b.packed_positions])
    indices = torch.cat([a.indices, b.indices])
    length = int(positions.max()) + 1 if positions.numel() else 1
    keys, order = (rows * length + positions).sort(stable=True)
    first = order[F.pad(keys[1:] != keys[:-1], (1, 0), value=True)[: keys.numel()]]
    counts = rows[first].bincount(minlength=a.counts.numel()).view_as(a.counts)
    return LayerKeepSet(a.layer, KeptIndices.of(indices[first], positions[first], HeadCounts(counts)), a.entry_bytes)


def _true_places(mask: Bool[Tensor, " places"], total: int) -> Int[Tensor, " total"]:
    """Where a mask is true, so often as is known: a search would make the host wait for a device."""
    if mask.device.type == "cpu":
        return mask.nonzero()[:, 0]
    # What is false goes to a place behind all others.
    rank = (mask.cumsum(0) - 1).where(mask, total)
    places = torch.arange(len(mask), device=mask.device)
    return places.new_empty(total + 1).scatter_(0, rank, places)[:total]
