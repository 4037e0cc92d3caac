"""Bytes that caches hold, how many there is room for, and whether there was."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from keepset.hf.cache import Cache
from keepset.hf.store import SLACK
from keepset.recipe import Recipe

SHARES = {"cuda": 0.9, "cpu": 0.5}
"""Of the memory that is free, what caches may grow by: a CPU's is others' too, and who takes too much is killed."""


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
        nbytes = cache.nbytes_full if self._is_full else cache.nbytes
        if nbytes > self.nbytes:
            self.nbytes, self.nbytes_full = nbytes, nbytes if self._is_full else cache.nbytes_full

    def finish(self, cache: Cache) -> None:
        """Notes what is left in the end, and what it took."""
        stores = [(layer.store, layer.logical) for layer in cache.kept_layers.values() if layer.store is not None]
        tokens = sum(store.kv_heads * logical for store, logical in stores)
        self.keep = sum(store.entries for store, _ in stores) / tokens if tokens else 1.0
        self.select_seconds = sum(event.seconds for event in cache.events)


def most_tokens(recipe: Recipe | None, prompt: int, after: int) -> int:
    """As many tokens' entries a cache comes to at most, on the mean over its heads, with so many after the prompt.

    Without a recipe, or where it does not say how much it keeps, those of all tokens.
    """
    total = prompt + after
    if recipe is None or (keep := recipe.budget.keep) is None:
        return total
    ranges = sum(min(end, total) - min(first, total) for first, end in recipe.budget.protect)
    always = recipe.budget.sinks + recipe.budget.recent + ranges
    kept = max(round(keep * prompt) if isinstance(keep, float) else keep, always)
    every = recipe.schedule.every
    if every is None:
        return min(kept + after + SLACK, total)
    whole = prompt if recipe.budget.protect_prompt or not recipe.schedule.prefill else 0
    return min(max(kept, whole + recipe.budget.recent) + every + SLACK, total)


class MemoryBudget:
    """Whether the memory at hand takes another cache, beside those that are still growing.

    What a token takes is that of the caches which it was shown; until there is one, there is room for one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._token_bytes = device, 0

    def learn(self, cache: Cache) -> None:
        """Sees what a token's entries take in all heads."""
        stores = [layer.store for layer in cache.kept_layers.values() if layer.store is not None]
        self._token_bytes = sum(store.kv_heads * store.entry_bytes for store in stores)

    def takes(self, tokens: int, growing: Iterable[tuple[Cache, int]]) -> bool:
        """One that needs so many tokens' entries; of those that grow it is said what they come to, in tokens."""
        growing = list(growing)
        if not growing:
            return True
        if (there := available(self._device)) is None:
            return True
        left = sum(max(0, most * self._token_bytes - cache.nbytes) for cache, most in growing)
        return left + tokens * self._token_bytes <= SHARES[self._device.type] * there


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines())
    return min(int(lines["MemAvailable"].split()[0]) * 1024, _left_to_this_container())


def _left_to_this_container() -> int:
    """What Linux's control group allows beyond what is in use; caches of files count as free."""
    try:
        folder = Path("/sys/fs/cgroup")
        most = int(folder.joinpath("memory.max").read_text("ascii"))
        used = int(folder.joinpath("memory.current").read_text("ascii"))
        files = dict(line.split() for line in folder.joinpath("memory.stat").read_text("ascii").splitlines())
        return most - used + int(files["inactive_file"])
    except (OSError, ValueError, KeyError):  # there is none, or it has no limit
        return 2**63


def watch_peak(device: torch.device) -> Callable[[], int | None]:
    """From now on notes the most bytes allocated on the device; the answer tells it, or None on a CPU."""
    if device.type != "cuda":
        return lambda: None
    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.max_memory_allocated(device)


def dynamic_nbytes(cache: DynamicCache) -> int:
    """Bytes of keys and values in a plain cache of transformers."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was not enough, which torch does in several ways."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
