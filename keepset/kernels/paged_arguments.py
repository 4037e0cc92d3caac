"""What kernels in an engine's pages are told: caches, new tokens, filed layouts, entries, queries, what is added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels.group_reduction import GroupReduction
from keepset.kernels.page_layout import PageLayout


class Addresses(NamedTuple):
    """Where the caches of some layers begin.

    Attributes:
        on_device: the addresses, on the device of the caches.
        aligned: whether each begins where a GPU loads 16 bytes at once.
    """

    on_device: Int[Tensor, " layers"]
    aligned: bool


class PagedTokens(NamedTuple):
    """New tokens of a step, each of which looks at what its request holds up to itself; vectors are contiguous.

    Attributes:
        block_table: blocks of each row by logical position.
        lengths: tokens of the request up to and with each; 0 for those that only fill a step up to a size.
        longest: none of the lengths is more.
        places: which of the step's tokens each is; None: the first one is the first, and so on.
        rows: each one's row of the block table; None with `places`: its own.
        slots: negative for tokens of nobody's, as in a dummy run: they are not written.
    """

    block_table: Int[Tensor, "rows width"]
    lengths: Int[Tensor, " n"]
    longest: int
    places: Int[Tensor, " n"] | None = None
    rows: Int[Tensor, " n"] | None = None
    slots: Int[Tensor, " n"] | None = None


class FiledLayouts(NamedTuple):
    """The layouts of all requests, each filed under the page that holds its request's newest token.

    Attributes:
        layout: page by page, contiguous.
        tokens: of the request, when it was filed.
    """

    layout: PageLayout
    tokens: Int[Tensor, " pages"]

    @classmethod
    def empty(cls, pages: int, layers: int, kv_heads: int, device: torch.device) -> FiledLayouts:
        """Of no requests."""
        shapes = (pages, layers, kv_heads), *[(pages, layers)] * 3, (pages,)
        *layout, tokens = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
        return cls(PageLayout(*layout), tokens)


class EntriesInPages(NamedTuple):
    """Where the entries of some requests lie; contiguous.

    Attributes:
        layout: what the heads' pages follow from: layer by layer of a group, or one that is all layers'.
        block_table: blocks of each request by logical position.
        lengths: tokens of each request.
        packed: of each head the first so many entries were packed after the event before, layer by layer as in the
            layout: those that it kept, and, where heads differ, those that came behind the event in its own step. They
            alone have positions and biases of their own.
        longest: no head has more entries.
    """

    layout: PageLayout
    block_table: Int[Tensor, "rows width"]
    lengths: Int[Tensor, " rows"]
    packed: Int[Tensor, "rows layers kv_heads"]
    longest: int

    def of_layers(self, places: range) -> EntriesInPages:
        """Those of some layers of the group."""
        some = slice(places.start, places.stop) if self.packed.shape[1] > 1 else slice(None)
        return self._replace(layout=PageLayout(*(part[:, some] for part in self.layout)), packed=self.packed[:, some])


class RecordedQueries(NamedTuple):
    """Queries of some requests after rotation, in each of some layers.

    Attributes:
        rings: where they lie, of each query's numbers one after another.
        slots: of the requests.
        places: of each query in its slot.
    """

    rings: Float[Tensor, "layers slots places query_heads head_dim"]
    slots: Int[Tensor, " rows"]
    places: Int[Tensor, "rows n"]

    def of_layers(self, layers: range) -> Float[Tensor, "layers_rows query_heads n head_dim"]:
        """The queries, layer after layer, of some of these layers."""
        chosen = self.rings[layers.start : layers.stop, self.slots[:, None], self.places]
        return chosen.transpose(2, 3).flatten(0, 1)


class ColumnTarget(NamedTuple):
    """What is added up, and where; columns are contiguous.

    Attributes:
        column: numbers for each slot `subpage * block_size + offset` of each layer of the group; it is written to.
        last_visible: the last position that a query sees, in rising order; before the first, and it gives nothing.
        unwritten: of how many of the newest entries of each head the column's numbers mean nothing yet.
        scaling: of the logits.
        sums_of: what is added up of the query heads of a group.
        bias: of each slot, added to the logits of entries that were packed.
        positions: of each slot that was packed, whole numbers bit for bit; None where queries see all that was kept.
        own: of requests that have numbers of their own, instead of those at the slots, these: a place for each entry in
            its order; None of others, and nothing at all where there are only those.
    """

    column: Float[Tensor, "layers slots *group"]
    last_visible: Int[Tensor, "rows n"]
    unwritten: Int[Tensor, " rows"]
    scaling: float
    sums_of: GroupReduction = GroupReduction.MEAN
    bias: Float[Tensor, "layers slots"] | None = None
    positions: Float[Tensor, "layers slots"] | None = None
    own: Sequence[Float[Tensor, "layers kv_heads places *group"] | None] = ()
