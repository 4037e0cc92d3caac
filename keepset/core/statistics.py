"""`Statistics`: what was measured of a model's queries beforehand, and the file that holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.core.shapes import Rows
from keepset.core.tensor_file import TensorFile
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import upload

FORMAT = 2
"""Of the file; raise it with every change to what is written."""
_FILE = TensorFile(
    "keepset_statistics",
    FORMAT,
    foreign="{path} is no file of keepset calibrate: give one that it has written.",
    other="{path} has format {found} of statistics, and this keepset reads format {version}: run keepset calibrate "
    "again.",
    damaged="{path} is damaged: run keepset calibrate again.",
)
_RETRIEVAL = "retrieval"


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """One layer: its queries, averaged over many texts, and how it rotates queries and keys.

    At position p the layer makes of a row x the row
    `gain[d] * (x[d] * cos(p * frequency[d]) + x[partner[d]] * sin(p * frequency[d]))`: each number and its partner
    are the coordinates of a plane. A number that is not rotated is its own partner and has frequency 0.

    Attributes:
        direction: of each KV head, the one along which its query heads' queries lie after rotation; see `qfilter`.
        mean, covariance: of each query head's queries before rotation.
        norm: mean length of the queries in each number's plane, before rotation.
        partner, frequency, gain: the rotation.
    """

    direction: Float[Tensor, "kv_heads head_dim"]
    mean: Float[Tensor, "query_heads head_dim"]
    covariance: Float[Tensor, "query_heads head_dim head_dim"]
    norm: Float[Tensor, "query_heads head_dim"]
    partner: Int[Tensor, " head_dim"]
    frequency: Float[Tensor, " head_dim"]
    gain: Float[Tensor, " head_dim"]


FIELDS = tuple(field.name for field in dataclasses.fields(LayerStatistics))


class RowStatistics:
    """`LayerStatistics` of the layer of each row of a batch; each is taken from where they are once it is asked for.

    Args:
        take: one of them by its name, with an axis for the rows in front.
    """

    def __init__(self, take: Callable[[str], Tensor]) -> None:
        self._take = take

    @cached_property
    def direction(self) -> Float[Tensor, "batch kv_heads head_dim"]:
        """As in `LayerStatistics`, and so are the others."""
        return self._take("direction")

    @cached_property
    def mean(self) -> Float[Tensor, "batch query_heads head_dim"]:
        """Of queries before rotation."""
        return self._take("mean")

    @cached_property
    def covariance(self) -> Float[Tensor, "batch query_heads head_dim head_dim"]:
        """Of the same."""
        return self._take("covariance")

    @cached_property
    def norm(self) -> Float[Tensor, "batch query_heads head_dim"]:
        """Of their parts in planes."""
        return self._take("norm")

    @cached_property
    def gain(self) -> Float[Tensor, "batch head_dim"]:
        """Of the rotation."""
        return self._take("gain")

    @cached_property
    def paired(self) -> Bool[Tensor, "batch head_dim"]:
        """Which numbers have a partner."""
        return self._partner != torch.arange(self._partner.shape[-1], device=self._partner.device)

    def rotate(self, rows: Rows, positions: Int[Tensor, "batch places"]) -> Rows:
        """Rows at the mean rotation of these positions: rotation is linear in cosines and sines."""
        angles = positions[..., None] * self._take("frequency").double()[:, None]
        cos, sin = (self.gain * part.mean(1).float() for part in (angles.cos(), angles.sin()))
        return rows * cos[:, None, None] + self._partners(rows) * sin[:, None, None]

    def in_plane(self, rows: Float[Tensor, "batch *rows head_dim"]) -> Float[Tensor, "batch *rows head_dim"]:
        """For every number the length of its row's part in its plane; a rotation changes it by its gain only."""
        return rows.where(~_beside(self.paired, rows), torch.hypot(rows, self._partners(rows))).abs()

    def _partners(self, rows: Float[Tensor, "batch *rows head_dim"]) -> Float[Tensor, "batch *rows head_dim"]:
        return rows.gather(-1, _beside(self._partner, rows).expand_as(rows))

    @cached_property
    def _partner(self) -> Int[Tensor, "batch head_dim"]:
        return self._take("partner")


def _beside(numbers: Shaped[Tensor, "batch head_dim"], rows: Tensor) -> Shaped[Tensor, "batch *ones head_dim"]:
    return numbers.view(len(numbers), *[1] * (rows.ndim - 2), -1)


