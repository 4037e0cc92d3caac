"""Checks of a saved context's file. Everything that is read from a file is checked here before it is used.

A digest tells a damaged file from a whole one. It does not tell who wrote the file, so these checks do not rely on it.
Every check raises ValueError if it fails.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.contexts.columns import RESIDUAL
from keepset.core.features.queries import WindowAttention
from keepset.core.features.runtime_features import QuantizedEntries
from keepset.core.files import TensorLocation, below, is_count
from keepset.kernels.columns import NAMES as MOMENTS
from keepset.kernels.entry_format import format_of
from keepset.kernels.packed import ENTRIES, SCALES
from keepset.recipe import Recipe

LAYER = "layers."
STATE = "states."
"""The prefix of the names of a layer's recurrent and convolution states."""
SAID = {"said.ids": 1, "said.left_out": 2, "said.newest": 0}
"""Tensors of a conversation, and their dimensions: the token at each position, the spans of positions that its history
does not contain any more, and how many of the other tokens are the newest prompt."""
FIGURES = ("length", "entries", "kept", "nbytes_before", "seconds")
"""Figures of an event, as the file has them."""
_ENTRIES, _SCALES = set(ENTRIES), set(SCALES.values())
_DIGEST = re.compile("[0-9a-f]{64}")
_MAX_TOKEN_ID = 2**31
_MAX_LENGTH = 2**26
"""Most tokens of a context. Their attention mask alone takes half a gigabyte."""
_MAX_LAYERS = 100_000
_MAX_ROW = 4096
"""Most numbers of a key or value in few bits. The matrix that mixes them has the square of that."""
_STATE = re.compile(r"(convolution|recurrent)\.(0|[1-9]\d?)")
"""Names of a layer's states: their kind, and a number for layers that have several."""
_RECORDER_TENSORS = re.compile(r"recorded\.\w+|holes|moments\.\d+\.\w+|added|added_up")
"""Names of a layer's `QueryRecorder.tensors`; in a file they begin with `passing.`."""


def check_header(metadata: Any, layout: Mapping[str, TensorLocation]) -> None:
    """Check a file's JSON object, and the types and shapes of its tensors, without reading a tensor.

    Args:
        metadata: the JSON object, which may be anything.
        layout: types and shapes of the tensors, by name.
    """
    _require(isinstance(metadata, dict))
    _check_metadata(metadata)
    _require(metadata["tensors"].keys() == layout.keys())
    (requests,) = _of(layout, "lengths", torch.int64)
    _require(requests > 0 and _of(layout, "prompts", torch.int64) == (requests,))
    if "seen" in layout:
        _require(_of(layout, "seen", torch.bool) == (requests, metadata["progress"]["logical"]))
    if "images" in layout:
        _require(_of(layout, "images", torch.int64)[1:] == (3,))
    if "offsets" in layout:
        _require(_of(layout, "offsets", torch.int64) == (requests, 1))
    if SAID.keys() & layout.keys():
        shapes = {name: _of(layout, name, torch.int64) for name in SAID}
        _require(requests == 1 and all(len(shape) == SAID[name] for name, shape in shapes.items()))
        _require(shapes["said.ids"] == (metadata["progress"]["logical"],) and shapes["said.left_out"][1] == 2)
    layers: dict[int, dict[str, TensorLocation]] = defaultdict(dict)
    for name, location in layout.items():
        if match := re.fullmatch(r"layers\.(0|[1-9]\d{0,5})\.(.+)", name):
            layers[int(match[1])][match[2]] = location
        else:
            _require(name in ("lengths", "prompts", "seen", "images", "offsets", *SAID))
    # Some layers of hybrids, such as experts, hold nothing.
    _require(max(layers, default=-1) < metadata["layers"] <= _MAX_LAYERS)
    for tensors in layers.values():
        _check_states(below(STATE, tensors), requests)
        kept_tensors = {name: location for name, location in tensors.items() if not name.startswith(STATE)}
        if "counts" in kept_tensors:
            _check_kept(kept_tensors, requests, metadata["event"] is not None)
        elif kept_tensors:
            _check_window(kept_tensors, requests)


