"""keepset on vLLM's FlashAttention backend for GPUs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from keepset.paged.pages import StridedPages
from keepset.vllm.backend import KeepBackend, KeepBuilder, KeepImpl


class FlashKeepImpl(KeepImpl, FlashAttentionImpl):
    """A layer."""

    def make_pages(self, layer: Any, kv_cache: Tensor) -> StridedPages:
        """In order, at whatever strides."""
        return StridedPages(kv_cache)


class FlashKeepBuilder(KeepBuilder, FlashAttentionMetadataBuilder):
    """Its metadata."""


class FlashKeepBackend(KeepBackend, FlashAttentionBackend):
    """Overrides FLASH_ATTN."""

    plain = FlashAttentionBackend
    impl = FlashKeepImpl
    builder = FlashKeepBuilder
