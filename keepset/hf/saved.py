"""The file of a compressed context: everything that a cache holds between two forwards, so that it can resume.

It is one safetensors file. For each compressed layer it has the columns of its store, packed head after head, their
counts, and the next event's other inputs. For each sliding window it has keys and values, and for layers with recurrent
or convolution states these. The metadata is one JSON object with a digest of every tensor and one of itself, so that
damage is noticed in every part that is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

import keepset
from keepset.core.budget import Ranges
from keepset.core.files import quoted
from keepset.core.keep_set import HeadCounts, KeepSet, KeptIndices, LayerKeepSet
from keepset.core.tensor_file import TensorFile, TensorLocation, TensorReader
from keepset.errors import KeepsetError, RecipeError
from keepset.hf import saved_layers, saved_schema
from keepset.hf.fingerprint import difference, fingerprint
from keepset.hf.images import image_token_ids
from keepset.hf.known_text import SavedText, text_digest
from keepset.hf.layer import DecodingPhase
from keepset.hf.observed_cache import ObservedCache
from keepset.hf.progress import Event, Progress
from keepset.hf.saved_schema import FIGURES, LAYER, STATE
from keepset.hf.store import RESIDUAL
from keepset.kernels.entry_format import format_of
from keepset.recipe import Recipe, in_full, in_short

FORMAT = 8
"""Version of the file's format; raise it with every change to what is written."""
_ADVICE = "give a file that keepset.Cache.save or keepset context build has written"
_FILE = TensorFile(
    "keepset_context",
    FORMAT,
    foreign=f"{{path}} is no saved context: {_ADVICE}.",
    unreadable=f"{{path}} is damaged or no saved context: {_ADVICE}.",
    other="{path} has format {found} of saved contexts, and this keepset reads format {version}: build it again, or "
    "use the version of keepset that wrote it.",
    damaged="{path} is damaged: build it again.",
)


class Header(NamedTuple):
    """Summary of a file.

    Attributes:
        recipe: the recipe that compressed it.
        model: name of its model, a folder or a name on the Hugging Face Hub.
        tokens: how many it has, padding included.
    """

    recipe: str
    model: str
    tokens: int


class Contents(NamedTuple):
    """Contents of a file, as far as they are known without reading its entries. All of it is checked.

    Attributes:
        header: the file's summary.
        digest: the digest of the whole file.
        fingerprint: the fingerprint of its model.
        requests: number of requests.
        padded: whether some of their tokens are padding.
        goes_on: whether its recipe compresses further while questions are asked.
        prompt: number of tokens after which it does so.
        text: digest of its tokens; "" if the file does not have it.
        opening: its first tokens, if every message begins with them.
        joint: tokens that come between the text and a question that begins with the opening.
        columns: names of the columns of an entry, over all layers.
        sizes: sizes of a key and of a value.
        counts: number of entries of every head, by the layer's index.
        layers: number of layers of the model's cache, compressed or not.
        states: whether some layers hold recurrent or convolution states.
        images: whether some of its tokens are of images.
    """

    header: Header
    digest: str
    fingerprint: dict[str, str]
    requests: int
    padded: bool
    goes_on: bool
    prompt: int
    text: str
    opening: list[int]
    joint: list[int]
    columns: set[str]
    sizes: set[int]
    counts: dict[int, Int[Tensor, "requests kv_heads"]]
    layers: int
    states: bool
    images: bool


class Saved(NamedTuple):
    """A context that was loaded, on its model's devices.

    Attributes:
        path: the file's path.
        recipe: the recipe that compressed it.
        progress: the progress of its cache.
        event: its newest event, if there was one.
        next_event: logical length of the next event; None if there is none.
        offsets: the differences between the model's positions and numbers of tokens, if they are not 0.
        layers: the tensors of each layer.
    """

    path: Path
    recipe: Recipe
    progress: Progress
    event: Event | None
    next_event: int | None
    offsets: Int[Tensor, "requests 1"] | None
    layers: list[dict[str, Tensor]]

    def restore(self, cache: ObservedCache) -> None:
        """Put the context into an empty cache of its recipe, except for the event.

        Raises:
            CorruptFileError: the model has other layers, or an input of the next event is missing.
        """
        if len(cache.layers) != len(self.layers) or not cache.set_position_offsets(self.offsets):
            raise _FILE.corrupt(self.path)
        cache.progress = self.progress
        if cache.schedule.every is None or self.next_event is None:
            cache.stop_watching()
        else:
            for kept in cache.managed_layers.values():
                kept.decoding = DecodingPhase(cache.needs, cache.schedule.every, self.next_event)
        try:
            for layer, tensors in zip(cache.layers, self.layers, strict=True):
                saved_layers.restore(layer, tensors, self.progress.logical)
        except ValueError:
            raise _FILE.corrupt(self.path) from None


