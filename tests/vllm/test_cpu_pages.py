"""Pages of vLLM's CPU backend, held against the kernels that write and read them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset import KeepsetError
from tests.paged.pages import (
    DTYPES,
    check_entries_may_be_views_of_larger_tensors,
    check_only_the_given_slots_are_written,
    random,
    seeded,
)
from tests.vllm.late import Late

cpu_pages = Late("keepset.vllm.cpu_pages")

kernels = Late("vllm._custom_ops")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Rounding of outputs of about 1; the kernel itself sums in float32."""


def isa_of(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, block_size, head_dim)


def official_write(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor, isa: str) -> None:
    """Write as `CPUAttentionBackendImpl.do_kv_cache_update` does: keys `[tokens, heads, head_dim]`, slots of blocks."""
    blocks, kv_heads, block_size, _ = cache.shape
    key_cache, value_cache = cache.view(blocks, kv_heads, block_size * 2, -1).chunk(2, dim=2)
    kernels.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)


def official_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor, starts: Tensor, isa: str
) -> Tensor:
    """Causal attention by vLLM's own kernel, as `CPUAttentionBackendImpl.forward` calls it."""
    # The kernel goes by addresses: views of larger tensors would be read wrongly without an error.
    table, lengths, starts = (part.int().contiguous() for part in (table, lengths, starts))
    plan = kernels.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=query.shape[1],
        num_kv_heads=key_cache.shape[1],
        head_dim=query.shape[2],
        seq_lens=lengths,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    output = torch.empty_like(query)
    kernels.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=query.shape[2] ** -0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return output


def naive_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the n newest queries `[n, group, head_dim]` over one head's entries, their own included."""
    rows = []
    for i, query in enumerate(queries.double()):
        seen = len(keys) - len(queries) + 1 + i
        logits = query @ keys[:seen].double().T / math.sqrt(keys.shape[-1])
        rows.append(logits.softmax(-1) @ values[:seen].double())
    return torch.stack(rows)


def close(output: Tensor, expected: Tensor) -> bool:
    return bool((output.double() - expected).abs().max() < TOLERANCE[output.dtype])


@pytest.mark.cross
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_what_vllm_writes_is_read_and_the_other_way_round(
    dtype: torch.dtype, head_dim: int, block_size: int, kv_heads: int
) -> None:
    generator = seeded(head_dim + kv_heads)
    isa = isa_of(dtype, block_size, head_dim)
    keys, values = (random(2 * block_size, kv_heads, head_dim, dtype=dtype, generator=generator) for _ in range(2))
    blocks = torch.tensor([3, 1])
    cache = torch.zeros(5, kv_heads, block_size, 2 * head_dim, dtype=dtype)
    of_tokens = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    official_write(cache, keys, values, of_tokens, isa)

    pages = cpu_pages.CPUPages([cache], 0, isa)
    assert (pages.kv_heads, pages.block_size, pages.head_dim) == (kv_heads, block_size, head_dim)
    subpages = blocks * kv_heads + torch.arange(kv_heads)[:, None]
    read = pages.read(subpages)
    assert [part.dtype for part in read] == [dtype, dtype]
    assert torch.equal(read[0], keys.transpose(0, 1))
    assert torch.equal(read[1], values.transpose(0, 1))

    # The same entries written head by head, in no order, make the same bytes.
    same = torch.zeros_like(cache)
    of_heads = (subpages[..., None] * block_size + torch.arange(block_size)).flatten()
    order = torch.randperm(len(of_heads), generator=generator)
    cpu_pages.CPUPages([same], 0, isa).write(
        read[0].flatten(0, 1)[order], read[1].flatten(0, 1)[order], of_heads[order]
    )
    assert torch.equal(same, cache)


