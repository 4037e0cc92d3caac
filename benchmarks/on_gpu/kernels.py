"""Kernels, compared with the bytes that they must move, and with PyTorch's attention over equal lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keepset.kernels.attention import append_entries, pack_entries, ragged_attention
from keepset.kernels.columns import attention_columns, attention_with_lse
from keepset.kernels.entry_format import FORMATS
from keepset.kernels.packed import HeadRun, PackedHeads, runs_of
from keepset.kernels.page_layout import ColumnTarget, EntriesInPages, PagedTokens, PageLayout, RecordedQueries
from keepset.kernels.paged import append_to_pages, paged_attention
from keepset.kernels.softmax import Softmax
from keepset.kernels.window import add_received, add_received_in_pages
from on_gpu.measuring import Bench


def measure(bench: Bench) -> None:
    """Measure all kernels, the shortest first."""
    lengths = (8192, 32768) if bench.on_gpu else (40,)
    for entries in lengths:
        for batch in (1, 8) if bench.on_gpu else (1,):
            _decode(bench, entries, batch)
        for requests in (1, 64) if bench.on_gpu and entries == lengths[0] else (2,):
            _paged(bench, entries if bench.on_gpu else 2 * entries, requests)
        _append(bench, entries)
        _columns(bench, entries)
        _compaction(bench, entries)


def ragged_counts(entries: int, heads: int) -> list[int]:
    """Return AdaKV-like lengths, from a fifth of the mean to more than twice the mean; `entries` a head on average."""
    weights = torch.linspace(0.2, 1.8, heads)
    counts = [int(entries * weight) for weight in weights]
    counts[-1] += entries * heads - sum(counts)
    return counts


def packed_heads(counts: Sequence[int], bench: Bench) -> PackedHeads:
    """Random entries, heads of these lengths."""
    runs, total = runs_of(counts), sum(counts)
    keys, values = (torch.randn(total, bench.head_dim, device=bench.device, dtype=bench.dtype) for _ in range(2))
    positions = torch.cat([torch.arange(count, device=bench.device, dtype=torch.int32) for count in counts])
    return PackedHeads(keys, values, positions, runs)


def _queries(bench: Bench, batch: int, n: int) -> Tensor:
    shape = batch, n, bench.kv_heads * bench.group, bench.head_dim
    return torch.randn(shape, device=bench.device, dtype=bench.dtype).transpose(1, 2)


def _decode(bench: Bench, entries: int, batch: int) -> None:
    heads, part = bench.kv_heads * batch, f"decode, {entries} entries a head, batch {batch}"
    nbytes = 2 * entries * heads * bench.head_dim * bench.dtype.itemsize
    queries = _queries(bench, batch, 1)

    def ours(counts: Sequence[int]) -> Callable[[], Any]:
        packed = packed_heads(counts, bench)
        return lambda: ragged_attention(queries, [packed], Softmax(bench.head_dim**-0.5))

    def sdpa() -> Callable[[], Any]:
        shape = batch, bench.kv_heads, entries, bench.head_dim
        keys, values = (torch.randn(shape, device=bench.device, dtype=bench.dtype) for _ in range(2))
        return lambda: F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

    def flash() -> Callable[[], Any]:
        attend = sdpa()

        def run() -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return attend()

        return run

    bench.run(part, "SDPA, as PyTorch chooses", sdpa, nbytes=nbytes)
    bench.run(part, "flash attention", flash, nbytes=nbytes, against="SDPA, as PyTorch chooses")
    bench.run(part, "uniform", lambda: ours([entries] * heads), nbytes=nbytes, against="flash attention")
    ragged = ragged_counts(entries, bench.kv_heads) * batch
    bench.run(part, "ragged", lambda: ours(ragged), nbytes=nbytes, against="uniform")

    def eight_bits() -> Callable[[], Any]:
        packed = packed_heads(ragged, bench)
        keys, values = (FORMATS[8].quantize(rows, bench.dtype) for rows in (packed.keys, packed.values))
        packed = PackedHeads(keys[0], values[0], packed.positions, packed.runs, None, keys[1], values[1])
        return lambda: ragged_attention(queries, [packed], Softmax(bench.head_dim**-0.5))

    of_bytes = nbytes * (bench.head_dim + bench.dtype.itemsize) // (bench.head_dim * bench.dtype.itemsize)
    bench.run(part, "ragged, 8 bits", eight_bits, nbytes=of_bytes, against="ragged")

    def received() -> Callable[[], Any]:
        packed, last = packed_heads(ragged, bench), torch.full((batch, 1), entries * 2, device=bench.device)
        column = torch.zeros(len(packed.keys), device=bench.device)
        return lambda: add_received(column, queries, packed, bench.kv_heads, last, Softmax(bench.head_dim**-0.5))

    bench.run(part, "ragged, what entries receive", received, nbytes=nbytes, against="ragged")


def _paged(bench: Bench, entries: int, requests: int) -> None:
    """A serving engine's pages, in which each request's heads keep on average a quarter of its entries."""
    size, keep = 16, entries // 4
    part = f"pages of {size}, {requests} requests, {keep} of {entries} entries a head"
    nbytes = 2 * keep * requests * bench.kv_heads * bench.head_dim * bench.dtype.itemsize
    width = -(-entries // size)
    # As after an event: the blocks of dropped entries belong to other requests.
    held = -(-keep // size) + 2
    cache = torch.randn(
        requests * held, bench.kv_heads, size, 2 * bench.head_dim, device=bench.device, dtype=bench.dtype
    )
    table = torch.zeros(requests, width, dtype=torch.int32, device=bench.device)
    blocks = torch.randperm(requests * held, device=bench.device).int()
    table[:, width - held :] = blocks.view(requests, held)
    bias = torch.zeros(1, len(blocks) * bench.kv_heads * size, device=bench.device)
    tokens = PagedTokens(table, torch.full((requests,), entries, device=bench.device, dtype=torch.int32), entries)
    group = bench.kv_heads * bench.group
    queries, output = (
        torch.randn(requests, group, bench.head_dim, device=bench.device, dtype=bench.dtype) for _ in range(2)
    )
    new = queries[:, : bench.kv_heads]

    def layout(counts: Sequence[int]) -> PageLayout:
        """Return the layout of an event one token ago."""
        number = torch.tensor(counts, device=bench.device, dtype=torch.int32).expand(requests, 1, -1)
        place = torch.ones(requests, 1, device=bench.device, dtype=torch.int32)
        return PageLayout(number.contiguous(), (entries - 1) * place, (width - held) * place, 0 * place)

    def ours(counts: Sequence[int], bias: Tensor | None = None) -> Callable[[], Any]:
        there = layout(counts)
        return lambda: paged_attention(queries, [cache], 0, tokens, there, Softmax(bench.head_dim**-0.5), output, bias)

    uniform, ragged = [keep - 1] * bench.kv_heads, ragged_counts(keep - 1, bench.kv_heads)
    bench.run(part, "uniform", lambda: ours(uniform), nbytes=nbytes)
    bench.run(part, "ragged", lambda: ours(ragged), nbytes=nbytes, against="uniform")
    bench.run(part, "ragged, with biases", lambda: ours(ragged, bias), nbytes=nbytes, against="uniform")
    there = layout(ragged)
    few = 4
    rings = torch.randn(1, requests, few, group, bench.head_dim, device=bench.device, dtype=bench.dtype)
    places = torch.arange(few, device=bench.device).expand(requests, few)
    recorded = RecordedQueries(rings, torch.arange(requests, device=bench.device), places)
    last = entries - few + places
    sums = ColumnTarget(
        bias, last, torch.zeros(requests, dtype=torch.int64, device=bench.device), Softmax(bench.head_dim**-0.5)
    )

    def received() -> Callable[[], Any]:
        there = layout(ragged)
        held = EntriesInPages(there, table, tokens.lengths, there.counts, entries)
        return lambda: add_received_in_pages([cache], range(1), recorded, held, sums)

    bench.run(part, f"ragged, what entries receive of {few} queries", received, nbytes=nbytes, against="ragged")
    bench.run(part, "one token's entries", lambda: lambda: append_to_pages(new, new, cache, tokens, there))


def _append(bench: Bench, entries: int) -> None:
    n = 64 if bench.on_gpu else 3
    part = f"{n} new queries, {entries} entries a head"
    queries = _queries(bench, 1, n)
    at = torch.arange(entries - n, entries, device=bench.device)[None]
    nbytes = 2 * entries * bench.kv_heads * bench.head_dim * bench.dtype.itemsize

    def ours(counts: Sequence[int]) -> Callable[[], Any]:
        packed = packed_heads(counts, bench)
        return lambda: ragged_attention(queries, [packed], Softmax(bench.head_dim**-0.5), at)

    def sdpa() -> Callable[[], Any]:
        shape = 1, bench.kv_heads, entries, bench.head_dim
        keys, values = (torch.randn(shape, device=bench.device, dtype=bench.dtype) for _ in range(2))
        mask = torch.arange(entries, device=bench.device) <= at[0][:, None]
        return lambda: F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)

    bench.run(part, "SDPA", sdpa, nbytes=nbytes)
    bench.run(part, "uniform", lambda: ours([entries] * bench.kv_heads), nbytes=nbytes, against="SDPA")
    bench.run(part, "ragged", lambda: ours(ragged_counts(entries, bench.kv_heads)), nbytes=nbytes, against="uniform")


def _columns(bench: Bench, entries: int) -> None:
    part = f"columns of {entries} queries"
    keys, values = (
        torch.randn(bench.kv_heads, entries, bench.head_dim, device=bench.device, dtype=bench.dtype) for _ in range(2)
    )
    queries = _queries(bench, 1, entries)[0]
    scaling = bench.head_dim**-0.5
    repeats = 5 if bench.on_gpu else 1

    def attention() -> Callable[[], Any]:
        return lambda: attention_with_lse(queries, keys, values, Softmax(scaling))

    def columns(names: Sequence[str]) -> Callable[[], Any]:
        lse = attention_with_lse(queries, keys, values, Softmax(scaling))[1]
        return lambda: attention_columns(queries, keys, softmax=Softmax(scaling), names=names, lse=lse)

    bench.run(part, "attention itself", attention, repeats=repeats)
    for names in (["sum"], ["max"], ["sum", "max", "square"]):
        what = " and ".join(names)
        bench.run(part, what, lambda n=names: columns(n), against="attention itself", repeats=repeats)
    window = min(64, entries // 2)

    def of_window() -> Callable[[], Any]:
        newest = queries[:, -window:]
        return lambda: attention_columns(newest, keys, softmax=Softmax(scaling))

    bench.run(part, f"sum of the newest {window}", of_window, nbytes=2 * keys.nbytes, against="attention itself")


def _compaction(bench: Bench, entries: int) -> None:
    part = f"compaction of {entries} entries a head to a quarter"
    keep = entries // 4
    shape = 1, entries, bench.kv_heads, bench.head_dim
    columns = {
        name: torch.randn(shape, device=bench.device, dtype=bench.dtype).transpose(1, 2) for name in ("keys", "values")
    }
    columns["positions"] = torch.arange(entries, device=bench.device, dtype=torch.int32).expand(1, bench.kv_heads, -1)
    order = torch.rand(bench.kv_heads, entries, device=bench.device).argsort(-1)[:, :keep].sort(-1).values.flatten()
    counts = torch.full((1, bench.kv_heads), keep, device=bench.device)
    nbytes = 2 * bench.kv_heads * keep * (2 * bench.head_dim * bench.dtype.itemsize + 4)
    rows = torch.arange(bench.kv_heads, device=bench.device).repeat_interleave(keep)

    def gather() -> Callable[[], Any]:
        return lambda: [column[0][rows, order] for column in columns.values()]

    bench.run(part, "indexing, column by column", gather, nbytes=nbytes)
    ours = lambda: lambda: pack_entries(columns, order, counts)  # noqa: E731
    bench.run(part, "all columns at once", ours, nbytes=nbytes, against="indexing, column by column")

    def append() -> Callable[[], Any]:
        keys, values = (
            torch.empty(bench.kv_heads * (keep + 1), bench.head_dim, device=bench.device, dtype=bench.dtype)
            for _ in range(2)
        )
        positions = torch.empty(len(keys), device=bench.device, dtype=torch.int32)
        store = PackedHeads(keys, values, positions, [HeadRun(0, bench.kv_heads, 0, keep, keep + 1)])
        new = [columns[name][:, :, :1] for name in ("keys", "values")]
        at = torch.full((1, 1), entries, device=bench.device)
        return lambda: append_entries([store], *new, at)

    bench.run(part, "one token more", append)