def save(
    path: Path,
    cache: ObservedCache,
    recipe: str,
    event: Event | None,
    model: PreTrainedModel,
    name: str,
    tokens: Sequence[int] | None,
    opening: int,
    joint: Sequence[int],
) -> None:
    """Write what a cache holds into a file.

    Args:
        recipe: the text of the cache's recipe.
        event: the newest event; None if there was none.
        model: the cache's model.
        name: the name or folder by which the model is found.
        tokens: token ids of the text, if a server is to find the file by them; else None.
        opening: how many of them every message begins with.
        joint: tokens between the text and a question.

    Raises:
        KeepsetError: the cache holds no whole prompt, or another number of tokens, or has layers that cannot be saved.
    """
    progress, keep_set = cache.require_prompt(), None if event is None else event.keep_set
    if tokens is not None and (len(progress.lengths), progress.logical) != (1, len(tokens)):
        raise KeepsetError(
            f"token_ids are {len(tokens)}, and the cache has {progress.logical} tokens of {len(progress.lengths)} "
            "requests: give those of its only request."
        )
    decoding = next(iter(cache.managed_layers.values())).decoding
    tensors = {"lengths": progress.lengths, "prompts": progress.prompts}
    if progress.valid is not None:
        tensors["seen"] = progress.valid
    if progress.has_images:
        assert progress.images is not None
        tensors["images"] = torch.tensor([[row, *each] for row, own in enumerate(progress.images) for each in own])
    if isinstance(offsets := cache.position_offsets, Tensor) and bool(offsets.any()):
        tensors["offsets"] = offsets
    for index, layer in enumerate(cache.layers):
        tensors |= {f"{LAYER}{index}.{name}": tensor for name, tensor in saved_layers.tensors_of(layer).items()}
    for kept in [] if keep_set is None else map(keep_set.layer, keep_set.layers):
        tensors[f"{LAYER}{kept.layer}.kept.positions"] = kept.packed_positions
        tensors[f"{LAYER}{kept.layer}.kept.counts"] = kept.counts
    # Layers may share small tensors, and a file may not.
    tensors = {
        name: tensor.detach() if ".columns." in name else tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    come_to = {
        **{figure: getattr(progress, figure) for figure in ("logical", "prompt", "compressed_at")},
        "next_event": None if decoding is None else decoding.next,
    }
    metadata = _metadata(recipe, name, fingerprint(model), come_to, len(cache.layers))
    if event is not None:
        metadata["event"] = {figure: getattr(event, figure) for figure in FIGURES}
    if tokens is not None:
        metadata |= {"text": text_digest(tokens), "opening": list(tokens[:opening]), "joint": list(joint)}
    _write(path, metadata, tensors)


Columns = dict[str, Tensor]
"""A layer's `keys`, `values`, `positions` and a method's own columns, packed head after head, and `counts` of heads."""


def save_entries(
    path: Path,
    recipe: str,
    model: str,
    fingerprint: Mapping[str, str],
    tokens: Sequence[int],
    layers: Mapping[int, Columns],
) -> None:
    """Write one request of another runtime into a file. All of its tokens count as its prompt.

    Args:
        recipe: the recipe that compressed the request.
        model: the name or folder by which the model is found.
        tokens: ids of all the request's tokens, dropped entries included.
        layers: all layers of the model, by index.
    """
    length = len(tokens)
    every = Recipe.parse(recipe).schedule.every
    tensors: dict[str, Tensor] = {name: torch.tensor([length]) for name in ("lengths", "prompts")}
    for index, columns in layers.items():
        tensors[f"{LAYER}{index}.counts"] = columns["counts"][None]
        tensors |= {f"{LAYER}{index}.columns.{name}": columns[name] for name in columns if name != "counts"}
    come_to = {
        **{"logical": length, "prompt": length, "compressed_at": None},
        "next_event": None if every is None else length + every,
    }
    metadata = _metadata(recipe, model, fingerprint, come_to, len(layers))
    _write(path, {**metadata, "text": text_digest(tokens), "opening": [], "joint": []}, tensors)


def _metadata(
    recipe: str, model: str, fingerprint: Mapping[str, str], progress: Mapping[str, int | None], layers: int
) -> dict[str, Any]:
    """Return the metadata of a file without an event and a text."""
    return {
        "format": FORMAT,
        "keepset": keepset.__version__,
        "recipe": in_full(recipe),
        "model": model,
        "fingerprint": dict(fingerprint),
        "progress": dict(progress),
        "layers": layers,
        "event": None,
    }


def header(path: Path) -> Header:
    """Return a file's summary.

    Raises:
        KeepsetError: it is no saved context that this version can read.
    """
    with _opened(path) as (_, metadata, recipe):
        return _header(metadata, recipe)


def contents(path: Path) -> Contents:
    """Return what a file holds.

    Raises:
        KeepsetError: it is no saved context that this version can read.
    """
    with _opened(path) as (file, metadata, recipe):
        requests = {name: _read(file, metadata, name) for name in ("lengths", "prompts")}
        saved_schema.check_lengths(metadata, requests)
        counts = {
            layer: _counts(file, metadata, layer, requests["lengths"])
            for layer in range(metadata["layers"])
            if f"{LAYER}{layer}.counts" in file
        }
        columns = {name.split(".columns.", 1)[1]: each for name, each in file.layout.items() if ".columns." in name}
        return Contents(
            _header(metadata, recipe),
            digest=metadata["digest"],
            fingerprint=metadata["fingerprint"],
            requests=len(requests["lengths"]),
            padded="seen" in file,
            goes_on=recipe.schedule.every is not None,
            prompt=metadata["progress"]["prompt"],
            text=metadata.get("text", ""),
            opening=metadata.get("opening", []),
            joint=metadata.get("joint", []),
            columns={name for name in columns if not name.startswith(RESIDUAL)},
            sizes={_size(each) for name, each in columns.items() if name in ("keys", "values")},
            counts=counts,
            layers=metadata["layers"],
            states=any(f".{STATE}" in name for name in file.layout),
            images="images" in file,
        )


def entries(path: Path, digest: str) -> dict[int, dict[str, Tensor]]:
    """Return the columns of every compressed layer, packed head after head, by the layer's index. All of it is checked.

    Args:
        digest: the file's digest, from `contents`.

    Raises:
        KeepsetError: the file is damaged, or has been replaced since.
    """
    with _opened(path) as (file, metadata, _):
        if metadata["digest"] != digest:
            raise ValueError
        lengths, layers = _read(file, metadata, "lengths"), {}
        for index in range(metadata["layers"]):
            if f"{LAYER}{index}.counts" in file:
                counts = _counts(file, metadata, index, lengths)
                layers[index] = _part(file, metadata, f"{LAYER}{index}.columns.")
                saved_schema.check_positions(layers[index]["positions"], counts, lengths)
                saved_schema.check_finite(layers[index].values())
        return layers


def load(path: Path, model: PreTrainedModel) -> Saved:
    """Return a context on the devices of its model.

    Raises:
        KeepsetError: the file is no saved context, damaged, of another version or of another model.
    """
    with _opened(path) as (file, metadata, recipe):
        if differs := difference(metadata["fingerprint"], fingerprint(model)):
            raise KeepsetError(f"{str(path)!r} is a context of another model, whose {differs}; load that model.")
        requests = {name: _read(file, metadata, name) for name in _REQUESTS if name in file}
        saved_schema.check_lengths(metadata, requests)
        images = _images(file, metadata, requests["lengths"], model)
        offsets = _read(file, metadata, "offsets").to(model.device) if "offsets" in file else None
        layers = [_part(file, metadata, f"{LAYER}{index}.") for index in range(metadata["layers"])]
        for index, layer in enumerate(layers):
            if "counts" in layer:
                _counts(file, metadata, index, requests["lengths"])
            saved_schema.check_layer(layer, requests["lengths"], metadata["progress"]["logical"])
    try:
        layers = saved_layers.with_states(layers, model)
    except ValueError:
        raise _FILE.corrupt(path) from None
    # A model may be spread over several devices.
    modules = (module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int))
    devices: dict[Any, torch.device] = {
        each.layer_idx: weight.device for each in modules for weight in each.parameters()
    }
    layers = [
        {name: tensor.to(devices.get(index, model.device)) for name, tensor in layer.items()}
        for index, layer in enumerate(layers)
    ]
    device = next((layer["counts"].device for layer in layers if "counts" in layer), model.device)
    numbers, event = metadata["progress"], metadata["event"]
    next_event = numbers.pop("next_event")
    tokens, prompts = (requests[name].tolist() for name in ("lengths", "prompts"))
    on_device: dict[str, Any] = {_REQUESTS[name]: tensor.to(device) for name, tensor in requests.items()}
    known = SavedText(metadata["text"], numbers["logical"]) if "text" in metadata else None
    progress = Progress(**numbers, **on_device, tokens=tokens, prompt_tokens=prompts, known=known, images=images)
    newest = None if event is None else Event(keep_set=_keep_set(layers), **event)
    return Saved(path, recipe, progress, newest, next_event, offsets, layers)


