"""vLLM's backends for GPUs on a CPU: everything of theirs runs, only their kernels are replaced by plain torch."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
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
    if rest.get("k_scale_cache") is not None:  # behind each row lies its scale
        scales = rest["k_scale_cache"], rest["v_scale_cache"]
        k, v = (part[..., : q.shape[2]].float() * scale[..., None] for part, scale in zip((k, v), scales, strict=True))
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


def attend_latents(
    q: Tensor,
    rows: Tensor,
    latents: Tensor,
    out: Tensor,
    lse: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    logits: Tensor,
    splits: int,
    scale: float,
    size: int,
    **_: Any,
) -> None:
    """Attention of one token of each request over rows `[blocks, block_size, 1, row]`, which begin with the value."""
    assert rows.shape[1] == size
    for row, have in enumerate(seq_lens.tolist()):
        blocks = block_table[row, : -(-have // size)].long()
        keys, values = (part[blocks].flatten(0, 2)[:have] for part in (rows, latents))
        out[row] = (q[row] @ keys.T * scale).softmax(-1) @ values


def write_latents(latents: Tensor, rotated: Tensor, kv_cache: Tensor, slots: Tensor, **_: Any) -> None:
    """New rows to their slots; a slot of -1 is of no token."""
    real, size = slots >= 0, kv_cache.shape[1]
    kv_cache[slots[real] // size, slots[real] % size] = torch.cat([latents, rotated], -1)[: len(slots)][real]


def write_rows(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    slots: Tensor,
    **_: Any,
) -> None:
    """New entries to their slots, as whole numbers of 8 bits, each key and value with a scale of its own."""
    real = (slots >= 0).nonzero()[:, 0]
    block, offset, dim = slots[real] // key_cache.shape[1], slots[real] % key_cache.shape[1], key.shape[2]
    for numbers, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        step = (numbers[real].abs().amax(-1) / 127).clamp(min=1e-6)
        steps = numbers[real] * (1 / step)[..., None]
        cache[block, offset, :, :dim] = ((steps.abs() + 0.5).floor() * steps.sign()).to(cache.dtype)
        scales[block, offset] = step


def schedule(num_heads_q: int, num_heads_kv: int, cache_seqlens: Tensor, **_: Any) -> Tensor:
    """The schedule that FlashAttention's kernel is given: here, what it was made for."""
    return torch.tensor([num_heads_kv, num_heads_q, *cache_seqlens.tolist()])


class Wrapper:
    """FlashInfer's attention, planned on the host: each request's queries, its pages, and the last one's entries.

    For a graph it reads pages where they lay when it was made.
    """

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        use_cuda_graph: bool = False,
        paged_kv_indices_buffer: Tensor | None = None,
        **_: Any,
    ) -> None:
        self._layout, self.is_cuda_graph_enabled, self._buffer = layout, use_cuda_graph, paged_kv_indices_buffer

    def plan(self, **plan: Any) -> None:
        assert plan["window_left"] == -1 and plan.get("causal", True)
        self._window_left, self._logits_soft_cap = -1, plan["logits_soft_cap"] or 0.0
        self._sm_scale, self._causal = plan["sm_scale"], True
        pages = plan.get("paged_kv_indptr", plan.get("indptr"))
        last = plan.get("paged_kv_last_page_len", plan.get("last_page_len"))
        indices = plan.get("paged_kv_indices", plan.get("indices"))
        if self._buffer is not None:
            assert indices.data_ptr() == self._buffer.data_ptr()
        self._indices = indices.clone() if self._buffer is None else self._buffer
        self._pages, self._lengths = pages.tolist(), sequence_lengths(pages, last, plan["page_size"])
        assert self._lengths.tolist() == plan.get("seq_lens", self._lengths).tolist()
        self._starts = plan.get("qo_indptr", torch.arange(len(last) + 1, dtype=torch.int32))

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, **_: Any) -> None:
        keys, values = (part.transpose(1, 2) if self._layout == "HND" else part for part in cache)
        widest = max(last - first for first, last in pairwise(self._pages))
        table = torch.full((len(self._lengths), widest), -(10**6))
        for row, (first, last) in enumerate(pairwise(self._pages)):
            table[row, : last - first] = self._indices[first:last]
        longest, most = int(self._lengths.max()), int(self._starts.diff().max())
        attend(query, keys, values, out, self._starts, self._lengths, table, self._sm_scale, most, longest, causal=True)


def sequence_lengths(pages: Tensor, last: Tensor, page_size: int) -> Tensor:
    """Entries of each request."""
    return (pages.diff() - 1).clamp(min=0) * page_size + last


class PageIndices:
    """The pages of all requests, one after another."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(indices: Tensor, table: Tensor, stride: int, pages: Tensor, **_: Any) -> None:
            assert stride == table.stride(0)
            for row, (first, last) in enumerate(pairwise(pages.tolist()[: grid[0] + 1])):
                indices[first:last] = table[row, : last - first]

        return launch


def use_flashinfer() -> None:
    """FlashInfer's own modules are not installed where no GPU is."""
    for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils"):
        sys.modules[name] = Anything(name)
    library: Any = sys.modules["flashinfer"]
    library.BatchPrefillWithPagedKVCacheWrapper = type("Prefill", (Wrapper,), {})
    library.BatchDecodeWithPagedKVCacheWrapper = type("Decode", (Wrapper,), {})
    library.get_seq_lens = sequence_lengths
    decode: Any = sys.modules["flashinfer.decode"]
    decode.fast_decode_plan = Wrapper.plan
    from vllm.v1.attention.backends import flashinfer

    def update(self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        write(key, value, keys, values, slots)

    flashinfer.FlashInferImpl.do_kv_cache_update = update
    flashinfer._copy_page_indices_kernel = PageIndices()
    flashinfer.can_use_trtllm_attention = flashinfer.use_trtllm_attention = lambda *_, **__: False


class Anything(ModuleType):
    """A library of which whatever is imported is there, for modules that import what they do not use here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def use(backend: str) -> None:
    """Engines that are built from now on choose this backend."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import flash_attn, triton_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def chosen(cls: Any, *_: Any, **__: Any) -> str:
        return AttentionBackendEnum[backend].get_path()

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)
    if backend == "FLASHINFER":
        use_flashinfer()
        return
    if backend == "TRITON_MLA":
        from vllm import _custom_ops
        from vllm.v1.attention.backends.mla import triton_mla

        triton_mla.decode_attention_fwd = attend_latents
        triton_mla._compute_num_kv_splits = lambda *_: 1
        _custom_ops.concat_and_cache_mla = write_latents
        return
    flash_attn.get_flash_attn_version = lambda *_, **__: 3
    flash_attn.get_scheduler_metadata = schedule
    flash_attn._FA4_DENSE_ATTENTION_KERNEL = attend
    flash_attn.reshape_and_cache_flash = write
    triton_attn.unified_attention = attend
    triton_attn.triton_reshape_and_cache_flash = write
    triton_attn.triton_reshape_and_cache_flash_per_token_head_quant = write_rows
