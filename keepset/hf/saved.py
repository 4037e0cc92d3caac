"""Saving a cache into a file, and loading it again; `keepset.contexts.file` has the format."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from keepset.contexts import schema
from keepset.contexts.file import FILE, ContextReader, metadata_of, opened, write
from keepset.contexts.fingerprint import difference, fingerprint, text_digest
from keepset.contexts.schema import FIGURES, LAYER, SAID, STATE
from keepset.contexts.weights import BY_REQUEST, adapters_digest, device_of
from keepset.core.budget import Ranges
from keepset.core.files import below
from keepset.core.keep_set import HeadCounts, KeepSet, KeptIndices, LayerKeepSet
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.hooks import image_token_ids
from keepset.hf.layer import LayerState
from keepset.hf.observed_cache import ObservedCache
from keepset.hf.other_layers import own_layers, restore_states, states, states_of_a_token
from keepset.hf.progress import Event, Progress, SavedText
from keepset.hf.query_recorder import NEVER, Collector
from keepset.recipe import Recipe


class Text(NamedTuple):
    """The text of a context of one request, by which a server finds its file.

    Attributes:
        ids: its tokens.
        opening: how many of them every message begins with.
        joint: tokens between the text and a question.
    """

    ids: Sequence[int]
    opening: int
    joint: Sequence[int]


class Said(NamedTuple):
    """What was said in a conversation.

    Attributes:
        ids: the token at each position.
        left_out: spans of positions that its history does not contain any more, apart and in order.
        newest: how many of the other tokens are the newest turn's prompt.
    """

    ids: list[int]
    left_out: Ranges
    newest: int

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a file has of it."""
        left_out = torch.tensor(self.left_out, dtype=torch.long).view(-1, 2)
        ids, newest = (torch.tensor(part, dtype=torch.long) for part in (self.ids, self.newest))
        return dict(zip(SAID, (ids, left_out, newest), strict=True))


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
        adapters: the digest of the adapters with which the model has read its tokens.
        said: what was said, if it is a conversation.
    """

    path: Path
    recipe: Recipe
    progress: Progress
    event: Event | None
    next_event: int | None
    offsets: Int[Tensor, "requests 1"] | None
    layers: list[dict[str, Tensor]]
    adapters: frozenset[str]
    said: Said | None

    def restore(self, cache: ObservedCache) -> None:
        """Put the context into an empty cache of its recipe, except for the event.

        Raises:
            CorruptFileError: the model has other layers, or an input of the next event is missing.
        """
        if len(cache.layers) != len(self.layers) or not cache.set_position_offsets(self.offsets):
            raise FILE.corrupt(self.path)
        cache.progress, cache.adapters = self.progress, self.adapters
        if cache.schedule.turns:  # the queries of a turn that had not ended are not in the file
            self.progress.turn = self.progress.logical
            for kept in cache.managed_layers.values():
                kept.collector = Collector(cache.needs, every=cache.schedule.every, turns=True)
                kept.collector.begin_turn(self.progress.logical, self.progress.lengths)
        elif cache.schedule.every is None or self.next_event is None:
            cache.stop_watching()
        else:
            for kept in cache.managed_layers.values():
                kept.collector = Collector(cache.needs, None, cache.schedule.every, self.next_event)
        try:
            for layer, tensors in zip(cache.layers, self.layers, strict=True):
                _restore(layer, tensors, self.progress.logical)
        except ValueError:
            raise FILE.corrupt(self.path) from None


def save(
    path: Path,
    cache: ObservedCache,
    recipe: str,
    event: Event | None,
    model: PreTrainedModel,
    name: str,
    text: Text | Said | None = None,
) -> None:
    """Write what a cache holds into a file.

    Args:
        recipe: the text of the cache's recipe.
        event: the newest event; None if there was none.
        model: the cache's model.
        name: the name or folder by which the model is found.
        text: the tokens, if the file is to have them.

    Raises:
        KeepsetError: the cache holds no whole prompt, or another number of tokens, or tokens of other adapters, or has
            layers that cannot be saved.
    """
    progress, keep_set = cache.require_prompt(), None if event is None else event.keep_set
    if BY_REQUEST in cache.adapters or cache.adapters - {adapters_digest(model)}:
        raise KeepsetError(
            "The cache holds tokens that the model has read with other adapters than are in use now: set them as they "
            "were to save it, or make a new cache."
        )
    if text is not None and (len(progress.lengths), progress.logical) != (1, len(text.ids)):
        raise KeepsetError(
            f"token_ids are {len(text.ids)}, and the cache has {progress.logical} tokens of {len(progress.lengths)} "
            "requests: give those of its only request."
        )
    collector = next(iter(cache.managed_layers.values())).collector
    tensors = {"lengths": progress.lengths, "prompts": progress.prompts}
    if progress.valid is not None:
        tensors["seen"] = progress.valid
    if progress.has_images:
        assert progress.images is not None
        images = [[row, *image] for row, row_images in enumerate(progress.images) for image in row_images]
        tensors["images"] = torch.tensor(images, dtype=torch.long)
    if isinstance(offsets := cache.position_offsets, Tensor) and bool(offsets.any()):
        tensors["offsets"] = offsets
    if isinstance(text, Said):
        tensors |= text.tensors
    for index, layer in enumerate(cache.layers):
        tensors |= {f"{LAYER}{index}.{name}": tensor for name, tensor in _tensors_of(layer).items()}
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
        "next_event": None if collector.next == NEVER or collector.turns else collector.next,
    }
    metadata = metadata_of(recipe, name, fingerprint(model), come_to, len(cache.layers))
    if event is not None:
        metadata["event"] = {figure: getattr(event, figure) for figure in FIGURES}
    if isinstance(text, Text):
        opening = list(text.ids[: text.opening])
        metadata |= {"text": text_digest(text.ids), "opening": opening, "joint": list(text.joint)}
    write(path, metadata, tensors)


def load(path: Path, model: PreTrainedModel) -> Saved:
    """Return a context on the devices of its model.

    Args:
        path: the file.
        model: the model that the context is of.

    Raises:
        KeepsetError: the file is no saved context, damaged, of another version or of another model.
    """
    device = device_of(model) or torch.device("cpu")
    with opened(path) as reader:
        file, metadata, recipe = reader
        if differs := difference(metadata["fingerprint"], fingerprint(model)):
            raise KeepsetError(f"{str(path)!r} is a context of another model, whose {differs}; load that model.")
        requests = {name: reader.tensor(name) for name in _REQUESTS if name in file}
        schema.check_lengths(metadata, requests)
        images, said = _images(reader, requests["lengths"], model), _said(reader, model)
        offsets = reader.tensor("offsets").to(device) if "offsets" in file else None
        layers = [reader.part(f"{LAYER}{index}.") for index in range(metadata["layers"])]
        for index, layer in enumerate(layers):
            if "counts" in layer:
                reader.counts(index, requests["lengths"])
            schema.check_layer(layer, requests["lengths"], metadata["progress"]["logical"])
    try:
        layers = _with_states(layers, model)
    except ValueError:
        raise FILE.corrupt(path) from None
    # A model may be spread over several devices.
    modules = (module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int))
    devices: dict[Any, torch.device | None] = {module.layer_idx: device_of(module) for module in modules}
    layers = [
        {name: tensor.to(devices.get(index) or device) for name, tensor in layer.items()}
        for index, layer in enumerate(layers)
    ]
    device = next((layer["counts"].device for layer in layers if "counts" in layer), device)
    numbers, event = metadata["progress"], metadata["event"]
    next_event = numbers.pop("next_event")
    tokens, prompts = (requests[name].tolist() for name in ("lengths", "prompts"))
    on_device: dict[str, Any] = {_REQUESTS[name]: tensor.to(device) for name, tensor in requests.items()}
    saved_text = SavedText(metadata["text"], numbers["logical"]) if "text" in metadata else None
    progress = Progress(**numbers, **on_device, tokens=tokens, prompt_tokens=prompts, known=saved_text, images=images)
    newest = None if event is None else Event(keep_set=_keep_set(layers), **event)
    adapters = frozenset({adapters_digest(model)})
    return Saved(path, recipe, progress, newest, next_event, offsets, layers, adapters, said)


def check_new(path: str | Path, force: bool) -> None:
    """Refuse to replace a file.

    Args:
        path: the file that is to be written.
        force: whether it may be replaced.

    Raises:
        KeepsetError: it exists.
    """
    if os.path.isfile(path) and not force:  # unlike Path.is_file, it takes any name
        raise KeepsetError(f"{str(path)!r} exists: save to another file, or replace it with force=True.")


def _said(reader: ContextReader, model: PreTrainedModel) -> Said | None:
    """Read what was said; None if the file is no conversation.

    Args:
        reader: an open file.
        model: knows the tokens.
    """
    if not all(name in reader.file for name in SAID):
        return None
    tensors = {name: reader.tensor(name) for name in SAID}
    schema.check_said(tensors, model.config.get_text_config(decoder=True).vocab_size)
    ids, left_out, newest = (tensors[name] for name in SAID)
    return Said(ids.tolist(), tuple((first, end) for first, end in left_out.tolist()), int(newest))


def _images(
    reader: ContextReader, lengths: Int[Tensor, " requests"], model: PreTrainedModel
) -> tuple[Ranges, ...] | None:
    """Read where each request's images are; None if the model has none.

    Args:
        reader: an open file.
        lengths: tokens of each request.
        model: says whether there can be images.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in lengths]
    if "images" in reader.file:
        rows = reader.tensor("images")
        schema.check_images(rows, lengths)
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
            kept_indices, heads = KeptIndices.of(positions, positions), HeadCounts(tensors["kept.counts"])
            kept.append(LayerKeepSet(index, heads, kept_indices, entry_bytes))
    return KeepSet(kept) if kept else None


