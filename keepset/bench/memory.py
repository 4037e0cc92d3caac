"""Bytes that caches hold, and whether there was room for them."""

import torch
from torch import Tensor
from transformers import DynamicCache

from keepset.hf.cache import Cache


class CacheMemory:
    """What a cache held, in the figures of a cell; `look` is cheap, for every token, and `finish` notes the rest.

    A cache that `is_full` drops nothing and stands for the full one, which has no positions to store. Bytes are the
    most at any look, allocated, positions and free places included; the full cache's are those at the same moment.
    `keep`, the fraction of all tokens' entries that were there, and the seconds that selecting had taken are those at
    the beginning, or when it was finished.
    """

    def __init__(self, cache: Cache, is_full: bool) -> None:
        self._is_full = is_full
        self.nbytes = self.nbytes_full = 0
        self.look(cache)
        self.finish(cache)

    def look(self, cache: Cache) -> None:
        """Notes the bytes that it holds now."""
        nbytes = nbytes_full(cache) if self._is_full else cache.nbytes
        if nbytes > self.nbytes:
            self.nbytes, self.nbytes_full = nbytes, nbytes if self._is_full else nbytes_full(cache)

    def finish(self, cache: Cache) -> None:
        """Notes what is left in the end, and what it took."""
        stores = [(layer.store, layer.logical) for layer in cache.kept_layers.values() if layer.store is not None]
        tokens = sum(store.kv_heads * logical for store, logical in stores)
        self.keep = sum(store.entries for store, _ in stores) / tokens if tokens else 1.0
        self.select_seconds = sum(event.seconds for event in cache.events)


def nbytes_full(cache: Cache) -> int:
    """Bytes of keys and values of all tokens so far; layers that keepset leaves alone hold what they hold."""
    total = cache.nbytes
    for layer in cache.kept_layers.values():
        assert layer.store is not None
        heads = layer.store.heads
        entry = (heads.keys.shape[-1] + heads.values.shape[-1]) * heads.keys.element_size()
        total += layer.store.kv_heads * layer.logical * entry - layer.nbytes
    return total


def dynamic_nbytes(cache: DynamicCache) -> int:
    """Bytes of keys and values in a plain cache of transformers."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was not enough, which torch does in several ways."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
