"""Attention that entries receive from a few queries, summed over the queries; the full matrix is never stored."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.kernels.dispatch import CACHE_BLOCK, block_size, launched_on, uses_triton
from keepset.kernels.packed import PackedHeads
from keepset.kernels.softmax import GroupReduction, Softmax, normalised


def received_attention(
    queries: Float[Tensor, "heads group n head_dim"],
    keys: Float[Tensor, "heads entries head_dim"],
    positions: Int[Tensor, "heads entries"],
    last_visible: Int[Tensor, "heads n"],
    softmax: Softmax,
    valid: Bool[Tensor, "heads entries"] | None = None,
    sums_of: GroupReduction = GroupReduction.EACH,
    bias: Float[Tensor, "heads entries"] | None = None,
) -> Float[Tensor, "heads _ entries"]:
    """Return the attention that each entry receives from some queries, summed over the queries, in float32.

        sum over queries q of softmax(q @ keys' * scaling + bias)

    On a CPU attention is computed and summed in blocks that stay in a core's cache. On a GPU two Triton kernels compute
    the sums without storing attention.

    Args:
        queries: queries after rotation, of each KV head's group.
        last_visible: the last position that each query sees, in rising order; -1 for a query that does not exist.
        softmax: the model's softmax; its sinks are those of these heads, `[heads, group]`.
        valid: which entries exist; None: all.
        sums_of: whether each query head counts, or their largest logits as if they were one head.
        bias: added to the logit of each entry.

    Returns:
        One row for each query head of a group, or one row if only the largest logits count.
    """
    if uses_triton(keys.device):
        from keepset.kernels.triton import window  # loads Triton

        with launched_on(keys.device):
            return window.received_attention(queries, keys, positions, last_visible, softmax, valid, sums_of, bias)
    heads, group, n, size = queries.shape
    entries = keys.shape[1]
    first = first_unseen(positions, last_visible, valid)
    largest = sums_of is GroupReduction.LARGEST
    totals = torch.zeros(heads, 1 if largest else group, entries, device=keys.device)
    most = block_size(keys.device, CACHE_BLOCK)
    # A block is several heads, or several queries of one head.
    at_once = max(1, most // (max(entries, 1) * max(group * n, size)))
    rows = max(1, most // (max(entries, 1) * group))
    for head in range(0, heads, at_once):
        part = slice(head, head + at_once)
        visible = positions[part, None, first:] <= last_visible[part, :, None]
        if valid is not None:
            visible &= valid[part, None, first:]
        few = queries[part].float() * softmax.scaling
        sinks = None if softmax.sinks is None else softmax.sinks[part, :, None]
        if largest and sinks is not None:
            sinks = sinks.amax(1, keepdim=True)
        facing = keys[part].float().transpose(1, 2)
        for chosen, seen in zip(few.split(rows, 2), visible.split(rows, 1), strict=True):
            logits = softmax.capped(chosen.flatten(1, 2) @ facing).unflatten(1, (group, -1))
            if bias is not None:
                logits += bias[part, None, None]
            if largest:
                logits = logits.amax(1, keepdim=True)
            totals[part] += masked_softmax(logits, seen[:, None], sinks).sum(2)
    return totals


def add_received(
    column: Float[Tensor, "places *group"],
    queries: Float[Tensor, "batch query_heads n head_dim"],
    packed: PackedHeads,
    kv_heads: int,
    last_visible: Int[Tensor, "batch n"],
    softmax: Softmax,
    sums_of: GroupReduction = GroupReduction.MEAN,
) -> None:
    """Add to a column the attention that every entry of packed heads receives from some queries.

    Args:
        column: numbers of the heads' places; written to.
        queries, last_visible: those of all requests, as in `received_attention`.
        softmax: the model's softmax; its sinks are `[query_heads]`.
        packed: all heads of all requests.
        sums_of: how to reduce the query heads that share a KV head.
    """
    if packed.in_triton:
        from keepset.kernels.triton import window  # loads Triton

        if packed.format and packed.format.refined:
            packed = packed.whole()
        elif packed.format:
            queries = packed.format.mix(queries)
        with launched_on(packed.keys.device):
            return window.add_received(column, queries, packed, kv_heads, last_visible, softmax, sums_of)
    if packed.format:
        queries = packed.format.mix(queries)
    grouped = queries.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    last = last_visible[:, None].expand(-1, kv_heads, -1).flatten(0, 1)
    softmax = softmax.by_query_group(len(queries), kv_heads)
    for run in packed.pieces:
        heads = slice(run.first, run.first + run.heads)
        keys, positions = packed.rows(run, "keys"), run.view(packed.positions)
        bias = None if packed.bias is None else run.view(packed.bias)
        own = softmax if softmax.sinks is None else replace(softmax, sinks=softmax.sinks[heads])
        sums = received_attention(grouped[heads], keys, positions, last[heads], own, None, sums_of, bias)
        run.view(column).add_(sums_of.of(sums))


def first_unseen(
    positions: Int[Tensor, "*heads entries"],
    last_visible: Int[Tensor, "*#heads n"],
    valid: Bool[Tensor, "*heads entries"] | None = None,
) -> int:
    """Return the first entry that the oldest query does not see; all queries see the entries before it.

    On a GPU it is always 0, because finding it would need a host sync.
    """
    if positions.device.type != "cpu":
        return 0
    hidden = positions > last_visible[..., :1]
    if valid is not None:
        hidden |= ~valid
    return int(F.pad(hidden.flatten(0, -2).any(0), (0, 1), value=True).int().argmax())


def masked_softmax(
    logits: Float[Tensor, "*rows entries"],
    visible: Bool[Tensor, "*#rows last"],
    sinks: Float[Tensor, "*#rows"] | None = None,
) -> Float[Tensor, "*rows entries"]:
    """Return the softmax of logits under a mask; zero for a query that sees nothing.

    Args:
        logits: logits of all entries; written to.
        visible: mask of the last entries; the entries before are visible to all queries.
        sinks: logit of each row's sink; None if there are none.
    """
    if visible.shape[-1]:
        # Masking also the entries that all queries see would cost as much as the softmax.
        logits[..., -visible.shape[-1] :].masked_fill_(~visible, float("-inf"))
    attention = normalised(logits, sinks)
    if visible.shape[-1] == logits.shape[-1]:
        attention.masked_fill_(~visible.any(-1, keepdim=True), 0.0)
    return attention
