"""Measurements of models that others have published: their files are read, checked and turned into `Statistics`."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.core.files import opened, parse_json
from keepset.core.statistics import Statistics
from keepset.errors import KeepsetError
from keepset.hf.model_support import head_dim_of

_CONFIG, _TENSORS, _TABLE = "config.json", "model.safetensors", "full_attention_heads.tsv"
"""Files of a published folder; the last is DuoAttention's."""
_DAMAGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, EOFError)
"""The errors that reading damaged contents raises. PyTorch's are RuntimeErrors."""
_MADE = ("dataset_name", "num_samples", "sample_seq_len", "n_sink")
"""Facts of Expected Attention's config that are kept."""
_HEAD = re.compile(r"layer(\d{2,})_head(\d{2,})")
_INTERLEAVED = "interleaved"
"""TriAttention's names of a head, and of planes that are made of neighbours."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that an artefact has to fit.

    Attributes:
        layers: all layers, also those that keepset does not compress.
        query_heads: query heads of a layer.
        kv_heads: KV heads of a layer.
        head_dim: numbers per key.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return the sizes in a model's configuration."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(config.num_hidden_layers, heads, kv_heads, head_dim_of(model))

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.query_heads} query and {self.kv_heads} KV heads of size {self.head_dim}"


@dataclass(frozen=True, eq=False)
class Found:
    """Contents of a file or folder.

    Attributes:
        tensors: tensors of a safetensors file, by their names; empty if there is none.
        config: the JSON object beside it; empty if there is none.
        unpickled: the contents of a `.pt` file; None if there is none.
        table: the numbers of a `.tsv` file, row by row; empty if there is none.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    unpickled: Any = None
    table: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, eq=False)
class Artefact:
    """Contents of an artefact, for all layers of a model.

    Attributes:
        format: the name of the format.
        fields: fields of `LayerStatistics` by their names, with an axis for the layers in front.
        retrieval: how much each KV head retrieves.
        partner: index of the number with which each number of a head is rotated, if the fields depend on it.
        made: the file's facts on how it was made or is used; plain JSON.
        advice: how a recipe must use it to follow its authors; "" if defaults do so.
    """

    format: str
    fields: Mapping[str, Float[Tensor, "layers heads *rest"]] = field(default_factory=dict)
    retrieval: Float[Tensor, "layers kv_heads"] | None = None
    partner: Int[Tensor, " head_dim"] | None = None
    made: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""

    @property
    def gives(self) -> list[str]:
        """Return the names of the statistics that it gives."""
        return [*self.fields, *([] if self.retrieval is None else ["retrieval"])]

    def fits(self, shape: ModelShape) -> bool:
        """Return whether it fits a model of this shape."""
        layers, heads, kv_heads, dim = shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim
        shapes = {
            "direction": (layers, kv_heads, dim),
            "mean": (layers, heads, dim),
            "covariance": (layers, heads, dim, dim),
            "norm": (layers, heads, dim),
        }
        return all(tensor.shape == shapes[name] for name, tensor in self.fields.items()) and (
            self.retrieval is None or self.retrieval.shape == (layers, kv_heads)
        )

    @property
    def finite(self) -> bool:
        """Return whether all its numbers are finite."""
        numbers = [*self.fields.values(), *([] if self.retrieval is None else [self.retrieval])]
        return all(bool(tensor.isfinite().all()) for tensor in numbers)


def read_artefact(path: Path, model: PreTrainedModel) -> Artefact:
    """Return the artefact in a published file or folder.

    Args:
        path: a file, or a folder with a copy of a hub's repository.
        model: the model for which it must have been made.

    Raises:
        KeepsetError: if it has no known format, is damaged, or fits a model of another shape.
    """
    try:
        found = _found(path)
        artefact = next((parsed for read in FORMATS if (parsed := read(found)) is not None), None)
        if artefact is not None and not artefact.finite:
            raise ValueError("numbers are not finite")
    except KeepsetError:
        raise
    except OSError as error:
        raise KeepsetError(f"{str(path)!r} cannot be read ({error.strerror or error}).") from None
    except _DAMAGED:
        raise KeepsetError(f"{str(path)!r} is damaged, or its format has changed: download it again.") from None
    if artefact is None:
        raise KeepsetError(
            f"{str(path)!r} holds nothing that keepset can import: give a published file or folder of "
            "DuoAttention, Q-Filters, Expected Attention (kvpress) or TriAttention."
        )
    shape = ModelShape.of(model)
    if not artefact.fits(shape):
        raise KeepsetError(
            f"{str(path)!r} ({artefact.format}) is of another model: this one has {shape}. Give what was published for "
            "this model."
        )
    return artefact


