"""keepset on vLLM's Triton backend for GPUs."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from keepset.paged.pages import StridedPages
from keepset.vllm.backend import KeepBackend, KeepBuilder, KeepImpl


class TritonKeepImpl(KeepImpl, TritonAttentionImpl):
    """A layer."""

    # No split along a request's entries, whose buffers are of the layer's real heads.
    own_metadata: ClassVar = {"seq_threshold_3D": 0}

    def make_pages(self, layer: Any, kv_cache: Tensor) -> StridedPages:
        """In order, at whatever strides."""
        return StridedPages(kv_cache)


class TritonKeepBuilder(KeepBuilder, TritonAttentionMetadataBuilder):
    """Its metadata."""


class TritonKeepBackend(KeepBackend, TritonAttentionBackend):
    """Overrides TRITON_ATTN."""

    plain = TritonAttentionBackend
    impl = TritonKeepImpl
    builder = TritonKeepBuilder
