"""What a cache holds, laid out flat: two of them are compared to the bit."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import keepset
from keepset.hf.query_recorder import QueryWindow
from keepset.hf.store import EntryStore

_NOT_STATE = {
    *("_hooks", "_second", "_perplexity", "_model", "_forecast", "_in_entries", "_few", "_from_files", "_waiting"),
    *("recipe", "observer", "schedule", "needs", "seconds", "positions", "_seconds", "managed_layers", "_config"),
    *("_model_name", "_in_forward", "_is_changed"),
}
"""Attributes that say nothing of what is cached, or, as positions of the newest forward, nothing any more."""


def state(cache: keepset.Cache) -> dict[str, Any]:
    """Everything that a cache holds, by path: tensors, copied, and plain values."""
    found: dict[str, Any] = {"waiting": len(cache._waiting)}
    _collect(cache, "", found, set())
    return found


def saved_state(cache: keepset.Cache) -> dict[str, Any]:
    """Of `state` what a saved context brings back; of its tokens a file has no ids."""
    found = state(cache)
    gone = (".events", ".history", ".prompt_length", "._is_user", ".progress.known")
    for name in [name for name in found if name.startswith(gone)]:
        del found[name]
    kept = tuple(f".layers[{index}]." for index in cache.managed_layers)
    for name in list(found):
        if name.startswith(kept) and name.rsplit(".", 1)[-1] in ("is_initialized", "dtype", "device", "keys", "values"):
            del found[name]
    for index, layer in enumerate(cache.layers):
        if index not in cache.managed_layers and layer.keys is not None:
            for part in ("keys", "values"):
                first = max(layer.keys.shape[2] - layer.sliding_window + 1, 0)
                found[f".layers[{index}].{part}"] = found[f".layers[{index}].{part}"][:, :, first:]
    if cache.events:
        _collect(cache.events[-1], ".event", found, set())
    return found


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return where two states differ first; "" where they are the same to the bit."""
    for name in [*one, *(name for name in other if name not in one)]:
        if name not in one or name not in other:
            return f"{name} is there only {'before' if name in one else 'after'}"
        a, b = one[name], other[name]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.dtype != b.dtype or a.shape != b.shape or not _same_bits(a, b):
                return f"{name}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)} differ"
        elif type(a) is not type(b) or a != b:
            return f"{name}: {a!r} and {b!r}"
    return ""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().view(torch.uint8) if x.numel() and x.ndim else x for x in (a, b))
    return torch.equal(a, b)


def _collect(thing: Any, path: str, found: dict[str, Any], above: set[int]) -> None:
    if thing is None or isinstance(thing, str | int | float | bool | torch.dtype | torch.device):
        found[path] = thing
        return
    if id(thing) in above:
        return
    above = above | {id(thing)}
    if isinstance(thing, Tensor):
        found[path] = thing.detach().clone()
        return
    if isinstance(thing, list | tuple | set):
        found[f"{path}.len"] = len(thing)
    for name, part in _parts(thing).items():
        _collect(part, path + name, found, above)


def _parts(thing: Any) -> dict[str, Any]:
    """What a thing holds; of those that may lie about in several ways, what they come to."""
    if isinstance(thing, EntryStore):
        return {".counts": tuple(thing.counts), ".batch": thing.batch, **_named(thing.packed)}
    if isinstance(thing, QueryWindow):
        return {".holes": thing.holes and thing.size > 0, **_named(thing.columns)}
    if isinstance(thing, keepset.KeepSet):
        layers = [(index, thing.layer(index)) for index in thing.layers]
        counts = {f"[{index}].counts": kept.counts for index, kept in layers}
        return counts | {f"[{index}].at": kept.packed_positions for index, kept in layers}
    if isinstance(thing, dict | list | tuple | set):
        items = thing.items() if isinstance(thing, dict) else enumerate(thing)
        return {f"[{key}]": value for key, value in items}
    if not type(thing).__module__.startswith(("keepset", "transformers.cache_utils")):
        return {}
    fields = dict(getattr(thing, "__dict__", {}))
    if dataclasses.is_dataclass(thing):
        fields |= {each.name: getattr(thing, each.name) for each in dataclasses.fields(thing)}
    held = {name: value for name, value in fields.items() if name not in _NOT_STATE and not _is_derived(thing, name)}
    return {f".{name}": value for name, value in held.items()}


def _is_derived(thing: Any, name: str) -> bool:
    """Return whether this attribute of something that never changes follows from its fields, once it is asked for."""
    params = getattr(type(thing), "__dataclass_params__", None)
    return params is not None and params.frozen and isinstance(getattr(type(thing), name, None), cached_property)


def _named(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f".{name}": column for name, column in columns.items()}
