"""Attention over rows of 8-bit integers where they lie in pages, and writing them; compiled by Numba for CPUs.

PyTorch has no operator that multiplies such rows: it would have to copy and convert all of them first.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int8
from llvmlite import ir
from llvmlite.binding import ffi
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

from keepset.kernels.page_format import LEAST_SCALE

# Each engine of a process has vLLM look at what all loaded modules hold, and take `__dict__` for a dictionary. Numba's
# library answers this name, like every other, with a function.
ffi.lib._fntab.setdefault("__dict__", {})

_F = np.float32
_PROCESS = ctypes.CDLL(None)
"""What the process has loaded, PyTorch's OpenMP included."""
AVAILABLE = hasattr(_PROCESS, "GOMP_parallel")
"""Whether this can run in PyTorch's threads, which needs an OpenMP with GNU's interface."""
_thread = types.ExternalFunction("omp_get_thread_num", types.int32())
_threads = types.ExternalFunction("omp_get_num_threads", types.int32())
_REORDERED = {"reassoc", "contract", "nsz", "arcp"}
"""What compiled sums may be altered by, so that several numbers are added at once; NaN stays NaN."""


def attend(
    queries: Float[Tensor, "heads group head_dim"],
    rows: Int8[Tensor, "subpages block_size entry"],
    tables: Int[Tensor, "heads pages"],
    lengths: Int[Tensor, " heads"],
    output: Float[Tensor, "heads group head_dim"],
    bias: Float[Tensor, " slots"],
    biased: Int[Tensor, " heads"],
) -> None:
    """Compute the attention of some queries, each over the entries of its own head.

        output = softmax(queries @ keys' + bias) @ values

    Args:
        queries: scaled, and mixed as keys are.
        rows: all pages, of a multiple of four entries. An entry is a key and a value, each with its scale behind it.
        tables: the pages of each head, in the order of its entries; int32.
        lengths: the number of entries of each head; int32.
        output: written to, mixed as values are; zero for a head without entries.
        bias: what is added to the logits of the entry in each place of all pages.
        biased: how many of each head's first entries have a bias, which others have not; int32.
    """
    heads, group, dim = queries.shape
    sizes = heads, tables.shape[1], len(rows), len(bias)
    _run(compiled_attention(group, dim, rows.shape[1]), sizes, queries, rows, tables, lengths, output, bias, biased)


def write(
    keys: Float[Tensor, "n head_dim"],
    values: Float[Tensor, "n head_dim"],
    rows: Int8[Tensor, "subpages block_size entry"],
    slots: Int[Tensor, " n"],
) -> None:
    """Round mixed entries as `PageFormat.encode` does, and write entry `i` to `slots[i]`.

    Args:
        keys, values: mixed.
        rows: all pages; written to.
        slots: places in all pages; int64.
    """
    _run(_write, (*keys.shape, *rows.shape), keys, values, rows, slots)


def _run(function: Any, sizes: tuple[int, ...], *tensors: Tensor) -> None:
    """Run a compiled function in all of PyTorch's threads.

    Args:
        function: takes the addresses of the sizes and of the tensors.
        sizes: of the tensors.
        tensors: contiguous.
    """
    assert all(tensor.is_contiguous() for tensor in tensors)
    numbers = (ctypes.c_int64 * len(sizes))(*sizes)
    addresses = ctypes.addressof(numbers), *(tensor.data_ptr() for tensor in tensors)
    given = (ctypes.c_void_p * len(addresses))(*addresses)
    _PROCESS.GOMP_parallel(ctypes.c_void_p(function.address), given, 0, 0)  # as many threads as PyTorch has


