"""Caches made one batch that goes on together, such as those of one prompt under several recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from keepset.hf.cache import Cache
from keepset.hf.progress import Progress
from keepset.hf.store import EntryStore


def can_join(cache: Cache) -> bool:
    """Whether it may join others: it compresses nothing more, has no padding, and no layers of another kind."""
    if cache.schedule.every is not None or len(cache.kept_layers) < len(cache.layers):
        return False
    return (progress := _progress(cache)) is not None and progress.seen is None


def join(caches: Sequence[Cache]) -> Cache:
    """The first of them, with the requests of all in their order; the others hold nothing any more.

    They are of one model and have as many tokens, and each `can_join`. One alone stays as it is.
    """
    if len(caches) == 1:
        return caches[0]
    parts = [progress for progress in map(_progress, caches) if progress is not None]
    assert len(parts) == len(caches) and len({part.logical for part in parts}) == 1
    lengths, prompts = (torch.cat([getattr(part, name) for part in parts]) for name in ("lengths", "prompts"))
    progress = replace(parts[0], lengths=lengths, prompts=prompts)
    for index, joined in caches[0].kept_layers.items():
        layers = [cache.kept_layers[index] for cache in caches]
        store = EntryStore.join([layer.store for layer in layers if layer.store is not None])
        # Layer by layer, so that no more than one of them is there twice.
        for layer in layers:
            layer.reset()
        joined.resume(store, progress, {})
    return caches[0]


def _progress(cache: Cache) -> Progress | None:
    """How far it has come, which all of its layers agree on."""
    return next((layer.progress for layer in cache.kept_layers.values()), None)
