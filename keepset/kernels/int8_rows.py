"""Attention over rows of 8-bit integers in pages, and writing such rows; compiled by Numba for CPUs.

PyTorch has no operator that multiplies such rows: it would have to copy and convert all of them first.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int8
from llvmlite import ir
from llvmlite.binding import ffi
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

from keepset.kernels.page_format import LEAST_SCALE
from keepset.kernels.vector_code import ROWS, key_products, value_sums

# When an engine starts, vLLM looks at all loaded modules and takes their `__dict__` for a dictionary. Numba's library
# object returns a function for this name, as for every other.
ffi.lib._fntab.setdefault("__dict__", {})

_F = np.float32
_PROCESS = ctypes.CDLL(None)
"""The libraries of this process, PyTorch's OpenMP included."""
AVAILABLE = hasattr(_PROCESS, "GOMP_parallel")
"""Whether the loops can run in PyTorch's threads, which needs an OpenMP with GNU's interface."""
_thread = types.ExternalFunction("omp_get_thread_num", types.int32())
_threads = types.ExternalFunction("omp_get_num_threads", types.int32())
_REORDERED = {"reassoc", "contract", "nsz", "arcp"}
"""Changes that the compiler may make to sums, so that several numbers are added at once; NaN stays NaN."""


def supports(dim: int, size: int, dtype: torch.dtype) -> bool:
    """Return whether there are loops for heads of `dim` numbers, pages of `size` entries, and keys of this dtype."""
    return AVAILABLE and dim % 4 == 0 and size % ROWS == 0 and dtype in NUMBERS


def compile_for(group: int, dim: int, size: int, dtype: torch.dtype) -> None:
    """Compile the loops for layers of these sizes, so that the first request need not wait for them.

    Args:
        group, dim, size, dtype: as `compiled_attention` takes them.
    """
    compiled_attention(group, dim, size, dtype)
    compiled_writing(dim, dtype)


def attend(
    queries: Float[Tensor, "heads group head_dim"],
    rows: Int8[Tensor, "subpages block_size entry"],
    tables: Int[Tensor, "heads pages"],
    lengths: Int[Tensor, " heads"],
    output: Float[Tensor, "heads group head_dim"],
    matrices: Float[Tensor, "2 head_dim head_dim"],
    bias: tuple[Float[Tensor, " slots"], Int[Tensor, " heads"]] | None = None,
) -> None:
    """Compute the attention of some queries, each over the entries of its own head.

        output = softmax(queries @ matrices[0] @ keys' + bias) @ values @ matrices[1]

    Args:
        queries: queries of a dtype in `NUMBERS`.
        rows: all pages; a page's size is a multiple of 4. An entry is a key and a value, each followed by its scale.
        tables: the pages of each head, in the order of its entries; int32.
        lengths: the number of entries of each head; int32.
        output: the result in the queries' dtype; written to; zero for a head without entries.
        matrices: the matrix for queries, and the one for sums of values, in float32.
        bias: for each slot of all pages a number to add to its entry's logit, and how many of each head's first
            entries have such a bias; int32.
    """
    heads, group, dim = queries.shape
    slots, biased = (matrices[:0], lengths) if bias is None else bias
    sizes = heads, tables.shape[1], len(rows), len(slots)
    function = compiled_attention(group, dim, rows.shape[1], queries.dtype)
    _run(function, sizes, queries, rows, tables, lengths, output, matrices, slots, biased)


def write(
    keys: Float[Tensor, "n head_dim"],
    values: Float[Tensor, "n head_dim"],
    rows: Int8[Tensor, "subpages block_size entry"],
    slots: Int[Tensor, " n"],
    mix: Float[Tensor, "head_dim head_dim"],
) -> None:
    """Mix entries and round them as `PageFormat.encode_entries` does, and write entry `i` to `slots[i]`.

    Args:
        keys, values: keys and values of a dtype in `NUMBERS`.
        rows: all pages; written to.
        slots: places in all pages; int64.
        mix: the matrix by which keys and values are multiplied, in float64.
    """
    n, dim = keys.shape
    sizes = n, len(rows) * rows.shape[1]
    _run(compiled_writing(dim, keys.dtype), sizes, keys, values, rows, slots, mix)


def _run(function: Any, sizes: tuple[int, ...], *tensors: Tensor) -> None:
    """Run a compiled function in all of PyTorch's threads.

    Args:
        function: takes the addresses of the sizes and of the tensors.
        sizes: the sizes that the function reads.
        tensors: contiguous tensors.
    """
    assert all(tensor.is_contiguous() for tensor in tensors)
    numbers = (ctypes.c_int64 * len(sizes))(*sizes)
    addresses = ctypes.addressof(numbers), *(tensor.data_ptr() for tensor in tensors)
    given = (ctypes.c_void_p * len(addresses))(*addresses)
    _PROCESS.GOMP_parallel(ctypes.c_void_p(function.address), given, 0, 0)  # as many threads as PyTorch has


