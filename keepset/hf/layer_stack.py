"""`LayerStack`: several layers at one event as one observation, so that a method chooses in all of them at once.

Calls of small operations take most of an event's time if there are few entries. All layers together need as many calls
as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from keepset.core.keep_set import HeadCounts, KeepSet, KeptIndices, LayerKeepSet
from keepset.core.observation import LazyObservation, Observation
from keepset.core.shapes import Scores
from keepset.hf.store import EntryStore, StoredObservation
from keepset.kernels.dispatch import CACHE_BLOCK, uses_triton
from keepset.kernels.predictor import Networks, entry_codes, new_entries

_WORKSPACE = 1 << 26
"""The most bytes of entries in a stack, because an event may hold these twice."""


class LayerStack(LazyObservation):
    """The entries that several neighbouring layers store, layer after layer, each with all requests.

    Keys and values are copied when a method reads them.

    Args:
        members: the layers' observations. They have heads of one size, and no collected features.
    """

    def __init__(self, members: Sequence[Observation]) -> None:
        first, width = members[0], max(member.valid.shape[2] for member in members)
        whole = len(members) * first.valid.shape[0], first.valid.shape[1], width
        kept = [member.num_kept for member in members if member.num_kept is not None]
        super().__init__(
            whole,
            first.head_dim,
            first.value_dim,
            first.dtype,
            first.valid.device,
            positions=_joined([member.positions for member in members], width),
            valid=_joined([member.valid for member in members], width),
            lengths=first.lengths.repeat(len(members)),
            prompts=first.prompts.repeat(len(members)),
            features=first.features,
            softmax=first.softmax,
            layer_ids=[member.layer for member in members],
            layers=first.layers,
            state={name: _joined([member.state[name] for member in members], width) for name in first.state},
            count=sum(member.count for member in members),
            entry_bytes=first.entry_bytes,
            longest=first.longest,
            num_kept=list(chain.from_iterable(kept)) if len(kept) == len(members) else None,
        )
        self.members = members

    def keys_of(self, heads: slice) -> Float[Tensor, "batch heads entries head_dim"]:
        return _joined([_source(member).keys[:, heads] for member in self.members], self.valid.shape[2])

    def values_of(self, heads: slice) -> Float[Tensor, "batch heads entries value_dim"]:
        return _joined([_source(member).values[:, heads] for member in self.members], self.valid.shape[2])

    def _codes_in_place(
        self, new: Bool[Tensor, "batch kv_heads entries"], networks: Networks, earlier_codes: Scores | None
    ) -> Scores | None:
        if uses_triton(new.device):  # the kernel reads new entries alone; to count them would wait for the device
            return None
        new_indices, members = new_entries(new), len(self.members)
        index = new_indices[2]
        parts: Sequence[slice | Tensor] = [index] * members if isinstance(index, slice) else index.chunk(members)
        are_new, positions, new_codes = new[new_indices], self.positions[new_indices], []
        rows = len(new) // members
        at_once = max(1, CACHE_BLOCK // max(1, are_new[:rows].numel() * self.head_dim))
        for first in range(0, members, at_once):
            group = slice(first, first + at_once)
            taken = [_source(member).take(part) for member, part in zip(self.members[group], parts[group], strict=True)]
            keys, values = taken[0] if len(taken) == 1 else map(torch.cat, zip(*taken, strict=True))
            group_rows = slice(first * rows, (first + at_once) * rows)
            new_codes.append(
                entry_codes(keys, values, positions[group_rows], are_new[group_rows], networks.of_layers(group))
            )
        codes = torch.zeros(new.shape, dtype=torch.float32) if earlier_codes is None else earlier_codes.clone()
        codes[new_indices] = torch.cat(new_codes).where(are_new, codes[new_indices])
        return codes

    def split(self, kept: LayerKeepSet) -> Iterator[LayerKeepSet]:
        """Yield each layer's part of a method's choice from this observation."""
        counts = kept.counts.chunk(len(self.members))
        heads_per_layer, host_counts = (
            counts[0].numel(),
            kept.heads.host_values if self.num_kept is None else self.num_kept,
        )
        totals = [
            sum(host_counts[first : first + heads_per_layer]) for first in range(0, len(host_counts), heads_per_layer)
        ]
        indices, positions = kept.indices.split(totals), kept.packed_positions.split(totals)
        for layer_index, member in enumerate(self.members):
            heads = HeadCounts(counts[layer_index], totals[layer_index])
            rows = slice(layer_index * len(counts[layer_index]), (layer_index + 1) * len(counts[layer_index]))
            yield LayerKeepSet(
                member.layer,
                heads,
                KeptIndices.of(indices[layer_index], positions[layer_index]),
                kept.entry_bytes,
                {name: numbers[rows, :, : member.valid.shape[2]] for name, numbers in kept.state.items()},
                bits=kept.bits,
            )


def stacks_of(observations: Sequence[Observation], across_layers: bool) -> list[Observation]:
    """Return an event's observations, in the model's order, neighbours stacked as far as they fit the workspace.

    Args:
        observations: the layers.
        across_layers: whether the method looks across layers. If not, a prompt's layers are not stacked.
    """
    if not across_layers and not all(isinstance(observation, StoredObservation) for observation in observations):
        return list(observations)
    return [LayerStack(group) if len(group) > 1 else group[0] for group in _alike(observations)]


def layers_of(observation: Observation) -> Sequence[Observation]:
    """Return the observations of the layers in a stack, or a layer's own."""
    return observation.members if isinstance(observation, LayerStack) else [observation]


def unstacked(keep_set: KeepSet, observations: Sequence[Observation]) -> KeepSet:
    """Return a KeepSet with a part for every layer of the observations that a method was given.

    Args:
        keep_set: what a method returned.
        observations: what it was given, of which some may be stacks.
    """
    if not any(isinstance(observation, LayerStack) for observation in observations):
        return keep_set
    parts: list[LayerKeepSet] = []
    for observation in observations:
        kept = keep_set.layer(observation.layer_ids[0])
        parts += observation.split(kept) if isinstance(observation, LayerStack) else [kept]
    return KeepSet(parts)


def _source(observation: Observation) -> Observation | EntryStore:
    """Return what has a layer's keys and values, without holding copies of them."""
    return observation.store if isinstance(observation, StoredObservation) else observation


def _alike(observations: Sequence[Observation]) -> Iterator[list[Observation]]:
    """Yield neighbours with heads of one size and the same columns, as many as fit the workspace."""
    group: list[Observation] = []
    kind, longest = None, 0
    for observation in observations:
        new_kind, entries = _kind(observation), observation.valid.shape[2]
        width = max(longest, entries)
        padded = (len(group) + 1) * observation.valid.shape[:2].numel() * width * observation.entry_bytes
        if group and not (new_kind == kind and padded <= _WORKSPACE):
            yield group
            group, width = [], entries
        group.append(observation)
        kind, longest = new_kind, width
    yield group


def _kind(observation: Observation) -> tuple[object, ...]:
    sizes, softmax = (*observation.valid.shape[:2], observation.head_dim, observation.value_dim), observation.softmax
    attention = softmax.scaling, softmax.softcap, id(softmax.sinks)
    return *sizes, *attention, observation.dtype, observation.valid.device, observation.state.keys()


def _joined(parts: Sequence[Shaped[Tensor, "batch heads _ *rest"]], width: int) -> Tensor:
    padding = [(0, 0) * (part.ndim - 3) + (0, width - part.shape[2]) for part in parts]
    return torch.cat([F.pad(part, pad) if pad[-1] else part for part, pad in zip(parts, padding, strict=True)])
