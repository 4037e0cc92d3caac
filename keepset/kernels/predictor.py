"""Codes of entries by small networks, one per KV head, that read an entry's key before rotation and its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.kernels.dispatch import CACHE_BLOCK, block_size, launched_on, uses_triton
from keepset.kernels.entry_format import encode, inputs_of
from keepset.kernels.page_entries import addresses_of
from keepset.kernels.page_format import PageFormat

TURN = 2.0**64
"""Units of a full turn; 64-bit integers count them, and wrap around as angles do."""


class Networks(NamedTuple):
    """The networks of some layers, with the layers' rotation of keys.

    With x an entry's inputs (`inputs_of`), `linear x + output gelu(hidden x + hidden_bias) + output_bias` are two
    numbers: the log score at a distance of `MIDDLE` octaves, and the slope. All tensors are contiguous in each layer.

    Attributes:
        linear, hidden, hidden_bias, output, output_bias: the weights.
        partner: index of the number with which each number of a key is rotated; its own if it is not rotated.
        turns: the angle per position of each number's rotation, in parts of a turn (`turns_of`).
        gain: the factor of each number's rotation.
    """

    linear: Float[Tensor, "layers kv_heads 2 inputs"]
    hidden: Float[Tensor, "layers kv_heads width inputs"]
    hidden_bias: Float[Tensor, "layers kv_heads width"]
    output: Float[Tensor, "layers kv_heads 2 width"]
    output_bias: Float[Tensor, "layers kv_heads 2"]
    partner: Int[Tensor, "layers head_dim"]
    turns: Int[Tensor, "layers head_dim"]
    gain: Float[Tensor, "layers head_dim"]

    def of_layers(self, layers: slice) -> Networks:
        """Return the networks of some of these layers."""
        return Networks(*(part[layers] for part in self))

    def of_heads(self, heads: slice) -> Networks:
        """Return the networks of some KV heads."""
        return self._replace(**{name: getattr(self, name)[:, heads] for name in _WEIGHTS})


_WEIGHTS = ("linear", "hidden", "hidden_bias", "output", "output_bias")


def turns_of(frequency: Float[Tensor, "*layers head_dim"]) -> Int[Tensor, "*layers head_dim"]:
    """Return angles in radians as parts of a full turn, in signed 64-bit integers.

    Multiplied by a position, they wrap around where the angle does. So the error of an angle is at most `position`
    times the rounding of a float64, and no device has to compute in float64.
    """
    turns = frequency.double() / (2 * torch.pi)
    return ((turns - turns.round()) * TURN).clamp(-(2.0**63), 2.0**63 - 1024).long()


def entry_codes(
    keys: Float[Tensor, "layers_rows kv_heads entries head_dim"],
    values: Float[Tensor, "layers_rows kv_heads entries value_dim"],
    positions: Int[Tensor, "layers_rows kv_heads entries"],
    new: Bool[Tensor, "layers_rows kv_heads entries"],
    networks: Networks,
    earlier_codes: Float[Tensor, "layers_rows kv_heads entries"] | None = None,
) -> Float[Tensor, "layers_rows kv_heads entries"]:
    """Return the code of every entry (`encode`), in float32. Only new entries are read, each once.

    Args:
        keys: keys after rotation, as cached; layer after layer, each with all requests.
        positions: the position of every entry.
        new: which entries have no code yet.
        earlier_codes: the codes of the other entries; zero by default.
    """
    if not uses_triton(keys.device):
        return _in_blocks(keys, values, positions, new, networks, earlier_codes)
    from keepset.kernels.triton import predictor  # loads Triton

    with launched_on(keys.device):
        return predictor.entry_codes(keys, values, positions, new, networks, earlier_codes)


def entry_codes_in_pages(
    caches: Sequence[Shaped[Tensor, "blocks kv_heads block_size two_head_dim"]],
    first_layer: int,
    subpages: Int[Tensor, "layers_rows kv_heads pages"],
    positions: Int[Tensor, "layers_rows kv_heads entries"],
    new: Bool[Tensor, "layers_rows kv_heads entries"],
    networks: Networks,
    earlier_codes: Float[Tensor, "layers_rows kv_heads entries"] | None = None,
    formats: Sequence[PageFormat] = (),
) -> Float[Tensor, "layers_rows kv_heads entries"]:
    """Return the code of every entry, read from its page; see `entry_codes`. Only in Triton.

    Args:
        caches, first_layer, subpages: as in `read_pages`.
        positions, new, networks, earlier_codes: as in `entry_codes`.
        formats: the formats of the networks' layers' caches if they are quantised.
    """
    from keepset.kernels.triton import predictor  # loads Triton

    with launched_on(positions.device):
        return predictor.entry_codes_in_pages(
            caches[0], addresses_of(caches), first_layer, subpages, positions, new, networks, earlier_codes, formats
        )


def outputs_of(
    inputs: Float[Tensor, "*rows entries inputs"],
    linear: Float[Tensor, "*#rows 2 inputs"],
    hidden: Float[Tensor, "*#rows width inputs"],
    hidden_bias: Float[Tensor, "*#rows width"],
    output: Float[Tensor, "*#rows 2 width"],
    output_bias: Float[Tensor, "*#rows 2"],
) -> Float[Tensor, "*rows entries 2"]:
    """Return each entry's log score and slope; see `Networks`.

    Args:
        inputs: what `inputs_of` has returned, keys before rotation.
        linear, hidden, hidden_bias, output, output_bias: as in `Networks`.
    """
    # One product for both parts reads the inputs only once.
    weights, biases = torch.cat([hidden, linear], -2), torch.cat([hidden_bias, output_bias], -1)
    sums = (inputs @ weights.transpose(-1, -2)).add_(biases[..., None, :])
    width = hidden.shape[-2]
    return (F.gelu(sums[..., :width]) @ output.transpose(-1, -2)).add_(sums[..., width:])


def cos_and_sin(
    positions: Int[Tensor, "#layers *rows entries"], turns: Int[Tensor, "#layers numbers"]
) -> tuple[Float[Tensor, "#layers *rows entries numbers"], Float[Tensor, "#layers *rows entries numbers"]]:
    """Return cosines and sines of a layer's rotation at positions.

    Args:
        positions: of the entries.
        turns: as in `Networks`.
    """
    steps = turns.view(len(turns), *[1] * (positions.ndim - 1), -1)
    angles = (positions[..., None] * steps).float().mul_(2 * torch.pi / TURN)
    return angles.cos(), angles.sin_()


def new_entries(
    new: Bool[Tensor, "rows heads entries"],
) -> tuple[slice | Tensor, slice | Tensor, slice | Int[Tensor, "rows heads n"]]:
    """Return the indices of the entries to read in each head: all new ones, padded with others.

    On a GPU these are all entries, because finding the new ones would need a host sync.
    """
    if new.device.type != "cpu":
        return slice(None), slice(None), slice(None)
    most, new_columns = int(new.sum(-1).max()), new.flatten(0, 1).any(0).nonzero()[:, 0].tolist()
    if not new_columns or new_columns[-1] - new_columns[0] < most:
        return slice(None), slice(None), slice(new_columns[0], new_columns[-1] + 1) if new_columns else slice(0)
    rows, heads = (torch.arange(length) for length in new.shape[:2])
    return rows[:, None, None], heads[:, None], new.int().topk(most, -1).indices.sort(-1).values


def _in_blocks(
    keys: Tensor, values: Tensor, positions: Tensor, new: Tensor, networks: Networks, earlier_codes: Tensor | None
) -> Float[Tensor, "layers_rows kv_heads entries"]:
    """Compute `entry_codes` in PyTorch, in blocks.

    Args:
        keys, values, positions, new, networks, earlier_codes: as in `entry_codes`.
    """
    (rows, heads), layers = new.shape[:2], len(networks.hidden)
    codes = (
        torch.zeros(new.shape, dtype=torch.float32, device=new.device)
        if earlier_codes is None
        else earlier_codes.clone()
    )
    if not new.numel():
        return codes
    new_indices = new_entries(new)
    chosen = [part[new_indices] for part in (keys, values, positions, new)]
    some_keys, some_values, new_positions = (part.unflatten(0, (layers, -1)).transpose(1, 2) for part in chosen[:3])
    rotations = _rotations(new_positions, networks)
    new_codes = torch.empty(new_positions.shape, dtype=torch.float32, device=new.device)
    size = max(1, block_size(new.device, 2 * CACHE_BLOCK) // (rows // layers * heads * max(networks.hidden.shape[2:])))
    for some_layers in _slices(layers, max(1, size // max(1, new_codes.shape[3]))):
        for entries in _slices(new_codes.shape[3], size):
            block = (some_layers, slice(None), slice(None), entries)
            turned = [(first, second, cos[block], sin[block]) for first, second, cos, sin in rotations]
            new_codes[block] = _of_block(some_keys[block], some_values[block], turned, networks.of_layers(some_layers))
    fresh = new_codes.transpose(1, 2).flatten(0, 1)
    codes[new_indices] = fresh.where(chosen[3], codes[new_indices])
    return codes


def _slices(length: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, length, size)]


def _rotations(
    positions: Int[Tensor, "layers heads rows entries"], networks: Networks
) -> list[tuple[slice, slice, Tensor, Tensor]]:
    """Return which numbers of a key rotate together, and the cosines and sines of their angles.

    On a CPU, layers and heads with the same positions share them, which is the usual case.

    Args:
        positions: of the entries.
        networks: of these layers.
    """
    layers, on_cpu = len(positions), positions.device.type == "cpu"
    if on_cpu and bool((positions == positions[:1, :1]).all()):
        positions = positions[:1, :1]
    numbers = torch.arange(networks.partner.shape[-1], device=positions.device)
    rotations = []
    for first, second in _planes(networks.partner):
        # A layer that does not rotate these numbers together has angle zero.
        turns = networks.turns[:, first] * (networks.partner[:, first] == numbers[second])
        if on_cpu and bool((turns == turns[:1]).all()):
            turns = turns[:1]
        cos, sin = (part.expand(layers, -1, -1, -1, -1) for part in cos_and_sin(positions, turns))
        rotations.append((first, second, cos, sin))
    return rotations


def _of_block(
    keys: Float[Tensor, "layers heads rows entries head_dim"],
    values: Float[Tensor, "layers heads rows entries value_dim"],
    rotations: list[tuple[slice, slice, Tensor, Tensor]],
    networks: Networks,
) -> Float[Tensor, "layers heads rows entries"]:
    inputs = inputs_of(keys / networks.gain[:, None, None, None], values)  # a rotation does not change lengths
    for first, second, cos, sin in rotations:
        x, y = inputs[..., first], inputs[..., second]
        from_x = x * sin
        x.mul_(cos).addcmul_(y, sin, value=-1)
        y.mul_(cos).add_(from_x)
    return encode(outputs_of(inputs.flatten(2, 3), *networks[:5])).view(keys.shape[:4])


def _planes(partner: Int[Tensor, "layers head_dim"]) -> Iterator[tuple[slice, slice]]:
    """Yield which numbers of a head rotate together in some layer."""
    for numbers in dict.fromkeys(map(tuple, partner.tolist())):
        yield from _runs(tuple((first, second) for first, second in enumerate(numbers) if first < second))


@cache
def _runs(pairs: tuple[tuple[int, int], ...]) -> list[tuple[slice, slice]]:
    """Return sorted pairs of indices as pairs of slices, such as the two halves of a head, or neighbours."""

    def run(item: tuple[int, tuple[int, int]]) -> tuple[int, int, int]:
        index, (first, second) = item
        step = 2 if second == first + 1 else 1
        return step, second - first, first - step * index

    slices = []
    for (step, between, _), items in groupby(enumerate(pairs), run):
        firsts = [first for _, (first, _) in items]
        start, end = firsts[0], firsts[-1] + 1
        slices.append((slice(start, end, step), slice(start + between, end + between, step)))
    return slices
