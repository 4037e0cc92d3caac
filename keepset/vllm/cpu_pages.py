"""Pages of vLLM's CPU backend."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from vllm import _custom_ops as ops

from keepset.errors import KeepsetError, UnsupportedEngineError


class CPUPages:
    """`Pages` of vLLM's CPU backend, which packs keys and values in the order that its instruction set reads.

    Args:
        caches: the caches of the layers that share block tables.
        place: the layer's index among them.
        isa: the instruction set that the layer's metadata builder chose (`layer.isa`).

    Attributes:
        folded: keys and values of all these layers for the backend's kernels, `[subpages, 1, block_size, head_dim]`:
            every sub-page is a block of one KV head. So a page table has one row for each (request, head), with its own
            length.
    """

    def __init__(
        self, caches: Sequence[Shaped[Tensor, "blocks kv_heads block_size two_head_dim"]], place: int, isa: str
    ) -> None:
        kv_cache = joined(caches)
        blocks, self.kv_heads, self.block_size, width = caches[place].shape
        self.head_dim = self.value_dim = width // 2
        self.slots = blocks * self.kv_heads * self.block_size
        self.entry_bytes, self.isa = width * kv_cache.itemsize, isa
        self.dtype, self.device, self.format = kv_cache.dtype, kv_cache.device, None
        self._before, self._all = place * blocks * self.kv_heads, len(caches) * blocks * self.kv_heads
        # Keys and values of a sub-page are neighbouring rows, so that each can be fetched without the other. They are
        # integers, because moving 16-bit floats converts them on a CPU: 2 to 3 times slower, and it alters NaNs.
        bits = {2: torch.int16, 4: torch.int32}[kv_cache.dtype.itemsize]
        self._rows = kv_cache.view(bits).view(-1, self.block_size * self.head_dim)
        keys, values = kv_cache.view(-1, 1, 2 * self.block_size, self.head_dim).chunk(2, dim=2)
        self.folded = keys, values
        self._key_order, self._value_order = packing(self.block_size, self.head_dim, kv_cache.dtype, isa)

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> Shaped[Tensor, "*rows entries head_dim"]:
        """Return the keys of whole sub-pages, unpacked."""
        return self._read(subpages, 0, self._key_order)

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[Shaped[Tensor, "*rows entries head_dim"], Shaped[Tensor, "*rows entries head_dim"]]:
        """Return keys and values of whole sub-pages, unpacked."""
        return self._read(subpages, 0, self._key_order), self._read(subpages, 1, self._value_order)

    def _read(
        self, subpages: Int[Tensor, "*rows pages"], row: int, order: Int[Tensor, " numbers"] | None
    ) -> Shaped[Tensor, "*rows entries head_dim"]:
        """Return one of each sub-page's two rows, unpacked by `order` and in the cache's dtype."""
        *rows, pages = subpages.shape
        packed = self._rows.index_select(0, 2 * ((subpages.flatten() + self._before) % self._all) + row)
        if order is not None:
            # `gather` with one row of indices expanded: on a CPU 2 to 4 times faster than `index_select` on this axis,
            # and the indices stay the size of one page.
            packed = packed.gather(1, order.expand(len(packed), -1))
        return packed.view(*rows, pages * self.block_size, self.head_dim).view(self.dtype)

    def write(
        self, keys: Shaped[Tensor, "n head_dim"], values: Shaped[Tensor, "n head_dim"], slots: Int[Tensor, " n"]
    ) -> None:
        """Write entry `i` to `slots[i]`."""
        self.write_folded(keys, values, (slots + self._before * self.block_size) % (self._all * self.block_size))

    def write_folded(
        self, keys: Shaped[Tensor, "n head_dim"], values: Shaped[Tensor, "n head_dim"], slots: Int[Tensor, " n"]
    ) -> None:
        """Write entry `i` to `slots[i]`, counted from the first layer's slots on.

        The backend's own kernel writes them.

        Raises:
            KeepsetError: keys or values have another dtype than the cache.
        """
        if keys.dtype != self.dtype or values.dtype != self.dtype:
            # The kernel only looks at the dtype of the keys and would overwrite other entries.
            raise KeepsetError(f"The KV cache holds {self.dtype}: keys and values must have the same dtype.")
        _pack(keys, values, *self.folded, slots, self.isa)


def joined(caches: Sequence[Tensor]) -> Shaped[Tensor, "all_blocks kv_heads block_size two_head_dim"]:
    """Return caches that follow one another in memory as one tensor.

    Raises:
        UnsupportedEngineError: they do not follow one another.
    """
    first = caches[0]
    follow = all(cache.data_ptr() == first.data_ptr() + i * first.nbytes for i, cache in enumerate(caches))
    if not follow or not all(cache.is_contiguous() for cache in caches):
        raise UnsupportedEngineError(
            "KV caches of the CPU backend must be contiguous and follow one another to be split into sub-pages."
        )
    return first.as_strided((len(caches) * len(first), *first.shape[1:]), first.stride())


@functools.cache
def packing(
    block_size: int, head_dim: int, dtype: torch.dtype, isa: str
) -> tuple[Int[Tensor, " numbers"] | None, Int[Tensor, " numbers"] | None]:
    """Return the place of each number (offset, channel) in a packed sub-page, for keys and for values.

    The packing differs between instruction sets and dtypes, and is not documented. So the backend's own kernel writes
    numbers that encode their original places.

    Returns:
        Two permutations, each None if numbers are not moved.

    Raises:
        UnsupportedEngineError: the kernel does more than reorder numbers.
    """
    numbers = block_size * head_dim
    home = torch.arange(numbers)
    came_from = torch.zeros(2, numbers, dtype=torch.int64)
    # Integers up to 256 are exact in every dtype, bfloat16 included.
    scale, base = 1, 256
    while scale < numbers:
        digits = (home // scale % base).to(dtype).view(block_size, head_dim)
        page = torch.zeros(1, 1, 2 * block_size, head_dim, dtype=dtype)
        key_cache, value_cache = page.chunk(2, dim=2)
        _pack(digits, digits, key_cache, value_cache, torch.arange(block_size), isa)
        came_from += page.view(2, numbers).float().long() * scale
        scale *= base
    if not torch.equal(came_from.sort(-1).values, home.expand(2, -1)):
        raise UnsupportedEngineError(
            f"vLLM packs KV cache pages of {block_size} x {head_dim} {dtype} for {isa!r} in a way "
            "that is not a permutation: keepset cannot read them."
        )
    keys, values = (None if torch.equal(order, home) else order for order in came_from.argsort(-1))
    return keys, values


def _pack(
    keys: Shaped[Tensor, "n head_dim"],
    values: Shaped[Tensor, "n head_dim"],
    key_cache: Shaped[Tensor, "subpages 1 block_size head_dim"],
    value_cache: Shaped[Tensor, "subpages 1 block_size head_dim"],
    slots: Int[Tensor, " n"],
    isa: str,
) -> None:
    # The kernel reads slots by address, as 64-bit numbers, and expects the last axis of entries to be dense.
    new = keys.contiguous().unsqueeze(1), values.contiguous().unsqueeze(1)
    slots = slots.long().contiguous()
    ops.cpu_attn_reshape_and_cache(*new, key_cache, value_cache, slots, isa)
