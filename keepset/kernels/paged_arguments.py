"""Arguments of kernels that work in an engine's pages: caches, new tokens, layouts, entries, queries, sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepset.kernels.page_layout import PageLayout
from keepset.kernels.softmax import GroupReduction, Softmax

LayerPages = Shaped[Tensor, "blocks kv_heads block_size width"]
"""The cache of one layer; only an entry's numbers must be contiguous. A sub-page is `block * kv_heads + head`."""


class Addresses(NamedTuple):
    """Addresses at which the caches of layers begin.

    Attributes:
        on_device: addresses, on the layers' device.
        aligned: whether each is a multiple of 16 bytes, which a GPU loads at once.
    """

    on_device: Int[Tensor, " layers"]
    aligned: bool


class PagedTokens(NamedTuple):
    """New tokens of a step. Each sees its request's entries up to itself. All vectors are contiguous.

    Attributes:
        block_table: blocks of each row by logical position.
        lengths: number of tokens of the request up to and with each token; 0 for padding tokens of the step.
        longest: an upper bound of the lengths.
        places: index of each token among the step's tokens; None: 0, 1, 2 and so on.
        rows: each token's row of the block table; None together with `places`: token `i` has row `i`.
        slots: slot of each token; negative for tokens that belong to no request, which are not written.
    """

    block_table: Int[Tensor, "rows width"]
    lengths: Int[Tensor, " n"]
    longest: int
    places: Int[Tensor, " n"] | None = None
    rows: Int[Tensor, " n"] | None = None
    slots: Int[Tensor, " n"] | None = None


class FiledLayouts(NamedTuple):
    """The page layouts of all requests, each filed under the page that holds its request's newest token.

    Attributes:
        layout: the layout filed under each page, contiguous.
        tokens: the request's number of tokens when its layout was filed.
    """

    layout: PageLayout
    tokens: Int[Tensor, " pages"]

    @classmethod
    def empty(cls, pages: int, layers: int, kv_heads: int, device: torch.device) -> FiledLayouts:
        """Return a table of zeros, without any request."""
        shapes = (pages, layers, kv_heads), *[(pages, layers)] * 3, (pages,)
        *layout, tokens = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
        return cls(PageLayout(*layout), tokens)


class EntriesInPages(NamedTuple):
    """Places of the entries of requests. All tensors are contiguous.

    Attributes:
        layout: the layout of each layer of a group, or of one layer that stands for all.
        block_table: blocks of each request by logical position.
        lengths: tokens of each request.
        packed: how many of each head's first entries were packed at the newest event: those that it kept and, if heads
            differ, those of later tokens of its step. Only these have stored positions and biases.
        longest: an upper bound of a head's entries.
    """

    layout: PageLayout
    block_table: Int[Tensor, "rows width"]
    lengths: Int[Tensor, " rows"]
    packed: Int[Tensor, "rows layers kv_heads"]
    longest: int

    def of_layers(self, places: range) -> EntriesInPages:
        """Return the places of the entries in some layers of the group."""
        some = slice(places.start, places.stop) if self.packed.shape[1] > 1 else slice(None)
        return self._replace(layout=PageLayout(*(part[:, some] for part in self.layout)), packed=self.packed[:, some])


class RecordedQueries(NamedTuple):
    """Queries of some requests after rotation, in each of some layers.

    Attributes:
        rings: buffers that hold the queries; each query's numbers are contiguous.
        slots: slot of each request in the buffers.
        places: index of each query in its slot.
    """

    rings: Float[Tensor, "layers slots places query_heads head_dim"]
    slots: Int[Tensor, " rows"]
    places: Int[Tensor, "rows n"]

    def of_layers(self, layers: range) -> Float[Tensor, "layers_rows query_heads n head_dim"]:
        """Return the queries of some of these layers, layer after layer."""
        chosen = self.rings[layers.start : layers.stop, self.slots[:, None], self.places]
        return chosen.transpose(2, 3).flatten(0, 1)


class ColumnTarget(NamedTuple):
    """Columns to which the attention that entries receive is added; they are contiguous.

    Attributes:
        column: numbers of each slot `subpage * block_size + offset` of each layer of the group; written to.
        last_visible: the last position that each query sees, in rising order; a negative one sees nothing.
        unwritten: how many of each head's newest entries have no number in the column yet.
        softmax: the layers' softmax; its sinks are `[layers, query_heads]`, for each layer of the group.
        sums_of: how to reduce the query heads that share a KV head.
        bias: bias of each slot, added to the logits of packed entries.
        positions: position of each packed slot, int32 stored as float32 bits; None if queries see all kept entries.
        own: the private column of each request, with a place for each entry in order, or None for a request whose
            numbers are in `column`. Empty if no request has a private one.
    """

    column: Float[Tensor, "layers slots *group"]
    last_visible: Int[Tensor, "rows n"]
    unwritten: Int[Tensor, " rows"]
    softmax: Softmax
    sums_of: GroupReduction = GroupReduction.MEAN
    bias: Float[Tensor, "layers slots"] | None = None
    positions: Float[Tensor, "layers slots"] | None = None
    own: Sequence[Float[Tensor, "layers kv_heads places *group"] | None] = ()