def check_recipe(metadata: Mapping[str, Any], layout: Mapping[str, TensorLocation], recipe: Recipe) -> None:
    """Check that the layers have the columns of a recipe's entries. `check_header` must have passed.

    Args:
        metadata: the file's JSON object.
        layout: types and shapes of its tensors, by name.
        recipe: the recipe by which the entries were compressed.
    """
    schedule = recipe.schedule
    method, goes_on = recipe.method, schedule.every is not None and not schedule.turns
    _require(goes_on == (metadata["progress"]["next_event"] is not None))
    sums = {feature.column: feature for feature in method.traits.needs.of(WindowAttention)} if goes_on else {}
    allowed = {*_ENTRIES, *method.traits.state_names, *sums} | (
        _SCALES if method.traits.needs.of(QuantizedEntries) else set()
    )
    # Before the first event a method remembers nothing.
    required = {*_ENTRIES, *method.traits.state_names} if goes_on and metadata["event"] is not None else _ENTRIES
    layers: defaultdict[str, set[str]] = defaultdict(set)
    for name, location in layout.items():
        if match := re.fullmatch(rf"({LAYER}\d+\.)columns\.(.+)", name):
            column = match[2]
            if column.startswith(RESIDUAL):
                continue
            _require(column in allowed)
            # A layer that holds more entries than others lets more queries wait before it sums them.
            layers[match[1]] |= {column} - sums.keys()
            _require(len(location.shape) == 1 or column in ("keys", "values") or column in sums)
        elif re.fullmatch(rf"{LAYER}\d+\.counts", name):
            _require(all(name.replace("counts", f"columns.{column}") in layout for column in required))
    _require(len(set(map(frozenset, layers.values()))) < 2)


