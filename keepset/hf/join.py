"""Caches made one batch that goes on together, such as those of one prompt under several recipes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepset.errors import KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.store import EntryStore


def can_join(cache: Cache) -> bool:
    """Whether it may join others: it compresses nothing more, has no padding, and no layers of another kind."""
    if cache.schedule.every is not None or len(cache.kept_layers) < len(cache.layers):
        return False
    try:
        return cache.require_prompt().valid is None
    except KeepsetError:
        return False


def join(caches: Sequence[Cache]) -> Cache:
    """The first of them, with the requests of all in their order; the others hold nothing any more.

    They are of one model and have as many tokens, and each `can_join`. One alone stays as it is.
    """
    if len(caches) == 1:
        return caches[0]
    parts = [cache.require_prompt() for cache in caches]
    assert len({part.logical for part in parts}) == 1
    parts[0].lengths = torch.cat([part.lengths for part in parts])
    parts[0].prompts = torch.cat([part.prompts for part in parts])
    for index, joined in caches[0].kept_layers.items():
        layers = [cache.kept_layers[index] for cache in caches]
        store = EntryStore.join([layer.store for layer in layers if layer.store is not None])
        # Layer by layer, so that no more than one of them is there twice.
        for layer in layers[1:]:
            layer.reset()
        joined.store = store
    for cache in caches[1:]:
        cache.progress = None
    return caches[0]
