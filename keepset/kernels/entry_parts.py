"""`EntryParts`: where the bytes of an entry lie in a cache that does not keep them in one row per key and value."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Shaped, UInt8
from torch import Tensor

from keepset.errors import UnsupportedEngineError

TOKENS = 4
"""Neighbouring tokens whose scales may lie among one another. The size of a block is a multiple of it."""

Part = Shaped[Tensor, "blocks kv_heads fours four *bytes"]
"""A view of some of each entry's bytes; `part[block, head, offset // 4, offset % 4]` has those of one entry."""


class EntryParts(NamedTuple):
    """Views of a layer's cache, in which each entry's bytes are found by block, head and offset.

    Where there are two parts, the second holds scales. Within a block these lie as the numbers do, but for an eighth of
    the distances, and those of values may be swizzled (`nvfp4_parts`).

    Attributes:
        keys: of the bytes of keys, in the order in which a format reads them.
        values: of the bytes of values, likewise.
    """

    keys: tuple[Part, ...]
    values: tuple[Part, ...]

    @property
    def numbers(self) -> UInt8[Tensor, "blocks kv_heads block_size bytes"]:
        """The numbers of keys. Kernels find all other bytes of an entry from there."""
        return self.keys[0].flatten(2, 3)

    @property
    def to_values(self) -> int:
        """How many bytes behind a key's numbers the value's begin."""
        return int(self.values[0].storage_offset() - self.keys[0].storage_offset())

    @property
    def to_scales(self) -> int:
        """How many bytes behind the numbers of a block the scales begin; 0 where there are none."""
        return int(self.keys[-1].storage_offset() - self.keys[0].storage_offset())

    @property
    def swizzled(self) -> bool:
        """Whether scales of values are."""
        return self.values[-1].ndim > self.keys[-1].ndim


LayerPages = Shaped[Tensor, "blocks kv_heads block_size width"]
"""The cache of one layer, with any strides but for an entry's own numbers. A sub-page is `block * kv_heads + head`."""


def pages_of(cache: LayerPages | EntryParts) -> LayerPages:
    """Return a cache as kernels look for entries in it."""
    return cache.numbers if isinstance(cache, EntryParts) else cache


def to_values(cache: LayerPages | EntryParts) -> int:
    """Return how far behind a key its value begins."""
    return cache.to_values if isinstance(cache, EntryParts) else cache.shape[3] // 2


def slot_parts(cache: UInt8[Tensor, "blocks kv_heads block_size slot"], key_bytes: int, value_bytes: int) -> EntryParts:
    """Return where entries lie whose key and value share a slot, one behind the other.

    Args:
        cache: the cache, with any strides but for a slot's own bytes.
        key_bytes, value_bytes: bytes of a key, and of a value. What lies behind them only fills the slot.
    """
    keys, values = cache[..., :key_bytes], cache[..., key_bytes : key_bytes + value_bytes]
    return EntryParts((_by_fours(keys),), (_by_fours(values),))


def nvfp4_parts(cache: UInt8[Tensor, "blocks two_kv_heads block_size row"], swizzled: bool) -> EntryParts:
    """Return where entries of an NVFP4 cache lie.

    A block holds the keys' numbers, the keys' scales, the values' numbers and the values' scales, of all heads each. In
    these four regions heads and tokens are in the order that the cache's strides have.

    In swizzled scales of values, four neighbouring tokens share four neighbouring rows: with `s` scales for each token,
    scale `i` of token `t` is in row `t // 4 * 4 + i // (s / 4)`, at `i % (s / 4) * 4 + t % 4`.

    Args:
        cache: the cache; what a block holds is dense.
        swizzled: whether scales of values are.

    Raises:
        UnsupportedEngineError: the strides are neither by heads nor by tokens, or scales cannot be swizzled so.
    """
    blocks, two_heads, size, row = cache.shape
    kv_heads, numbers, scales = two_heads // 2, row * 8 // 9, row // 9
    by_heads = cache.stride()[1:] == (size * row, row, 1)
    if not by_heads and cache.stride()[1:] != (row, two_heads * row, 1):
        raise UnsupportedEngineError(
            f"Blocks of an NVFP4 cache must be dense, and these have strides {cache.stride()}."
        )
    if swizzled and not (by_heads and scales % TOKENS == 0):
        raise UnsupportedEngineError(
            "An NVFP4 cache with swizzled scales must be laid out by heads, with heads of a multiple of 64 numbers."
        )

    def region(first: int, width: int) -> Tensor:
        """Return the view of a region that begins at this byte of a block, with so many bytes for each entry."""
        strides = (size * width, width) if by_heads else (width, kv_heads * width)
        shape = blocks, kv_heads, size, width
        return cache.as_strided(shape, (cache.stride(0), *strides, 1), cache.storage_offset() + first)

    side = kv_heads * size * row
    of_numbers = [_by_fours(region(first, numbers)) for first in (0, side)]
    of_scales = [_by_fours(region(first + kv_heads * size * numbers, scales)) for first in (0, side)]
    if swizzled:
        rows = of_scales[1].unflatten(-1, (-1, TOKENS))  # [blocks, kv_heads, fours, row, column, token]
        of_scales[1] = rows.permute(0, 1, 2, 5, 3, 4)
    return EntryParts((of_numbers[0], of_scales[0]), (of_numbers[1], of_scales[1]))


def _by_fours(view: Shaped[Tensor, "blocks kv_heads block_size n"]) -> Part:
    return view.unflatten(2, (-1, TOKENS))
