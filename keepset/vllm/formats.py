"""The quantised caches of vLLM that are served: how keys and values are read and written, and where their bytes lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from keepset.errors import UnsupportedEngineError
from keepset.kernels.entry_parts import EntryParts, nvfp4_parts, slot_parts
from keepset.kernels.mixing import Mixing, mixing_of_stores
from keepset.kernels.packed_formats import NVFP4Format, PackedFormat
from keepset.kernels.page_format import FOUR_BITS, SCALE_BYTES, PageFormat
from keepset.paged.pages import ScatteredPages, decoded_entries
from keepset.vllm.compat import mixing_of, turboquant_format, write_rows
from keepset.vllm.recipe_support import INT4, INT8

WHOLE = ("auto", "float16", "bfloat16", "float32")
"""Types of caches that are not quantised."""
LAYER_SCALES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Types of caches with one scale for a layer's keys, and one for its values."""
ROW_SCALES = (INT8, INT4, "fp8_per_token_head")
"""Types of caches with a scale for each key and one for each value."""
TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
"""Types of caches with a slot for each entry: a key of 8, 4 or 3 bits, followed by a value of 4 or 3 bits."""
NVFP4 = ("nvfp4", "nvfp4_4over6")
"""Types of caches of 4-bit floats with a scale for every sixteen of them; the two differ in how scales are chosen."""
PACKED = (*TURBOQUANT, *NVFP4)
"""Types of caches that store keys and values differently, or in several places."""

_ROW_MODES = {
    KVQuantMode.INT8_PER_TOKEN_HEAD: (torch.int8, 1),
    KVQuantMode.INT4_PER_TOKEN_HEAD: (torch.uint8, 2),
    KVQuantMode.FP8_PER_TOKEN_HEAD: (torch.uint8, 1),
}
"""The caches with a scale for each row by vLLM's quantisation mode: their dtype, and how many numbers share a byte."""


def format_of(layer: Any, dtype: torch.dtype) -> PageFormat | None:
    """Return the format of a layer's cache, if keepset writes to it; None if it is not quantised.

    Args:
        layer: vLLM's attention layer.
        dtype: the model's dtype, in which keys and values are read.
    """
    kind, head_dim = layer.kv_cache_dtype, layer.head_size
    if kind in WHOLE:
        return None
    if kind in ROW_SCALES:
        return row_format(kind, head_dim, dtype)
    # The Triton backend always writes this dtype, whichever was asked for.
    is_wide = kind == "fp8_e5m2" and getattr(layer.impl, "fp8_dtype", None) is None
    numbers = torch.float8_e5m2 if is_wide else current_platform.fp8_dtype()
    return PageFormat(numbers, head_dim, dtype, layer._k_scale, layer._v_scale)


def check_rows(kind: str, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check that keepset reads back a few mixed entries with their own scales that vLLM writes.

    Args:
        kind: vLLM's name of the cache's type.
        kv_heads, head_dim, dtype: shape and dtype of a layer's keys and values.
        device: the cache's device.

    Raises:
        UnsupportedEngineError: the entries differ by more than the rounding to 8 or 4 bits.
    """
    format, size, draw = row_format(kind, head_dim, dtype), 16, torch.Generator().manual_seed(0)
    cache = torch.zeros(2, kv_heads, size, 2 * format.row_bytes, dtype=torch.int8, device=device)
    cache = cache if kind == INT8 else cache.view(torch.uint8)
    numbers = torch.randn(2, 3, kv_heads, head_dim, generator=draw).to(device, dtype)
    slots = torch.tensor([size + 1, 5, 2], device=device)
    own = own_mixing(kind, head_dim)
    new = numbers if own is None else own.mixed(numbers)
    write_rows(kind, new[0], new[1], cache, slots)
    rows = cache[slots // size, :, slots % size].chunk(2, -1)
    for part, right in zip(rows, numbers, strict=True):
        off, whole = format.decode_keys(part).float() - right.float(), right.float()
        if kind == INT4:
            near = off.norm(dim=-1) <= whole.norm(dim=-1) / _PARTS
        else:
            near = off.abs() <= whole.abs().amax(-1, keepdim=True) / _STEPS
        if not bool(near.all()):
            raise UnsupportedEngineError(
                f"keepset does not know the layout of this vLLM's KV cache of kind {kind}: use a supported version, "
                "or kv_cache_dtype auto."
            )


_STEPS = 24
"""The error of an 8-bit number is less than its row's largest number divided by this."""
_PARTS = 4
"""The error of a 4-bit row is less than the row's length divided by this."""
_PACKED_PARTS = 3
"""The error of a row is less than its length divided by this; that of 3-bit rows is about a quarter."""


def row_format(kind: str, head_dim: int, dtype: torch.dtype) -> PageFormat:
    """Return the format of a cache in which each key and each value has a scale."""
    if kind == INT4:
        return PageFormat(FOUR_BITS, head_dim, dtype, mixing=mixing_of(head_dim, current_platform.device_type))
    numbers = torch.int8 if kind == INT8 else current_platform.fp8_dtype()
    return PageFormat(numbers, head_dim, dtype, mixing=own_mixing(kind, head_dim))


def own_mixing(kind: str, head_dim: int) -> Mixing | None:
    """Return how keepset mixes rows before vLLM sees them; None if it does not. vLLM itself mixes 4-bit rows.

    Args:
        kind: vLLM's name of the cache's type.
        head_dim: numbers of a key.
    """
    return mixing_of_stores(head_dim, current_platform.device_type) if kind == INT8 else None


def as_on_gpus(spec: AttentionSpec) -> AttentionSpec:
    """Return a layer's kind of cache as in vLLM's backends for GPUs: with packed slots, or room for rows' scales."""
    head_slots, content = _slots_of(spec)
    if content is None or spec.state_content_bytes is not None:
        return spec
    return replace(spec, num_head_slots=head_slots, state_content_bytes=content)


def packed_otherwise(spec: AttentionSpec) -> bool:
    """Return whether a layer's cache has another layout than the one that keepset knows for its type."""
    mode = spec.kv_quant_mode
    if mode in _ROW_MODES:
        dtype, together = _ROW_MODES[mode]
        if spec.dtype != dtype or spec.head_size % (together * SCALE_BYTES):
            return True
    elif not (mode.is_nvfp4 or mode.is_turboquant or mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)):
        return True
    return (spec.num_head_slots, spec.state_content_bytes, spec.tokens_per_state) != (*_slots_of(spec), 1)


def _slots_of(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """Return how many slots a token has on GPUs, and the bytes of each; None where vLLM's defaults are right."""
    mode = spec.kv_quant_mode
    if mode.is_nvfp4 or mode.is_turboquant:
        kind = NVFP4[0] if mode.is_nvfp4 else mode.name.lower()
        slots, content = packed_slots(kind, spec.num_kv_heads, spec.head_size)
        return None if slots == spec.num_kv_heads else slots, content
    if mode in _ROW_MODES:  # a row for the key and one for the value, each followed by its scale
        return None, 2 * (spec.head_size // _ROW_MODES[mode][1] + SCALE_BYTES)
    return None, None


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
        if not bool((off.norm(dim=-1) <= right.norm(dim=-1) / _PACKED_PARTS).all()):
            raise UnsupportedEngineError(
                f"keepset does not know the layout of this vLLM's KV cache of kind {kind}: use a supported version, "
                "or kv_cache_dtype auto."
            )
