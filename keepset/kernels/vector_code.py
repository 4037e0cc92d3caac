"""Vector instructions for Numba: products of rows of 8-bit integers, with sums that stay in registers.

Numba's compiler would write the sums to memory and read them again for every entry, which takes twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

ROWS = 4
"""Entries that are processed at once."""
_QUERIES = 4
"""The most queries that are processed at once: the sums of more do not fit the registers."""
_LANES = 8
"""The most numbers of a vector."""
_FLAGS = ("contract", "reassoc", "nsz")
"""Changes that the compiler may make to sums; NaN stays NaN."""
_BYTE, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_SIZE = 4
"""Bytes of a float."""


class _Code:
    """A writer of instructions on vectors of one length. Addresses are integers.

    Args:
        builder: the builder to which instructions are added.
        lanes: the numbers of a vector.

    Attributes:
        zero: a vector of zeros.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self._builder, self.lanes = builder, lanes
        self.zero = ir.Constant(ir.VectorType(_FLOAT, lanes), None)

    def place(self, address: ir.Value, steps: ir.Value, size: int) -> ir.Value:
        """Return the address `steps` times `size` bytes behind another."""
        return self._builder.add(address, self._builder.mul(steps, _LONG(size)))

    def pointer(self, address: ir.Value, offset: int, type: ir.Type) -> ir.Value:
        """Return a pointer to `offset` bytes behind an address."""
        return self._builder.inttoptr(self._builder.add(address, _LONG(offset)), type.as_pointer())

    def floats(self, address: ir.Value, offset: int) -> ir.Value:
        """Read a vector of floats."""
        return self._builder.load(self.pointer(address, offset, self.zero.type), align=1)

    def whole_numbers(self, address: ir.Value, offset: int) -> ir.Value:
        """Read a vector of 8-bit integers, as floats."""
        stored = self._builder.load(self.pointer(address, offset, ir.VectorType(_BYTE, self.lanes)), align=1)
        return self._builder.sitofp(self._builder.sext(stored, ir.VectorType(_INT, self.lanes)), self.zero.type)

    def gathered(self, address: ir.Value, offsets: Sequence[int]) -> ir.Value:
        """Read floats at several offsets, as a vector."""
        vector = ir.Constant(ir.VectorType(_FLOAT, len(offsets)), ir.Undefined)
        for place, offset in enumerate(offsets):
            number = self._builder.load(self.pointer(address, offset, _FLOAT), align=1)
            vector = self._builder.insert_element(vector, number, _INT(place))
        return vector

    def repeated(self, address: ir.Value, offset: int) -> ir.Value:
        """Read a float, and return a vector in which every number is this float."""
        one = self.gathered(address, [offset])
        return self._picked(one, one, [0] * self.lanes)

    def write(self, vector: ir.Value, address: ir.Value, offset: int) -> None:
        """Write a vector."""
        self._builder.store(vector, self.pointer(address, offset, vector.type), align=1)

    def times(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._builder.fmul(a, b, flags=_FLAGS)

    def plus(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._builder.fadd(a, b, flags=_FLAGS)

    def totals(self, vectors: list[ir.Value]) -> ir.Value:
        """Return the sums of four vectors' numbers as one vector.

        Each vector's first half is added to its second half, and two vectors are joined into one. When one vector is
        left, its numbers are added in the same way until each of the four vectors has one.
        """
        a, b, c, d = vectors
        lanes = self.lanes // 4
        total = self._halved(self._halved(a, b, self.lanes), self._halved(c, d, self.lanes), self.lanes // 2)
        while lanes > 1:
            total, lanes = self._halved(total, total, lanes, 4 * lanes), lanes // 2
        return total

    def _halved(self, a: ir.Value, b: ir.Value, lanes: int, numbers: int | None = None) -> ir.Value:
        """Add the halves of every `lanes` numbers of two vectors, up to `numbers` of them; None: all."""
        numbers = numbers or 2 * a.type.count
        first = [start + i for start in range(0, numbers, lanes) for i in range(lanes // 2)]
        return self.plus(self._picked(a, b, first), self._picked(a, b, [i + lanes // 2 for i in first]))

    def _picked(self, a: ir.Value, b: ir.Value, places: list[int]) -> ir.Value:
        """Return the numbers at some places of two concatenated vectors."""
        return self._builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(places)), places))


def _function(dim: int, write: Callable[[_Code, ir.Value, ir.Value, ir.Value, ir.Value], None]) -> Any:
    """Return a function of four integers that Numba can call and always inlines."""

    @intrinsic
    def function(typing: Any, first: Any, second: Any, third: Any, fourth: Any) -> tuple[Any, Any]:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            write(_Code(builder, math.gcd(dim, _LANES)), *arguments)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), code

    return function


def _in_groups(group: int) -> list[range]:
    return [range(start, min(start + _QUERIES, group)) for start in range(0, group, _QUERIES)]


def key_products(group: int, dim: int, width: int) -> Any:
    """Return a function that writes the products of queries with the keys of `ROWS` entries.

    It takes the addresses of the queries, of the entries and of the first query's products, and the distance in floats
    from one query's products to the next one's.

    Args:
        group: number of queries; they lie one behind the other.
        dim: numbers of a query, and integers of a key; a key's scale follows them.
        width: bytes of an entry.
    """

    def write(code: _Code, queries: ir.Value, entries: ir.Value, products: ir.Value, stride: ir.Value) -> None:
        scales = code.gathered(entries, [row * width + dim for row in range(ROWS)])
        for some in _in_groups(group):
            sums = {i: [code.zero] * ROWS for i in some}
            for k in range(0, dim, code.lanes):
                keys = [code.whole_numbers(entries, row * width + k) for row in range(ROWS)]
                for i in some:
                    query = code.floats(queries, _SIZE * (i * dim + k))
                    sums[i] = [
                        code.plus(total, code.times(query, key)) for total, key in zip(sums[i], keys, strict=True)
                    ]
            for i in some:
                place = code.place(products, stride, _SIZE * i)
                code.write(code.times(code.totals(sums[i]), scales), place, 0)

    return _function(dim, write)


def value_sums(group: int, dim: int, width: int) -> Any:
    """Return a function that adds the weighted values of `ROWS` entries to each query's sum.

    It takes the addresses of the first query's weights, of the entries' values and of the sums, and the distance in
    floats from one query's weights to the next one's. The weights include the values' scales.

    Args:
        group: number of queries; their sums lie one behind the other.
        dim: numbers of a sum, and integers of a value.
        width: bytes of an entry.
    """

    def write(code: _Code, weights: ir.Value, values: ir.Value, sums: ir.Value, stride: ir.Value) -> None:
        for some in _in_groups(group):
            places = {i: code.place(weights, stride, _SIZE * i) for i in some}
            own = {i: [code.repeated(places[i], _SIZE * row) for row in range(ROWS)] for i in some}
            for k in range(0, dim, code.lanes):
                rows = [code.whole_numbers(values, row * width + k) for row in range(ROWS)]
                for i in some:
                    total = code.floats(sums, _SIZE * (i * dim + k))
                    for weight, row in zip(own[i], rows, strict=True):
                        total = code.plus(total, code.times(weight, row))
                    code.write(total, sums, _SIZE * (i * dim + k))

    return _function(dim, write)
