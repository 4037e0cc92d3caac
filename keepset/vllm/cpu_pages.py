"""Pages of vLLM's CPU backend, and attention over quantised ones, few of which that backend can read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from keepset.errors import KeepsetError, UnsupportedEngineError
from keepset.kernels.page_layout import FiledLayouts, PagedTokens, PageGroup
from keepset.kernels.paged import attend_heads, attend_pages
from keepset.kernels.softmax import Softmax
from keepset.paged.pages import Pages, decoded_entries
from keepset.vllm.attention import CompressedAttentionImpl
from keepset.vllm.engine_context import PlannedStep


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
        self, caches: Sequence[Shaped[Tensor, "blocks kv_heads block_size two_head_dim"]], layer_index: int, isa: str
    ) -> None:
        kv_cache = joined(caches)
        blocks, self.kv_heads, self.block_size, width = caches[layer_index].shape
        self.head_dim = self.value_dim = width // 2
        self.entry_sizes = self.head_dim, self.value_dim
        self.slots = blocks * self.kv_heads * self.block_size
        self.entry_bytes, self.isa = width * kv_cache.itemsize, isa
        self.dtype, self.device, self.format = kv_cache.dtype, kv_cache.device, None
        self._before, self._all = layer_index * blocks * self.kv_heads, len(caches) * blocks * self.kv_heads
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
        """Return one of each sub-page's two rows, unpacked by `order` and in the cache's dtype.

        Args:
            subpages: numbers of the sub-pages, counted in this layer.
            row: 0 for keys, 1 for values.
            order: the permutation that unpacks a sub-page; None if numbers are not moved.
        """
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
        """Write entry `i` to `slots[i]`.

        Args:
            keys: the keys, in the cache's dtype.
            values: the values, in the cache's dtype.
            slots: the slot of each entry, counted in this layer.
        """
        self.write_folded(keys, values, (slots + self._before * self.block_size) % (self._all * self.block_size))

    def write_folded(
        self, keys: Shaped[Tensor, "n head_dim"], values: Shaped[Tensor, "n head_dim"], slots: Int[Tensor, " n"]
    ) -> None:
        """Write entry `i` to `slots[i]`, counted from the first layer's slots on.

        The backend's own kernel writes them.

        Args:
            keys: the keys, in the cache's dtype.
            values: the values, in the cache's dtype.
            slots: the slot of each entry.

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

    Args:
        block_size: tokens per sub-page.
        head_dim: numbers of a key, and of a value.
        dtype: the dtype of the cache.
        isa: the instruction set, as vLLM names it.

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


def write(pages: Pages, keys: Tensor, values: Tensor, slots: Int[Tensor, " n"]) -> None:
    """Write keys and values, `[n, head_dim]`, in the cache's format to slots of the layer.

    Args:
        pages: the layer's cache.
        keys: the keys, after rotation.
        values: the values.
        slots: the slot of each entry.
    """
    rows = (keys, values) if pages.format is None else pages.format.encode_entries(keys, values)
    pages.write(*rows, slots)


