"""`Statistics`: measurements of a model's queries, networks that were fitted to it, and the file that holds both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from keepset.core.files import TensorFile
from keepset.core.shapes import Rows
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import upload
from keepset.kernels.entry_format import MIDDLE, decode
from keepset.kernels.predictor import Networks, outputs_of, turns_of

FORMAT = 5
"""The version of the file format; raise it with every change to what is written."""
_FILE = TensorFile(
    "keepset_statistics",
    FORMAT,
    foreign="{path} is no file of keepset calibrate: give one that it has written.",
    other="{path} has format {found} of statistics, and this keepset reads format {version}: run keepset calibrate "
    "again.",
    damaged="{path} is damaged: run keepset calibrate again.",
)
_RETRIEVAL = "retrieval"
_offers: dict[str, Callable[[], Path]] = {}
"""Functions that make the file of a model's statistics, by the model's name."""


class Predictor(NamedTuple):
    """A network with one hidden layer for each KV head of a layer.

    With x an entry's key before rotation, its value, and the logarithms of both norms, the network gives two numbers,
    `linear x + output gelu(hidden x + hidden_bias) + output_bias`: the logarithm of the entry's score at a distance of
    64 tokens from the end of the text, and the slope, which is what each doubling of the distance adds. The weights
    contain the scales of the inputs.

    Most heads look less at entries far from the end of the text, whatever these hold, and in long texts more so. So a
    number that depends only on the distance and the text's length is added to all log scores: `age` has it for the
    lengths 1, 2, 4, ... and the distances 1, 2, 4, .... Between them it is interpolated linearly in both logarithms.
    Beyond the last of them it stays constant, and so does what slopes add.

    Attributes:
        linear: the weights from the inputs to both outputs.
        hidden: the weights of the hidden layer.
        hidden_bias: the biases of the hidden layer.
        output: the weights of both outputs.
        output_bias: the biases of both outputs.
        age: what the distances 1, 2, 4, ... from the end of texts of the lengths 1, 2, 4, ... add.
    """

    linear: Float[Tensor, "kv_heads 2 inputs"]
    hidden: Float[Tensor, "kv_heads width inputs"]
    hidden_bias: Float[Tensor, "kv_heads width"]
    output: Float[Tensor, "kv_heads 2 width"]
    output_bias: Float[Tensor, "kv_heads 2"]
    age: Float[Tensor, "kv_heads lengths knots"]

    def of_heads(self, heads: slice) -> Predictor:
        """Return the networks of some KV heads."""
        return Predictor(*(part[heads] for part in self))

    def outputs_of(self, inputs: Float[Tensor, "kv_heads entries inputs"]) -> Float[Tensor, "kv_heads entries 2"]:
        """Return each entry's log score at a distance of 64 tokens, and its slope."""
        return outputs_of(inputs, *self[:5])


def scores_at(
    codes: Float[Tensor, "*rows kv_heads entries"],
    age: Float[Tensor, "*rows kv_heads lengths knots"],
    distances: Int[Tensor, "*rows #kv_heads entries"],
    lengths: Int[Tensor, "*rows"],
) -> Float[Tensor, "*rows kv_heads entries"]:
    """Return the scores of entries at their distances from the end of the text, 1 for the newest token.

    Args:
        codes: the networks' outputs for the entries, as `keepset.kernels.predictor.encode` returns them.
        age: as in `Predictor`.
        distances: from the end of the text.
        lengths: tokens of each text.
    """
    last = age.shape[-1] - 1
    of_length = _interpolated(age.transpose(-1, -2), _places(lengths, age.shape[-2] - 1)[..., None, None, None])
    octaves = _places(distances, last)
    by_age = _interpolated(of_length.squeeze(-1), octaves)
    scores, slopes = decode(codes)
    return by_age.addcmul_(slopes, octaves - MIDDLE).add_(scores).exp_()


def _interpolated(
    knots: Float[Tensor, "*rows knots"], points: Float[Tensor, "*#rows entries"]
) -> Float[Tensor, "*rows entries"]:
    """Return values at places between knots, by linear interpolation between the two neighbouring knots.

    Args:
        knots: values at 0, 1, 2 and so on.
        points: where to look, from 0 on.
    """
    below = points.long().expand(*knots.shape[:-1], -1)
    rise = F.pad(knots.diff(dim=-1), (0, 1))
    at_zero = knots - rise * torch.arange(knots.shape[-1], device=knots.device)
    return at_zero.gather(-1, below).addcmul_(rise.gather(-1, below), points)