def _images(
    file: TensorReader, metadata: Mapping[str, Any], lengths: Int[Tensor, " requests"], model: PreTrainedModel
) -> tuple[Ranges, ...] | None:
    """Read where each request's images are; None if the model has none."""
    found: list[list[tuple[int, int]]] = [[] for _ in lengths]
    if "images" in file:
        rows = _read(file, metadata, "images")
        saved_schema.check_images(rows, lengths)
        for row, first, end in rows.tolist():
            found[row].append((first, end))
    return tuple(map(tuple, found)) if image_token_ids(model.config) else None


_REQUESTS = {"lengths": "lengths", "prompts": "prompts", "seen": "valid"}
"""Tensors with each request's progress, and their names in `Progress`."""


def _keep_set(layers: Sequence[Mapping[str, Tensor]]) -> KeepSet | None:
    kept = []
    for index, tensors in enumerate(layers):
        if "kept.counts" in tensors:
            columns = (tensors.get(f"columns.{name}") for name in ("keys", "values", "key_scale", "value_scale"))
            entry_bytes = sum(column[:1].nbytes for column in columns if column is not None)
            positions = tensors["kept.positions"]
            places, heads = KeptIndices.of(positions, positions), HeadCounts(tensors["kept.counts"])
            kept.append(LayerKeepSet(index, heads, places, entry_bytes))
    return KeepSet(kept) if kept else None


