"""What a cache holds, in the figures of a cell."""

from __future__ import annotations

from keepset.hf.cache import Cache


class Holding:
    """What a cache held when somebody looked; `look` is cheap, for every token, and `finish` says the rest.

    Args:
        whole: the cache drops nothing and stands for the full one, which has no positions to store.

    Attributes:
        nbytes: the most bytes at any look, allocated: positions and free places included.
        nbytes_full: the full cache's at the same moment.
        keep: fraction of all tokens' entries that were there at the beginning, or when it was finished.
        select_seconds: that choosing and freeing had taken by then.
    """

    def __init__(self, cache: Cache, whole: bool) -> None:
        self._whole = whole
        self.nbytes = self.nbytes_full = 0
        self.look(cache)
        self.finish(cache)

    def look(self, cache: Cache) -> None:
        """Notes the bytes that it holds now."""
        nbytes = nbytes_full(cache) if self._whole else cache.nbytes
        if nbytes > self.nbytes:
            self.nbytes, self.nbytes_full = nbytes, nbytes if self._whole else nbytes_full(cache)

    def finish(self, cache: Cache) -> None:
        """Notes what is left in the end, and what it took."""
        self.keep = kept(cache)
        self.select_seconds = sum(event.seconds for event in cache.events)


def nbytes_full(cache: Cache) -> int:
    """Bytes of keys and values of all tokens so far; layers that keepset leaves alone hold what they hold."""
    total = cache.nbytes
    for layer in cache.kept_layers.values():
        assert layer.store is not None
        span = next(layer.store.spans())
        entry = (span.keys.shape[-1] + span.values.shape[-1]) * span.keys.element_size()
        total += layer.store.kv_heads * layer.logical * entry - layer.nbytes
    return total


def kept(cache: Cache) -> float:
    """Fraction of all tokens' entries that are there."""
    layers = list(cache.kept_layers.values())
    entries = [layer.store.entries for layer in layers if layer.store is not None]
    tokens = [layer.store.kv_heads * layer.logical for layer in layers if layer.store is not None]
    return sum(entries) / sum(tokens) if tokens else 1.0
