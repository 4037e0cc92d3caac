"""TurboQuant in plain torch: what `turboquant_4bit_nc` stores, and vLLM's backend with it on a CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

KIND = "turboquant_4bit_nc"


def stored(keys: Tensor, values: Tensor) -> Tensor:
    """The slots of entries, `[..., bytes]`: direction and length of a key, levels, step and least number of a value."""
    length = keys.norm(dim=-1, keepdim=True)
    nearest = ((keys / (length + 1e-8) @ _rotation(keys.shape[-1]))[..., None] - _centroids(keys.shape[-1])).abs()
    least, largest = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    step = ((largest - least) / 15).clamp(min=1e-8)
    levels = ((values - least) / step + 0.5).floor().clamp(0, 15)
    parts = [_pairs(nearest.argmin(-1)), _halves(length), _pairs(levels.int()), _halves(step), _halves(least)]
    return torch.cat(parts, -1)


def meant(slots: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The keys and values that slots stand for."""
    directions, length, levels, step, least = slots.split([dim // 2, 2, dim // 2, 2, 2], -1)
    chosen = _centroids(dim)[_numbers(directions)]
    keys = _half(length) * (chosen / chosen.norm(dim=-1, keepdim=True)) @ _rotation(dim)
    return keys, _numbers(levels) * _half(step) + _half(least)


@cache
def _rotation(dim: int) -> Tensor:
    """A Hadamard matrix of length one."""
    return torch.tensor([[1.0 - (i & j).bit_count() % 2 * 2 for j in range(dim)] for i in range(dim)]) / dim**0.5


@cache
def _centroids(dim: int) -> Tensor:
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids

    return get_centroids(dim, 4)


def _pairs(numbers: Tensor) -> Tensor:
    return (numbers[..., 0::2] + 16 * numbers[..., 1::2]).to(torch.uint8)


def _numbers(pairs: Tensor) -> Tensor:
    return torch.stack([pairs % 16, pairs // 16], -1).flatten(-2).long()


def _halves(numbers: Tensor) -> Tensor:
    return numbers.half().view(torch.uint8)


def _half(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16).float()


def use(attend: Any) -> None:
    """Have vLLM's backend store and attend as this module does, with `attend` for its kernels.

    All tokens attend to what is stored, also those that came with it, which vLLM's own prefill sees as they were.
    """
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionImpl

    def store(self: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor, layer: Any) -> None:
        assert slots.shape[0] <= key.shape[0] and self.tq_config.key_quant_bits == 4
        real, size = slots >= 0, kv_cache.shape[1]
        kv_cache[slots[real] // size, slots[real] % size] = stored(key[real], value[real])

    def attended(self: Any, query: Tensor, kv_cache: Tensor, metadata: Any, starts: Tensor, most: int) -> Tensor:
        keys, values = meant(kv_cache, self.head_size)
        out = torch.empty_like(query)
        longest = metadata.max_seq_len
        attend(
            query, keys, values, out, starts, metadata.seq_lens, metadata.block_table, self.scale, most, longest, True
        )
        return out

    def prefill(
        self: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any, *_: Any, **__: Any
    ) -> Tensor:
        return attended(self, query, kv_cache, metadata, metadata.query_start_loc, metadata.max_query_len)

    def decode(self: Any, query: Tensor, kv_cache: Tensor, metadata: Any, *_: Any, **__: Any) -> Tensor:
        starts = torch.arange(len(query) + 1, dtype=torch.int32)
        return attended(self, query, kv_cache, metadata, starts, 1)

    TurboQuantAttentionImpl._store_kv = store
    TurboQuantAttentionImpl._prefill_attention, TurboQuantAttentionImpl._decode_attention = prefill, decode
