"""Conversations between turns: which entries stay is chosen when a turn ends; the others go when the next one begins.

At a turn's end all that its recipe looks at is still there. But a turn may be asked for again, and is then computed
with the very entries that it had. So the choice is only noted, in a column beside the entries (`STAYS`). What stays is
fitted (`match`) when the next turn begins, to queries that wait in host memory until then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepset.core.budget import Ranges
from keepset.core.keep_set import LayerKeepSet, LazyHostInts
from keepset.core.observation import Observation
from keepset.paged.entry_columns import STAYS
from keepset.paged.event_execution import EventEntries, execute, read_event
from keepset.paged.eviction import EvictionEvent, RequestPlan
from keepset.paged.layer_group import LayerGroup
from keepset.paged.query_records import EndedQueries
from keepset.paged.ragged_heads import RaggedEventPages, RaggedHeadTables

PLAIN = ""
"""In place of a running turn's name: nothing was dropped of the tokens, so that no layout is needed to find them."""


@dataclass(frozen=True)
class EndedTurn:
    """What a turn has left in the pages.

    Attributes:
        blocks: its blocks by logical position, for each group of layers; freed ones are arbitrary.
        tokens: tokens whose entries they hold, from the conversation's first on.
        prompt: tokens of the turn's prompt, which begins with the conversation's first token.
        said: how many of the tokens the client has not left out since: a share is one of these.
        system: where all before the first user's message is, if a recipe protects it.
        running: the engine's name of the turn if it has not ended, so that its entries are copied; `PLAIN` if they are
            copied and are all there.
    """

    blocks: Sequence[Sequence[int]]
    tokens: int
    prompt: int
    said: int
    system: Ranges = ()
    running: str | None = None

    def newest_page(self, group: int, block_size: int) -> int:
        """Return the page with its newest token.

        Args:
            group: the group of layers.
            block_size: tokens of a page.
        """
        return self.blocks[group][(self.tokens - 1) // block_size]

    def of_groups(self, numbers: Sequence[int]) -> EndedTurn:
        """Return the same turn in some groups of layers."""
        return replace(self, blocks=[self.blocks[number] for number in numbers])


@dataclass(frozen=True)
class NextTurn:
    """How a request goes on from an ended turn.

    Attributes:
        name: the engine's name of the request.
        ended: the turn that it goes on from.
        blocks: its own blocks by logical position, for each group of layers: those of the ended turn, perhaps moved.
        tokens: the tokens that it goes on from; entries of later ones are dropped.
        left_out: spans of positions that the client has left out; their entries are dropped.
        compact: whether all entries are dropped that were not chosen when the turn ended.
        plan: how the request is compressed.
    """

    name: str
    ended: EndedTurn
    blocks: Sequence[Sequence[int]]
    tokens: int
    left_out: Sequence[tuple[int, int]]
    compact: bool
    plan: RequestPlan

    @property
    def packs(self) -> bool:
        """Whether entries are moved."""
        is_copy = self.ended.running is not None
        return is_copy or self.compact or bool(self.left_out) or self.tokens < self.ended.tokens

    def of_groups(self, numbers: Sequence[int]) -> NextTurn:
        """Return the same turn in some groups of layers."""
        blocks = [self.blocks[number] for number in numbers]
        return replace(self, ended=self.ended.of_groups(numbers), blocks=blocks)


def choose_what_stays(groups: Sequence[LayerGroup], turn: EndedTurn) -> None:
    """Choose which entries of a conversation stay when its next turn begins, and note it beside the entries.

    Args:
        groups: all groups of layers. No event is due in them.
        turn: the turn that has ended.

    Raises:
        RuntimeError: the place of its entries is not known any more.
    """
    method = groups[0].recipe.method.chooser
    events = [_ended(group, turn, blocks) for group, blocks in zip(groups, turn.blocks, strict=True)]
    parts = [
        (group, entries) for group, event in zip(groups, events, strict=True) for entries in read_event(group, event)
    ]
    parts.sort(key=lambda part: part[1].observation.layer_ids)
    for together in [parts] if method.traits.across_layers else [[part] for part in parts]:
        observations = [entries.observation for _, entries in together]
        budget = groups[0].recipe.budget_for(observations).of_tokens(turn.said).with_system(turn.system)
        chosen = method.select_all(observations, budget)
        for group, entries in together:
            _note(group, entries, chosen.layer(entries.observation.layer_ids[0]))
    for number, (group, event) in enumerate(zip(groups, events, strict=True)):
        if (reference := group.planner.recording.reference) is not None:
            queries, _ = group.observer.newest(event, range(len(group.layers)), reference.later)
            page = turn.newest_page(number, group.block_size)
            group.ended_queries[page] = EndedQueries(queries.contiguous().cpu(), event.first_query)
        group.planner.close(event.records)


def _ended(group: LayerGroup, turn: EndedTurn, blocks: Sequence[int]) -> EvictionEvent:
    """Return the event of a turn that has ended, once its queries are summed.

    Args:
        group: the layers.
        turn: the turn that has ended.
        blocks: its blocks in these layers, by logical position.
    """
    pages = _pages(group, blocks, turn.tokens)
    event = _event(group, turn, pages)
    if not group.planner.recording:
        return event
    record, addition = group.planner.ended(blocks[(turn.tokens - 1) // group.block_size], turn.tokens, pages.entries)
    group.run([addition])
    return replace(event, records=[record], slots=addition.slots, first_query=record.start)


def begin_turn(groups: Sequence[LayerGroup], turn: NextTurn) -> list[int]:
    """Make a request go on in the pages of an ended turn, without the entries that it does not go on with.

    Args:
        groups: all groups of layers. No event is due in them.
        turn: the turn that begins.

    Returns:
        How many leading blocks of each group are empty.

    Raises:
        RuntimeError: the place of the ended turn's entries is not known any more.
    """
    emptied = []
    for number, (group, left, blocks) in enumerate(zip(groups, turn.ended.blocks, turn.blocks, strict=True)):
        tables, fitted_to = group.planner.tables, None
        assert isinstance(tables, RaggedHeadTables)
        if turn.ended.running is None:
            fitted_to = group.ended_queries.pop(turn.ended.newest_page(number, group.block_size), None)
        if turn.packs:
            pages = _pages(group, left, turn.ended.tokens, blocks, turn.tokens, turn.ended.running)
            event, start = _event(group, turn.ended, pages), time.perf_counter()
            if turn.compact and fitted_to is not None:
                event = replace(event, queries=fitted_to.queries, first_query=fitted_to.first)
            for entries in read_event(group, event):
                kept = _kept(group, entries, turn)
                assignment = pages.assign(entries.places, kept.counts)
                LazyHostInts.read([kept.heads, *assignment.host_reads])
                execute(group, event, entries, kept, assignment, start)
                start = time.perf_counter()
        page = blocks[(turn.tokens - 1) // group.block_size]
        group.planner.requests.begin(page, turn.tokens, turn.name, turn.plan)
        emptied.append(tables.go_on(page, turn.tokens))
    return emptied


def forget_turns(groups: Mapping[int, LayerGroup], newest_pages: Sequence[Sequence[int]]) -> None:
    """Forget turns with which no other turn goes on.

    Args:
        groups: the groups of layers, by their numbers among all that are compressed.
        newest_pages: the page with the newest token of each turn, for each of all groups.
    """
    for number, group in groups.items():
        for pages in newest_pages:
            group.ended_queries.pop(pages[number], None)


def _pages(
    group: LayerGroup,
    left: Sequence[int],
    tokens: int,
    blocks: Sequence[int] | None = None,
    length: int | None = None,
    running: str | None = None,
) -> RaggedEventPages:
    tables = group.planner.tables
    assert isinstance(tables, RaggedHeadTables)
    if running is not None and blocks is not None and length is not None:
        where = group.planner.requests.newest(running) if running else None
        return tables.copied_pages(left, where, blocks, length)
    return tables.ended_pages(left, tokens, left if blocks is None else blocks, tokens if length is None else length)


def _event(group: LayerGroup, turn: EndedTurn, pages: RaggedEventPages) -> EvictionEvent:
    """Return the event of a request that has ended, the only one.

    Args:
        group: the layers.
        turn: the turn that has ended.
        pages: the pages of its entries in these layers.
    """
    device = group.pages_of(0).device
    at, prompts, slots = (
        torch.tensor(numbers, dtype=torch.long, device=device) for numbers in ([turn.tokens], [turn.prompt], [])
    )
    return EvictionEvent(
        recipe=group.recipe,
        rows=[0],
        at=at,
        earliest=turn.tokens,
        latest=turn.tokens,
        prompts=prompts,
        newer=0,
        keep=None,
        compressed=True,
        ends_prompt=False,
        equal_heads=False,
        pages=pages,
        records=[],
        slots=slots,
    )


def _slots(group: LayerGroup, entries: EventEntries) -> Int[Tensor, "layers_rows kv_heads entries"]:
    return group.columns.slots(entries.paged.subpages)[..., : entries.observation.valid.shape[-1]]


def _note(group: LayerGroup, entries: EventEntries, kept: LayerKeepSet) -> None:
    """Note in the columns which entries stay, and what the method remembers of them.

    Args:
        group: the layers.
        entries: the entries of a part of these layers.
        kept: which of them stay.
    """
    exists, slots = entries.observation.valid, _slots(group, entries)
    stays = torch.zeros(exists.shape, dtype=torch.float32, device=exists.device)
    stays.view(-1)[kept.rows * exists.shape[-1] + kept.indices] = 1
    group.columns.write(STAYS, slots[exists], stays[exists])
    for name in _states(group):
        if name in kept.state:
            group.columns.write(name, slots[exists], kept.state[name][exists])


def _kept(group: LayerGroup, entries: EventEntries, turn: NextTurn) -> LayerKeepSet:
    """Return what the next turn goes on with.

    Args:
        group: the layers.
        entries: the entries of a part of these layers.
        turn: the turn that begins.
    """
    observation = entries.observation
    goes_on = _going_on(observation, turn)
    if not turn.compact:
        return observation.kept(goes_on)
    slots = _slots(group, entries)
    stays = group.columns.read(STAYS, slots) > 0
    # The method has chosen again, and may remember something of entries that had come since the event before.
    state = {name: group.columns.read(name, slots) for name in _states(group)}
    chosen = group.recipe.method.stored(observation, observation.kept(stays, state))
    kept = observation.kept(goes_on & stays, chosen.state)
    if chosen.values is None:
        return kept
    row_starts = chosen.rows * stays.shape[-1]
    return replace(kept, values=chosen.values[goes_on.view(-1)[row_starts + chosen.indices]])


def _going_on(observation: Observation, turn: NextTurn) -> Bool[Tensor, "layers_rows kv_heads entries"]:
    """Return of which entries the next turn's prompt has the tokens.

    Args:
        observation: some layers of a group.
        turn: the turn that begins.
    """
    positions = observation.positions
    goes_on = observation.valid & (positions < turn.tokens)
    for first, end in turn.left_out:
        goes_on &= (positions < first) | (positions >= end)
    return goes_on


def _states(group: LayerGroup) -> Iterator[str]:
    return (name for name in group.recipe.method.traits.state_names if name in group.columns)
