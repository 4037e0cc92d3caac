"""The bytes that a cache really holds: counted from its tensors' storages, not reported by the cache."""

import gc
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Types that lead out of the cache into the rest of the program; a worker adds those that all its caches share.
OUTSIDE: list[type] = [nn.Module, type, types.ModuleType, types.FrameType, torch.dtype, torch.device]


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of the unique storages that a cache reaches."""

    floating: int
    other: int  # positions, offsets, masks


def held_bytes(cache: object) -> HeldBytes:
    """Count every storage reachable from `cache` once, whole: a view of a large buffer holds the buffer."""
    sizes: dict[int, int] = {}
    floating: set[int] = set()
    for tensor in _reachable_tensors(cache):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        if tensor.is_floating_point():
            floating.add(storage.data_ptr())
    held = sum(size for address, size in sizes.items() if address in floating)
    return HeldBytes(held, sum(sizes.values()) - held)


def _reachable_tensors(root: object) -> Iterator[Tensor]:
    seen: set[int] = set()
    waiting: list[Any] = [root]
    outside = tuple(OUTSIDE)
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, outside):
            continue
        seen.add(id(item))
        if isinstance(item, nn.Parameter):
            continue  # a weight of the model, not an entry of the cache
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, types.FunctionType):
            waiting.extend(item.__closure__ or ())  # not its globals: they are the whole module
        else:
            waiting.extend(gc.get_referents(item))


class PeakBytes(TorchDispatchMode):
    """Watches every operation while active: the peak bytes of the cache, and of all live tensors."""

    def __init__(self, cache: object):
        super().__init__()
        self.cache_peak = 0  # floating bytes reachable from the cache
        self.alive_peak = 0  # bytes of all storages made since the start and not yet freed
        self._cache = cache
        self._alive: dict[int, int] = {}
        self._alive_now = 0
        self._watched: set[weakref.ref[torch.UntypedStorage]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _address(leaf) not in given:
                self._watch(leaf.untyped_storage())
        self.alive_peak = max(self.alive_peak, self._alive_now)
        self.cache_peak = max(self.cache_peak, held_bytes(self._cache).floating)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._alive or size == 0:
            return
        self._alive[address] = size
        self._alive_now += size

        def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
            self._watched.discard(reference)
            self._alive_now -= self._alive.pop(address)

        self._watched.add(weakref.ref(storage, freed))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
