"""What keepset will need of a GPU's memory once there is a cache, so that vLLM leaves room for it.

vLLM measures what is taken before it decides how large the cache is. What is held of queries is there by then
(`EngineContext`). Numbers of entries are as many as the cache has slots, and events take entries out of it for a
while: for these as much is held, while vLLM measures, as they can come to.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from keepset.paged.entry_columns import COLUMN_BYTES
from keepset.paged.layer_group import WORKSPACE

_COPIES = 3
"""What an event makes of a layer's entries of the longest prompt: a copy, and twice their bytes for scores."""


def needed_bytes(pool: int, columns: int, entry_bytes: int, kv_heads: int, longest: int) -> int:
    """What there will be beside the cache.

    Args:
        pool: bytes for the cache and its entries' numbers together.
        columns: numbers of an entry.
        entry_bytes: of an entry's key and value.
        kv_heads: of a layer, in this process.
        longest: tokens of a request, at most.
    """
    beside = columns * COLUMN_BYTES
    return pool * beside // (entry_bytes + beside) + max(WORKSPACE, _COPIES * longest * kv_heads * entry_bytes)


def reserve(config: VllmConfig, columns: int, entry_bytes: int, kv_heads: int) -> Tensor | None:
    """Holds so much; to be dropped as soon as vLLM has measured. None where it measures nothing."""
    cache = config.cache_config
    if not current_platform.is_cuda_alike() or cache.kv_cache_memory_bytes:
        return None
    free, total = torch.cuda.mem_get_info()
    pool = max(0, int(cache.gpu_memory_utilization * total) - (total - free))
    needed = needed_bytes(pool, columns, entry_bytes, kv_heads, config.model_config.max_model_len)
    return torch.empty(min(needed, free), dtype=torch.uint8, device=current_platform.device_type)
