"""Attention of a task's tokens that follow a cache, and what each entry of the cache receives of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.kernels.columns import MERGE

_BLOCK = 2**20
"""Numbers of attention at a time: matrices large enough for products at a core's full speed, small beside the cache."""

_DEVICE_BLOCK = 2**26
"""The same where operations are launched: few of them, in a quarter of a gigabyte."""

_LEAST_ROWS = 16
"""Fewer queries make slow matrix products."""


class Among(NamedTuple):
    """Statistics of the entries from `start` to `stop`, as if beside them there were only the first `sinks`."""

    sinks: int
    start: int
    stop: int


class Piece(NamedTuple):
    """Some tokens of a task that see the entries and one another, and no other piece."""

    tokens: int
    among: Among | None = None


def task_attention(
    queries: Float[Tensor, "query_heads n head_dim"],
    entries: tuple[Float[Tensor, "kv_heads entries head_dim"], Float[Tensor, "kv_heads entries value_dim"]],
    own: tuple[Float[Tensor, "kv_heads n head_dim"], Float[Tensor, "kv_heads n value_dim"]],
    scaling: float,
    names: Collection[str],
    pieces: Sequence[Piece] | None = None,
) -> tuple[Float[Tensor, "query_heads n value_dim"], dict[str, Float[Tensor, "query_heads entries"]]]:
    """Attention of `n` tokens to all cached entries and, causally, to the others of their piece (by default all).

    With it come the named statistics over these tokens, of every entry's column: `sum`, `max`, `square`. Attention
    is made once, in blocks of queries, and serves both: memory grows with the entries, not with their square.
    Where a piece's `among` says so, its statistics are those of attention to some entries and the tokens alone.
    """
    kv_heads, cached, _ = entries[0].shape
    n = queries.shape[1]
    pieces = [Piece(n)] if pieces is None else pieces
    longest = max(piece.tokens for piece in pieces)
    grouped = queries.unflatten(0, (kv_heads, -1))
    group = grouped.shape[1]
    most = _BLOCK if queries.device.type == "cpu" else _DEVICE_BLOCK
    rows = min(max(_LEAST_ROWS, most // (group * (cached + longest))), longest)
    future = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1)
    output = queries.new_empty(kv_heads, group, n, entries[1].shape[-1])
    received = {name: torch.zeros(kv_heads, group, cached, device=queries.device) for name in names}
    space = queries.new_empty(group * rows * (cached + longest))
    keys, values = (old.new_empty(cached + longest, old.shape[-1]) for old in entries)
    for head in range(kv_heads):
        keys[:cached], values[:cached] = entries[0][head], entries[1][head]
        first = 0
        for tokens, among in pieces:
            part = slice(first, first + tokens)
            keys[cached : cached + tokens], values[cached : cached + tokens] = own[0][head, part], own[1][head, part]
            for start in range(0, tokens, rows):
                block = grouped[head, :, part][:, start : start + rows]
                size = block.shape[1]
                seen = cached + start + size
                logits = space[: group * size * seen].view(group * size, seen)  # fresh memory would cost a tenth more
                flat = block.reshape(group * size, -1)
                logits = torch.addmm(logits, flat, keys[:seen].T, beta=0, alpha=scaling, out=logits).float()
                logits.view(group, size, seen)[..., seen - size :].masked_fill_(future[:size, :size], float("-inf"))
                attention = torch.softmax(logits, -1, out=logits)
                attended = attention.to(values.dtype) @ values[:seen]
                output[head, :, first + start : first + start + size] = attended.view(group, size, -1)
                _note(attention, cached, size, among, {name: column[head] for name, column in received.items()})
            first += tokens
    return output.flatten(0, 1), {name: columns.flatten(0, 1) for name, columns in received.items()}


def _note(
    attention: Float[Tensor, "group_rows seen"],
    cached: int,
    rows: int,
    among: Among | None,
    received: Mapping[str, Float[Tensor, "group entries"]],
) -> None:
    """Merges what a block of queries pays to the entries into what they have received."""
    sinks, start, stop = among or Among(0, 0, cached)
    columns = attention[:, start:stop]
    if sinks < start or stop < cached:
        columns = columns / _mass(attention[:, :sinks], columns, attention[:, cached:])
    columns = columns.unflatten(0, (-1, rows))
    for name, statistic in received.items():
        so_far = statistic[:, start:stop]
        so_far.copy_(MERGE[name](so_far, _STATISTIC[name](columns)))


def _mass(*parts: Float[Tensor, "rows _"]) -> Float[Tensor, "rows 1"]:
    """What rows of attention pay to these parts of all that they see."""
    paid = torch.stack([part.sum(1, keepdim=True) for part in parts]).sum(0)
    return paid.clamp(min=torch.finfo(paid.dtype).tiny)  # less is nothing, even of so little


_STATISTIC: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda columns: columns.sum(-2),
    "max": lambda columns: columns.amax(-2),
    "square": lambda columns: columns.square().sum(-2),
}
