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

import keepset
from keepset.contexts import schema
from keepset.contexts.columns import RESIDUAL
from keepset.contexts.fingerprint import text_digest
from keepset.contexts.schema import LAYER, STATE
from keepset.core.files import TensorFile, TensorLocation, TensorReader
from keepset.errors import KeepsetError, RecipeError, quoted
from keepset.kernels.entry_format import format_of
from keepset.recipe import Recipe, in_full, in_short

FORMAT = 9
"""Version of the file's format; raise it with every change to what is written."""
_ADVICE = "give a file that keepset.Cache.save or keepset context build has written"
FILE = TensorFile(
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
        prompt: number of tokens that count as its prompt.
        next_event: number of tokens at which its recipe compresses next; None if it does not.
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
    next_event: int | None
    text: str
    opening: list[int]
    joint: list[int]
    columns: set[str]
    sizes: set[int]
    counts: dict[int, Int[Tensor, "requests kv_heads"]]
    layers: int
    states: bool
    images: bool


class ContextReader(NamedTuple):
    """An open file whose header was checked.

    Attributes:
        file: its tensors.
        metadata: its metadata, with the digest of each tensor.
        recipe: the recipe that compressed it.
    """

    file: TensorReader
    metadata: dict[str, Any]
    recipe: Recipe

    @property
    def header(self) -> Header:
        """The file's summary."""
        return Header(str(self.recipe), self.metadata["model"], self.metadata["progress"]["logical"])

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            ValueError: it differs from its digest.
        """
        tensor = self.file[name]
        if _tensor_digest(tensor) != self.metadata["tensors"][name]:
            raise ValueError
        return tensor

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Read the tensors whose names begin with a prefix, by names without it."""
        names = [name for name in self.file.layout if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensor(name) for name in names}

    def counts(self, layer: int, lengths: Int[Tensor, " requests"]) -> Int[Tensor, "requests kv_heads"]:
        """Read how many entries the heads of a layer have.

        Args:
            layer: its index.
            lengths: tokens of each request.

        Raises:
            ValueError: they do not fit the lengths or the columns.
        """
        counts = self.tensor(f"{LAYER}{layer}.counts")
        columns = f"{LAYER}{layer}.columns."
        schema.check_counts(counts, lengths[:, None], self.file.layout[f"{columns}keys"])
        if f"{columns}{RESIDUAL}counts" in self.file:
            residual = self.tensor(f"{columns}{RESIDUAL}counts")
            schema.check_counts(residual, counts, self.file.layout[f"{columns}{RESIDUAL}keys"])
        return counts


def header(path: Path) -> Header:
    """Return a file's summary.

    Raises:
        KeepsetError: it is no saved context that this version can read.
    """
    with opened(path) as reader:
        return reader.header


def contents(path: Path) -> Contents:
    """Return what a file holds.

    Raises:
        KeepsetError: it is no saved context that this version can read.
    """
    with opened(path) as reader:
        file, metadata = reader.file, reader.metadata
        requests = {name: reader.tensor(name) for name in ("lengths", "prompts")}
        schema.check_lengths(metadata, requests)
        counts = {
            layer: reader.counts(layer, requests["lengths"])
            for layer in range(metadata["layers"])
            if f"{LAYER}{layer}.counts" in file
        }
        columns = {
            name.split(".columns.", 1)[1]: location for name, location in file.layout.items() if ".columns." in name
        }
        return Contents(
            reader.header,
            digest=metadata["digest"],
            fingerprint=metadata["fingerprint"],
            requests=len(requests["lengths"]),
            padded="seen" in file,
            goes_on=reader.recipe.schedule.every is not None,
            prompt=metadata["progress"]["prompt"],
            next_event=metadata["progress"]["next_event"],
            text=metadata.get("text", ""),
            opening=metadata.get("opening", []),
            joint=metadata.get("joint", []),
            columns={name for name in columns if not name.startswith(RESIDUAL)},
            sizes={_size(location) for name, location in columns.items() if name in ("keys", "values")},
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
    with opened(path) as reader:
        if reader.metadata["digest"] != digest:
            raise ValueError
        lengths, layers = reader.tensor("lengths"), {}
        for index in range(reader.metadata["layers"]):
            if f"{LAYER}{index}.counts" in reader.file:
                counts = reader.counts(index, lengths)
                layers[index] = reader.part(f"{LAYER}{index}.columns.")
                schema.check_positions(layers[index]["positions"], counts, lengths)
                schema.check_finite(layers[index].values())
        return layers


Columns = dict[str, Tensor]
"""A layer's `keys`, `values`, `positions` and a method's own columns, packed head after head, and `counts` of heads."""


def save_entries(
    path: Path,
    recipe: str,
    model: str,
    fingerprint: Mapping[str, str],
    tokens: Sequence[int],
    next_event: int | None,
    layers: Mapping[int, Columns],
) -> None:
    """Write one request of another runtime into a file. All of its tokens count as its prompt.

    Args:
        recipe: the recipe that compressed the request.
        model: the name or folder by which the model is found.
        tokens: ids of all the request's tokens, dropped entries included.
        next_event: number of tokens at which the recipe compresses next; None if it does not.
        layers: all layers of the model, by index.
    """
    length = len(tokens)
    tensors: dict[str, Tensor] = {name: torch.tensor([length], dtype=torch.long) for name in ("lengths", "prompts")}
    for index, columns in layers.items():
        tensors[f"{LAYER}{index}.counts"] = columns["counts"][None]
        tensors |= {f"{LAYER}{index}.columns.{name}": columns[name] for name in columns if name != "counts"}
    come_to = {
        **{"logical": length, "prompt": length, "compressed_at": None},
        "next_event": next_event,
    }
    metadata = metadata_of(recipe, model, fingerprint, come_to, len(layers))
    write(path, {**metadata, "text": text_digest(tokens), "opening": [], "joint": []}, tensors)


def metadata_of(
    recipe: str, model: str, fingerprint: Mapping[str, str], progress: Mapping[str, int | None], layers: int
) -> dict[str, Any]:
    """Return the metadata of a file without an event and a text.

    Args:
        recipe: the text of the recipe that compressed the context.
        model: the name or folder by which the model is found.
        fingerprint: the model's.
        progress: tokens of the context and of its prompt, and lengths at the newest and the next event.
        layers: number of layers of the model's cache.
    """
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


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file whole or not at all, with the digests of its tensors and of its metadata.

    Args:
        path: the file.
        metadata: its JSON object, without digests.
        tensors: its tensors, by name.
    """
    digests = {name: _tensor_digest(tensor) for name, tensor in sorted(tensors.items())}
    whole = {**metadata, "tensors": digests}
    FILE.write(path, tensors, {**whole, "digest": _digest(whole)})


def _digest(metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def opened(path: Path) -> Iterator[ContextReader]:
    """Open a file and check its header.

    A ValueError within the block says that the file is damaged.

    Raises:
        KeepsetError: it is no saved context that this version can read.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, it takes any name
        if not os.path.exists(path):
            raise KeepsetError(f"There is no file {quoted(path)}: {_ADVICE}.")
        raise KeepsetError(f"{quoted(path)} is {'a folder' if os.path.isdir(path) else 'no regular file'}: {_ADVICE}.")
    with FILE.opened(path) as (file, metadata):
        schema.check_header(metadata, file.layout)
        if _digest({name: value for name, value in metadata.items() if name != "digest"}) != metadata["digest"]:
            raise ValueError
        try:
            recipe = Recipe.parse(in_short(metadata["recipe"])).require_budget()
        except RecipeError as error:
            raise KeepsetError(f"{str(path)!r} is of another version of keepset, build it again: {error}") from None
        schema.check_recipe(metadata, file.layout, recipe)
        yield ContextReader(file, metadata, recipe)


def _size(rows: TensorLocation) -> int:
    """Return the numbers of a key or a value."""
    format = format_of(rows.dtype)
    return format.size(rows.shape[1]) if format else rows.shape[1]
