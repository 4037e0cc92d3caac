"""Attention of tokens that follow a cache without joining it, and statistics of the attention to cached entries."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.kernels.columns import ColumnStatistic, attention_columns, attention_with_lse, log_sum_exp
from keepset.kernels.dispatch import PRODUCT_BLOCK, block_size, uses_triton
from keepset.kernels.softmax import Softmax, with_sink

_LEAST_ROWS = 16
"""The least queries of a block; fewer make slow matrix products."""


class SoftmaxScope(NamedTuple):
    """The entries that statistics cover: those from `start` to `stop`.

    Attention is normalised only over these entries, the first `sinks` entries and the new tokens. KVzip does so for
    each chunk of the prompt (Kim et al. 2025, arXiv:2505.23416).
    """

    sinks: int
    start: int
    stop: int


class PackedSequence(NamedTuple):
    """Neighbouring tokens that see the cached entries and, causally, one another, but no other sequence.

    Attributes:
        tokens: number of tokens.
        scope: the entries that their statistics cover; None: all entries.
    """

    tokens: int
    scope: SoftmaxScope | None = None


def second_pass_attention(
    queries: Float[Tensor, "query_heads n head_dim"],
    cached: tuple[Float[Tensor, "kv_heads entries head_dim"], Float[Tensor, "kv_heads entries value_dim"]],
    new: tuple[Float[Tensor, "kv_heads n head_dim"], Float[Tensor, "kv_heads n value_dim"]],
    softmax: Softmax,
    names: Collection[str],
    sequences: Sequence[PackedSequence] | None = None,
) -> tuple[Float[Tensor, "query_heads n value_dim"], dict[str, Float[Tensor, "query_heads entries"]]]:
    """Return the attention of `n` tokens over all cached entries and, causally, over their own sequence.

    Attention is computed once, in blocks of queries, for both output and statistics. Memory grows with the entries.

    Args:
        queries: queries of the tokens, after rotation.
        cached: keys and values of the cache.
        new: keys and values of the tokens.
        names: names of statistics in `ColumnStatistic`.
        sequences: the sequences of which the tokens consist, in order; by default one sequence.

    Returns:
        The output in the values' dtype, and the statistics of every cached entry over these tokens by name, float32.
    """
    kv_heads, entries, _ = cached[0].shape
    n = queries.shape[1]
    sequences = [PackedSequence(n)] if sequences is None else sequences
    if uses_triton(queries.device):
        return _in_two_passes(queries, cached, new, softmax, names, sequences)
    longest = max(sequence.tokens for sequence in sequences)
    grouped = queries.unflatten(0, (kv_heads, -1))
    group = grouped.shape[1]
    rows = min(max(_LEAST_ROWS, block_size(queries.device, PRODUCT_BLOCK) // (group * (entries + longest))), longest)
    future = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1)
    output = queries.new_empty(kv_heads, group, n, cached[1].shape[-1])
    statistics = {
        name: torch.zeros(kv_heads, group, entries, dtype=torch.float32, device=queries.device) for name in names
    }
    sinks = softmax.by_query_group(1, kv_heads).sinks
    workspace = queries.new_empty(group * rows * (entries + longest))  # new memory costs a tenth more time
    keys, values = (old.new_empty(entries + longest, old.shape[-1]) for old in cached)
    for head in range(kv_heads):
        keys[:entries], values[:entries] = cached[0][head], cached[1][head]
        first = 0
        for tokens, scope in sequences:
            part = slice(first, first + tokens)
            after = slice(entries, entries + tokens)
            keys[after], values[after] = new[0][head, part], new[1][head, part]
            for start in range(0, tokens, rows):
                block = grouped[head, :, part][:, start : start + rows]
                size = block.shape[1]
                visible = entries + start + size
                logits = workspace[: group * size * visible].view(group * size, visible)
                folded = block.reshape(group * size, -1)
                logits = torch.addmm(
                    logits, folded, keys[:visible].T, beta=0, alpha=softmax.scaling, out=logits
                ).float()
                logits = softmax.capped(logits)
                newest_logits = logits.view(group, size, visible)[..., visible - size :]
                newest_logits.masked_fill_(future[:size, :size], float("-inf"))
                if sinks is None:
                    attention, sunk = torch.softmax(logits, -1, out=logits), None
                else:
                    attention, sunk = with_sink(logits, sinks[head].repeat_interleave(size))
                attended = attention.to(values.dtype) @ values[:visible]
                output[head, :, first + start : first + start + size] = attended.view(group, size, -1)
                of_head = {name: column[head] for name, column in statistics.items()}
                _merge_columns(of_head, attention, entries, size, scope, sunk)
            first += tokens
    return output.flatten(0, 1), {name: columns.flatten(0, 1) for name, columns in statistics.items()}


def _in_two_passes(
    queries: Float[Tensor, "query_heads n head_dim"],
    cached: tuple[Float[Tensor, "kv_heads entries head_dim"], Float[Tensor, "kv_heads entries value_dim"]],
    new: tuple[Float[Tensor, "kv_heads n head_dim"], Float[Tensor, "kv_heads n value_dim"]],
    softmax: Softmax,
    names: Collection[str],
    sequences: Sequence[PackedSequence],
) -> tuple[Float[Tensor, "query_heads n value_dim"], dict[str, Float[Tensor, "query_heads entries"]]]:
    """Compute `second_pass_attention` on a GPU: fused attention first, then the kernel for column statistics.

    Args:
        queries, cached, new, softmax, names, sequences: as there.
    """
    entries = cached[0].shape[1]
    outputs, first = [], 0
    statistics = {
        name: torch.zeros(len(queries), entries, dtype=torch.float32, device=queries.device) for name in names
    }
    for tokens, scope in sequences:
        part = slice(first, first + tokens)
        asking, keys, values = queries[:, part], new[0][:, part], new[1][:, part]
        of_cached, cached_lse = attention_with_lse(asking, *cached, softmax.without_sinks, causal=False)
        of_own, own_lse = attention_with_lse(asking, keys, values, softmax.without_sinks)
        lse = softmax.with_sinks(torch.logaddexp(cached_lse, own_lse))
        of_cached, of_own = of_cached * (cached_lse - lse).exp()[..., None], of_own * (own_lse - lse).exp()[..., None]
        outputs.append((of_cached + of_own).to(values.dtype))
        sinks, start, stop = scope or SoftmaxScope(0, 0, entries)
        if sinks < start or stop < entries:
            visible_keys = torch.cat([cached[0][:, :sinks], cached[0][:, start:stop], keys], 1)
            lse = log_sum_exp(asking, visible_keys, softmax)
        columns = attention_columns(
            asking, cached[0][:, start:stop], softmax=softmax, names=names, causal=False, lse=lse
        )
        for name, column in columns.items():
            so_far = statistics[name][:, start:stop]
            so_far.copy_(ColumnStatistic(name).merge(so_far, column))
        first += tokens
    return torch.cat(outputs, 1), statistics


def _merge_columns(
    statistics: Mapping[str, Float[Tensor, "group entries"]],
    attention: Float[Tensor, "group_rows visible"],
    entries: int,
    rows: int,
    scope: SoftmaxScope | None,
    sunk: Float[Tensor, " group_rows"] | None,
) -> None:
    """Merge the attention of a block of queries to the entries, given a sink's share, into the entries' statistics.

    Args:
        statistics: of every entry, by name; written to.
        attention: of a block of queries, to the entries and to later tokens.
        entries: how many there are.
        rows: queries of the block.
        scope: the entries that are counted; None for all.
        sunk: the sink's share of each query's attention; None if there is no sink.
    """
    sinks, start, stop = scope or SoftmaxScope(0, 0, entries)
    columns = attention[:, start:stop]
    if sinks < start or stop < entries:
        parts = attention[:, :sinks], columns, attention[:, entries:]
        paid = torch.stack([part.sum(1, keepdim=True) for part in parts]).sum(0)
        paid = paid if sunk is None else paid + sunk[:, None]
        columns = columns / paid.clamp(min=torch.finfo(paid.dtype).tiny)  # less is nothing, even of so little
    columns = columns.unflatten(0, (-1, rows))
    for name, statistic in statistics.items():
        kind, so_far = ColumnStatistic(name), statistic[:, start:stop]
        so_far.copy_(kind.merge(so_far, kind.over_queries(columns)))