def with_artefact(statistics: Statistics, artefact: Artefact, name: str = "") -> Statistics:
    """Return statistics in which the artefact's values replace the measured ones.

    Args:
        statistics: the measured statistics.
        artefact: what others have published for the same model.
        name: the file's name, for the provenance.

    Raises:
        KeepsetError: if the artefact's model has other layers, or rotates its heads differently.
    """
    layers = {}
    for index, measured in statistics.layers.items():
        fields = {field: numbers[index].contiguous() for field, numbers in artefact.fields.items()}
        gates = None if artefact.retrieval is None else artefact.retrieval[index]
        fits = all(numbers.shape == getattr(measured, field).shape for field, numbers in fields.items()) and (
            gates is None or len(gates) == len(measured.direction)
        )
        if not fits:
            raise KeepsetError(
                f"{name!r} ({artefact.format}) does not fit layer {index}, whose heads are of another kind."
            )
        if artefact.partner is not None and not torch.equal(artefact.partner, measured.partner):
            raise KeepsetError(
                f"{name!r} ({artefact.format}) pairs the numbers of a head differently from the rotation of layer "
                f"{index} of this model, so it cannot be used: run keepset calibrate without it."
            )
        layers[index] = replace(measured, **fields)
    retrieval = statistics.retrieval
    if artefact.retrieval is not None:
        retrieval = {index: artefact.retrieval[index].contiguous() for index in layers}
    origin = {"format": artefact.format, "file": name, "gives": artefact.gives, **artefact.made}
    imported = [*statistics.provenance.get("imported", []), origin]
    provenance = {**statistics.provenance, "imported": imported}
    return replace(statistics, layers=layers, retrieval=retrieval, provenance=provenance)


# --- files, as they are


def _found(path: Path) -> Found:
    """Return the contents of a file or folder; raise ValueError or OSError if it cannot be read."""
    if path.is_dir():
        named = [path / name for name in (_TENSORS, _TABLE) if (path / name).is_file()]
        return _found(named[0]) if len(named) == 1 else Found()
    config = path.with_name(_CONFIG)
    fields = _config(config) if config.is_file() else {}
    if path.suffix == ".pt":
        return Found(unpickled=_unpickled(path))
    if path.suffix == ".tsv":
        lines = path.read_text("utf-8").splitlines()
        return Found(config=fields, table=[[float(number) for number in line.split("\t")] for line in lines if line])
    if path.suffix == ".safetensors":
        with opened(path) as tensors:
            return Found({name: tensors[name] for name in tensors.layout}, fields)
    path.stat()  # raises if there is no such file
    return Found()


def _config(path: Path) -> Mapping[str, Any]:
    fields = parse_json(path.read_bytes())
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    return fields


def _unpickled(path: Path) -> Any:
    """Return the contents of a `.pt` file without running any code in it."""
    path.open("rb").close()  # later errors are about its contents
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise ValueError("the archive ends early") from None
    except pickle.UnpicklingError:
        raise KeepsetError(
            f"{str(path)!r} is damaged, or contains code, which keepset does not run. If you trust it, extract its "
            'tensors: python -c "import sys, torch; whole = torch.load(sys.argv[1], weights_only=False); '
            "torch.save({name: whole[name] for name in ('metadata', 'stats') if name in whole}, "
            f'sys.argv[2])" {path.name} plain.pt'
        ) from None


# --- the formats: each function returns the artefact, or None if the contents have another format


def duo_attention(found: Found) -> Artefact | None:
    """Return DuoAttention's gates (arXiv:2410.10819) from its table, and its training's options from `config.json`.

    A row of the table is a layer, a column a KV head, a number the gate; gates are clipped to 0 to 1, as in the
    authors' program. The config gives the sinks and recent tokens with which the gates were trained.
    """
    if not found.table:
        return None
    if len({len(row) for row in found.table}) != 1:
        raise ValueError("rows of different lengths")
    gates = torch.tensor(found.table, dtype=torch.float64)
    names = {"sinks": "sink_size", "recent": "recent_size"}
    sizes = {name: found.config[field] for name, field in names.items() if type(found.config.get(field)) is int}
    options = ", ".join(f"{name}={size}" for name, size in sizes.items())
    advice = f"the gates were trained with duo_attention({options})" if sizes else ""
    # NaN is not clipped, and is refused later.
    return Artefact("DuoAttention", retrieval=gates.clamp(0, 1).float(), made=sizes, advice=advice)


