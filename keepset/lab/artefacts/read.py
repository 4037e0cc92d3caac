"""Reading the statistics that others have published for a model, and adding them to the model's statistics."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from keepset.core.statistics import Statistics
from keepset.core.tensor_file import opened, parse_json
from keepset.errors import KeepsetError
from keepset.lab.artefacts.artefact import Artefact, Found, ModelShape
from keepset.lab.artefacts.formats import FORMATS, TABLE

_CONFIG, _TENSORS = "config.json", "model.safetensors"
_DAMAGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, EOFError)
"""The errors that reading damaged contents raises. PyTorch's are RuntimeErrors."""


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
        artefact = next((made for read in FORMATS if (made := read(found)) is not None), None)
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


def _found(path: Path) -> Found:
    """Return the contents of a file or folder; raise ValueError or OSError if it cannot be read."""
    if path.is_dir():
        named = [path / name for name in (_TENSORS, TABLE) if (path / name).is_file()]
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