def _tensors_of(layer: Any) -> dict[str, Tensor]:
    """Return all that a layer of a cache holds."""
    layer_tensors: dict[str, Tensor] = {}
    if isinstance(layer, LinearAttentionLayer):
        layer_tensors = {f"{STATE}{name}": state for name, state in states(layer).items()}
        if type(layer) is LinearAttentionLayer:
            return layer_tensors
    if isinstance(layer, LayerState):
        assert layer.store is not None
        layer_tensors |= {f"columns.{name}": column for name, column in layer.store.packed.items()}
        if (recorder := layer.collector.recorder) is not None and not layer.collector.turns:
            layer_tensors |= {f"passing.{name}": tensor for name, tensor in recorder.tensors.items()}
        counts = torch.tensor(layer.store.counts, dtype=torch.long)
        return layer_tensors | {"counts": counts.view(layer.store.batch, layer.store.kv_heads)}
    windows = DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer
    if type(layer) in windows and layer.keys is not None and layer.values is not None:
        # Tokens before the window are held only while a draft may be taken back.
        first = max(layer.keys.shape[2] - layer.sliding_window + 1, 0)
        return layer_tensors | {"keys": layer.keys[:, :, first:], "values": layer.values[:, :, first:]}
    raise UnsupportedModelError(
        f"The model has a {type(layer).__name__} among the layers of its cache, and keepset saves only those of keys "
        "and values, sliding windows and recurrent states: this context cannot be saved."
    )


