"""The quantised caches of vLLM that are served: how keys and values are read and written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from keepset.errors import UnsupportedEngineError
from keepset.kernels.entry_format import Mixing, mixing_of
from keepset.kernels.page_format import SCALE_BYTES, PageFormat
from keepset.vllm.compat import write_rows
from keepset.vllm.recipe_support import INT8

WHOLE = ("auto", "float16", "bfloat16", "float32")
"""Types of caches that are not quantised."""
LAYER_SCALES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Types of caches with one scale for a layer's keys, and one for its values."""
ROW_SCALES = (INT8, "fp8_per_token_head")
"""Types of caches with a scale for each key and one for each value."""

_ROW_MODES = {KVQuantMode.INT8_PER_TOKEN_HEAD: torch.int8, KVQuantMode.FP8_PER_TOKEN_HEAD: torch.uint8}
"""The caches with a scale for each row by vLLM's quantisation mode, and their dtype."""


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
        UnsupportedEngineError: the entries differ by more than the rounding to 8 bits.
    """
    format, size, draw = row_format(kind, head_dim, dtype), 16, torch.Generator().manual_seed(0)
    cache = torch.zeros(2, kv_heads, size, 2 * format.row_bytes, dtype=torch.int8, device=device)
    cache = cache if kind == INT8 else cache.view(torch.uint8)
    numbers = torch.randn(2, 3, kv_heads, head_dim, generator=draw, dtype=torch.float32).to(device, dtype)
    slots = torch.tensor([size + 1, 5, 2], dtype=torch.long, device=device)
    new = numbers if format.mixing is None else format.mixing.mixed(numbers)
    write_rows(kind, new[0], new[1], cache, slots)
    rows = cache[slots // size, :, slots % size].chunk(2, -1)
    for part, right in zip(rows, numbers, strict=True):
        off = format.decode(part).float() - right.float()
        if not bool((off.abs() <= right.float().abs().amax(-1, keepdim=True) / _STEPS).all()):
            raise UnsupportedEngineError(
                f"keepset does not know the layout of this vLLM's KV cache of kind {kind}: use a supported version, "
                "or kv_cache_dtype auto."
            )


_STEPS = 24
"""The error of an 8-bit number is less than its row's largest number divided by this."""


def row_format(kind: str, head_dim: int, dtype: torch.dtype) -> PageFormat:
    """Return the format of a cache in which each key and each value has a scale.

    Args:
        kind: the cache's kind, as vLLM's `cache_dtype` names it.
        head_dim: numbers of a key, and of a value.
        dtype: the model's precision, in which entries are read.
    """
    numbers = torch.int8 if kind == INT8 else current_platform.fp8_dtype()
    return PageFormat(numbers, head_dim, dtype, mixing=own_mixing(kind, head_dim))


def own_mixing(kind: str, head_dim: int) -> Mixing | None:
    """Return how keepset mixes rows before vLLM sees them; None if it does not.

    Args:
        kind: vLLM's name of the cache's type.
        head_dim: numbers of a key.
    """
    return mixing_of(head_dim, current_platform.device_type) if kind == INT8 else None


def as_on_gpus(spec: AttentionSpec) -> AttentionSpec:
    """Return a layer's kind of cache as in vLLM's backends for GPUs: with room for rows' scales."""
    if spec.state_content_bytes is not None:
        return spec
    return replace(spec, state_content_bytes=_content_of(spec))


def packed_otherwise(spec: AttentionSpec) -> bool:
    """Return whether a layer's cache has another layout than the one that keepset knows for its type."""
    mode = spec.kv_quant_mode
    if mode in _ROW_MODES:
        if spec.dtype != _ROW_MODES[mode] or spec.head_size % SCALE_BYTES:
            return True
    elif mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        return True
    layout = spec.num_head_slots, spec.state_content_bytes, spec.tokens_per_state
    return layout != (None, _content_of(spec), 1)


def _content_of(spec: AttentionSpec) -> int | None:
    """Return the bytes of a head's key and value in a cache with rows' scales; None where vLLM's default is right."""
    if spec.kv_quant_mode not in _ROW_MODES:
        return None
    return 2 * (spec.head_size + SCALE_BYTES)