def attend_ragged(
    step: PlannedStep, layer_index: int, pages: Pages, query: Tensor, output: Tensor, softmax: Softmax
) -> None:
    """Compute the attention of each head over its own entries, with biases if entries have them.

    Args:
        step: the step, in which heads have their own pages.
        layer_index: the layer's index in the group.
        pages: the layer's cache.
        query: queries of the step, `[tokens, query_heads, head_dim]`.
        output: of the same shape; written to.
        softmax: the layer's softmax; its sinks are `[query_heads]`.
    """
    ragged, bias, size = step.plan.ragged, step.group.columns.bias, pages.block_size
    assert ragged is not None and ragged.tokens is not None
    rows, layout = ragged.tokens.rows, ragged.of_layer(layer_index)
    if rows is not None and len(rows.unique()) < len(rows):
        group = ragged.group._replace(places=range(layer_index, layer_index + 1))
        read = partial(decoded_entries, pages)
        attend_pages(query, read, size, ragged.tokens, layout, group, softmax, output, bias)
        return
    per_head = step.per_head
    batch, buffer, kv_heads = per_head.batch(layer_index), per_head.output_buffer(output), layout.counts.shape[2]
    tables, lengths = batch.block_table, batch.seq_lens
    counts = layout.counts[: len(lengths) // kv_heads] if rows is None else layout.counts[rows]
    before = layer_index * pages.slots // size  # sub-pages of the layers before, from which on tables count

    def biases(heads: Int[Tensor, " some"], entries: int) -> Float[Tensor, "some entries"]:
        """Return the biases of some heads' first entries; entries since the event have none.

        Args:
            heads: rows of `tables`, one per token and KV head.
            entries: how many entries of each head.
        """
        assert bias is not None
        entry = torch.arange(entries)
        slots = tables[heads][:, entry // size].long() * size + entry % size
        return bias.view(-1)[slots].where(entry < counts.flatten()[heads, None], 0)

    attend_heads(
        per_head.split(query),
        lambda subpages: pages.read(subpages - before),
        tables,
        lengths,
        size,
        softmax.by_query_group(len(lengths) // kv_heads, kv_heads),
        buffer,
        pages.format,
        None if bias is None else biases,
    )
    per_head.merge(buffer, output)


@dataclass
class RowsMetadata:
    """A step of requests whose heads all have the same entries, at the places of vLLM's block tables.

    Attributes:
        starts: the index of each request's first token, and the end of the last request.
        block_table: blocks of each request.
        lengths: entries of each request.
        kv_heads: KV heads of a layer.
    """

    starts: list[int]
    block_table: Int[Tensor, "rows width"]
    lengths: Int[Tensor, " rows"]
    kv_heads: int

    @cached_property
    def decoding(self) -> Int[Tensor, " some"]:
        """The rows that have one new token."""
        return torch.tensor([row for row in range(len(self.lengths)) if self._new(row) == 1], dtype=torch.int64)

    @cached_property
    def heads(self) -> tuple[Int[Tensor, "some_heads width"], Int[Tensor, " some_heads"], Int[Tensor, " some"]]:
        """The sub-pages and entries of each head of the rows with one new token, and the indices of the tokens."""
        tables = self.block_table[self.decoding].long()
        tables = tables[:, None] * self.kv_heads + torch.arange(self.kv_heads)[:, None]
        lengths = self.lengths[self.decoding].long().repeat_interleave(self.kv_heads)
        return tables.flatten(0, 1), lengths, torch.tensor(self.starts, dtype=torch.long)[self.decoding]

    @cached_property
    def prompts(self) -> PagedTokens | None:
        """The tokens of rows with several new tokens."""
        several = [
            (self.starts[row] + i, row, int(length) - self._new(row) + i + 1)
            for row, length in enumerate(self.lengths)
            if self._new(row) > 1
            for i in range(self._new(row))
        ]
        if not several:
            return None
        token_indices, rows, lengths = torch.tensor(several, dtype=torch.long).unbind(1)
        return PagedTokens(self.block_table, lengths, int(lengths.max()), token_indices, rows)

    def _new(self, row: int) -> int:
        return self.starts[row + 1] - self.starts[row]


class RowsMetadataBuilder(AttentionMetadataBuilder[RowsMetadata]):
    """Builds the metadata."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RowsMetadata:
        rows = common_attn_metadata.num_reqs
        return RowsMetadata(
            common_attn_metadata.query_start_loc_cpu[: rows + 1].tolist(),
            common_attn_metadata.block_table_tensor[:rows],
            common_attn_metadata.seq_lens[:rows],
            self.kv_cache_spec.num_kv_heads,  # type: ignore[attr-defined]
        )


class RowsImpl:
    """A mixin that replaces how vLLM's layers for CPUs write to their cache and attend to it."""

    num_kv_heads: int
    num_queries_per_kv: int

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new entries to their slots; negative slots are skipped."""
        pages = self.pages(layer, kv_cache)  # type: ignore[attr-defined]
        real, size = (slot_mapping >= 0).nonzero()[:, 0], pages.block_size
        slots = slot_mapping[real].long()
        of_heads = ((slots // size)[:, None] * self.num_kv_heads + torch.arange(self.num_kv_heads)) * size
        of_heads += (slots % size)[:, None]
        write(pages, key[real].flatten(0, 1), value[real].flatten(0, 1), of_heads.flatten())

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: RowsMetadata | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the attention of a step's requests; nothing without metadata, when vLLM warms up."""
        if attn_metadata is None:
            return output
        pages = self.pages(layer, kv_cache)  # type: ignore[attr-defined]
        if len(attn_metadata.decoding):
            tables, lengths, token_indices = attn_metadata.heads
            head_queries = query[token_indices].unflatten(1, (self.num_kv_heads, -1)).flatten(0, 1)
            attended = torch.empty_like(head_queries)
            softmax = self.softmax.by_query_group(len(token_indices), self.num_kv_heads)  # type: ignore[attr-defined]
            attend_heads(head_queries, pages.read, tables, lengths, pages.block_size, softmax, attended, pages.format)
            output[token_indices] = attended.unflatten(0, (len(token_indices), -1)).flatten(1, 2)
        if (tokens := attn_metadata.prompts) is not None:
            whole = FiledLayouts.empty(len(attn_metadata.lengths), 1, self.num_kv_heads, query.device).layout
            blocks = pages.slots // (self.num_kv_heads * pages.block_size)
            attend_pages(
                query,
                partial(decoded_entries, pages),
                pages.block_size,
                tokens,
                whole,
                PageGroup(range(1), 1, blocks),
                self.softmax,  # type: ignore[attr-defined]
                output,
            )
        return output


class RowsMixin(CompressedAttentionImpl):
    """A mixin for layers on CPUs whose cache is quantised."""

    def mixing(self, layer: Any) -> None:
        """Return None, because `RowsImpl` mixes by the pages' format."""

    def append_ragged(self, layer: Any, step: PlannedStep, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        per_head, pages = step.per_head, self.pages(layer, kv_cache)
        keys, values = (per_head.split(rows)[:, 0] for rows in (key, value))
        write(pages, keys, values, per_head.batch(self._place).slot_mapping - self._place * pages.slots)

    def attend_ragged(self, layer: Any, step: PlannedStep, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        pages = self.pages(layer, kv_cache)
        attend_ragged(step, self._place, pages, query, output, self.softmax)
