"""Records of a request's queries, and the operations of layers on queries: collect, sum, hold, write to rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.feature import Accumulators
from keepset.kernels.page_layout import EntriesInPages


@dataclass
class QueryRecord:
    """The record of one request's queries. `RequestTable` files it by page.

    Attributes:
        slot: the request's slot in the rings of the layers (`QueryRing`).
        start: position of the first token that was recorded without a gap.
        length: tokens that the request had when it was recorded last.
        point: tokens at the event that its sums are for.
        added: position up to which its queries are summed.
        written: tokens at which they were summed last; 0 before that, when entries have no sums.
        shares: pages of its prompt that other requests may share until its first event.
        own: whether its sums are in private columns, because another request with an open window shares a page.
        held: how many of its newest queries are held back, because they came after an event in the same step.
        drafted: the queries of its newest step if some may be taken back; None if all are recorded.
        chunks: for each layer what was collected from its prompt, if the recipe looks at whole prompts.
        prompt_tokens: how many of the prompt's first tokens were collected.
    """

    slot: int
    start: int
    length: int
    point: int = 0
    added: int = 0
    written: int = 0
    shares: Sequence[int] = ()
    own: bool = False
    held: int = 0
    drafted: DraftedTokens | None = None
    chunks: list[Accumulators] = field(default_factory=list)
    prompt_tokens: int = 0

    def goes_on_at(self, tokens: int) -> bool:
        """Return whether a request with this many tokens may be the one that was recorded last."""
        return self.length == tokens if self.drafted is None else tokens - 1 in self.drafted.positions

    def aim(self, point: int, begins: int) -> None:
        """Start the sums of the event at `point`, unless they have begun.

        Args:
            point: tokens at the event.
            begins: position of the first query that counts.
        """
        if self.point != point:
            self.point, self.added, self.written, self.held = point, begins, 0, 0


class DraftedTokens(NamedTuple):
    """The newest tokens of a request; the next step says how many of them were accepted.

    Attributes:
        queries: their queries, together with those of other requests.
        first: the index of their first query.
        positions: their positions.
    """

    queries: DraftedQueries
    first: int
    positions: range


class EndedQueries(NamedTuple):
    """The newest queries of a turn that has ended, in host memory.

    Attributes:
        queries: after rotation, for each of the group's layers.
        first: the position of the first query that exists; those before count as missing.
    """

    queries: Float[Tensor, "layers query_heads n head_dim"]
    first: int


def slots_for(requests: int) -> int:
    """Return how many ring slots layers need: a quarter more than requests run, as some ended unnoticed or pause."""
    return requests + max(requests // 4, 2)


@dataclass(frozen=True)
class PromptChunk:
    """Collects this step's part of a prompt, for recipes that look at the whole prompt.

    Attributes:
        layers: what each layer of the group has collected from the prompt so far.
        first_query, end_query: the prompt's tokens among the step's queries, the end exclusive.
        position: the position of the first.
        subpages: the sub-pages that hold the prompt's entries up to the last token.
    """

    layers: Sequence[Accumulators]
    first_query: int
    end_query: int
    position: int
    subpages: Int[Tensor, "kv_heads pages"]


@dataclass(frozen=True)
class QueryAddition:
    """Sums the attention of some requests' queries for a later event.

    The queries are in the rings, unless `held` or `first_query` says otherwise.

    Attributes:
        slots: the slots of the requests.
        positions: the positions of the queries.
        begins: the position of the first query of each request that counts, whatever the window's length.
        points, ends_prompt: tokens at the event, and whether these are the prompts' ends.
        lengths: tokens of each request.
        unwritten: how many of the newest entries of each head have no sum yet.
        owners: slot and tokens of each request with private columns (`EntryColumns`), None for other requests; empty
            if no request has any.
        entries: returns where the layers have the entries; to be called once the step is planned.
        held: the slot of the only request, whose queries were held back.
        first_query: the first query of the only request, whose queries are this step's.
    """

    slots: Int[Tensor, " rows"]
    positions: Int[Tensor, "rows n"]
    begins: Int[Tensor, " rows"]
    points: Int[Tensor, " rows"]
    ends_prompt: bool
    lengths: Int[Tensor, " rows"]
    unwritten: Int[Tensor, " rows"]
    owners: Sequence[tuple[int, int] | None]
    entries: Callable[[], EntriesInPages]
    held: int | None = None
    first_query: int | None = None


@dataclass(frozen=True)
class HeldQueries:
    """Holds back queries that came after an event of their own step, until the request's next step sums them.

    Attributes:
        slot: the request's slot.
        first_query, end_query: its queries among the step's, the end exclusive.
    """

    slot: int
    first_query: int
    end_query: int


@dataclass(frozen=True)
class QueryCapture:
    """Writes some of a step's queries to the rings.

    Attributes:
        queries: the indices of these queries in the step.
        slots, places: for each query the slot of its request, and its place in that ring.
    """

    queries: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]
    places: Int[Tensor, " n"]


@dataclass(eq=False)
class DraftedQueries:
    """Copies some of a step's queries, until the next step says which of their tokens were taken back.

    Attributes:
        queries: which of the step's queries they are.
        copies: the queries of each layer, by its place in the group.
    """

    queries: Int[Tensor, " n"]
    copies: dict[int, Float[Tensor, "n query_heads head_dim"]] = field(default_factory=dict)


@dataclass(frozen=True)
class AcceptedQueries:
    """Writes queries of drafted tokens that were not taken back to the rings.

    Attributes:
        drafted: has the queries.
        capture: which of them they are, and where they belong.
    """

    drafted: DraftedQueries
    capture: QueryCapture


@dataclass
class LateCapture:
    """Writes queries that came after an event of their own step to the rings, once the event is over.

    It runs twice: in the layers it copies the queries, and after the events it writes them.
    """

    capture: QueryCapture
    copies: list[tuple[range, Tensor]] = field(default_factory=list)


LayerOperation = (
    PromptChunk | QueryAddition | HeldQueries | QueryCapture | DraftedQueries | AcceptedQueries | LateCapture
)
"""What layers do with the queries of a step, or with recorded ones; `LayerGroup` executes it."""
