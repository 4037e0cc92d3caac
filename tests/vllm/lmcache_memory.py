"""A store for LMCache in the memory of a CPU engine, for which LMCache has none: it copies whole pages.

`worker_extension_cls` has an engine load this module, which then is what LMCache makes.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from lmcache.v1 import gpu_connector
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from torch import Tensor


class HostConnector(GPUConnectorInterface):
    """Copies chunks, which are whole pages, byte by byte."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._layers, self._parts, _, self._kv_heads, self._head_dim = shape

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([self._parts, self._layers, num_tokens, self._kv_heads * self._head_dim])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        for cache, page, stored in self._pages(memory_obj, start, end, **kwargs):
            cache[page].view(-1).view(torch.uint8).copy_(stored)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        for cache, page, stored in self._pages(memory_obj, start, end, **kwargs):
            stored.copy_(cache[page].view(-1).view(torch.uint8))

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(one, start, end, **kwargs)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **kwargs)

    def _pages(
        self, memory_obj: Any, start: int, end: int, *, kvcaches: Any, slot_mapping: Tensor, **kwargs: Any
    ) -> list[tuple[Tensor, int, Tensor]]:
        """Each page of each layer of a chunk that is not cached already, and where its bytes are stored."""
        size = kvcaches[0].shape[2]
        assert start % size == end % size == 0
        known = max(0, kwargs.get("vllm_cached_tokens", 0) - start) // size
        pages = (slot_mapping[start:end:size] // size).tolist()
        stored = memory_obj.tensor.view(-1).view(torch.uint8).view(len(kvcaches), len(pages), -1)
        return [
            (cache, page, stored[layer, place])
            for layer, cache in enumerate(kvcaches)
            for place, page in enumerate(pages)
            if place >= known
        ]


class Extension:
    """Nothing: vLLM loads its module."""


def _make(config: Any, metadata: Any, *args: Any, **kwargs: Any) -> HostConnector:
    return HostConnector(metadata.kv_shape)


def _start(thread: threading.Thread) -> None:
    """Start a thread that ends with the process: nobody tells LMCache's to stop."""
    thread.daemon = True
    _started(thread)


gpu_connector.CreateGPUConnector = _make
_started, threading.Thread.start = threading.Thread.start, _start  # type: ignore[method-assign]