def knot_weights(numbers: Int[Tensor, " entries"], knots: int) -> Float[Tensor, "entries knots"]:
    """Return the interpolation weights of the knots 1, 2, 4, ... at distances or lengths.

    Args:
        numbers: distances or lengths from 1 on.
        knots: how many knots there are.
    """
    knot_positions = _places(numbers, knots - 1)[:, None]
    return (1 - (knot_positions - torch.arange(knots, device=numbers.device)).abs()).clamp(min=0)


def _places(numbers: Int[Tensor, "*shape"], last: int) -> Float[Tensor, "*shape"]:
    return numbers.clamp(min=1).float().log2().clamp(max=last)


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """The queries of one layer, averaged over many texts, and the layer's rotation of queries and keys.

    At position p the layer turns a row x into the row
    `gain[d] * (x[d] * cos(p * frequency[d]) + x[partner[d]] * sin(p * frequency[d]))`: each number and its partner
    are the coordinates of a plane. A number that is not rotated is its own partner and has frequency 0.

    Attributes:
        direction: for each KV head, the direction of its query heads' queries after rotation; see `qfilter`.
        mean: the mean of each query head's queries before rotation.
        covariance: the covariance of each query head's queries before rotation.
        norm: the mean norm of the queries in each number's plane, before rotation.
        partner: the number that each number rotates with.
        frequency: the angle per position of each number's rotation, in radians.
        gain: the factor of each number's rotation.
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
    """`LayerStatistics` for the layer of each row of a batch; each is computed when it is first needed.

    Args:
        take: returns a statistic by its name, with an axis for the rows in front.
    """

    direction: Float[Tensor, "batch kv_heads head_dim"]
    mean: Float[Tensor, "batch query_heads head_dim"]
    covariance: Float[Tensor, "batch query_heads head_dim head_dim"]
    norm: Float[Tensor, "batch query_heads head_dim"]
    partner: Int[Tensor, "batch head_dim"]
    gain: Float[Tensor, "batch head_dim"]

    def __init__(self, take: Callable[[str], Tensor]) -> None:
        self._take = take

    def __getattr__(self, name: str) -> Tensor:
        if name not in FIELDS:
            raise AttributeError(name)
        return vars(self).setdefault(name, self._take(name))

    def scores_at(
        self,
        codes: Float[Tensor, "batch kv_heads entries"],
        distances: Int[Tensor, "batch #kv_heads entries"],
        lengths: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch kv_heads entries"]:
        """Return the scores of entries at distances from the end of the text, 1 for the newest token.

        Args:
            codes: of the entries.
            distances: of the entries from the end of the text.
            lengths: tokens of each request.
        """
        return scores_at(codes, self._take("age"), distances, lengths)

    @cached_property
    def paired(self) -> Bool[Tensor, "batch head_dim"]:
        """Return which numbers have a partner."""
        return self.partner != torch.arange(self.partner.shape[-1], device=self.partner.device)

    def rotate(self, rows: Rows, positions: Int[Tensor, "batch places"]) -> Rows:
        """Return rows under the mean rotation of several positions: rotation is linear in cosines and sines.

        Args:
            rows: any number of them for each row of the batch.
            positions: over which the rotation is averaged.
        """
        angles = positions[..., None] * self._take("frequency").double()[:, None]
        cos, sin = (self.gain * part.mean(1).float() for part in (angles.cos(), angles.sin()))
        return rows * cos[:, None, None] + self._partners(rows) * sin[:, None, None]

    def in_plane(self, rows: Float[Tensor, "batch *rows head_dim"]) -> Float[Tensor, "batch *rows head_dim"]:
        """Return for every number the norm of its row in its plane; a rotation changes it by its gain only."""
        return rows.where(~_beside(self.paired, rows), torch.hypot(rows, self._partners(rows))).abs()

    def _partners(self, rows: Float[Tensor, "batch *rows head_dim"]) -> Float[Tensor, "batch *rows head_dim"]:
        return rows.gather(-1, _beside(self.partner, rows).expand_as(rows))


def _beside(numbers: Shaped[Tensor, "batch head_dim"], rows: Tensor) -> Shaped[Tensor, "batch *ones head_dim"]:
    return numbers.view(len(numbers), *[1] * (rows.ndim - 2), -1)


@dataclass(frozen=True)
class HeadShare:
    """The heads of a model that one process of several has (tensor parallelism).

    Query heads are divided, and so are KV heads. If there are more processes than KV heads, several have the same one.

    Attributes:
        rank: the process, from 0.
        ranks: how many processes there are.
        kv_heads: KV heads of a layer in the whole model.
    """

    rank: int
    ranks: int
    kv_heads: int

    def of(self, heads: int) -> slice:
        """Return which of `heads` heads the process has."""
        first = self.rank * heads // self.ranks
        return slice(first, first + max(1, heads // self.ranks))


@dataclass(frozen=True, eq=False)
class Statistics:
    """Measurements of the layers that can be compressed.

    Attributes:
        layers: statistics by the layer's index in the model.
        retrieval: for each of these layers, how much each KV head needs of the distant text, from 0 to 1; see
            `duo_attention`. Empty if it was not measured.
        predictors: for each of these layers, networks that compute an entry's score from its key and value; see
            `distilled`. Empty if none was fitted.
        provenance: model, texts and version of keepset that they come from; plain JSON.
        name: the recipe's name for them, for messages.
    """

    layers: Mapping[int, LayerStatistics]
    retrieval: Mapping[int, Float[Tensor, " kv_heads"]] = dataclasses.field(default_factory=dict, kw_only=True)
    predictors: Mapping[int, Predictor] = dataclasses.field(default_factory=dict, kw_only=True)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""

    def check(self, layers: tuple[int, ...], kv_heads: int, head_dim: int | None = None) -> None:
        """Check that they were measured on a model of this shape.

        Args:
            layers: indices of the compressed layers.
            kv_heads: KV heads of a layer.
            head_dim: numbers of a key; None if it is not known.

        Raises:
            KeepsetError: they were not.
        """
        heads, size = next(iter(self.layers.values())).direction.shape
        file_shape = len(self.layers), heads, None if head_dim is None else size
        ours = len(layers), kv_heads, head_dim
        if tuple(self.layers) != layers or file_shape != ours:
            raise KeepsetError(
                f"The statistics {self.name!r} are of another model: theirs has {_shape(*file_shape)}, this one "
                f"{_shape(*ours)}. Make them for this model with keepset calibrate."
            )

    def of_heads(self, share: HeadShare) -> Statistics:
        """Return the statistics of the heads that a process has.

        Raises:
            KeepsetError: if they were measured on a model with another number of KV heads.
        """
        layers = tuple(self.layers)
        self.check(layers, share.kv_heads)
        kv_heads = share.of(share.kv_heads)

        def divided(layer: LayerStatistics) -> LayerStatistics:
            head_rows = share.of(len(layer.mean))
            mean, covariance, norm = layer.mean[head_rows], layer.covariance[head_rows], layer.norm[head_rows]
            direction = layer.direction[kv_heads]
            return dataclasses.replace(layer, direction=direction, mean=mean, covariance=covariance, norm=norm)

        return dataclasses.replace(
            self,
            layers={index: divided(layer) for index, layer in self.layers.items()},
            retrieval={index: gates[kv_heads] for index, gates in self.retrieval.items()},
            predictors={index: predictor.of_heads(kv_heads) for index, predictor in self.predictors.items()},
        )

    def on(self, device: torch.device, name: str) -> Tensor:
        """Return a field of the layers' statistics or predictors, and keep it on the device.

        Args:
            device: where the result is.
            name: of the field.
        """
        holders = self.predictors if name in Predictor._fields else self.layers

        def make() -> Tensor:
            return upload(torch.stack([getattr(holders[index], name) for index in self.layers]), device)

        return self._once((device, name), make)

    def networks(self, device: torch.device) -> Networks:
        """Return the predictors of all layers with the layers' rotations, and keep them on the device.

        Raises:
            KeepsetError: if no predictors were fitted.
        """

        def make() -> Tensor:
            return upload(turns_of(torch.stack([layer.frequency for layer in self.layers.values()])), device)

        names = (*(name for name in Predictor._fields if name != "age"), "partner", "gain")
        return Networks(turns=self._once((device, "turns"), make), **{name: self.on(device, name) for name in names})

    def _once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the value for a key, computed at the first call."""
        computed: dict[Hashable, Tensor] = vars(self).setdefault("_made", {})
        if key not in computed:
            with torch.inference_mode(False):  # kept for later calls, which may be outside of the caller's mode
                computed[key] = make()
        return computed[key]

    def gates(self) -> Float[Tensor, "layers kv_heads"]:
        """Return how much each KV head retrieves; raise KeepsetError if that was not measured."""
        if not self.retrieval:
            raise KeepsetError(
                f"The statistics {self.name!r} do not say which heads retrieve: make them again with keepset "
                "calibrate, without --gate-steps 0."
            )
        return torch.stack([self.retrieval[index] for index in self.layers])


