"""`EntryParts`: where the bytes of an entry lie in a cache that does not have one row for each key and value."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Shaped, UInt8
from torch import Tensor

from keepset.errors import UnsupportedEngineError

TOKENS = 4
"""Neighbouring tokens whose scales may be interleaved. The size of a block is a multiple of it."""

Part = Shaped[Tensor, "blocks kv_heads fours four *bytes"]
"""A view of some of each entry's bytes; `part[block, head, offset // 4, offset % 4]` are those of one entry."""


class EntryParts(NamedTuple):
    """Views of a layer's cache, in which each entry's bytes are found by block, head and offset.

    If there are two parts, the second holds scales. Within a block scales lie as the numbers do, at an eighth of their
    strides, and those of values may be swizzled (`nvfp4_parts`).

    Attributes:
        keys: views of the bytes of keys, in the order in which a format reads them.
        values: views of the bytes of values, in the same order.
    """

    keys: tuple[Part, ...]
    values: tuple[Part, ...]

    @property
    def numbers(self) -> UInt8[Tensor, "blocks kv_heads block_size bytes"]:
        """The numbers of keys. Kernels find an entry's other bytes by their distance from these."""
        return self.keys[0].flatten(2, 3)

    @property
    def to_values(self) -> int:
        """The distance in bytes from a key's numbers to its value's."""
        return int(self.values[0].storage_offset() - self.keys[0].storage_offset())

    @property
    def to_scales(self) -> int:
        """The distance in bytes from a block's numbers to its scales; 0 if there are no scales."""
        return int(self.keys[-1].storage_offset() - self.keys[0].storage_offset())

    @property
    def swizzled(self) -> bool:
        """Whether the scales of values are swizzled."""
        return self.values[-1].ndim > self.keys[-1].ndim


LayerPages = Shaped[Tensor, "blocks kv_heads block_size width"]
"""The cache of one layer; only an entry's numbers must be contiguous. A sub-page is `block * kv_heads + head`."""


def pages_of(cache: LayerPages | EntryParts) -> LayerPages:
    """Return the tensor in which kernels look for entries."""
    return cache.numbers if isinstance(cache, EntryParts) else cache


def to_values(cache: LayerPages | EntryParts) -> int:
    """Return the distance from a key to its value."""
    return cache.to_values if isinstance(cache, EntryParts) else cache.shape[3] // 2


def slot_parts(cache: UInt8[Tensor, "blocks kv_heads block_size slot"], key_bytes: int, value_bytes: int) -> EntryParts:
    """Return the parts of entries whose key and value share a slot, one behind the other.

    Args:
        cache: the cache; only a slot's bytes must be contiguous.
        key_bytes, value_bytes: bytes of a key, and of a value. Bytes behind them are padding.
    """
    keys, values = cache[..., :key_bytes], cache[..., key_bytes : key_bytes + value_bytes]
    return EntryParts((_by_fours(keys),), (_by_fours(values),))


def nvfp4_parts(cache: UInt8[Tensor, "blocks two_kv_heads block_size row"], swizzled: bool) -> EntryParts:
    """Return the parts of entries of an NVFP4 cache.

    A block holds four regions: the keys' numbers, the keys' scales, the values' numbers and the values' scales of all
    heads. In each, heads and tokens are in the order of the cache's strides.

    In swizzled scales of values, four neighbouring tokens share four neighbouring rows: with `s` scales for each token,
    scale `i` of token `t` is in row `t // 4 * 4 + i // (s / 4)`, at `i % (s / 4) * 4 + t % 4`.

    Args:
        cache: the cache; its blocks are dense.
        swizzled: whether the scales of values are swizzled.

    Raises:
        UnsupportedEngineError: the strides are neither by heads nor by tokens, or do not fit swizzled scales.
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
        """Return the view of a region that begins at byte `first` of a block and has `width` bytes for each entry."""
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
