"""Attention over packed heads of any lengths, in one store or several: one launch, split along the entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from keepset.kernels import dispatch
from keepset.kernels.packed import HeadTable
from keepset.kernels.triton.softmax import LEAST_PART, PROGRAMS_PER_PROCESSOR, begun, capped, rows_of, streamed

_BLOCK = 64
"""The length of a part is a multiple of this number of entries."""
_MERGED = 16
"""Parts of a query that are merged at a time."""


def ragged_attention(queries, stores, softmax, query_positions) -> Float[Tensor, "batch n query_heads value_dim"]:
    """Compute `keepset.kernels.attention.ragged_attention`.

    A head's entries are cut into parts of one length for all heads, so a long head gets more programs and delays no
    other. A second, small launch merges the parts' outputs by their log-sum-exps. Logits, sums and partial outputs are
    float32. The output of a query that sees nothing is zero. There is no host sync.

    Args:
        queries, stores, softmax, query_positions: as there.
    """
    launch, kind, n = Launch(queries, stores, softmax, query_positions), stores[0], queries.shape[2]
    _attend_part[launch.grid](
        queries, kind.keys, kind.values, kind.positions, launch.bias, kind.key_scale, launch.table.addresses,
        launch.last_visible, launch.sinks, launch.partial, launch.partial_lse, *queries.stride(), softmax.scaling,
        softmax.softcap or 1.0, launch.part, launch.table.grown, n, launch.kv_heads, launch.heads, launch.lse.numel(),
        HEAD_DIM=queries.shape[3], VALUE_DIM=launch.output.shape[3], HEAD_BLOCK=launch.head_block,
        VALUE_BLOCK=launch.value_block, INT8=kind.key_scale is not None, ALIGNED=launch.table.aligned, **launch.sizes,
    )  # fmt: skip
    return launch.merged()


class Launch:
    """A launch of attention over packed heads, and its outputs: the parts of each head, or the result.

    Args:
        queries, stores, softmax, query_positions: as for `keepset.kernels.attention.ragged_attention`.

    Attributes:
        table: addresses of the heads.
        heads, kv_heads: heads of all requests, and of each.
        head_block, value_block: numbers of a key and of a value, rounded up to a power of two.
        bias, last_visible, sinks: the kernel's arguments of these names.
        output, lse: the result, `[batch, n, query_heads, value_dim]` in the queries' dtype, and its log-sum-exps.
        partial, partial_lse: output and log-sum-exps of each part, in float32; the result itself if there is one part.
        part: entries of a part.
        grid: a program for each head and block of rows, and for each part.
        sizes: the kernel's compile-time constants.
    """

    def __init__(self, queries, stores, softmax, query_positions) -> None:
        batch, query_heads, n, head_dim = queries.shape
        self.table, value_dim, device = HeadTable(stores), stores[0].sizes[1], queries.device
        self.heads = self.table.addresses.shape[1]
        self.kv_heads = self.heads // batch
        group = query_heads // self.kv_heads
        self.head_block, self.value_block = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
        block = rows_of(max(self.head_block, self.value_block), queries.dtype)
        # Each block of rows reads its head's entries again.
        rows = min(block, max(16, triton.next_power_of_2(group * n)))
        row_blocks = triton.cdiv(group * n, rows)
        self.part = _part(device, sum(store.entries for store in stores) * row_blocks)
        parts = max(1, triton.cdiv(max(store.longest for store in stores), self.part))
        # Only the first axis of a grid may have more than 65,535 programs.
        self.grid = self.heads * row_blocks, parts
        self.output = self.partial = queries.new_empty(batch, n, query_heads, value_dim)
        self.lse = self.partial_lse = torch.empty(batch, n, query_heads, dtype=torch.float32, device=device)
        if parts > 1:
            results = self.output, self.lse
            self.partial, self.partial_lse = (
                torch.empty(parts, *result.shape, dtype=torch.float32, device=device) for result in results
            )
        self.bias = next((store.bias for store in stores if store.bias is not None), None)
        self.last_visible = None if query_positions is None else query_positions.contiguous()
        self.sinks = None if softmax.sinks is None else softmax.sinks.contiguous()
        self.sizes = dict(
            GROUP=group, ROWS=rows, BLOCK=block, CAUSAL=self.last_visible is not None, BIASED=self.bias is not None,
            CAPPED=softmax.softcap is not None, SINKS=self.sinks is not None,
        )  # fmt: skip

    def merged(self) -> Tensor:
        """Return the result, after merging parts by their log-sum-exps."""
        if (parts := self.grid[1]) > 1:
            (*_, query_heads, value_dim), outputs = self.output.shape, self.lse.numel()
            _merge_parts[(outputs,)](
                self.partial, self.partial_lse, self.output, self.lse, None, outputs, parts, query_heads,
                VALUE_DIM=value_dim, VALUE_BLOCK=triton.next_power_of_2(value_dim), BLOCK=_MERGED, LISTED=False,
            )  # fmt: skip
        return self.output


def _part(device: torch.device, entries: int) -> int:
    """Return the entries of a part: short enough to keep the device busy, long enough to be worth a program.

    With twice as many programs, the last ones run alone for less time, but there are more parts to merge. That pays
    while parts are long.
    """
    programs = dispatch.processors(device) * PROGRAMS_PER_PROCESSOR
    few, many = (triton.cdiv(triton.cdiv(entries, n), _BLOCK) * _BLOCK for n in (programs, 2 * programs))
    return max(LEAST_PART, min(few, max(many, 2 * LEAST_PART)))


@triton.jit
def query_rows(heads, kv_heads, n, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return a program's head and request, its rows, and the query head and token of each; tokens are innermost.

    Args:
        heads, kv_heads: of all requests, and of one.
        n: tokens of each request.
        GROUP: query heads of a KV head.
        ROWS: rows of a program.
    """
    head, block = tl.program_id(0) % heads, tl.program_id(0) // heads
    request, kv_head = head // kv_heads, head % kv_heads
    row = block * ROWS + tl.arange(0, ROWS)
    return head, request, row, (kv_head * GROUP + row // n).to(tl.int64), (row % n).to(tl.int64)


@triton.jit
def sight(
    query_positions, index, exists, positions_kind, bias_kind, table, head, heads, length,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Return the last position that each row sees, pointers to positions and biases, and the entries with biases.

    Args:
        query_positions: position of each token.
        index: of each row's token.
        exists: which rows exist.
        positions_kind, bias_kind: tensors of the right types.
        table: addresses of the heads, as in `HeadTable`.
        head, heads: the head, and how many there are.
        length: the head's entries.
        CAUSAL, BIASED: whether tokens see only entries before them, and whether any head has biases.
    """
    last_visible, positions, bias, biased = 0, 0, 0, 0
    if CAUSAL:
        last_visible = tl.load(query_positions + index, mask=exists, other=-1)
        positions = tl.load(table + 2 * heads + head).to(positions_kind.dtype)
    if BIASED:
        address = tl.load(table + 3 * heads + head)
        bias, biased = address.to(bias_kind.dtype), tl.where(address == 0, 0, length)
    return last_visible, positions, bias, biased


@triton.jit
def masked(
    logits, entry, stored, last_visible, positions, bias, biased, cap,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Return capped logits of a block of entries with biases, minus infinity for unseen entries; see `sight`.

    Args:
        logits: `[rows, entries]`.
        entry: index of each entry in its head.
        stored: which entries exist.
        last_visible, positions, bias, biased: what `sight` has returned.
        cap: bound of the logits, if `CAPPED`.
        CAUSAL, BIASED, CAPPED: what is to be done.
    """
    if CAPPED:
        logits = capped(logits, cap)
    if BIASED:
        logits += tl.load(bias + entry.to(tl.int64), mask=entry < biased, other=0.0).to(tl.float32)[None, :]
    visible = stored[None, :]
    if CAUSAL:
        at = tl.load(positions + entry.to(tl.int64), mask=stored, other=0)
        visible = visible & (at[None, :] <= last_visible[:, None])
    return tl.where(visible, logits, float("-inf"))


# Only the dtypes of `keys_kind` and the like are used: heads are found by the table's addresses.
@triton.jit(do_not_specialize=["part", "grown", "n", "heads", "outputs"])
def _attend_part(
    queries, keys_kind, values_kind, positions_kind, bias_kind, scale_kind, table, query_positions, sinks, output, lse,
    query_batch, query_head, query_token, query_dim,
    scaling, cap, part, grown, n, kv_heads, heads, outputs,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, INT8: tl.constexpr, ALIGNED: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend one block of rows over one part of a head; program axes: (head and block of rows, part).

    A row is one query head of one token; the tokens are innermost.
    """
    head, request, row, query, token = query_rows(heads, kv_heads, n, GROUP, ROWS)
    split, exists = tl.program_id(1), row < GROUP * n
    dims, value_dims = tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    of_row = request.to(tl.int64) * query_batch + query * query_head + token * query_token
    q = tl.load(
        queries + of_row[:, None] + dims[None, :] * query_dim,
        mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    keys = tl.load(table + head).to(keys_kind.dtype)
    values = tl.load(table + heads + head).to(values_kind.dtype)
    if ALIGNED:
        keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
    length = tl.load(table + 6 * heads + head).to(tl.int32) + grown
    last_visible, positions, bias, biased = sight(
        query_positions, request * n + token, exists, positions_kind, bias_kind, table, head, heads, length,
        CAUSAL, BIASED,
    )  # fmt: skip
    if INT8:
        key_scale = tl.load(table + 4 * heads + head).to(scale_kind.dtype)
        value_scale = tl.load(table + 5 * heads + head).to(scale_kind.dtype)
    largest, total = begun(sinks, query, exists, split, ROWS, SINKS)
    attended = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    first = split * part
    for offset in range(first, tl.minimum(first + part, length), BLOCK):
        entry = offset + tl.arange(0, BLOCK)
        stored = entry < length
        entry_row = entry.to(tl.int64)
        k = tl.load(
            keys + entry_row[None, :] * HEAD_DIM + dims[:, None],
            mask=stored[None, :] & (dims < HEAD_DIM)[:, None], other=0.0,
        )  # fmt: skip
        if INT8:
            k = k.to(tl.float32).to(q.dtype)
        logits = tl.dot(q, k, input_precision="ieee") * scaling
        if INT8:
            logits *= tl.load(key_scale + entry_row, mask=stored, other=0.0).to(tl.float32)[None, :]
        logits = masked(logits, entry, stored, last_visible, positions, bias, biased, cap, CAUSAL, BIASED, CAPPED)
        largest, total, weights, shrink = streamed(largest, total, logits)
        v = tl.load(
            values + entry_row[:, None] * VALUE_DIM + value_dims[None, :],
            mask=stored[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        if INT8:
            weights *= tl.load(value_scale + entry_row, mask=stored, other=0.0).to(tl.float32)[None, :]
            v = v.to(tl.float32).to(q.dtype)
        attended = attended * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    # A row that sees nothing gives zero; NaN stays NaN.
    total = tl.where(total == 0.0, 1.0, total)
    attended = attended / total[:, None]
    at_output = (request.to(tl.int64) * n + token) * (kv_heads * GROUP) + query
    at_part = split.to(tl.int64) * outputs + at_output
    tl.store(lse + at_part, largest + tl.log(total), mask=exists)
    # For a part beyond its head's end only the log-sum-exp is written.
    written = tl.where(first < tl.maximum(length, 1), GROUP * n, 0)
    tl.store(
        output + at_part[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(output.dtype.element_ty), mask=(row < written)[:, None] & (value_dims < VALUE_DIM)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["outputs", "parts"])
def _merge_parts(
    partial, partial_lse, output, lse, token_indices, outputs, parts, heads,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one output row: `sum(exp(lse_p - lse) * output_p)`. One program for each row."""
    row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, VALUE_BLOCK)
    largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    merged = tl.zeros([VALUE_BLOCK], tl.float32)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        of_part = tl.load(partial_lse + part * outputs + row, mask=part < parts, other=float("-inf"))
        largest, total, weights, shrink = streamed(largest, total, of_part[None, :])
        attended = tl.load(
            partial + (part[:, None] * outputs + row) * VALUE_DIM + dims[None, :],
            mask=(of_part != float("-inf"))[:, None] & (dims < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        merged = merged * shrink + tl.sum(attended * tl.trans(weights), 0)
    total = tl.where(total == 0.0, 1.0, total)
    merged = merged / total
    if lse is not None:
        tl.store(lse + row + tl.arange(0, 1), largest + tl.log(total))
    if LISTED:  # the index of the token in the step
        row = tl.load(token_indices + row // heads).to(tl.int64) * heads + row % heads
    tl.store(output + row * VALUE_DIM + dims, merged.to(output.dtype.element_ty), mask=dims < VALUE_DIM)


_MOVED = 32


def pack(columns, packed, indices, starts, counts, most) -> None:
    """Copy every head's chosen entries to the places of their indices.

    Args:
        columns, indices: as in `keepset.kernels.attention.pack_entries`.
        packed: the results, in the order of the columns; written to.
        starts, counts: the first index of each head, and how many it has.
        most: the most that a head has, or more.
    """
    widths = tuple(column.shape[3] if column.ndim == 4 else 1 for column in columns)
    # The strides of every column, for each of the four axes.
    strides = [tuple(column.stride(axis) if axis < column.ndim else 1 for column in columns) for axis in range(4)]
    _pack[(len(counts), max(1, triton.cdiv(most, _MOVED)))](
        tuple(columns), tuple(packed), indices, starts, counts, *strides, columns[0].shape[1],
        WIDTHS=widths, WIDE=tuple(triton.next_power_of_2(width) for width in widths), BLOCK=_MOVED,
    )  # fmt: skip


def append(stores, keys, values, positions) -> None:
    """Append all new entries to their heads.

    Args:
        stores, keys, values, positions: as in `keepset.kernels.attention.append_entries`.
    """
    batch, kv_heads, n, width = keys.shape
    value_width, table, kind = values.shape[3], HeadTable(stores), stores[0]
    _append[(batch * kv_heads, triton.cdiv(n, _MOVED))](
        keys, values, positions, kind.keys, kind.values, kind.positions, kind.key_scale, table.addresses,
        table.grown, n,
        kv_heads, batch * kv_heads, *keys.stride(), *values.stride(), *positions.stride(),
        WIDTH=width, WIDE=triton.next_power_of_2(width), VALUE_WIDTH=value_width,
        VALUE_WIDE=triton.next_power_of_2(value_width), BLOCK=_MOVED, INT8=kind.key_scale is not None,
        ALIGNED=table.aligned,
    )  # fmt: skip


@triton.jit
def _pack(
    columns, packed, indices, starts, counts, of_request, of_head, of_entry, of_number, kv_heads,
    WIDTHS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one block of one head's chosen entries; program axes: (head, block of entries)."""
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, count = tl.load(starts + head).to(tl.int64), tl.load(counts + head)
    moves = row < count
    entry = tl.load(indices + start + row, mask=moves, other=0).to(tl.int64)
    target_row = start + row
    request, kv_head = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    for column in tl.static_range(len(WIDTHS)):
        dims = tl.arange(0, WIDE[column])
        mask = moves[:, None] & (dims < WIDTHS[column])[None, :]
        source = request * of_request[column] + kv_head * of_head[column] + entry * of_entry[column]
        numbers = tl.load(columns[column] + source[:, None] + (dims * of_number[column])[None, :], mask=mask)
        tl.store(packed[column] + target_row[:, None] * WIDTHS[column] + dims[None, :], numbers, mask=mask)


# Only the dtypes of `keys_kind` and the like are used: heads are found by the table's addresses.
@triton.jit(do_not_specialize=["grown", "n", "heads"])
def _append(
    keys, values, positions, keys_kind, values_kind, positions_kind, scale_kind, table, grown, n, kv_heads, heads,
    key_request, key_head, key_token, key_dim, value_request, value_head, value_token, value_dim,
    position_request, position_token,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_WIDE: tl.constexpr,
    BLOCK: tl.constexpr, INT8: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy one block of one head's new entries; program axes: (head, block of tokens)."""
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < n
    request, kv_head, token = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64), token.to(tl.int64)
    stored_keys = tl.load(table + head).to(keys_kind.dtype)
    stored_values = tl.load(table + heads + head).to(values_kind.dtype)
    stored_positions = tl.load(table + 2 * heads + head).to(positions_kind.dtype)
    if ALIGNED:
        stored_keys, stored_values = tl.multiple_of(stored_keys, 16), tl.multiple_of(stored_values, 16)
    entry_row = tl.load(table + 6 * heads + head) + grown + token
    dims = tl.arange(0, WIDE)
    mask = exists[:, None] & (dims < WIDTH)[None, :]
    source = request * key_request + kv_head * key_head + token * key_token
    numbers = tl.load(keys + source[:, None] + (dims * key_dim)[None, :], mask=mask, other=0.0)
    if INT8:
        numbers, scale = _quantized(numbers, scale_kind)
        tl.store(tl.load(table + 4 * heads + head).to(scale_kind.dtype) + entry_row, scale, mask=exists)
    tl.store(stored_keys + entry_row[:, None] * WIDTH + dims[None, :], numbers, mask=mask)
    dims = tl.arange(0, VALUE_WIDE)
    mask = exists[:, None] & (dims < VALUE_WIDTH)[None, :]
    source = request * value_request + kv_head * value_head + token * value_token
    numbers = tl.load(values + source[:, None] + (dims * value_dim)[None, :], mask=mask, other=0.0)
    if INT8:
        numbers, scale = _quantized(numbers, scale_kind)
        tl.store(tl.load(table + 5 * heads + head).to(scale_kind.dtype) + entry_row, scale, mask=exists)
    tl.store(stored_values + entry_row[:, None] * VALUE_WIDTH + dims[None, :], numbers, mask=mask)
    at = tl.load(positions + request * position_request + token * position_token, mask=exists)
    tl.store(stored_positions + entry_row, at.to(stored_positions.dtype.element_ty), mask=exists)


@triton.jit
def _quantized(rows, scale_kind):
    """Quantise rows as `EightBits.quantize` in `keepset.kernels.entry_format` does."""
    rows = rows.to(tl.float32)
    spoilt = tl.min((rows - rows == 0.0).to(tl.int32), 1) == 0
    scale = (tl.where(spoilt, float("nan"), tl.max(tl.abs(rows), 1)) / 127).to(scale_kind.dtype.element_ty)
    step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    whole = tl.floor(rows / step[:, None] + 0.5)
    # 8-bit integers have no NaN, so the scale is NaN instead.
    whole = tl.where(spoilt[:, None], 0.0, tl.minimum(tl.maximum(whole, -127.0), 127.0))
    return whole.to(tl.int8), scale