def qfilters(found: Found) -> Artefact | None:
    """Return Q-Filters' directions (arXiv:2503.02812) from the file of its authors' `QFilters.save_pretrained`.

    The only tensor is `q_filters`, `[layers, kv_heads, head_dim]`. The published directions point away from most
    queries: the authors' `make_filters.py` negates them, and their cache keeps the keys with the smallest products. In
    keepset they point along the queries, so their sign is reversed.
    """
    if set(found.tensors) != {"q_filters"}:
        return None
    return Artefact("Q-Filters", fields={"direction": -found.tensors["q_filters"].float()})


def expected_attention(found: Found) -> Artefact | None:
    """Return Expected Attention's statistics (arXiv:2510.00636) from the file of kvpress' `ExpectedAttentionStats`.

    Tensors are `query_mean`, `[layers, query_heads, head_dim]`, and `query_cov`, `[layers, query_heads, head_dim,
    head_dim]`, of queries before rotation. The config names the texts, and how many first tokens were left out.
    """
    if set(found.tensors) != {"query_mean", "query_cov"}:
        return None
    fields = {"mean": found.tensors["query_mean"].float(), "covariance": found.tensors["query_cov"].float()}
    provenance = {name: found.config[name] for name in _MADE if isinstance(found.config.get(name), str | int)}
    return Artefact("Expected Attention", fields=fields, made=provenance)


def triattention(found: Found) -> Artefact | None:
    """Return TriAttention's means and norms (arXiv:2604.04921) from the `.pt` file of its authors' `calibrate.py`.

    The file is a dictionary of `metadata` and `stats`. The latter has `layerNN_headNN` for each query head, with
    `q_mean_real`, `q_mean_imag` and `q_abs_mean`: mean and mean norm of the queries before rotation, in each plane.
    Planes are made of the two halves of a head, or of neighbours if `rope_style` is "interleaved".
    """
    if not isinstance(found.unpickled, dict) or not {"metadata", "stats"} <= set(found.unpickled):
        return None
    metadata, stats = found.unpickled["metadata"], found.unpickled["stats"]
    style = metadata.get("rope_style", "half")
    if style not in ("half", _INTERLEAVED):
        raise ValueError("an unknown style of rotation")
    head_names = {tuple(map(int, match.groups())): name for name in stats if (match := _HEAD.fullmatch(name))}
    layers, heads = (1 + max(numbers) for numbers in zip(*head_names, strict=True))
    if len(head_names) != layers * heads:
        raise ValueError("heads are missing")

    def stacked(part: str) -> Float[Tensor, "layers heads planes"]:
        ordered = [stats[head_names[layer, head]] for layer in range(layers) for head in range(heads)]
        return torch.stack([_numbers(head, part) for head in ordered]).unflatten(0, (layers, heads))

    real, imaginary, norm = map(stacked, ("q_mean_real", "q_mean_imag", "q_abs_mean"))
    half = torch.arange(real.shape[-1])
    first, second = half, half + len(half)
    return Artefact(
        "TriAttention",
        fields={"mean": _joined(real, imaginary, style), "norm": _joined(norm, norm, style)},
        partner=_joined(second, first, style) if style == "half" else _joined(2 * half + 1, 2 * half, style),
        made={name: metadata[name] for name in ("model_name", "rope_style") if isinstance(metadata.get(name), str)},
    )


def _numbers(head: Mapping[str, Any], part: str) -> Float[Tensor, " planes"]:
    numbers = head[part]
    if not isinstance(numbers, Tensor) or numbers.ndim != 1:
        raise ValueError("no row of numbers")
    return numbers.float()


def _joined(first: Tensor, second: Tensor, style: str) -> Tensor:
    """Return the numbers of a head, given the first and the second coordinates of its planes."""
    return torch.stack([first, second], -1).flatten(-2) if style == _INTERLEAVED else torch.cat([first, second], -1)


FORMATS: Sequence[Callable[[Found], Artefact | None]] = (duo_attention, qfilters, expected_attention, triattention)