def _restore(layer: Any, tensors: Mapping[str, Tensor], logical: int) -> None:
    """Restore the tensors of one cache layer in an empty one; raise ValueError if they are of another kind.

    Args:
        layer: an empty layer of a cache.
        tensors: what `_tensors_of` has returned of another one.
        logical: the cache's logical length.
    """
    presence = {
        "counts": isinstance(layer, LayerState),
        "keys": isinstance(layer, DynamicSlidingWindowLayer) and not isinstance(layer, LayerState),
    }
    if any((name in tensors) != expected for name, expected in presence.items()):
        raise ValueError
    layer_states = below(STATE, tensors)
    if layer_states and not isinstance(layer, LinearAttentionLayer):
        raise ValueError
    if isinstance(layer, LinearAttentionLayer):
        restore_states(layer, layer_states)
    if isinstance(layer, LayerState):
        layer.store, layer.logical = layer.store_type.of(below("columns.", tensors), tensors["counts"]), logical
        if (recorder := layer.collector.recorder) is not None and not layer.collector.turns:
            recorder.restore(below("passing.", tensors), logical, layer.collector.next)
    elif "keys" in tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.keys, layer.values = tensors["keys"], tensors["values"]
        layer.cumulative_length = logical


def _with_states(layers: Sequence[Mapping[str, Tensor]], model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Return a file's layers with states in the model's precision.

    Args:
        layers: the tensors of each layer.
        model: the model that the context is of.

    Raises:
        ValueError: states are of other sizes than the model's.
    """
    layer_states = [below(STATE, layer) for layer in layers]
    model_layers = own_layers(model.config.get_text_config(decoder=True), type(model).__name__)
    if not any(layer_states) and not any(isinstance(layer, LinearAttentionLayer) for layer in model_layers):
        return [dict(layer) for layer in layers]
    models = states_of_a_token(model)
    schema.check_states(layer_states, models)
    return [
        {**layer, **{f"{STATE}{name}": state.to(like[name].dtype) for name, state in own_states.items()}}
        for layer, own_states, like in zip(layers, layer_states, models, strict=True)
    ]