def _part(file: TensorReader, metadata: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose names begin with a prefix, by names without it."""
    names = [name for name in file.layout if name.startswith(prefix)]
    return {name.removeprefix(prefix): _read(file, metadata, name) for name in names}


def _read(file: TensorReader, metadata: Mapping[str, Any], name: str) -> Tensor:
    """Read a tensor and compare it with its digest; raises ValueError if it differs."""
    tensor = file[name]
    if _tensor_digest(tensor) != metadata["tensors"][name]:
        raise ValueError
    return tensor


def _size(rows: TensorLocation) -> int:
    """Return the numbers of a key or a value."""
    format = format_of(rows.dtype)
    return format.size(rows.shape[1]) if format else rows.shape[1]


def _counts(
    file: TensorReader, metadata: Mapping[str, Any], layer: int, lengths: Int[Tensor, " requests"]
) -> Int[Tensor, "requests kv_heads"]:
    """Read how many entries the heads of a layer have."""
    counts = _read(file, metadata, f"{LAYER}{layer}.counts")
    columns = f"{LAYER}{layer}.columns."
    saved_schema.check_counts(counts, lengths[:, None], file.layout[f"{columns}keys"])
    if f"{columns}{RESIDUAL}counts" in file:
        residual = _read(file, metadata, f"{columns}{RESIDUAL}counts")
        saved_schema.check_counts(residual, counts, file.layout[f"{columns}{RESIDUAL}keys"])
    return counts


def _write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    digests = {name: _tensor_digest(tensor) for name, tensor in sorted(tensors.items())}
    whole = {**metadata, "tensors": digests}
    _FILE.write(path, tensors, {**whole, "digest": _digest(whole)})


def _digest(metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[tuple[TensorReader, dict[str, Any], Recipe]]:
    """Open a file and check its header."""
    if not os.path.isfile(path):  # unlike Path.is_file, it takes any name
        if os.path.isdir(path):
            raise KeepsetError(f"{quoted(path)} is a folder: {_ADVICE}.")
        raise KeepsetError(f"There is no file {quoted(path)}: {_ADVICE}.")
    with _FILE.opened(path) as (file, metadata):
        saved_schema.check_header(metadata, file.layout)
        if _digest({name: value for name, value in metadata.items() if name != "digest"}) != metadata["digest"]:
            raise ValueError
        try:
            recipe = Recipe.parse(in_short(metadata["recipe"])).require_budget()
        except RecipeError as error:
            raise KeepsetError(f"{str(path)!r} is of another version of keepset, build it again: {error}") from None
        saved_schema.check_recipe(metadata, file.layout, recipe)
        yield file, metadata, recipe


def _header(metadata: Mapping[str, Any], recipe: Recipe) -> Header:
    return Header(str(recipe), metadata["model"], metadata["progress"]["logical"])
