"""Compiles for GPUs what keepset launches, as it is launched there: run outside of Triton's interpreter.

Prints of each its name, the shared memory that it takes, and the size of its code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton import JITFunction, compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keepset.kernels import dispatch
from keepset.kernels.attention import append_entries, pack_entries, ragged_attention
from keepset.kernels.columns import attention_columns
from keepset.kernels.entry_format import FORMATS, Mixing
from keepset.kernels.packed import PackedHeads, runs_of
from keepset.kernels.page_entries import read_pages, take_entries, write_entries
from keepset.kernels.page_format import PageFormat
from keepset.kernels.page_layout import ColumnTarget, EntriesInPages, FiledLayouts, PagedTokens, RecordedQueries
from keepset.kernels.paged import append_to_pages, follow_layouts, paged_attention, shift_step
from keepset.kernels.predictor import Networks, entry_codes, entry_codes_in_pages, turns_of
from keepset.kernels.softmax import GroupReduction, Softmax
from keepset.kernels.window import add_received, add_received_in_pages
from tests.posing import LAUNCHED

Launch = tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]
_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.bool: "*i1"}
_TYPES |= {torch.int8: "*i8", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
BLOCKS, SIZE, LAYERS = 12, 16, 2
LENGTHS = 2048, 300, 5001
"""Entries of a head, or tokens of a request."""


class _Noted:
    """A kernel that is not launched."""

    def __init__(self, kernel: JITFunction[Any], launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self._launches.append((self._kernel, args, kwargs))


def launched(
    dtype: torch.dtype, head_dim: int, kv_heads: int, group: int, long: int, quantised: bool = False
) -> list[Launch]:
    """Every kernel in the ways that differ most, for a model like this; over quantised pages, too, if wanted."""
    launches: list[Launch] = []
    with ExitStack() as patches:
        patches.enter_context(patch.object(dispatch, "INTERPRETED", True))
        patches.enter_context(patch.object(dispatch, "processors", lambda device: 108))
        for module, name in [(module, name) for module, names in LAUNCHED.items() for name in names]:
            patches.enter_context(patch.object(module, name, _Noted(getattr(module, name), launches)))
        _in_stores(dtype, head_dim, kv_heads, group, long)
        _in_pages(dtype, head_dim, kv_heads, group, long, quantised)
    return launches


def _in_stores(dtype: torch.dtype, head_dim: int, kv_heads: int, group: int, long: int) -> None:
    queries = torch.zeros(1, kv_heads * group, 64, head_dim, dtype=dtype)
    keys = torch.zeros(1, kv_heads, 64, head_dim, dtype=dtype)
    positions, last = torch.arange(64)[None], torch.full((1, 64), long)
    flat, flat_positions = (
        torch.zeros(kv_heads * long, head_dim, dtype=dtype),
        torch.zeros(kv_heads * long, dtype=torch.int32),
    )
    runs, bias = runs_of([long] * kv_heads), torch.zeros(kv_heads * long)
    whole, scales = FORMATS[8].quantize(flat, flat.dtype)
    eight_bits = PackedHeads(whole, whole, flat_positions, runs, bias, scales, scales)
    codes = torch.zeros(kv_heads * long, head_dim // 2, dtype=torch.uint8)
    residual = PackedHeads(codes, codes, flat_positions, runs, None, scales, scales)
    four = PackedHeads(codes, codes, flat_positions, runs, bias, scales, scales, residual)
    for softmax in Softmax(1.5), Softmax(1.5, 30.0, torch.zeros(kv_heads * group, dtype=dtype)):
        ragged_attention(queries[:, :, :1], [four], softmax)
    append_entries([four], keys, keys, positions)
    for store in PackedHeads(flat, flat, flat_positions, runs, bias), eight_bits:
        ragged_attention(queries[:, :, :1], [store], Softmax(1.5))
        ragged_attention(queries, [store], Softmax(1.5), last)
        capped = Softmax(1.5, 30.0, torch.zeros(kv_heads * group, dtype=dtype))
        ragged_attention(queries[:, :, :1], [store], capped)
        append_entries([store], keys, keys, positions)
        for sums_of in GroupReduction if store is not eight_bits else [GroupReduction.MEAN]:
            column = torch.zeros(*bias.shape, *sums_of.shape(group))
            if store is eight_bits:
                add_received(column, queries[:, :, :8], store, kv_heads, last[:, :8], capped, sums_of)
            add_received(column, queries[:, :, :8], store, kv_heads, last[:, :8], Softmax(1.5), sums_of)
    many = keys.repeat(LAYERS, 1, -(-long // 64), 1)
    flat_positions = torch.arange(many.shape[2]).expand(many.shape[:3])
    for earlier_codes in torch.zeros(many.shape[:3]), None:
        entry_codes(many, many, flat_positions, flat_positions >= 40, networks_of(kv_heads, head_dim), earlier_codes)
    for softmax in Softmax(head_dim**-0.5), capped:
        attention_columns(queries[0], keys[0], softmax=softmax, names=("sum", "max", "square"))
    entries = {"keys": keys, "values": keys, "positions": positions[:, None].expand(-1, kv_heads, -1)}
    pack_entries(entries, torch.zeros(48 * kv_heads, dtype=torch.int64), torch.full((1, kv_heads), 48))


def networks_of(kv_heads: int, head_dim: int, width: int = 64) -> Networks:
    """Networks of the layers, as wide as a fit makes them."""
    inputs = 2 * head_dim + 2
    shapes = [(2, inputs), (width, inputs), (width,), (2, width), (2,)]
    weights = [torch.zeros(LAYERS, kv_heads, *shape) for shape in shapes]
    rotation = torch.zeros(LAYERS, head_dim)
    return Networks(*weights, rotation.long(), turns_of(rotation), rotation)


def _in_pages(dtype: torch.dtype, head_dim: int, kv_heads: int, group: int, long: int, quantised: bool) -> None:
    caches = [torch.zeros(BLOCKS, kv_heads, SIZE, 2 * head_dim, dtype=dtype) for _ in range(LAYERS)]
    queries, keys = (torch.zeros(2, heads, head_dim, dtype=dtype) for heads in (kv_heads * group, kv_heads))
    filed, table = FiledLayouts.empty(BLOCKS, LAYERS, kv_heads, keys.device), torch.zeros(2, 512, dtype=torch.int32)
    layout, lengths = FiledLayouts.empty(2, LAYERS, kv_heads, keys.device).layout, torch.tensor([40, 7])
    layer_layout = type(layout)(*(part[:, :1] for part in layout))
    tokens = PagedTokens(table, lengths.int(), long, torch.arange(2), lengths, lengths)
    columns = torch.zeros(LAYERS, BLOCKS * kv_heads * SIZE)
    scale, rows = torch.ones(()), torch.zeros(BLOCKS, kv_heads, SIZE, 2 * head_dim + 8, dtype=torch.int8)
    int8 = PageFormat(torch.int8, head_dim, dtype, mixing=Mixing(torch.eye(head_dim)))
    fp8 = PageFormat(torch.float8_e4m3fn, head_dim, dtype, scale, scale)
    stored = (rows, int8), (rows[..., :-8].contiguous(), fp8)
    few_bits = [([cache] * LAYERS, format) for cache, format in stored] if quantised else []
    for group_caches, format in [(caches, None), *few_bits]:
        append_to_pages(keys, keys, group_caches[0], tokens, layer_layout, format)
        paged_attention(
            queries, group_caches, 0, tokens, layer_layout, Softmax(1.5), torch.zeros_like(queries), columns, format
        )
    capped = Softmax(1.5, 9.0, torch.zeros(kv_heads * group))  # of logits, whatever their entries are stored as
    paged_attention(queries, caches, 0, tokens, layer_layout, capped, torch.zeros_like(queries))
    _over_latents(dtype, tokens)
    follow_layouts(filed, table, lengths, lengths, lengths, torch.zeros(1, dtype=torch.int32), SIZE, layout)
    entries = EntriesInPages(layout, table, lengths, layout.counts, long)
    rings = torch.zeros(LAYERS, 2, 4, kv_heads * group, head_dim, dtype=dtype)
    recorded = RecordedQueries(rings, torch.arange(2), torch.arange(4).expand(2, -1))
    for sums_of in GroupReduction:
        sums = torch.zeros(*columns.shape, *sums_of.shape(group))
        own = [torch.zeros(LAYERS, kv_heads, long, *sums_of.shape(group)), None]
        softmax = Softmax(1.5, 9.0, torch.zeros(LAYERS, kv_heads * group))
        received = ColumnTarget(sums, lengths[:, None].expand(-1, 4), lengths, softmax, sums_of, columns, columns, own)
        add_received_in_pages(caches, range(LAYERS), recorded, entries, received)
    received = ColumnTarget(
        columns, lengths[:, None].expand(-1, 4), lengths, Softmax(1.5), bias=columns, positions=columns
    )
    for group_caches, format in few_bits:
        add_received_in_pages(group_caches, range(LAYERS), recorded, entries, received, [format] * LAYERS)
    shift_step(table, lengths.int(), torch.arange(3).int(), lengths, lengths, SIZE, table, lengths.int())
    read_pages(caches, 0, torch.zeros(kv_heads, 3, dtype=torch.int64))
    networks, subpages = networks_of(kv_heads, head_dim), torch.zeros(2 * LAYERS, kv_heads, long // SIZE)
    positions = torch.arange(long // SIZE * SIZE).expand(2 * LAYERS, kv_heads, -1)
    for earlier_codes in torch.zeros(positions.shape), None:
        entry_codes_in_pages(caches, 0, subpages.long(), positions, positions > 40, networks, earlier_codes)
    for group_caches, format in few_bits:
        pages = group_caches, 0, subpages.long()
        entry_codes_in_pages(*pages, positions, positions > 40, networks, None, [format] * LAYERS)
    slots = torch.arange(48)
    write_entries(caches, *take_entries(caches, slots), slots)


def _over_latents(dtype: torch.dtype, tokens: PagedTokens) -> None:
    """For a model like DeepSeek V3: more query heads than a program has room for."""
    row, latent, heads = 576, 512, 128
    caches = [torch.zeros(BLOCKS, 1, SIZE, row, dtype=dtype) for _ in range(LAYERS)]
    layout = FiledLayouts.empty(2, 1, 1, tokens.lengths.device).layout
    queries, output = (torch.zeros(2, heads, width, dtype=dtype) for width in (row, latent))
    paged_attention(queries, caches, 0, tokens, layout, Softmax(1.5), output, value_dim=latent)


def source(kernel: JITFunction[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ASTSource:
    """A launch as Triton specialises it: for what is None or 1, and for addresses and numbers that 16 divides."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def type_of(value: Any, path: tuple[int, ...], fixed: bool, looked_at: bool) -> Any:
        if isinstance(value, tuple) and not fixed:
            return tuple(type_of(part, (*path, i), fixed, looked_at) for i, part in enumerate(value))
        if fixed or value is None or (looked_at and type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        if looked_at and not isinstance(value, float):
            number = value.data_ptr() if isinstance(value, Tensor) else value
            attributes[path] = [["tt.divisibility", 16]] if number % 16 == 0 else []
        if isinstance(value, Tensor):
            return _TYPES[value.dtype]
        return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"

    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for index, parameter in enumerate(kernel.params):
        looked_at = not parameter.do_not_specialize
        signature[parameter.name] = type_of(values[parameter.name], (index,), parameter.is_constexpr, looked_at)
    return ASTSource(kernel, signature, constants, {path: value for path, value in attributes.items() if value})


def distinct(launches: list[Launch], which: str) -> Iterator[tuple[ASTSource, dict[str, int]]]:
    """Each that is another program, and with how many warps and stages; of each kernel only the first one for `once`.

    For `tiles` it is the first one with the same sizes, by which a GPU's own instructions are chosen.
    """
    keys: set[tuple[object, ...]] = set()
    for kernel, args, kwargs in launches:
        ast_source = source(kernel, args, kwargs)
        sizes = tuple(
            sorted((path, size) for path, size in ast_source.constants.items() if type(size) is int and size >= 16)
        )
        key = {"all": (ast_source.hash(),), "tiles": (kernel.__name__, sizes), "once": (kernel.__name__,)}[which]
        if key not in keys:
            keys.add(key)
            yield ast_source, {name: kwargs[name] for name in ("num_warps", "num_stages") if name in kwargs}


if __name__ == "__main__":
    dtype, head_dim, kv_heads, group, capability, what = sys.argv[1:]
    of_model = getattr(torch, dtype), int(head_dim), int(kv_heads), int(group)
    # Over quantised pages for the least of these GPUs alone: for all it would take as long as the rest.
    every = [launched(*of_model, long, quantised=capability == "80") for long in LENGTHS]
    programs, *others = (list(distinct(launches, what)) for launches in every)
    known = {made.hash() for made, _ in programs}
    for made in (made for other in others for made, _ in other if made.hash() not in known):
        print(made.fn.__name__, "anew", 0)  # another program would be compiled while a request waits
    for made, options in programs:
        target = GPUTarget("cuda", int(capability), 32)
        program = compile(made, target=target, options=options)
        print(made.fn.__name__, program.metadata.shared, len(program.asm["cubin"]))
