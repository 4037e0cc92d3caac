"""Attention of a task's tokens that follow a cache, and what each entry of the cache receives of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_BLOCK = 2**18
"""Numbers of attention at a time: what stays in a core's cache."""

_DEVICE_BLOCK = 2**26
"""The same where operations are launched: few of them, in a quarter of a gigabyte."""

_LEAST_ROWS = 16
"""Fewer queries make slow matrix products."""


class Among(NamedTuple):
    """Statistics of the entries from `start` to `stop`, as if beside them there were only the first `sinks`."""

    sinks: int
    start: int
    stop: int


def task_attention(
    queries: Float[Tensor, "query_heads n head_dim"],
    entries: tuple[Float[Tensor, "kv_heads entries head_dim"], Float[Tensor, "kv_heads entries value_dim"]],
    own: tuple[Float[Tensor, "kv_heads n head_dim"], Float[Tensor, "kv_heads n value_dim"]],
    scaling: float,
    names: Collection[str],
    among: Among | None = None,
) -> tuple[Float[Tensor, "query_heads n value_dim"], dict[str, Float[Tensor, "query_heads entries"]]]:
    """Attention of `n` tokens to all cached entries and, causally, to one another.

    With it come the named statistics over these tokens, of every entry's column: `sum`, `max`, `square`. Attention
    is made once, in blocks of queries, and serves both: memory grows with the entries, not with their square.
    Where `among` says so, the statistics are those of attention to some entries and the tokens alone.
    """
    kv_heads, cached, _ = entries[0].shape
    n = queries.shape[1]
    grouped = queries.unflatten(0, (kv_heads, -1))
    group = grouped.shape[1]
    most = _BLOCK if queries.device.type == "cpu" else _DEVICE_BLOCK
    rows = max(_LEAST_ROWS, most // (group * (cached + n)))
    future = torch.ones(min(rows, n), min(rows, n), dtype=torch.bool, device=queries.device).triu(1)
    output = queries.new_empty(kv_heads, group, n, entries[1].shape[-1])
    received = {name: torch.zeros(kv_heads, group, cached, device=queries.device) for name in names}
    space = queries.new_empty(group * min(rows, n) * (cached + n))
    sinks, first, last = among or Among(0, 0, cached)
    whole = sinks == first and last == cached
    for head in range(kv_heads):
        keys, values = (torch.cat([old[head], new[head]]) for old, new in zip(entries, own, strict=True))
        for start in range(0, n, rows):
            block = grouped[head, :, start : start + rows]
            size = block.shape[1]
            seen = cached + start + size
            logits = space[: group * size * seen].view(group * size, seen)  # fresh memory would cost a tenth more
            logits = torch.mm(block.reshape(group * size, -1), keys[:seen].T, out=logits).float().mul_(scaling)
            logits.view(group, size, seen)[..., seen - size :].masked_fill_(future[:size, :size], float("-inf"))
            attention = torch.softmax(logits, -1, out=logits)
            output[head, :, start : start + size] = (attention.to(values.dtype) @ values[:seen]).view(group, size, -1)
            columns = attention[:, first:last]
            if not whole:
                columns = columns / _mass(attention[:, :sinks], columns, attention[:, cached:])
            columns = columns.unflatten(0, (group, size))
            for name, statistic in received.items():
                so_far = statistic[head, :, first:last]
                so_far.copy_(MERGE[name](so_far, _STATISTIC[name](columns)))
    return output.flatten(0, 1), {name: columns.flatten(0, 1) for name, columns in received.items()}


def _mass(*parts: Float[Tensor, "rows _"]) -> Float[Tensor, "rows 1"]:
    """What rows of attention pay to these parts of all that they see."""
    paid = torch.stack([part.sum(1, keepdim=True) for part in parts]).sum(0)
    return paid.clamp(min=torch.finfo(paid.dtype).tiny)  # less is nothing, even of so little


MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "square": torch.add,
}
"""From a statistic of some tokens and that of others to that of all; for none of them it is zero."""

_STATISTIC: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda columns: columns.sum(-2),
    "max": lambda columns: columns.amax(-2),
    "square": lambda columns: columns.square().sum(-2),
}