@intrinsic
def _prefetch(typing: Any, address: Any) -> tuple[Any, Any]:
    """Ask for the cache line at an address, before it is read."""

    def written(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *[ir.IntType(32)] * 3])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        # To be read (0), as near as may be (3), and data (1).
        builder.call(prefetch, [pointer, *(ir.IntType(32)(number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.intp), written


@njit(fastmath=_REORDERED)
def _exp(x: Any) -> Any:
    """Return the exponential of a number that is not above zero, such that a loop makes several at once."""
    x = (_F(-87.0) if x < _F(-87.0) else x) * _F(math.log2(math.e))
    whole = np.int32(x - _F(0.5))
    part = (x - _F(whole)) * _F(math.log(2))
    series = _F(1 / 720)
    for i in (120, 24, 6, 2, 1, 1):
        series = series * part + _F(1) / _F(i)
    return series * np.int32((whole + 127) * 2**23).view(np.float32)


@njit
def _highest(numbers: Any) -> Any:
    """Return the largest number, or some number where one is NaN; by sixteen maxima, which are compared at once."""
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
    """Add biases to logits and make weights of them, in place; write the sum of each query's weights to `total`."""
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
def compiled_attention(group: int, dim: int, size: int) -> Any:
    """Return the attention of layers of these sizes, compiled for them: loops of known lengths are faster by a quarter.

    Args:
        group: queries of a head.
        dim: numbers of a key, and of a value.
        size: entries of a page.
    """
    width = 2 * dim + 8

    @njit(fastmath=_REORDERED)
    def decode(page: Any, scales: Any, at: int, first: int, last: int, numbers: Any) -> None:
        """Write what four keys or values stand for. Behind the last entry there may be anything, so it is taken again.

        Args:
            page, scales: a page as whole numbers, and the same memory as scales.
            at: where in an entry a key or value begins.
            first, last: the first of the four entries, and the last one that exists.
            numbers: written to.
        """
        for i in range(4):
            entry = min(first + i, last)
            stored, scale, own = page[entry, at : at + dim], scales[entry, (at + dim) // 4], numbers[i]
            for k in range(dim):
                own[k] = scale * _F(stored[k])

    @njit(fastmath=_REORDERED, error_model="numpy")
    def attend_head(
        queries: Any, rows: Any, scales: Any, table: Any, entries: int, output: Any, bias: Any, biased: int
    ) -> None:
        """Compute one head's attention, four entries at a time, so that a query's numbers are loaded less often."""
        output[:] = 0
        if not entries:
            return
        weights, four = np.zeros((group, entries + 3), np.float32), np.empty((4, dim), np.float32)
        total = np.zeros(group, np.float32)
        for first in range(0, entries, size):
            number, last = table[first // size], min(size, entries - first) - 1
            following = rows[table[min(first + size, entries - 1) // size]].ctypes.data
            for entry in range(0, last + 1, 4):
                for line in range(0, 4 * width, 64):
                    _prefetch(following + entry * width + line)
                decode(rows[number], scales[number], 0, entry, last, four)
                for i in range(group):
                    a = b = c = d = _F(0)
                    for k in range(dim):
                        x = queries[i, k]
                        a += x * four[0, k]
                        b += x * four[1, k]
                        c += x * four[2, k]
                        d += x * four[3, k]
                    logits = weights[i, first + entry :]
                    logits[0], logits[1], logits[2], logits[3] = a, b, c, d
        _weigh(weights, entries, table, size, bias, biased, total)
        for first in range(0, entries, size):
            number, last = table[first // size], min(size, entries - first) - 1
            for entry in range(0, last + 1, 4):
                decode(rows[number], scales[number], dim + 4, entry, last, four)
                for i in range(group):
                    own = weights[i, first + entry :]
                    a, b, c, d = own[0], own[1], own[2], own[3]
                    for k in range(dim):
                        output[i, k] += a * four[0, k] + b * four[1, k] + c * four[2, k] + d * four[3, k]
        for i in range(group):
            output[i] /= total[i]

    @cfunc(types.void(types.CPointer(types.voidptr)))
    def attend(given: Any) -> None:
        """Compute the attention of this thread's heads."""
        sizes = carray(given[0], 4, np.int64)
        heads, pages, subpages = sizes[0], sizes[1], sizes[2]
        queries = carray(given[1], (heads, group, dim), np.float32)
        rows = carray(given[2], (subpages, size, width), np.int8)
        scales = carray(given[2], (subpages, size, width // 4), np.float32)
        tables, lengths = carray(given[3], (heads, pages), np.int32), carray(given[4], heads, np.int32)
        output = carray(given[5], (heads, group, dim), np.float32)
        bias, biased = carray(given[6], sizes[3], np.float32), carray(given[7], heads, np.int32)
        for head in range(_thread(), heads, _threads()):
            attend_head(queries[head], rows, scales, tables[head], lengths[head], output[head], bias, biased[head])

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


@cfunc(types.void(types.CPointer(types.voidptr)))
def _write(given: Any) -> None:
    """Write this thread's entries."""
    sizes = carray(given[0], 5, np.int64)
    n, dim, subpages, size, width = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    keys, values = carray(given[1], (n, dim), np.float32), carray(given[2], (n, dim), np.float32)
    rows = carray(given[3], (subpages * size, width), np.int8)
    scales = carray(given[3], (subpages * size, width // 4), np.float32)
    slots = carray(given[4], n, np.int64)
    for i in range(_thread(), n, _threads()):
        row, scale = rows[slots[i]], scales[slots[i]]
        _write_row(keys[i], row[:dim], scale[dim // 4 :])
        _write_row(values[i], row[dim + 4 : 2 * dim + 4], scale[dim // 2 + 1 :])
