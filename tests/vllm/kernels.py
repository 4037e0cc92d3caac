"""vLLM's backends for GPUs on a CPU: everything of theirs runs, only their kernels are replaced by plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    **rest: Any,
) -> None:
    """Causal attention over a paged cache `[blocks, block_size, kv_heads, head_dim]`, request after request."""
    assert causal is True
    assert rest.get("mask_mod") is None and rest.get("rswa_prefix_lens") is None
    assert int(seqused_k.max()) <= max_seqlen_k and int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_q[-1]) <= q.shape[0]
    if rest.get("scheduler_metadata") is not None:
        assert rest["scheduler_metadata"].tolist() == [k.shape[2], q.shape[1], *seqused_k.tolist()]
    if "softmax_segm_output" in rest and cu_seqlens_q.shape[0] - 1 <= rest["seq_threshold_3D"] and max_seqlen_q == 1:
        # The kernel that splits a request's entries writes its parts to buffers of so many heads.
        assert rest["softmax_segm_output"].shape[1] == q.shape[1]
    group, size = q.shape[1] // k.shape[2], k.shape[1]
    for row, (first, last) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)):
        have, new = int(seqused_k[row]), last - first
        if not new:
            continue
        blocks = block_table[row, : -(-have // size)].long()
        keys, values = (part[blocks].flatten(0, 1)[:have].repeat_interleave(group, 1) for part in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[first:last], keys) * softmax_scale
        hidden = torch.arange(have)[None] > torch.arange(have - new, have)[:, None]
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values)


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: Any) -> None:
    """New entries to their slots; a slot of -1 is of no token."""
    size, tokens = key_cache.shape[1], slots.shape[0]
    real = slots >= 0
    slots = slots[real]
    key_cache[slots // size, slots % size] = key[:tokens][real]
    value_cache[slots // size, slots % size] = value[:tokens][real]


def schedule(num_heads_q: int, num_heads_kv: int, cache_seqlens: Tensor, **_: Any) -> Tensor:
    """What FlashAttention's kernel is told beforehand: here, for what it was meant."""
    return torch.tensor([num_heads_kv, num_heads_q, *cache_seqlens.tolist()])


def use(backend: str) -> None:
    """Engines that are built from now on choose this backend."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import flash_attn, triton_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def chosen(cls: Any, *_: Any, **__: Any) -> str:
        return AttentionBackendEnum[backend].get_path()

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)
    flash_attn.get_flash_attn_version = lambda *_, **__: 3
    flash_attn.get_scheduler_metadata = schedule
    flash_attn._FA4_DENSE_ATTENTION_KERNEL = attend
    flash_attn.reshape_and_cache_flash = write
    triton_attn.unified_attention = attend
    triton_attn.triton_reshape_and_cache_flash = write
