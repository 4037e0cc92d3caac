"""The file of a compressed context: what a cache holds between two forwards, so that it can go on from there.

One safetensors file. Of every compressed layer it has the columns of its store, packed head after head, their
counts, and the queries that were recorded for the next event; of sliding windows their keys and values. The metadata
is one JSON object, with a digest of it and of all tensors: a damaged byte is noticed, wherever it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

import keepset
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.tensor_file import opened, write
from keepset.errors import KeepsetError
from keepset.hf.fingerprint import fingerprint
from keepset.hf.layer import KeepLayer
from keepset.hf.progress import Progress
from keepset.hf.store import EntryStore

if TYPE_CHECKING:
    import transformers

    from keepset.hf.cache import Cache

FORMAT = 1
"""Of the file; raise it with every change to what is written."""
_METADATA = "keepset_context"
_ADVICE = "give a file that keepset.Cache.save or keepset context build has written"
_AGAIN = "build it again"


@dataclass(frozen=True)
class Header:
    """What a file says of itself before anything else is read.

    Attributes:
        model: the name of the model, a folder or a hub name.
        tokens: of the context, padding included.
    """

    recipe: str
    model: str
    tokens: int


@dataclass(frozen=True, eq=False)
class Context:
    """What a file holds, once it has been found to be whole and of this model.

    Attributes:
        event: figures of the newest compression, if there was one.
        keep_set: what that one kept.
    """

    recipe: str
    event: dict[str, Any] | None
    keep_set: KeepSet | None
    _progress: Progress
    _tensors: dict[str, dict[str, Tensor]]

    def restore(self, layers: Sequence[Any]) -> None:
        """Puts into the empty layers of a new cache what the saved one held."""
        for index, layer in enumerate(layers):
            tensors = self._tensors[str(index)]
            if isinstance(layer, KeepLayer):
                store = EntryStore.of(_part(tensors, "columns."), tensors["counts"])
                device = tensors["counts"].device
                layer.resume(store, self._progress.to(device), _part(tensors, "recorded."))
            else:
                layer.lazy_initialization(tensors["keys"], tensors["values"])
                layer.keys, layer.values = tensors["keys"], tensors["values"]
                layer.cumulative_length = self._progress.logical


def save(cache: Cache, model: transformers.PreTrainedModel, path: Path, name: str) -> None:
    """Writes what a cache of this model holds; `name` is what the model is found by again.

    Raises:
        KeepsetError: the cache is not between two forwards after its prompt, the model has layers of a kind that
            is not saved, or the place cannot be written to.
    """
    reached = progress(cache)
    tensors = {name: tensor for name in _LENGTHS if (tensor := getattr(reached, name)) is not None}
    for index, layer in enumerate(cache.layers):
        found = _layer(layer, cache.keep_set)
        tensors |= {f"{_LAYER}{index}.{name}": tensor for name, tensor in found.items()}
    # Layers may share small tensors, and a file may not.
    tensors = {
        name: tensor.detach() if ".columns." in name else tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    event = cache.events[-1] if cache.events else None
    metadata = {
        "format": FORMAT,
        "keepset": keepset.__version__,
        "recipe": str(cache.recipe),
        "model": name,
        "fingerprint": fingerprint(model),
        "progress": {name: getattr(reached, name) for name in _NUMBERS},
        "layers": len(cache.layers),
        "event": None if event is None else {name: getattr(event, name) for name in _FIGURES},
    }
    write(path, tensors, _METADATA, {**metadata, "digest": _digest(metadata, tensors)})


def header(path: Path) -> Header:
    """What a file says of itself; its tensors are not looked at.

    Raises:
        KeepsetError: it is no saved context that this version can read.
    """
    with _opened(path) as (_, metadata):
        return Header(str(metadata["recipe"]), str(metadata["model"]), int(metadata["progress"]["logical"]))


def read(path: Path, model: transformers.PreTrainedModel) -> Context:
    """The context in a file, on this model's devices.

    Raises:
        KeepsetError: it is no saved context that this version can read, it is damaged, or it is of another model.
    """
    with _opened(path) as (file, metadata):
        _check_model(path, metadata["fingerprint"], fingerprint(model))
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        if metadata.pop("digest") != _digest(metadata, tensors):
            raise ValueError
        lengths: dict[str, Any] = {name: tensors.get(name) for name in _LENGTHS}
        devices = _devices(model)
        layers = {
            str(index): {
                name: tensor.to(devices.get(index, model.device))
                for name, tensor in _part(tensors, f"{_LAYER}{index}.").items()
            }
            for index in range(metadata["layers"])
        }
        return Context(
            metadata["recipe"],
            metadata["event"],
            _keep_set(layers),
            Progress(**metadata["progress"], **lengths),
            layers,
        )


_LAYER = "layers."
_LENGTHS = ("lengths", "prompts", "seen")
_NUMBERS = ("logical", "prompt", "compressed_at", "next_event")
_FIGURES = ("length", "entries", "kept", "nbytes_before", "seconds")


def progress(cache: Cache) -> Progress:
    """How far a cache has come.

    Raises:
        KeepsetError: it does not hold a whole prompt, or nothing that keepset has compressed.
    """
    if not cache.kept_layers:
        raise KeepsetError("Every layer of this model has a window of its own, so keepset has nothing to save.")
    found = [layer.progress for layer in cache.kept_layers.values()]
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    if found[0] is None or any(layer.get_seq_length() != found[0].logical for layer in layers):
        raise KeepsetError("This cache does not hold a whole prompt yet: run the model on all of it first.")
    return found[0]


def _layer(layer: Any, keep_set: KeepSet | None) -> dict[str, Tensor]:
    if isinstance(layer, KeepLayer):
        assert layer.store is not None
        tensors = {f"columns.{name}": column for name, column in layer.store.packed.items()}
        tensors |= {f"recorded.{name}": column for name, column in layer.recorded.items()}
        if keep_set is not None:
            kept = keep_set.layer(layer.index)
            tensors |= {"kept.positions": kept.packed_positions, "kept.counts": kept.counts}
        counts = torch.tensor(layer.store.counts)
        return {**tensors, "counts": counts.view(layer.store.batch, layer.store.kv_heads)}
    if type(layer) is DynamicSlidingWindowLayer and layer.keys is not None and layer.values is not None:
        # What lies before the window is there only while a draft may be taken back.
        first = max(layer.keys.shape[2] - layer.sliding_window + 1, 0)
        return {"keys": layer.keys[:, :, first:], "values": layer.values[:, :, first:]}
    raise KeepsetError(
        f"The model has a {type(layer).__name__} among the layers of its cache, and keepset saves only those with "
        "keys and values: this context cannot be saved."
    )


def _keep_set(layers: Mapping[str, Mapping[str, Tensor]]) -> KeepSet | None:
    kept = []
    for index, tensors in layers.items():
        if "kept.counts" in tensors:
            keys, values = tensors["columns.keys"], tensors["columns.values"]
            entry_bytes = (keys.shape[-1] + values.shape[-1]) * keys.element_size()
            positions = tensors["kept.positions"]
            kept.append(LayerKeepSet(int(index), positions, positions, tensors["kept.counts"], entry_bytes))
    return KeepSet(kept) if kept else None


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _devices(model: transformers.PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer is, for models that are spread over several devices."""
    modules = (module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int))
    return {module.layer_idx: parameter.device for module in modules for parameter in module.parameters()}


def _digest(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _opened(path: Path) -> AbstractContextManager[tuple[Any, dict[str, Any]]]:
    """A file and its metadata; whatever goes wrong with them is told in one sentence."""
    shown = str(path)
    if not path.is_file():
        raise KeepsetError(f"There is no file {shown!r}: {_ADVICE}.")
    return opened(
        path,
        _METADATA,
        FORMAT,
        foreign=f"{shown!r} is no saved context: {_ADVICE}.",
        unreadable=f"{shown!r} is damaged or no saved context: {_ADVICE}.",
        other=lambda found: (
            f"{shown!r} has format {found} of saved contexts, and this keepset reads format {FORMAT}: {_AGAIN}, or use "
            "the version of keepset that wrote it."
        ),
        damaged=f"{shown!r} is damaged: {_AGAIN}.",
    )


def _check_model(path: Path, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    other = [name for name, value in ours.items() if theirs[name] != value]
    if not other:
        return
    # The first says it: what follows from it, such as the weights, differs too.
    name = other[0]
    differs = "weights differ" if name == "weights" else f"{name} differs: {theirs[name]} there, {ours[name]} here"
    raise KeepsetError(f"{str(path)!r} is a context of another model, whose {differs}; load that model.")