@dataclass(frozen=True, eq=False)
class Statistics:
    """What was measured of the layers that can be compressed.

    Attributes:
        layers: by the layer's index in the model.
        retrieval: of each KV head of these layers, from 0 to 1, how much it needs of the distant text; see
            `duo_attention`. Nothing where it was not measured.
        provenance: of what model and texts, and by what version of keepset; plain JSON.
        name: for messages: what the recipe calls them.
    """

    layers: Mapping[int, LayerStatistics]
    retrieval: Mapping[int, Float[Tensor, " kv_heads"]] = dataclasses.field(default_factory=dict, kw_only=True)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""

    def check(self, layers: tuple[int, ...], kv_heads: int, head_dim: int) -> None:
        """Refuses a model of another shape than they were measured on: KeepsetError."""
        first = next(iter(self.layers.values()))
        theirs, ours = (len(self.layers), *first.direction.shape), (len(layers), kv_heads, head_dim)
        if tuple(self.layers) != layers or theirs != ours:
            raise KeepsetError(
                f"The statistics {self.name!r} are of another model: theirs has {_shape(*theirs)}, this one "
                f"{_shape(*ours)}. Make them for this model with keepset calibrate."
            )

    def on(self, device: torch.device, name: str) -> Tensor:
        """One of all layers' `FIELDS`, layer by layer, which is on the device from then on."""
        if (device, name) not in self._on_device:
            together = torch.stack([getattr(layer, name) for layer in self.layers.values()])
            self._on_device[device, name] = upload(together, device)
        return self._on_device[device, name]

    @cached_property
    def _on_device(self) -> dict[tuple[torch.device, str], Tensor]:
        return {}

    def gates(self) -> Float[Tensor, "layers kv_heads"]:
        """How much each KV head retrieves; KeepsetError where that was not measured."""
        if not self.retrieval:
            raise KeepsetError(
                f"The statistics {self.name!r} do not say which heads retrieve: make them again with keepset "
                "calibrate, without --gate-steps 0."
            )
        return torch.stack([self.retrieval[index] for index in self.layers])


def _shape(layers: int, kv_heads: int, head_dim: int) -> str:
    return f"{layers} layers with {kv_heads} KV heads of size {head_dim}"


_offers: dict[str, Callable[[], Path]] = {}


def offer(model: str, make: Callable[[], Path]) -> None:
    """Says how to get the statistics of the model of this name where a recipe names no file."""
    _offers[model] = make


def load(file: str, model: str = "") -> Statistics:
    """The statistics in a file, or if none is named those that somebody offers for the model of this name.

    Raises:
        KeepsetError: there are none, or the file holds none that this version can read.
    """
    if not file and model not in _offers:
        raise KeepsetError(
            "This recipe looks at statistics of the model, and names no file that holds them: run "
            f"`keepset calibrate --model {model or 'MODEL'} --out stats.safetensors`, then write "
            "stats='stats.safetensors' in the recipe."
        )
    path = Path(file) if file else _offers[model]()
    try:
        state = path.stat()
    except (OSError, ValueError):
        raise KeepsetError(f"There is no file {file!r} with statistics: make one with keepset calibrate.") from None
    return _read(path, state.st_mtime_ns, state.st_size)


# More than one recipe in a comparison may name another file.
@lru_cache(maxsize=4)
def _read(path: Path, modified: int, size: int) -> Statistics:
    with _FILE.opened(path) as (file, provenance):
        layers = {index: _layer(file, index) for index in provenance["model"]["layers"]}
        if not layers:
            raise ValueError
        retrieval = _retrieval(file, layers)
    return Statistics(layers, provenance, str(path), retrieval=retrieval)


def _layer(file: Any, index: int) -> LayerStatistics:
    places = {name: f"layers.{index}.{name}" for name in FIELDS}
    if not set(places.values()) <= set(file.layout):
        raise ValueError
    tensors = {name: file[place] for name, place in places.items()}
    (kv_heads, dim), heads = tensors["direction"].shape, tensors["mean"].shape[0]
    shapes = {"direction": (kv_heads, dim), "mean": (heads, dim), "covariance": (heads, dim, dim), "norm": (heads, dim)}
    partner = tensors["partner"]
    if (
        any(tensor.shape != shapes.get(name, (dim,)) for name, tensor in tensors.items())
        or any(t.dtype != (torch.int64 if t is partner else torch.float32) for t in tensors.values())
        or not all(tensor.isfinite().all() for tensor in tensors.values())
        or heads % kv_heads
        or not torch.equal(partner[partner.clamp(0, dim - 1)], torch.arange(dim))
    ):
        raise ValueError
    return LayerStatistics(**tensors)


def _retrieval(file: Any, layers: Mapping[int, LayerStatistics]) -> dict[int, Tensor]:
    """The gates of all layers, or none."""
    places = {index: f"layers.{index}.{_RETRIEVAL}" for index in layers}
    written = set(file.layout)
    gates = {index: file[place] for index, place in places.items() if place in written}
    if gates and len(gates) < len(layers):
        raise ValueError
    for index, gate in gates.items():
        shape = layers[index].direction.shape[:1]
        if gate.shape != shape or gate.dtype != torch.float32 or not ((gate >= 0) & (gate <= 1)).all():
            raise ValueError
    return gates


def save(statistics: Statistics, path: Path) -> None:
    """Writes them whole or not at all; KeepsetError where the place cannot be written to."""
    # Cloned: layers may share tensors, and a file may not.
    tensors = {
        f"layers.{index}.{name}": getattr(layer, name).clone(memory_format=torch.contiguous_format)
        for index, layer in statistics.layers.items()
        for name in FIELDS
    } | {f"layers.{index}.{_RETRIEVAL}": gate.clone() for index, gate in statistics.retrieval.items()}
    _FILE.write(path, tensors, {"format": FORMAT, **statistics.provenance})