def _shape(layers: int, kv_heads: int, head_dim: int | None) -> str:
    return f"{layers} layers with {kv_heads} KV heads" + (f" of size {head_dim}" if head_dim is not None else "")


def offer(model: str, make: Callable[[], Path]) -> None:
    """Register a function that returns the file of a model's statistics, made if it does not exist.

    Args:
        model: the model's name or folder.
        make: returns the file's path; called at the first use.
    """
    _offers[model] = make


def offered(model: str) -> Statistics | None:
    """Return the statistics that `offer` registered for a model; None if there are none.

    Raises:
        KeepsetError: if this version cannot read them.
    """
    return load("", model) if model in _offers else None


def load(file: str, model: str = "") -> Statistics:
    """Return the statistics in a file, or those that are offered for a model.

    Args:
        file: the file; "" for the statistics that `offer` registered for the model.

    Raises:
        KeepsetError: if there are none, or the file holds none that this version can read.
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
        retrieval, predictors = _retrieval(file, layers), _predictors(file, layers)
    return Statistics(layers, provenance, str(path), retrieval=retrieval, predictors=predictors)


def _layer(file: Any, index: int) -> LayerStatistics:
    tensors = {name: file[f"layers.{index}.{name}"] for name in FIELDS}
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
    gate_names = {index: f"layers.{index}.{_RETRIEVAL}" for index in layers}
    if not any(gate_name in file for gate_name in gate_names.values()):
        return {}
    gates = {index: file[gate_name] for index, gate_name in gate_names.items()}
    for index, gate in gates.items():
        shape = layers[index].direction.shape[:1]
        if gate.shape != shape or gate.dtype != torch.float32 or not ((gate >= 0) & (gate <= 1)).all():
            raise ValueError
    return gates


def _predictors(file: Any, layers: Mapping[int, LayerStatistics]) -> dict[int, Predictor]:
    tensor_names = {index: [f"layers.{index}.{name}" for name in Predictor._fields] for index in layers}
    if not any(tensor_name in file for names in tensor_names.values() for tensor_name in names):
        return {}
    predictors = {}
    for index, names in tensor_names.items():
        predictor = Predictor(*(file[tensor_name].float() for tensor_name in names))
        heads, width = predictor.hidden_bias.shape
        if (
            heads != len(layers[index].direction)
            or predictor.hidden.shape != (heads, width, predictor.linear.shape[-1])
            or predictor.linear.shape[:-1] != (heads, 2)
            or predictor.output.shape != (heads, 2, width)
            or predictor.output_bias.shape != (heads, 2)
            or predictor.age.dim() != 3
            or len(predictor.age) != heads
            or not predictor.age.numel()
            or not all(part.isfinite().all() for part in predictor)
        ):
            raise ValueError
        predictors[index] = predictor
    return predictors


def save(statistics: Statistics, path: Path) -> None:
    """Write statistics to a file, whole or not at all; raise KeepsetError if it cannot be written.

    Args:
        statistics: what to write.
        path: the file.
    """
    # Cloned: layers may share tensors, and a file may not.
    tensors = {
        f"layers.{index}.{name}": getattr(layer, name).clone(memory_format=torch.contiguous_format)
        for index, layer in statistics.layers.items()
        for name in FIELDS
    }
    tensors |= {f"layers.{index}.{_RETRIEVAL}": gate.clone() for index, gate in statistics.retrieval.items()}
    for index, predictor in statistics.predictors.items():
        tensors |= {f"layers.{index}.{name}": part.clone() for name, part in predictor._asdict().items()}
    _FILE.write(path, tensors, {"format": FORMAT, **statistics.provenance})