@pytest.mark.cross
@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_survives(isa: str, dtype: torch.dtype) -> None:
    """Copies are copies: NaN, infinities, subnormal numbers and negative zero too."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limits = torch.iinfo(bits)
    numbers = torch.randint(limits.min, limits.max, (2, 64, 64), dtype=bits, generator=seeded(0))
    pages = cpu_pages.CPUPages([torch.zeros(2, 1, 32, 128, dtype=dtype)], 0, isa)
    pages.write(numbers[0].view(dtype), numbers[1].view(dtype), torch.arange(64))
    keys, values = pages.read(torch.arange(2))
    assert torch.equal(keys.view(bits), numbers[0])
    assert torch.equal(values.view(bits), numbers[1])


def test_rows_of_pages_of_any_shape() -> None:
    pages = cpu_pages.CPUPages([random(4, 2, 32, 128, dtype=torch.float32, generator=seeded(1))], 0, "vec")
    subpages = torch.tensor([[[0, 7], [3, 3]], [[5, 1], [2, 6]], [[4, 0], [1, 1]]], dtype=torch.int32)
    keys, values = pages.read(subpages)
    assert keys.shape == values.shape == (3, 2, 64, 64)
    for row in range(3):
        for column in range(2):
            own = pages.read(subpages[row, column].long())
            assert torch.equal(keys[row, column], own[0]) and torch.equal(values[row, column], own[1])
    assert [part.shape for part in pages.read(torch.zeros(2, 0, dtype=torch.long))] == [(2, 0, 64)] * 2


def test_only_the_given_slots_are_written() -> None:
    cache = torch.ones(3, 2, 32, 64)
    check_only_the_given_slots_are_written(cpu_pages.CPUPages([cache], 0, "vec"), cache)


def test_entries_may_be_views_of_larger_tensors() -> None:
    check_entries_may_be_views_of_larger_tensors(cpu_pages.CPUPages([torch.zeros(1, 1, 32, 64)], 0, "vec"))


def test_packing_is_whatever_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a kernel that scatters both keys and values: no instruction set is like that."""
    key_order, value_order = (torch.randperm(32 * 16, generator=seeded(seed)) for seed in (3, 4))

    def scatter(keys: Any, values: Any, key_cache: Any, value_cache: Any, slots: Tensor, isa: str, **_: Any) -> None:
        for entry, slot in enumerate(slots.tolist()):
            for numbers, cache, order in ((keys, key_cache, key_order), (values, value_cache, value_order)):
                page = torch.zeros(32 * 16, dtype=cache.dtype)
                at = order[slot % 32 * 16 : slot % 32 * 16 + 16]
                page[:] = cache[slot // 32].flatten()
                page[at] = numbers[entry, 0]
                cache[slot // 32] = page.view(1, 32, 16)

    monkeypatch.setattr("vllm._custom_ops.cpu_attn_reshape_and_cache", scatter)
    pages = cpu_pages.CPUPages([torch.zeros(2, 3, 32, 32)], 0, "scattered")
    keys, values = (random(64, 16, dtype=torch.float32, generator=seeded(seed)) for seed in (5, 6))
    pages.write(keys, values, torch.arange(32, 96))
    found = pages.read(torch.tensor([1, 2]))
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)


@pytest.mark.parametrize("fault", ["drops a number", "doubles a number", "rounds"])
def test_packing_that_loses_something_is_refused(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def faulty(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any, **__: Any) -> None:
        key_cache[0, 0], value_cache[0, 0] = keys[:, 0], values[:, 0]
        if fault == "drops a number":
            value_cache[0, 0, 7, 3] = 0
        elif fault == "doubles a number":
            key_cache[0, 0, 7, 3] = key_cache[0, 0, 9, 5]
        else:
            key_cache.div_(2, rounding_mode="floor").mul_(2)

    monkeypatch.setattr("vllm._custom_ops.cpu_attn_reshape_and_cache", faulty)
    with pytest.raises(
        KeepsetError, match=r"^vLLM packs KV cache pages of 32 x 48 torch.float32 for 'faulty' in a way"
    ):
        cpu_pages.packing(32, 48, torch.float32, "faulty")


def test_packing_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cpu_pages.packing(32, 112, torch.float32, "vec16")
    monkeypatch.delattr("vllm._custom_ops.cpu_attn_reshape_and_cache")
    assert cpu_pages.packing(32, 112, torch.float32, "vec16") is first
    cpu_pages.CPUPages([torch.zeros(1, 1, 32, 224)], 0, "vec16")


def test_what_the_kernel_would_not_notice_is_refused() -> None:
    pages = cpu_pages.CPUPages([torch.zeros(1, 1, 32, 128, dtype=torch.bfloat16)], 0, "vec")
    half, whole, first = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 64), torch.zeros(1, dtype=torch.long)
    for keys, values in ((whole, half), (half, whole)):
        with pytest.raises(KeepsetError, match=r"holds torch\.bfloat16: keys and values must have the same dtype"):
            pages.write(keys, values, first)
    with pytest.raises(KeepsetError, match="must be contiguous"):
        cpu_pages.CPUPages([torch.zeros(2, 32, 3, 128).transpose(1, 2)], 0, "vec")


CASES = [
    # dtype, head_dim, block_size, kv_heads, group
    (torch.float32, 64, 32, 3, 3),
    (torch.float32, 128, 128, 1, 8),
    (torch.float32, 80, 32, 8, 1),
    (torch.float32, 256, 128, 3, 1),
    (torch.bfloat16, 64, 128, 3, 3),
    (torch.bfloat16, 128, 32, 8, 8),
    (torch.bfloat16, 96, 32, 1, 1),
    (torch.float16, 32, 32, 8, 3),
    (torch.float16, 80, 128, 3, 8),
]

CaseArguments = tuple[torch.dtype, int, int, int, int]


@pytest.mark.cross
@pytest.mark.parametrize("arguments", CASES, ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_every_head_attends_to_its_own_entries(arguments: CaseArguments, tokens: int) -> None:
    """One row of the table for each (request, head), over sub-pages in no order; again after entries were dropped."""
    dtype, head_dim, size, kv_heads, group = arguments
    generator, isa = seeded(head_dim + 7 * group + kv_heads), isa_of(dtype, size, head_dim)
    rows, width = 3 * kv_heads, -(-360 // size)
    table = torch.randperm(rows * width, generator=generator).view(rows, width)
    cache = random(3 * width, kv_heads, size, 2 * head_dim, dtype=dtype, generator=generator)
    pages = cpu_pages.CPUPages([cache], 0, isa)
    held = [torch.empty(2, 0, head_dim, dtype=dtype)] * rows

    def write(row: int, entries: Tensor, first: int) -> None:
        at = torch.arange(first, first + entries.shape[1])
        pages.write(*entries, table[row, at // size] * size + at % size)

    for _ in range(3):
        for row, count in enumerate(torch.randint(tokens, 120, (rows,), generator=generator).tolist()):
            new = random(2, count, head_dim, dtype=dtype, generator=generator)
            write(row, new, held[row].shape[1])
            held[row] = torch.cat([held[row], new], 1)
        queries = random(rows, tokens, group, head_dim, dtype=dtype, generator=generator)
        lengths, starts = torch.tensor([own.shape[1] for own in held]), torch.arange(rows + 1) * tokens
        output = official_attention(queries.flatten(0, 1), *pages.folded, table, lengths, starts, isa)
        for own, query, found in zip(held, queries, output.unflatten(0, (rows, tokens)), strict=True):
            assert close(found, naive_attention(query, *own))
        for row, most in enumerate(torch.randint(0, 70, (rows,), generator=generator).tolist()):
            kept = torch.randperm(held[row].shape[1], generator=generator)[:most].sort().values
            write(row, torch.stack(pages.read(table[row]))[:, kept], 0)
            held[row] = held[row][:, kept]
