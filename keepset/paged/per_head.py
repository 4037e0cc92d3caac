"""`PerHeadSequences`: heads of different lengths as requests of their own, for an engine's kernel on CPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels import page_layout
from keepset.kernels.page_layout import PageLayout
from keepset.paged.step import RaggedStep


class PerHeadBatch(NamedTuple):
    """One layer's tokens. Each KV head of each token is a request of its own, with one KV head and one query.

    Attributes:
        seq_lens: entries of each request.
        block_table: sub-pages of each, numbered through the caches of all layers that share the engine's block table.
        query_start_loc: the first query of each, and the end of the last one's.
        slot_mapping: the slot of each new entry in these sub-pages.
    """

    seq_lens: Int[Tensor, " tokens_heads"]
    block_table: Int[Tensor, "tokens_heads pages"]
    query_start_loc: Int[Tensor, " tokens_heads_plus_1"]
    slot_mapping: Int[Tensor, " tokens_heads"]


class PerHeadSequences:
    """The `PerHeadBatch` of every layer of a group, made for all of them at once."""

    def __init__(self, step: RaggedStep) -> None:
        tokens = step.tokens
        assert tokens is not None
        self._places = tokens.places
        rows, lengths = tokens.rows, tokens.lengths.long()
        layout = step.layout if rows is None else PageLayout(*(part[rows] for part in step.layout))
        entries, size = page_layout.entries(layout, lengths), step.block_size
        if step.tables is None:
            # Tables reach as far as a request's newest block: until that is full, no other is needed.
            coming = entries + (-lengths % size)[:, None, None]
            blocks = tokens.block_table[: len(lengths)] if rows is None else tokens.block_table[rows]
            step.tables = page_layout.tables(layout, coming, blocks, size, -(-int(coming.max()) // size), step.group)
        n, layers, heads, pages = step.tables.shape
        self._tokens, self._kv_heads = n, heads
        before = torch.arange(layers, device=lengths.device)[:, None] * (step.group.blocks * heads)
        every = torch.arange(n, device=lengths.device)
        slots = page_layout.slots(layout, step.tables, lengths - 1, every, size)
        starts = torch.arange(n * heads + 1, device=lengths.device, dtype=torch.int32)
        # Contiguous, because kernels read them by address; with a single head the transposed ones would not be.
        slots = (slots + before * size).contiguous()
        tables = step.tables.transpose(0, 1).reshape(layers, n * heads, pages)
        tables = ((tables + before[..., None]) % (layers * step.group.blocks * heads)).int().contiguous()
        lengths = entries.transpose(0, 1).reshape(layers, -1).int().contiguous()
        self._batches = [
            PerHeadBatch(seq_lens, table, starts, own)
            for seq_lens, table, own in zip(lengths, tables, slots, strict=True)
        ]

    def batch(self, place: int) -> PerHeadBatch:
        """Return the batch of the layer at this place of the group."""
        return self._batches[place]

    def split(self, rows: Float[Tensor, "n heads dim"]) -> Float[Tensor, "tokens_heads group dim"]:
        """Return queries, keys or values of the step as those of the heads' requests."""
        own = rows[: self._tokens] if self._places is None else rows[self._places]
        return own.reshape(self._tokens * self._kv_heads, -1, own.shape[-1])

    def output_buffer(self, output: Float[Tensor, "n query_heads dim"]) -> Float[Tensor, "tokens_heads group dim"]:
        """Return a tensor for the attention of the heads' requests: a view of the step's output if possible."""
        if self._places is None:
            return self.split(output)
        return output.new_empty(self._tokens * self._kv_heads, output.shape[1] // self._kv_heads, output.shape[2])

    def merge(
        self, attended: Float[Tensor, "tokens_heads group dim"], output: Float[Tensor, "n query_heads dim"]
    ) -> None:
        """Write the attention of the heads' requests to its places in the step's output, unless it is a view of that.

        Args:
            attended: the attention of the heads' requests.
            output: the tensor for the step's attention.
        """
        if self._places is not None:
            output[self._places] = attended.view(-1, *output.shape[1:])