def check_lengths(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check how many tokens the requests have: `lengths`, `prompts` and, if there is padding, `seen`.

    Args:
        metadata: the file's JSON object.
        tensors: those of its tensors that are not a layer's, by name.
    """
    lengths, prompts, logical = tensors["lengths"], tensors["prompts"], metadata["progress"]["logical"]
    _require(bool(((prompts >= 0) & (prompts <= lengths) & (lengths <= logical)).all()))
    tokens = tensors["seen"].sum(-1) if "seen" in tensors else torch.full_like(lengths, logical)
    _require(torch.equal(tokens, lengths))


def check_said(tensors: Mapping[str, Tensor], vocabulary: int) -> None:
    """Check what was said in a conversation. `check_header` must have passed.

    Args:
        tensors: those of `SAID`.
        vocabulary: how many tokens the model knows.
    """
    ids, left_out, newest = (tensors[name] for name in SAID)
    _require(bool(((ids >= 0) & (ids < vocabulary)).all()))
    edges = left_out.flatten()  # spans are apart, and in order
    _require(bool((edges.diff() > 0).all() and (edges >= 0).all() and (edges <= len(ids)).all()))
    _require(0 <= int(newest) <= len(ids) - int((left_out[:, 1] - left_out[:, 0]).sum()))


def check_images(images: Int[Tensor, "images 3"], lengths: Int[Tensor, " requests"]) -> None:
    """Check where images are: the request, the first token and the one after the last of each range.

    Args:
        images: row of the request, first token and the one after the last, for each image.
        lengths: tokens of each request.
    """
    row, first, end = images.unbind(1)
    _require(bool(((row >= 0) & (row < len(lengths)) & (first >= 0) & (first < end)).all()))
    _require(bool((end <= lengths[row]).all()))


def check_counts(
    counts: Int[Tensor, "requests kv_heads"], most: Int[Tensor, "requests _"], keys: TensorLocation
) -> None:
    """Check the number of entries of each head of a layer, or of its residual; their `keys` are in the file.

    Args:
        counts: entries of each head.
        most: the most entries that a head may have, per request or per request and head.
        keys: type and shape of the keys, packed head after head.
    """
    _require(bool(((counts >= 0) & (counts <= most)).all()) and int(counts.sum()) == keys.shape[0])


def check_positions(
    positions: Int[Tensor, " entries"], counts: Int[Tensor, "requests kv_heads"], lengths: Int[Tensor, " requests"]
) -> None:
    """Check that every head's positions, packed head after head, rise and are positions of tokens.

    Args:
        positions: the position of each entry, counted from its request's first token.
        counts: entries of each head.
        lengths: tokens of each request.
    """
    limits = torch.repeat_interleave(lengths.repeat_interleave(counts.shape[1]), counts.flatten())
    _require(bool(((positions >= 0) & (positions < limits)).all()))
    heads = torch.repeat_interleave(torch.arange(counts.numel()), counts.flatten())
    _require(bool(((positions.diff() > 0) | (heads.diff() > 0)).all()))


def check_finite(columns: Iterable[Tensor]) -> None:
    """Check that columns hold finite numbers. Others would spread to all requests that use the same pages later."""
    _require(all(bool(column.isfinite().all()) for column in columns))


def check_layer(layer: Mapping[str, Tensor], lengths: Int[Tensor, " requests"], logical: int) -> None:
    """Check the numbers of a layer's tensors: its positions, what the newest event kept, and the sums.

    Args:
        layer: the layer's tensors, by name.
        lengths: tokens of each request.
        logical: tokens of every request, with padding.
    """
    if "counts" in layer:
        check_positions(layer["columns.positions"], layer["counts"], lengths)
    if "kept.counts" in layer:
        positions, counts = layer["kept.positions"], layer["kept.counts"]
        _require(bool((counts >= 0).all()) and int(counts.sum()) == len(positions) and bool((positions >= 0).all()))
    if "passing.added_up" in layer:
        _require(0 <= int(layer["passing.added_up"]) <= logical)


def check_states(layers: Sequence[Mapping[str, Tensor]], models: Sequence[Mapping[str, Tensor]]) -> None:
    """Check that every layer has the model's states of one request, with the model's sizes.

    Args:
        layers: the states of each layer in the file, by name, `[requests, ...]`.
        models: the states of each layer of the model, by name, `[requests, ...]`.
    """
    _require(len(layers) == len(models))
    for layer, model in zip(layers, models, strict=True):
        _require(layer.keys() == model.keys() and all(layer[name].shape[1:] == model[name].shape[1:] for name in layer))


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    for name in ("keepset", "recipe", "model"):
        _require(isinstance(metadata[name], str))
    _require(is_count(metadata["layers"]) and metadata["layers"] > 0)
    for name in ("fingerprint", "tensors"):
        texts = metadata[name]
        _require(isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values()))
    _require(all(_DIGEST.fullmatch(digest) for digest in [metadata["digest"], *metadata["tensors"].values()]))
    progress = metadata["progress"]
    _require(isinstance(progress, dict))
    _require(progress.keys() == {"logical", "prompt", "compressed_at", "next_event"})
    _require(is_count(progress["logical"]) and 0 < progress["logical"] <= _MAX_LENGTH and is_count(progress["prompt"]))
    _require(all(number is None or is_count(number) for number in progress.values()))
    _require(progress["next_event"] is None or progress["logical"] < progress["next_event"] <= 2 * _MAX_LENGTH)
    if (event := metadata["event"]) is not None:
        _require(isinstance(event, dict) and event.keys() == set(FIGURES))
        _require(all(is_count(event[name]) for name in FIGURES if name != "seconds"))
        _require(type(event["seconds"]) in (int, float) and 0 <= event["seconds"] < math.inf)
    if "text" in metadata:
        _require(isinstance(metadata["text"], str) and _DIGEST.fullmatch(metadata["text"]))
        for tokens in (metadata["opening"], metadata["joint"]):
            _require(isinstance(tokens, list) and all(is_count(token) and token < _MAX_TOKEN_ID for token in tokens))


def _check_kept(tensors: Mapping[str, TensorLocation], requests: int, event: bool) -> None:
    rows, heads = _of(tensors, "counts", torch.int64)
    _require(rows == requests and heads > 0)
    columns = below("columns.", tensors)
    residual = below(RESIDUAL, columns)
    columns = {name: location for name, location in columns.items() if not name.startswith(RESIDUAL)}
    _check_columns(columns)
    keys = columns["keys"]
    format = format_of(keys.dtype)
    if residual:
        _require(format is not None and format.refined)
        _require(_of(residual, "counts", torch.int64) == (requests, heads))
        residual = {name: location for name, location in residual.items() if name != "counts"}
        _check_columns(residual)
        _require(residual.keys() == _ENTRIES | _SCALES)
        for name, location in residual.items():
            _require((location.dtype, location.shape[1:]) == (columns[name].dtype, columns[name].shape[1:]))
    extra_names = {name for name in tensors if not name.startswith("columns.")} - {"counts"}
    kept = {"kept.positions", "kept.counts"}
    if extra_names & kept:
        _require(kept <= extra_names and event and len(_of(tensors, "kept.counts", torch.int64)) == 2)
        _require(len(_of(tensors, "kept.positions", torch.int32)) == 1)
    for name in extra_names - kept:
        _require(name.startswith("passing.") and _RECORDER_TENSORS.fullmatch(name.removeprefix("passing.")))
    key, value = (
        format.size(location.shape[1]) if format else location.shape[1] for location in (keys, columns["values"])
    )
    sizes = {key, key + value} if heads == 1 else {key}  # queries attend to both parts of latents
    _check_recorder(below("passing.", tensors), requests, heads, sizes)


def _check_columns(columns: Mapping[str, TensorLocation]) -> None:
    """Check the types and shapes of a store's columns."""
    _require(columns.keys() >= _ENTRIES and len({location.shape[0] for location in columns.values()}) == 1)
    keys, values = columns["keys"], columns["values"]
    _require(len(keys.shape) == len(values.shape) == 2 and keys.dtype == values.dtype)
    _require(columns["positions"].dtype == torch.int32 and len(columns["positions"].shape) == 1)
    format = format_of(keys.dtype)
    is_coded = format is not None
    _require(format is None or max(format.size(location.shape[1]) for location in (keys, values)) <= _MAX_ROW)
    _require((columns.keys() & _SCALES) == (_SCALES if is_coded else set()))
    _require(is_coded or keys.dtype.is_floating_point)
    for name in columns.keys() - _ENTRIES - _SCALES:
        _require(columns[name].dtype == torch.float32 and len(columns[name].shape) in (1, 2))
    for name in columns.keys() & _SCALES:  # in the model's precision
        _require(columns[name].dtype.is_floating_point and len(columns[name].shape) == 1)


def _check_recorder(tensors: Mapping[str, TensorLocation], requests: int, kv_heads: int, sizes: set[int]) -> None:
    """Check the types and shapes of `QueryRecorder.tensors`.

    Args:
        tensors: types and shapes of the tensors, by name.
        requests: the number of requests.
        kv_heads: KV heads of the layer.
        sizes: head sizes that queries may have.
    """
    if not tensors:
        return
    _require(_of(tensors, "holes", torch.bool) == () and _of(tensors, "added_up", torch.int64) == ())
    if "added" in tensors:
        _require(_of(tensors, "added", torch.int64) == (requests,))
    if recorded := below("recorded.", tensors):
        _require({"queries", "positions"} <= recorded.keys() <= {"queries", "positions", "cos", "sin"})
        _require(len({location.shape[:2] for location in recorded.values()}) == 1)
        queries = recorded["queries"]
        _require(queries.dtype.is_floating_point and len(queries.shape) == 4 and queries.shape[0] == requests)
        _require(queries.shape[2] > 0 and queries.shape[2] % kv_heads == 0 and queries.shape[3] in sizes)
        _require(len(_of(recorded, "positions", torch.int64)) == 2)
        rotations = recorded.keys() & {"cos", "sin"}
        _require(len(rotations) in (0, 2))
        for name in rotations:
            _require(recorded[name].dtype.is_floating_point and len(recorded[name].shape) == 3)
    moments = below("moments.", tensors)
    for number in {name.split(".")[0] for name in moments}:
        _require(all(f"{number}.{name}" in moments for name in MOMENTS))
    for location in moments.values():
        _require(location.dtype.is_floating_point and len(location.shape) > 1 and location.shape[0] == requests)


def _check_window(tensors: Mapping[str, TensorLocation], requests: int) -> None:
    _require(tensors.keys() == {"keys", "values"})
    keys, values = tensors["keys"], tensors["values"]
    _require(keys.dtype == values.dtype and keys.dtype.is_floating_point)
    _require(len(keys.shape) == len(values.shape) == 4 and keys.shape[:3] == values.shape[:3])
    _require(keys.shape[0] == requests)


def _check_states(tensors: Mapping[str, TensorLocation], requests: int) -> None:
    for name, location in tensors.items():
        _require(_STATE.fullmatch(name) and location.dtype.is_floating_point)
        _require(len(location.shape) > 1 and location.shape[0] == requests and 0 not in location.shape)


def _of(layout: Mapping[str, TensorLocation], name: str, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a tensor, which must be there and of this type.

    Args:
        layout: types and shapes of the tensors, by name.
        name: the tensor's name.
        dtype: the type that it must have.
    """
    _require(name in layout and layout[name].dtype == dtype)
    return layout[name].shape


def _require(holds: object) -> None:
    if not holds:
        raise ValueError
