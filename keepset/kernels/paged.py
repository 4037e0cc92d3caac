"""Attention over heads of any lengths in the pages of a serving engine, and writing new entries into the pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepset.kernels import page_layout
from keepset.kernels.dispatch import PRODUCT_BLOCK, launched_on, uses_triton
from keepset.kernels.page_entries import addresses_of, read_pages
from keepset.kernels.page_format import PageFormat
from keepset.kernels.page_layout import FiledLayouts, LayerPages, PagedTokens, PageGroup, PageLayout
from keepset.kernels.softmax import Softmax, normalised, softmax_attention

ReadRows = Callable[[Int[Tensor, "heads pages"]], tuple[Shaped[Tensor, "heads entries row"], ...]]
"""Returns the stored keys and values of whole sub-pages, each head's pages joined."""
_LONGER = 1.25
"""The largest ratio of a block's longest head to its shortest."""
_QUERIES = 128
"""Queries of one request that PyTorch computes at a time, so that the mask stays small."""


def shift_step(
    block_table: Int[Tensor, "rows width"],
    lengths: Int[Tensor, " rows"],
    starts: Int[Tensor, " rows_plus_1"],
    dropped: Int[Tensor, " rows"],
    slots: Int[Tensor, " tokens"],
    block_size: int,
    left_table: Int[Tensor, "rows width"],
    left: Int[Tensor, " rows"],
) -> None:
    """Fill `left_table` and `left` with each request's remaining blocks and numbers of entries; on a GPU in one launch.

    A request's remaining entries lie in its blocks from the first that is not free. The slots of new tokens are moved,
    in place, to the end of the request's entries.

    Args:
        block_table: blocks by logical position.
        lengths: tokens of each request after the step.
        starts: index of each row's first query, and the end of the last row.
        dropped: entries that each request has lost.
        slots: slot mapping of the new tokens by logical position; written to. A slot moves within its block or to the
            block before.
        left_table: remaining blocks; written to. Columns beyond a row's blocks hold arbitrary numbers.
        left: number of remaining entries; written to.
    """
    if uses_triton(block_table.device):
        from keepset.kernels.triton import paged  # loads Triton

        with launched_on(block_table.device):
            paged.shift_step(block_table, lengths, starts, dropped, slots, block_size, left_table, left)
        return
    left.copy_(lengths - dropped)
    if dropped.device.type == "cpu" and not dropped.any():
        left_table.copy_(block_table)
        return
    columns = torch.arange(block_table.shape[1], device=block_table.device) + (dropped // block_size)[:, None]
    left_table.copy_(block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1)))
    tokens = torch.arange(len(slots), device=slots.device)
    row = torch.searchsorted(starts[1:].to(tokens), tokens, right=True).clamp(max=len(lengths) - 1)
    back = (dropped % block_size)[row]
    entry_index = lengths[row] - starts[row + 1] + tokens - back
    moves = (back > 0) & (tokens < starts[-1])
    entry_index = entry_index.where(moves, 0)
    moved = block_table[row, entry_index // block_size].to(slots) * block_size + entry_index % block_size
    slots.copy_(moved.where(moves, slots))


def follow_layouts(
    filed: FiledLayouts,
    block_table: Int[Tensor, "rows width"],
    before: Int[Tensor, " rows"],
    after: Int[Tensor, " rows"],
    required: Int[Tensor, " rows"],
    lost: Int[Tensor, " 1"],
    block_size: int,
    layout: PageLayout,
    drafts: int = 0,
) -> Int[Tensor, " rows"]:
    """Move each request's layout to the page of its newest token, and return that page; on a GPU in one launch.

    If the newest tokens are drafts, the layout is filed under each page that may hold the newest accepted token.

    Args:
        filed: layouts of all requests; written to.
        block_table: block table of the step's requests.
        before, after: tokens of each request before and after the step.
        required: nonzero if a layout of the request with `before` tokens must be filed; others have none.
        lost: set to 1 if a required layout is missing.
        layout: the layout found for each row, zero if none was filed; contiguous; written to. Further rows stay
            unchanged.
        drafts: the largest number of a request's newest tokens that may be rejected after a step.
    """
    if uses_triton(block_table.device):
        from keepset.kernels.triton import paged  # loads Triton

        with launched_on(block_table.device):
            return paged.follow(filed, block_table, before, after, required, lost, block_size, layout, drafts)
    row = torch.arange(len(before), device=before.device)
    old = block_table[row, (before - 1).clamp(min=0) // block_size].long()
    had = filed.tokens[old]
    is_filed = required.bool() & (had - drafts <= before) & (before <= had)
    lost |= (required.bool() & ~is_filed).any()
    for part, rows in zip(filed.layout, layout, strict=True):
        rows[: len(row)] = part[old].where(is_filed.view(-1, *(1,) * (part.ndim - 1)), 0)
    for taken_back in range(0, drafts + block_size, block_size):
        pages = block_table[row, (after - 1 - taken_back).maximum(before) // block_size].long()
        for part, rows in zip(filed.layout, layout, strict=True):
            part[pages] = rows[: len(row)]
        filed.tokens[pages] = after.to(filed.tokens.dtype)
    return block_table[row, (after - 1) // block_size].long()


def append_to_pages(
    keys: Float[Tensor, "tokens kv_heads head_dim"],
    values: Float[Tensor, "tokens kv_heads head_dim"],
    cache: LayerPages,
    tokens: PagedTokens,
    layout: PageLayout,
    format: PageFormat | None = None,
) -> None:
    """Append the entries of some tokens to their heads; on a GPU in one launch.

    Args:
        keys, values: keys and values of the step; the numbers of each are contiguous.
        cache: cache of the layer; pages that requests share are not written to.
        tokens, layout, format: as in `paged_attention`.
    """
    if uses_triton(keys.device):
        from keepset.kernels.triton import paged  # loads Triton

        with launched_on(keys.device):
            if format is not None and format.mixing is not None:
                keys, values = (format.mixing.mixed(rows) for rows in (keys, values))
            paged.append(keys, values, cache, tokens, layout, format)
        return
    kv_heads, size, _ = cache.shape[1:]
    if format is not None:
        keys, values = (rows.view(cache.dtype) for rows in format.encode_entries(keys, values))
    for token_index, slots in _newest(tokens, layout, size):
        page = slots // size
        cache[page // kv_heads, page % kv_heads, slots % size] = torch.cat((keys[token_index], values[token_index]), -1)


def paged_attention(
    queries: Float[Tensor, "tokens query_heads head_dim"],
    caches: Sequence[LayerPages],
    layer: int,
    tokens: PagedTokens,
    layout: PageLayout,
    softmax: Softmax,
    output: Float[Tensor, "tokens query_heads value_dim"],
    bias: Float[Tensor, "layers slots"] | None = None,
    format: PageFormat | None = None,
    value_dim: int | None = None,
) -> None:
    """Compute the attention of some tokens; on a GPU in two launches for all heads of all requests.

    The query heads that share a KV head are folded together, so nothing is repeated. Sums are float32.

    Args:
        queries: queries of the step, after rotation; the numbers of each are contiguous.
        caches: caches of the layers that share the block table, in which the tokens' entries (keys, then values) are
            already written. All have the same strides; an entry's numbers are contiguous.
        layer: index of the layer that attends.
        tokens: the tokens that attend; the output of others is not written.
        layout: the layout of this layer for each row.
        softmax: the layer's softmax; its sinks are `[query_heads]`.
        output: the result, contiguous; written to; zero for a token that sees nothing.
        bias: for each slot `(block * kv_heads + head) * block_size + offset` of each layer, added to the logits of the
            entries that were kept at the newest event.
        format: the format of the layer's cache if it is quantised.
        value_dim: if an entry is only a key, how many of the key's first numbers are the value; None if an entry is a
            key and a value of equal size.
    """
    if uses_triton(queries.device):
        from keepset.kernels.triton import paged  # loads Triton

        cache, addresses = caches[layer], addresses_of(caches)
        with launched_on(queries.device):
            if format is None or format.mixing is None:
                paged.attend(queries, cache, addresses, layer, tokens, layout, softmax, output, bias, format, value_dim)
                return
            attending = slice(len(tokens.lengths)) if tokens.places is None else tokens.places
            mixed = format.mixing.mixed_queries(queries[attending])
            # Only these tokens, in their order.
            attended, mixed_tokens = torch.empty_like(mixed), tokens
            if tokens.places is not None:
                mixed_tokens = tokens._replace(places=torch.arange(len(mixed), device=mixed.device))
            paged.attend(
                mixed, cache, addresses, layer, mixed_tokens, layout, softmax, attended, bias, format, value_dim
            )
            output[attending] = format.mixing.unmixed(attended)
        return
    group = PageGroup(range(layer, layer + 1), len(caches), len(caches[0]))

    def read(table: Tensor) -> tuple[Tensor, Tensor]:
        rows = read_pages(caches, layer, table)
        if value_dim is not None:
            return rows, rows[..., :value_dim]
        keys, values = rows.chunk(2, -1)
        return (keys, values) if format is None else format.decode_entries(keys, values)

    attend_pages(queries, read, caches[0].shape[2], tokens, layout, group, softmax, output, bias)


def attend_pages(
    queries: Float[Tensor, "tokens query_heads head_dim"],
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    block_size: int,
    tokens: PagedTokens,
    layout: PageLayout,
    group: PageGroup,
    softmax: Softmax,
    output: Float[Tensor, "tokens query_heads value_dim"],
    bias: Float[Tensor, "layers slots"] | None = None,
) -> None:
    """Compute `paged_attention` in PyTorch, request by request.

    Args:
        queries, tokens, layout, softmax, output, bias: as in `paged_attention`.
        read: returns keys and values of whole sub-pages, numbered from the group's first layer on.
        block_size: entries of a page.
        group: the layer that attends, among those that share the block table.
    """
    kv_heads, members = layout.counts.shape[-1], defaultdict[int, list[tuple[int, int]]](list)
    for token_index, row, length in _listed(tokens):
        if length:
            members[row].append((token_index, length))
        else:
            output[token_index] = 0
    for row, of_row in members.items():
        longest = max(length for _, length in of_row)
        table, entries = _pages(tokens, layout, row, longest, block_size, group)
        keys, values = read(table)
        entry = torch.arange(keys.shape[1], device=keys.device)
        exists = (entry < entries[:, None])[..., None]
        keys, values = (part.where(exists, 0)[:, None] for part in (keys, values))  # unwritten places hold anything
        added = queries.new_zeros(1, len(entry))
        if bias is not None:
            slots = (table * block_size)[..., None] + torch.arange(block_size, device=table.device)
            kept, through = entry < layout.counts[row, 0, :, None], group.places[0] * bias.shape[1] + slots.flatten(1)
            added = bias.view(-1)[through % bias.numel()].to(added.dtype).where(kept, 0)
        most = int(entries.max())
        for first in range(0, len(of_row), _QUERIES):
            pairs = torch.tensor(of_row[first : first + _QUERIES], dtype=torch.long, device=queries.device)
            token_indices, lengths = pairs.unbind(1)
            width = most - longest + int(lengths.max())  # no query sees later entries
            visible = entry[:width] < (entries[:, None] - (longest - lengths))[..., None]
            mask = added[:, None, :width].where(visible, float("-inf"))[:, None]
            grouped = queries[token_indices].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
            own_keys, own_values = keys[:, :, :width], values[:, :, :width]
            if softmax.plain:
                # Expanded, because SDPA is three times as slow if it has to broadcast by itself.
                own_keys, own_values = (part.expand(-1, len(grouped[0]), -1, -1) for part in (own_keys, own_values))
                attended = F.scaled_dot_product_attention(grouped, own_keys, own_values, mask, scale=softmax.scaling)
                output[token_indices] = attended.permute(2, 0, 1, 3).flatten(1, 2)
            else:  # one request's KV heads, because each query head has its own sink
                mask = mask.expand(-1, len(grouped[0]), -1, -1).flatten(0, 1)[None]
                rows = grouped.flatten(0, 1)[None], own_keys[:, 0][None], own_values[:, 0][None]
                output[token_indices] = softmax_attention(*rows, softmax, mask)[0][0]


def _newest(tokens: PagedTokens, layout: PageLayout, block_size: int) -> Iterator[tuple[int, Int[Tensor, " kv_heads"]]]:
    """Yield for each written token its index in the step, and the slots of its entries.

    Args:
        tokens: new tokens of a step.
        layout: of the layer.
        block_size: entries of a page.
    """
    for index, (token_index, row, length) in enumerate(_listed(tokens)):
        if not length or (tokens.slots is not None and tokens.slots[index] < 0):
            continue
        table, entries = _pages(tokens, layout, row, length, block_size)
        newest = entries - 1
        page = table.gather(1, (newest // block_size)[:, None])[:, 0]
        yield token_index, page * block_size + newest % block_size


def _listed(tokens: PagedTokens) -> Iterator[tuple[int, int, int]]:
    """Yield for each token its index in the step, its row, and its request's number of tokens up to and with it."""
    lengths = tokens.lengths.tolist()
    if tokens.places is None or tokens.rows is None:
        return zip(range(len(lengths)), range(len(lengths)), lengths, strict=True)
    return zip(tokens.places.tolist(), tokens.rows.tolist(), lengths, strict=True)


def _pages(
    tokens: PagedTokens, layout: PageLayout, row: int, length: int, block_size: int, group: PageGroup | None = None
) -> tuple[Int[Tensor, "kv_heads pages"], Int[Tensor, " kv_heads"]]:
    """Return the sub-pages of a row's heads at a length, and how many entries each head has.

    Args:
        tokens: new tokens of a step.
        layout: of the layer.
        row: of the block table.
        length: tokens of the row's request.
        block_size: entries of a page.
        group: as in `page_layout.tables`.
    """
    row_layout = PageLayout(*(part[row : row + 1] for part in layout))
    entries = page_layout.entries(row_layout, row_layout.length.new_tensor([length]))
    most = -(-int(entries.max()) // block_size)
    table = page_layout.tables(row_layout, entries, tokens.block_table[row : row + 1], block_size, most, group)
    return table[0, 0].long(), entries[0, 0]


def attend_heads(
    queries: Float[Tensor, "heads group head_dim"],
    read: ReadRows,
    tables: Int[Tensor, "heads pages"],
    lengths: Int[Tensor, " heads"],
    block_size: int,
    softmax: Softmax,
    output: Float[Tensor, "heads group head_dim"],
    format: PageFormat | None = None,
    bias: Callable[[Int[Tensor, " some"], int], Float[Tensor, "some entries"]] | None = None,
) -> None:
    """Compute the attention of the queries of some heads, each over its own entries.

        output = softmax(queries @ keys' * scaling + bias) @ values

    The logits may be capped, and there may be a sink beside the entries. Heads of similar length are computed together,
    in blocks. Quantised numbers enter the products unscaled; their scales multiply logits and weights, which are fewer.
    If rows are mixed, queries are mixed and the output is unmixed. Products are computed in float32.

    Args:
        queries: one query of each query head that shares the KV head, after rotation.
        read: function that reads pages.
        tables: the sub-pages of each head, in the order of its entries.
        lengths: the number of entries of each head.
        block_size: entries of a page.
        softmax: the layer's softmax; its sinks are `[heads, group]`.
        output: the result; written to; zero for a head without entries.
        format: the format of the rows if the cache is quantised.
        bias: function that returns the biases of a given number of some heads' first entries.
    """
    sizes, key_factor, value_factor = lengths.tolist(), 1.0, 1.0
    if format is not None and format.key_scale is not None and format.value_scale is not None:
        key_factor, value_factor = float(format.key_scale), float(format.value_scale)
    mixing = None if format is None else format.mixing
    if mixing is not None:
        queries = mixing.mixed_queries(queries.float())
    for heads in _of_similar_size(sizes, queries.shape[2]):
        longest, shortest = sizes[heads[-1]], sizes[heads[0]]
        if not longest:
            output[heads] = 0
            continue
        head_indices = torch.tensor(heads, dtype=torch.long)
        keys, values = read(tables[head_indices, : -(-longest // block_size)])
        hidden = torch.arange(keys.shape[1]) >= lengths[head_indices, None]
        key_scale = value_scale = None
        if format is not None:
            (keys, key_scale), (values, value_scale) = format.parts(keys), format.parts(values)
        logits = torch.bmm(
            queries[head_indices].float().mul_(softmax.scaling * key_factor), keys.float().transpose(1, 2)
        )
        if key_scale is not None:
            logits.mul_(key_scale[:, None])
        logits = softmax.capped(logits)
        if bias is not None:
            logits += bias(head_indices, keys.shape[1])[:, None]
        sinks = None if softmax.sinks is None else softmax.sinks[head_indices]
        weights = normalised(logits.masked_fill_(hidden[:, None], float("-inf")), sinks)
        if value_scale is not None:
            weights.mul_(value_scale[:, None])
        # Behind a head's end, pages may hold NaN, and 0 x NaN is NaN.
        behind, values = hidden[:, shortest:], values.float()
        weights[:, :, shortest:].masked_fill_(behind[:, None], 0.0)
        values[:, shortest:] = values[:, shortest:].masked_fill(behind[..., None], 0.0)
        attended = torch.bmm(weights, values).mul_(value_factor)
        output[head_indices] = (attended if mixing is None else mixing.unmixed(attended)).to(output.dtype)


def _of_similar_size(sizes: Sequence[int], head_dim: int) -> Iterator[list[int]]:
    """Yield groups of heads whose keys, padded to one length, fill a block."""
    group: list[int] = []
    for head in sorted(range(len(sizes)), key=sizes.__getitem__):
        numbers = (len(group) + 1) * sizes[head] * head_dim
        if group and (numbers > PRODUCT_BLOCK or sizes[head] > _LONGER * sizes[group[0]]):
            yield group
            group = []
        group.append(head)
    if group:
        yield group
