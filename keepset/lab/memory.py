"""Memory: the bytes of caches, the room for more caches, and errors about memory."""

from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from keepset.core.budget import TEXT
from keepset.core.traits import FULL_BYTES
from keepset.hf.cache import Cache
from keepset.hf.conversation import Conversation
from keepset.hf.other_layers import is_bounded, nbytes_of
from keepset.kernels.packed import SLACK
from keepset.recipe import Recipe

SHARES = {"cuda": 0.9, "cpu": 0.5}
"""The share of free memory that caches may take; less on a CPU, where a process that takes too much is killed."""


_LARGE = 4096
"""A key size so large that the other bytes of an entry are negligible."""


class CacheMemory:
    """The memory figures of a cell. `look` is cheap enough for every token; `finish` notes the rest.

    Attributes:
        nbytes: the most bytes allocated at any `look`, with positions and free places.
        nbytes_full: bytes of the full cache at that moment.
        share: `Cache.share` at that moment; 1.0 for the full cache, which drops nothing and stores no positions.
        keep: fraction of all tokens' entries that were held, at the beginning or when finished.
        select_seconds: seconds of all events by then.
    """

    def __init__(self, cache: Cache, is_full: bool) -> None:
        self._is_full = is_full
        self.nbytes = self.nbytes_full = 0
        self.share = 1.0
        self.look(cache)
        self.finish(cache)

    def look(self, cache: Cache) -> None:
        """Note the bytes that the cache holds now."""
        nbytes = cache.nbytes_full if self._is_full else cache.nbytes
        if nbytes > self.nbytes:
            self.nbytes, self.nbytes_full = nbytes, nbytes if self._is_full else cache.nbytes_full
            self.share = 1.0 if self._is_full else cache.share

    def finish(self, cache: Cache) -> None:
        """Note the share of remaining entries, and the seconds of all events."""
        stores = [(layer.store, layer.logical) for layer in cache.managed_layers.values() if layer.store is not None]
        tokens = sum(store.kv_heads * logical for store, logical in stores)
        self.keep = sum(store.entries for store, _ in stores) / tokens if tokens else 1.0
        self.select_seconds = sum(event.seconds for event in cache.events)


def most_tokens(recipe: Recipe | None, prompt: int, after: int) -> int:
    """Return the most entries that a cache holds at any time, in tokens, averaged over its heads.

    Args:
        recipe: the recipe; without a number of entries it holds all tokens, as the full cache (None) does.
        prompt: tokens of the prompt.
        after: tokens after it.
    """
    total = prompt + after
    if recipe is None or not recipe.budget.is_given:
        return total
    keep = recipe.budget_of_sizes([(_LARGE, _LARGE)]).keep  # with smaller heads fewer entries fit
    assert keep is not None
    ranges = sum(min(end, total) - min(first, total) for first, end in recipe.budget.ranges)
    if recipe.budget.kinds:  # the number of tokens of these kinds is not known yet
        ranges = total if TEXT in recipe.budget.kinds else prompt
    always = recipe.budget.sinks + recipe.budget.recent + max(ranges, prompt if prompt < recipe.budget.short else 0)
    kept = round(keep * prompt) if isinstance(keep, float) else keep
    kept = max(kept + (recipe.budget.recent if recipe.budget.recent_extra else 0), always)
    every = recipe.schedule.every
    if every is None:
        return min(kept + after + SLACK, total)
    whole = prompt if recipe.budget.protect_prompt or not recipe.schedule.prefill else 0
    return min(max(kept, whole + recipe.budget.recent) + every + SLACK, total)


class MemoryBudget:
    """Decides whether free memory has room for another cache, beside those that still grow.

    The bytes of a token are learned from other caches. Until then there is room for one cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._token_bytes = device, 0

    def learn(self, cache: Cache) -> None:
        """Learn from a cache how many bytes a token's entries take in all heads."""
        stores = [layer.store for layer in cache.managed_layers.values() if layer.store is not None]
        self._token_bytes = sum(store.kv_heads * store.token_bytes for store in stores)

    def takes(self, tokens: int, growing: Iterable[tuple[Cache, int]]) -> bool:
        """Return whether memory has room for another cache.

        Args:
            tokens: the most entries of the new cache, in tokens.
            growing: the caches that still grow, each with its most entries, in tokens.
        """
        growing = list(growing)
        if not growing:
            return True
        if (available_bytes := available(self._device)) is None:
            return True
        left = sum(max(0, most * self._token_bytes - cache.nbytes) for cache, most in growing)
        return left + tokens * self._token_bytes <= SHARES[self._device.type] * available_bytes


def available(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(psutil.virtual_memory().available, _left_to_this_container()) if device.type == "cpu" else None


def _left_to_this_container() -> int:
    """Return the bytes that Linux's control group still allows. Cached files count as free."""
    try:
        folder = Path("/sys/fs/cgroup")
        most = int(folder.joinpath("memory.max").read_text("ascii"))
        used = int(folder.joinpath("memory.current").read_text("ascii"))
        files = dict(line.split() for line in folder.joinpath("memory.stat").read_text("ascii").splitlines())
        return most - used + int(files["inactive_file"])
    except (OSError, ValueError, KeyError):  # there is none, or it has no limit
        return 2**63


def watch_peak(device: torch.device) -> Callable[[], int | None]:
    """Start measuring the peak of bytes allocated on a device; return a function that returns it, None on a CPU."""
    if device.type != "cuda":
        return lambda: None
    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.max_memory_allocated(device)


def dynamic_nbytes(cache: DynamicCache) -> int:
    """Return the bytes of a plain cache of transformers, recurrent states included."""
    return sum(nbytes_of(layer) for layer in cache.layers)


def growing_nbytes(cache: DynamicCache) -> int:
    """Return the bytes of a plain cache of transformers in the layers that grow with the text."""
    return sum(tensor.nbytes for tensor in _growing(cache))


def counted_nbytes(cache: DynamicCache) -> int:
    """Return the bytes of a plain cache as `Cache.nbytes_counted_full` counts them: entries alone, in 16 bits."""
    return sum(tensor.numel() for tensor in _growing(cache)) * FULL_BYTES


def _growing(cache: DynamicCache) -> list[torch.Tensor]:
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin) and not is_bounded(layer)]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory was insufficient. PyTorch has several such errors."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def chat_status(conversation: Conversation) -> str:
    """Return what the newest turn of a conversation has computed, and what its cache holds, for a person."""
    cache = conversation.cache
    held, full, allocated = (
        f"{nbytes / 1e6:.1f} MB" for nbytes in (cache.nbytes_counted, cache.nbytes_counted_full, cache.nbytes)
    )
    return (
        f"{conversation.computed} tokens of the history computed, {conversation.reused} not again, "
        f"{conversation.dropped} dropped; {held} of keys and values in 16 bits, of {full} in a full cache; {allocated} "
        "allocated"
    )
