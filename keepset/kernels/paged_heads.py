"""Attention of decoded tokens over pages in PyTorch, if each KV head of each request has its own entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepset.kernels.dispatch import PRODUCT_BLOCK
from keepset.kernels.page_format import PageFormat
from keepset.kernels.softmax import Softmax, normalised

ReadRows = Callable[[Int[Tensor, "heads pages"]], tuple[Shaped[Tensor, "heads entries row"], ...]]
"""Returns the stored keys and values of whole sub-pages, each head's pages joined."""
_LONGER = 1.25
"""The largest ratio of a block's longest head to its shortest."""


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
        some = torch.tensor(heads)
        keys, values = read(tables[some, : -(-longest // block_size)])
        hidden = torch.arange(keys.shape[1]) >= lengths[some, None]
        key_scale = value_scale = None
        if format is not None:
            (keys, key_scale), (values, value_scale) = format.parts(keys), format.parts(values)
        logits = torch.bmm(queries[some].float().mul_(softmax.scaling * key_factor), keys.float().transpose(1, 2))
        if key_scale is not None:
            logits.mul_(key_scale[:, None])
        logits = softmax.capped(logits)
        if bias is not None:
            logits += bias(some, keys.shape[1])[:, None]
        sinks = None if softmax.sinks is None else softmax.sinks[some]
        weights = normalised(logits.masked_fill_(hidden[:, None], float("-inf")), sinks)
        if value_scale is not None:
            weights.mul_(value_scale[:, None])
        # Behind a head's end, pages may hold NaN, and 0 x NaN is NaN.
        behind, values = hidden[:, shortest:], values.float()
        weights[:, :, shortest:].masked_fill_(behind[:, None], 0.0)
        values[:, shortest:] = values[:, shortest:].masked_fill(behind[..., None], 0.0)
        attended = torch.bmm(weights, values).mul_(value_factor)
        output[some] = (attended if mixing is None else mixing.unmixed(attended)).to(output.dtype)


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
