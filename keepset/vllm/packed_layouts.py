"""Caches that store keys and values differently, or in several places: TurboQuant and NVFP4.

For both, this module gives the format of keys and values, and the places of an entry's bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import AttentionSpec

from keepset.errors import UnsupportedEngineError
from keepset.kernels.entry_parts import EntryParts, nvfp4_parts, slot_parts
from keepset.kernels.packed_formats import NVFP4Format, PackedFormat
from keepset.paged.pages import ScatteredPages, decoded_entries
from keepset.vllm.compat import turboquant_format

TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
"""Types of caches with a slot for each entry: a key of 8, 4 or 3 bits, followed by a value of 4 or 3 bits."""
NVFP4 = ("nvfp4", "nvfp4_4over6")
"""Types of caches of 4-bit floats with a scale for every sixteen of them; the two differ in how scales are chosen."""
PACKED = (*TURBOQUANT, *NVFP4)

_PARTS = 3
"""The error of a row is less than its length divided by this; that of 3-bit rows is about a quarter."""


def packed_format(layer: Any, dtype: torch.dtype) -> PackedFormat:
    """Return the format of a layer's cache.

    Args:
        layer: vLLM's attention layer.
        dtype: the model's dtype, in which keys and values are read.
    """
    if layer.kv_cache_dtype in NVFP4:
        return NVFP4Format(layer.head_size, dtype, layer._k_scale, layer._v_scale)
    return turboquant_format(layer.kv_cache_dtype, layer.head_size, dtype)


def parts_of(layer: Any, cache: Tensor) -> EntryParts:
    """Return views of the bytes of a cache's entries.

    Args:
        layer: vLLM's attention layer.
        cache: its cache, or that of a layer like it.

    Raises:
        UnsupportedEngineError: keepset does not know the cache's layout.
    """
    if layer.kv_cache_dtype in NVFP4:
        return nvfp4_parts(cache, swizzled=not getattr(layer.impl, "nvfp4_fa2", True))  # on CPUs they never are
    format = turboquant_format(layer.kv_cache_dtype, layer.head_size, cache.dtype)
    return slot_parts(cache, format.key_bytes, format.value_bytes)


def room_like(cache: Tensor, tokens: int) -> Tensor:
    """Return a new cache with the layout of another one, and room for `tokens` tokens.

    Args:
        cache: a layer's cache, `[blocks, slots of a token, block_size, bytes]`.
        tokens: the number of tokens.
    """
    _, slots, size, content = cache.shape
    blocks, by_heads = -(-tokens // size), cache.stride(1) > cache.stride(2)
    if by_heads:
        return cache.new_empty(blocks, slots, size, content)
    return cache.new_empty(blocks, size, slots, content).transpose(1, 2)


def with_slots(spec: AttentionSpec) -> AttentionSpec:
    """Return a layer's kind of cache, with the slots of vLLM's backends for GPUs if it is packed."""
    if (kind := kind_of(spec)) is None or spec.state_content_bytes is not None:
        return spec
    slots, content = packed_slots(kind, spec.num_kv_heads, spec.head_size)
    head_slots = None if slots == spec.num_kv_heads else slots
    return replace(spec, num_head_slots=head_slots, state_content_bytes=content)


def packed_slots(kind: str, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return how many slots a token has in a layer, and the bytes of each.

    Args:
        kind: vLLM's name of the cache's type.
        kv_heads, head_dim: the layer's KV heads, and numbers of a key.
    """
    if kind in NVFP4:  # one for each key and one for each value
        one = torch.ones(())
        return 2 * kv_heads, NVFP4Format(head_dim, torch.float32, one, one).key_bytes
    format = turboquant_format(kind, head_dim, torch.float32)
    return kv_heads, -(-(format.key_bytes + format.value_bytes) // 2) * 2


def kind_of(spec: AttentionSpec) -> str | None:
    """Return vLLM's name of a packed cache's type, given the layer's kind of cache; None if it is not packed."""
    if spec.kv_quant_mode.is_nvfp4:
        return NVFP4[0]
    return spec.kv_quant_mode.name.lower() if spec.kv_quant_mode.is_turboquant else None


def check_packed(layer: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Check that keepset reads back a few entries that vLLM writes to a packed cache.

    Args:
        layer: vLLM's attention layer.
        dtype: the model's dtype.
        device: the cache's device.

    Raises:
        UnsupportedEngineError: the entries differ by more than the rounding.
    """
    kind, kv_heads, head_dim, size = layer.kv_cache_dtype, layer.num_kv_heads, layer.head_size, 16
    draw, (head_slots, content) = torch.Generator().manual_seed(0), packed_slots(kind, kv_heads, head_dim)
    cache = torch.zeros(2, head_slots, size, content, dtype=torch.uint8, device=device)
    written = torch.randn(2, 3, kv_heads, head_dim, generator=draw).to(device, dtype)
    slots = torch.tensor([size + 1, 5, 2], device=device)
    layer.impl.write_plain(layer, written[0], written[1], cache, slots)
    pages = ScatteredPages([parts_of(layer, cache)], 0, packed_format(layer, dtype))
    subpages = torch.arange(2 * kv_heads, device=device).view(2, kv_heads, 1)
    for read, right in zip(decoded_entries(pages, subpages), written.float(), strict=True):
        off = read[slots // size, :, slots % size].float() - right
        if not bool((off.norm(dim=-1) <= right.norm(dim=-1) / _PARTS).all()):
            raise UnsupportedEngineError(
                f"keepset does not know the layout of this vLLM's KV cache of kind {kind}: use a supported version, "
                "or kv_cache_dtype auto."
            )
