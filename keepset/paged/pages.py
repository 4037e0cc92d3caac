"""Pages of engines that keep an entry's numbers in order."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


class StridedPages:
    """Pages of backends that keep an entry's numbers in order, at any strides: those for GPUs.

    Attributes:
        kv_heads, block_size, head_dim, slots: of the cache.
    """

    def __init__(self, kv_cache: Float[Tensor, "blocks kv_heads block_size two_head_dim"]) -> None:
        blocks, self.kv_heads, self.block_size, width = kv_cache.shape
        self.head_dim, self.slots = width // 2, blocks * self.kv_heads * self.block_size
        self._cache = kv_cache

    def columns(self, number: int) -> Float[Tensor, "columns slots"]:
        """Room for numbers beside each entry."""
        return torch.zeros(number, self.slots, device=self._cache.device)

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> Float[Tensor, "*rows entries head_dim"]:
        """Keys of whole sub-pages."""
        block, head = self._block_and_head(subpages)
        return self._cache[block, head, :, : self.head_dim].flatten(-3, -2)

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[Float[Tensor, "*rows entries head_dim"], Float[Tensor, "*rows entries head_dim"]]:
        """Keys and values of whole sub-pages: halves of one tensor."""
        entries = self._cache[self._block_and_head(subpages)].flatten(-3, -2)
        return entries[..., : self.head_dim], entries[..., self.head_dim :]

    def write(
        self, keys: Float[Tensor, "n head_dim"], values: Float[Tensor, "n head_dim"], slots: Int[Tensor, " n"]
    ) -> None:
        """Puts entry `i` at `slots[i]`."""
        place = (*self._block_and_head(slots // self.block_size), slots % self.block_size)
        self._cache[place] = torch.cat((keys, values), dim=-1)

    def _block_and_head(self, subpages: Int[Tensor, "*rows"]) -> tuple[Int[Tensor, "*rows"], Int[Tensor, "*rows"]]:
        # Not one index into a folded view: blocks and heads need not have strides that fold.
        return subpages // self.kv_heads, subpages % self.kv_heads