@njit
def _same(x: Any) -> Any:
    return x


@njit
def _widened(x: Any) -> Any:
    """Return a bfloat16, given as its 16 bits, as float32."""
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@njit
def _narrowed(x: Any) -> Any:
    """Return the nearest bfloat16 as its 16 bits, ties to even."""
    bits = _F(x).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + (np.uint32(bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(rounded >> np.uint32(16)) if not np.isnan(x) else np.uint16(0x7FC0)


NUMBERS: dict[torch.dtype, tuple[Any, Any, Any]] = {
    torch.float32: (np.float32, _same, _same),
    torch.bfloat16: (np.uint16, _widened, _narrowed),
}
"""The dtypes of keys and queries: the type in memory, and functions that convert to float32 and back."""


@intrinsic
def _prefetch(typing: Any, address: Any) -> tuple[Any, Any]:
    """Ask for the cache line at an address, before it is read."""

    def written(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *[ir.IntType(32)] * 3])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        # For reading (0), with the highest locality (3), as data (1).
        builder.call(prefetch, [pointer, *(ir.IntType(32)(number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.intp), written


@njit(fastmath=_REORDERED)
def _exp(x: Any) -> Any:
    """Return the exponential of a number that is at most zero, in a form that loops vectorise."""
    x = (_F(-87.0) if x < _F(-87.0) else x) * _F(math.log2(math.e))
    whole = np.int32(x - _F(0.5))
    part = (x - _F(whole)) * _F(math.log(2))
    series = _F(1 / 720)
    for i in (120, 24, 6, 2, 1, 1):
        series = series * part + _F(1) / _F(i)
    return series * np.int32((whole + 127) * 2**23).view(np.float32)


@njit
def _highest(numbers: Any) -> Any:
    """Return the largest number, or any if one is NaN; computed as sixteen maxima in parallel."""
    highs, whole = np.full(16, numbers[0]), len(numbers) // 16 * 16
    for first in range(0, whole, 16):
        for k in range(16):
            x = numbers[first + k]
            highs[k] = x if x > highs[k] else highs[k]
    for k in range(whole, len(numbers)):
        highs[k - whole] = max(highs[k - whole], numbers[k])
    return highs.max()


@njit(fastmath=_REORDERED)
def _weigh(weights: Any, entries: int, table: Any, size: int, bias: Any, biased: int, total: Any) -> None:
    """Turn logits into unnormalised weights in place, after adding biases; write each query's sum to `total`."""
    for i in range(len(weights)):
        for first in range(0, biased, size):
            own = bias[table[first // size] * size :]
            for k in range(min(size, biased - first)):
                weights[i, first + k] += own[k]
        highest = _highest(weights[i, :entries])
        for k in range(entries):
            weights[i, k] = _exp(weights[i, k] - highest)
        total[i] = weights[i, :entries].sum()
        weights[i, entries:] = 0


@lru_cache
def compiled_attention(group: int, dim: int, size: int, dtype: torch.dtype) -> Any:
    """Return the attention compiled for layers of these sizes; loops of known lengths are faster by a quarter.

    Args:
        group: queries of a head.
        dim: numbers of a key, and of a value.
        size: entries of a page.
        dtype: one of `NUMBERS`.
    """
    width = 2 * dim + 8
    stored, widened, narrowed = NUMBERS[dtype]

    write_products, add_values = key_products(group, dim, width), value_sums(group, dim, width)

    @njit(fastmath=_REORDERED)
    def multiply(vectors: Any, matrix: Any, products: Any) -> None:
        """Write the product of each vector with a matrix."""
        for i in range(group):
            own = products[i]
            own[:] = 0
            for j in range(0, dim, 2):
                x, y, row, next_row = vectors[i, j], vectors[i, j + 1], matrix[j], matrix[j + 1]
                for k in range(dim):
                    own[k] += x * row[k] + y * next_row[k]

    @njit(fastmath=_REORDERED, error_model="numpy")
    def attend_head(
        queries: Any, rows: Any, scales: Any, table: Any, entries: int, output: Any, bias: Any, biased: int
    ) -> None:
        """Compute one head's attention."""
        output[:] = 0
        if not entries:
            return
        stride = entries + ROWS - 1
        weights, total = np.empty((group, stride), np.float32), np.empty(group, np.float32)
        pages, page_bytes = rows.ctypes.data, size * width
        for first in range(0, entries, size):
            page = pages + table[first // size] * page_bytes
            following = pages + table[min(first + size, entries - 1) // size] * page_bytes
            for entry in range(0, min(size, entries - first), ROWS):
                for line in range(0, ROWS * width, 64):
                    _prefetch(following + entry * width + line)
                place = weights.ctypes.data + 4 * (first + entry)
                write_products(queries.ctypes.data, page + entry * width, place, stride)
        _weigh(weights, entries, table, size, bias, biased, total)
        for first in range(0, entries, size):
            number, n = table[first // size], min(size, entries - first)
            for i in range(group):
                for k in range(n):
                    weights[i, first + k] *= scales[number, k, dim // 2 + 1]
            for entry in range(0, n, ROWS):
                place = weights.ctypes.data + 4 * (first + entry)
                values = pages + number * page_bytes + entry * width + dim + 4
                add_values(place, values, output.ctypes.data, stride)
        for i in range(group):
            output[i] /= total[i]

    @cfunc(types.void(types.CPointer(types.voidptr)))
    def attend(given: Any) -> None:
        """Compute the attention of this thread's heads."""
        sizes = carray(given[0], 4, np.int64)
        heads, pages, subpages = sizes[0], sizes[1], sizes[2]
        queries = carray(given[1], (heads, group, dim), stored)
        rows = carray(given[2], (subpages, size, width), np.int8)
        scales = carray(given[2], (subpages, size, width // 4), np.float32)
        tables, lengths = carray(given[3], (heads, pages), np.int32), carray(given[4], heads, np.int32)
        output = carray(given[5], (heads, group, dim), stored)
        matrices = carray(given[6], (2, dim, dim), np.float32)
        bias, biased = carray(given[7], sizes[3], np.float32), carray(given[8], heads, np.int32)
        own, mixed = np.empty((group, dim), np.float32), np.empty((group, dim), np.float32)
        for head in range(_thread(), heads, _threads()):
            for i in range(group):
                for k in range(dim):
                    own[i, k] = widened(queries[head, i, k])
            multiply(own, matrices[0], mixed)
            number = biased[head] if sizes[3] else 0
            attend_head(mixed, rows, scales, tables[head], lengths[head], own, bias, number)
            multiply(own, matrices[1], mixed)
            for i in range(group):
                for k in range(dim):
                    output[head, i, k] = narrowed(mixed[i, k])

    return attend


@njit(error_model="numpy")
def _write_row(numbers: Any, row: Any, scale: Any) -> None:
    """Write the numbers of a key or value, and its scale, which is NaN if a number is not finite."""
    largest, finite = _F(0), True
    for x in numbers:
        largest, finite = max(largest, abs(x)), finite and abs(x) < _F(np.inf)
    scale[0] = max(largest / _F(127), _F(LEAST_SCALE)) if finite else _F(np.nan)
    factor = _F(1) / scale[0]
    for k in range(len(row)):
        step = numbers[k] * factor
        row[k] = np.int8(min(max(step + math.copysign(_F(0.5), step), _F(-127)), _F(127))) if finite else np.int8(0)


@lru_cache
def compiled_writing(dim: int, dtype: torch.dtype) -> Any:
    """Return the function that writes entries, compiled for layers with heads of this size.

    Args:
        dim: numbers of a key, and of a value.
        dtype: one of `NUMBERS`.
    """
    width = 2 * dim + 8
    stored, widened, narrowed = NUMBERS[dtype]

    @njit(fastmath=_REORDERED)
    def mix_row(given: Any, mix: Any, sums: Any, mixed: Any) -> None:
        """Write the product of a key or value with the matrix, rounded to its own dtype."""
        sums[:] = 0
        for j in range(0, dim, 4):
            a, b, c, d = widened(given[j]), widened(given[j + 1]), widened(given[j + 2]), widened(given[j + 3])
            for k in range(dim):
                sums[k] += a * mix[j, k] + b * mix[j + 1, k] + c * mix[j + 2, k] + d * mix[j + 3, k]
        for k in range(dim):
            mixed[k] = widened(narrowed(_F(sums[k])))

    @cfunc(types.void(types.CPointer(types.voidptr)))
    def write(given: Any) -> None:
        """Write this thread's entries."""
        sizes = carray(given[0], 2, np.int64)
        n, slots_in_all = sizes[0], sizes[1]
        keys, values = carray(given[1], (n, dim), stored), carray(given[2], (n, dim), stored)
        rows = carray(given[3], (slots_in_all, width), np.int8)
        scales = carray(given[3], (slots_in_all, width // 4), np.float32)
        slots, mix = carray(given[4], n, np.int64), carray(given[5], (dim, dim), np.float64)
        sums, mixed = np.empty(dim, np.float64), np.empty(dim, np.float32)
        for i in range(_thread(), n, _threads()):
            row, scale = rows[slots[i]], scales[slots[i]]
            mix_row(keys[i], mix, sums, mixed)
            _write_row(mixed, row[:dim], scale[dim // 4 :])
            mix_row(values[i], mix, sums, mixed)
            _write_row(mixed, row[dim + 4 : 2 * dim + 4], scale[dim // 2 + 1 :])

    return write
