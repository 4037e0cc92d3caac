"""The least engine that keepset's paged caches can serve, over made-up numbers instead of a model.

It holds blocks, lets requests run in steps, writes and attends as it is told, and checks what it attends to: what each
head of each layer would see by a list of its entries alone. Pages that are free hold large numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from keepset import Observation, Recipe
from keepset.core.features.queries import WindowAttention
from keepset.kernels.packed import BIAS
from keepset.kernels.paged import append_to_pages, paged_attention
from keepset.kernels.softmax import Softmax
from keepset.paged.engine import EngineSize
from keepset.paged.event_execution import EventQueue
from keepset.paged.eviction import EvictionSchedule, group_leader
from keepset.paged.layer_group import LayerGroup
from keepset.paged.layout_table import EmptiedBlocks
from keepset.paged.pages import StridedPages
from keepset.paged.planner import Planner
from keepset.paged.query_records import slots_for
from keepset.paged.ragged_heads import PerHeadSequences
from keepset.paged.step import ScheduledRequest, StepBatch, StepPlan
from keepset.recording import QueryRing, Recording
from tests.paged.reference import blocks_gone, budget_of, is_executed, newest_event

LAYERS, KV_HEADS, GROUP, DIM, BLOCK = (0, 1, 2), 2, 2, 8, 4
SCALING = DIM**-0.5
MOST = 128
"""Tokens of a request."""
REQUESTS = 8
"""That run at once, at most."""
POISON = 1e3


@cache
def numbers(request: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries `[heads, tokens, dim]` of all tokens of a request."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(100 * request + layer))
    return draw(KV_HEADS, MOST, DIM), draw(KV_HEADS, MOST, DIM), draw(KV_HEADS * GROUP, MOST, DIM)


@dataclass
class Request:
    """A request, and what it would hold if there were no pages.

    Attributes:
        number, prompt: it.
        length: tokens that it has had.
        recomputed: tokens that it had before it was preempted.
        blocks: of each group of layers, by logical position; 0 where it has none.
        kept: positions that each head of each layer holds.
        state: what a method remembers of entries, by layer, name, head and position.
        gone: leading blocks that each layer can do without, where the data say how many.
        events: points at which something was dropped.
    """

    number: int
    prompt: int
    length: int = 0
    recomputed: int = 0
    blocks: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    kept: dict[int, list[list[int]]] = field(default_factory=lambda: {n: [[] for _ in range(KV_HEADS)] for n in LAYERS})
    state: dict[int, dict[str, list[dict[int, float]]]] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    events: list[int] = field(default_factory=list)

    def take_back(self, drafts: int) -> None:
        """Take back the newest tokens."""
        self.length -= drafts
        for heads in self.kept.values():
            for head in heads:
                del head[len(head) - drafts :]

    def restart(self) -> Request:
        """The request after a preemption."""
        return Request(self.number, self.prompt)


class Group:
    """Layers that share block tables."""

    def __init__(self, recipe: Recipe, leader: int, freed: EmptiedBlocks, caches: dict[int, Tensor], drafts: int):
        self.leader = leader
        self.layers = [layer for layer in LAYERS if group_leader(recipe, layer, LAYERS) == leader]
        self.schedule = EvictionSchedule(recipe, leader, LAYERS, KV_HEADS, DIM, BLOCK)
        recording = Recording.of_recipe(recipe, GROUP, DIM, 4, drafts)
        size = EngineSize(REQUESTS, len(caches[leader]), drafts)
        planner = Planner(self.schedule, recording, self.layers, size, freed)
        shape = len(self.layers), slots_for(REQUESTS), KV_HEADS * GROUP, DIM
        self.ring = QueryRing(recording, *shape, torch.float32, caches[leader].device)
        self.caches = [caches[layer] for layer in self.layers]
        self.pages = [StridedPages(self.caches, place) for place in range(len(self.layers))]
        of_layers = [partial(self.pages.__getitem__, place) for place in range(len(self.layers))]
        self.paged = LayerGroup(planner, of_layers, self.ring, Softmax(SCALING))


class Engine:
    """One recipe's, which may take back so many `drafts` of a step."""

    def __init__(self, recipe: str, blocks: int, drafts: int = 0) -> None:
        self.recipe = Recipe.parse(recipe)
        self._freed = EmptiedBlocks()
        self.events = EventQueue(self._freed)
        self._emptied: list[int] = []
        leaders = sorted({group_leader(self.recipe, layer, LAYERS) for layer in LAYERS})
        caches = torch.full((len(LAYERS), blocks, KV_HEADS, BLOCK, 2 * DIM), POISON)
        by_layer = dict(zip(LAYERS, caches, strict=True))
        self.groups = [Group(self.recipe, leader, self._freed, by_layer, drafts) for leader in leaders]
        self.pages = {
            layer: pages for group in self.groups for layer, pages in zip(group.layers, group.pages, strict=True)
        }
        self._caches = caches
        self.free = list(range(1, blocks))  # block 0 is nobody's

    def step(self, tokens: dict[int, int], running: dict[int, Request], wrong: Mapping[int, int] | None = None) -> None:
        """So many new tokens for these requests, in this order; the newest ones may be wrong drafts.

        These are taken back after the step. Nobody is told before the next one.
        """
        requests, wrong = [running[number] for number in tokens], wrong or {}
        plans = [(group, self._plan(group, requests, tokens)) for group in self.groups]
        # From here on somebody else may write to what is free, and not before.
        self._caches[:, self._emptied] = POISON
        self._emptied.clear()
        for request in requests:
            request.length += tokens[request.number]
        for group, (batch, plan) in plans:
            for place, layer in enumerate(group.layers):
                queries = self._attend(group, layer, place, batch, plan, requests, tokens, wrong)
                group.paged.record(range(place, place + 1), plan, queries[None])
        for request in requests:
            taken_back = wrong.get(request.number, 0)
            request.take_back(taken_back)
            self._compress(request, tokens[request.number] - taken_back)
        pages = {}
        for request, group in product(requests, self.groups):
            newest = request.blocks[group.leader][(request.length - 1) // BLOCK]
            pages[newest] = str(request.number), request.recomputed, group.leader
        self._freed.expect(pages)
        for (name, recomputed, leader), blocks in self._freed.drain().items():
            request = running.get(int(name))
            if request is not None and request.recomputed == recomputed:  # it was not preempted since
                self._release(request.blocks[leader], blocks)

    def leave(self, request: Request) -> None:
        """Free a request's blocks."""
        for table in request.blocks.values():
            self._release(table, len(table))

    def _release(self, table: list[int], blocks: int) -> None:
        for place, block in enumerate(table[:blocks]):
            if block:
                self._emptied.append(block)
                self.free.append(block)
                table[place] = 0

    # --- what an engine does: schedules, writes, attends

    def _plan(self, group: Group, requests: list[Request], tokens: dict[int, int]) -> tuple[StepBatch, StepPlan]:
        scheduled, slots, starts = [], [], [0]
        for row, request in enumerate(requests):
            new, table = tokens[request.number], request.blocks[group.leader]
            before, after = request.length, request.length + new
            if group.schedule.fixed:
                self._release(table, group.schedule.freed(request.prompt, before))
            while len(table) * BLOCK < after:
                table.append(self.free.pop())
            slots += [table[position // BLOCK] * BLOCK + position % BLOCK for position in range(before, after)]
            scheduled.append(ScheduledRequest(row, starts[-1], starts[-1] + new, request.prompt, before, after))
            starts.append(starts[-1] + new)
        width = MOST // BLOCK
        tables = [request.blocks[group.leader] for request in requests]
        batch = StepBatch(
            scheduled, torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            torch.tensor([one.after for one in scheduled], dtype=torch.int32), torch.tensor(slots),
            torch.tensor(starts, dtype=torch.int32), max(tokens.values()),
        )  # fmt: skip
        return batch, self.events.plan(group.paged, batch)

    def _attend(
        self, group: Group, layer: int, place: int, batch: StepBatch, plan: StepPlan, requests: list[Request],
        tokens: dict[int, int], wrong: Mapping[int, int],
    ) -> Tensor:  # fmt: skip
        """Writes and attends as told; returns the step's queries."""
        spans = [(request, request.length - tokens[request.number], request.length) for request in requests]
        right = torch.cat(
            [torch.arange(first, end) < end - wrong.get(request.number, 0) for request, first, end in spans]
        )
        keys, values, queries = (
            torch.cat([numbers(request.number, layer)[part][:, first:end] for request, first, end in spans], 1)
            .transpose(0, 1)
            .where(right[:, None, None], POISON)
            for part in range(3)
        )
        pages, heads = self.pages[layer], torch.arange(KV_HEADS)
        output = torch.zeros(queries.shape)
        ragged = plan.ragged
        if ragged is None or ragged.others:
            real = plan.slot_mapping >= 0
            block, offset = plan.slot_mapping[real, None] // BLOCK, plan.slot_mapping[real, None] % BLOCK
            slots = (block * KV_HEADS + heads) * BLOCK + offset
            pages.write(keys[real].flatten(0, 1), values[real].flatten(0, 1), slots.flatten())
            told = batch if plan.shifted is None else plan.shifted
            for row in range(len(requests)):
                have = int(told.seq_lens[row])
                blocks = told.block_table[row, : -(-have // BLOCK)].long()
                own = slice(int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1]))
                for head in range(KV_HEADS):
                    mine = slice(head * GROUP, (head + 1) * GROUP)
                    output[own, mine] = attention(queries[own, mine], pages, blocks * KV_HEADS + head, have)
        if ragged is not None and ragged.tokens is not None:
            layout = ragged.of_layer(place)
            append_to_pages(keys, values, group.caches[place], ragged.tokens, layout)
            bias = group.paged.columns.bias
            paged_attention(queries, group.caches, place, ragged.tokens, layout, Softmax(SCALING), output, bias)
            if bias is None:  # which no engine's own kernel adds
                self._check_heads_as_requests(PerHeadSequences(ragged), place, pages, queries, output)
        torch.testing.assert_close(output[right], torch.cat([expected(layer, *span) for span in spans])[right])
        return queries

    def _check_heads_as_requests(
        self, per_head: PerHeadSequences, place: int, pages: StridedPages, queries: Tensor, output: Tensor
    ) -> None:
        """An engine's own kernel would see the same, and its entries be written to the same places."""
        own, again = per_head.batch(place), output.clone()
        split, room = per_head.split(queries), per_head.output_buffer(again)
        blocks = pages.slots // BLOCK  # of each layer; they are numbered through
        newest, tables = own.seq_lens.long() - 1, own.block_table.long()
        slots = tables.gather(1, (newest // BLOCK)[:, None])[:, 0] * BLOCK + newest % BLOCK
        assert torch.equal(own.slot_mapping, slots)
        for row, have in enumerate(own.seq_lens.tolist()):
            mine = slice(int(own.query_start_loc[row]), int(own.query_start_loc[row + 1]))
            room[mine] = attention(split[mine], pages, tables[row, : -(-have // BLOCK)] - place * blocks, have)
        per_head.merge(room, again)
        torch.testing.assert_close(again, output)

    # --- what is held without pages

    def _compress(self, request: Request, new: int) -> None:
        recipe, length = self.recipe, request.length
        at = newest_event(recipe, request.prompt, length - new, length)
        if not at:
            return
        observations = [observe(request, layer, recipe, at) for layer in LAYERS]
        chosen = recipe.method.select_all(observations, budget_of(recipe, DIM))
        for layer in LAYERS:
            held = [[position for position in head if position < at] for head in request.kept[layer]]
            answer = [chosen.positions(layer, 0, head).tolist() for head in range(KV_HEADS)]
            if recipe.method.traits.fixed_total:
                if not is_executed(recipe, BLOCK, at, held, answer):
                    continue
            else:
                gone = blocks_gone(BLOCK, list(map(len, answer)), at, length)
                if gone < request.gone[layer]:
                    continue
                request.gone[layer] = gone
            if layer == LAYERS[0]:
                request.events.append(at)
            newer = list(range(at, length))
            request.kept[layer] = [head + newer for head in answer]
            request.state[layer] = {
                name: [dict(zip(own, column[0, head].tolist(), strict=False)) for head, own in enumerate(held)]
                for name, column in chosen.layer(layer).state.items()
            }


def attention(queries: Tensor, pages: StridedPages, subpages: Tensor, have: int) -> Tensor:
    """Attention of the newest queries `[n, group, dim]` over one head's entries."""
    keys, values = (part[:have] for part in pages.read(subpages))
    logits = torch.einsum("ngd,ed->nge", queries, keys) * SCALING
    future = torch.arange(have) > torch.arange(have - len(queries), have)[:, None]
    return logits.masked_fill(future[:, None], float("-inf")).softmax(-1) @ values


def expected(layer: int, request: Request, first: int, end: int) -> Tensor:
    """Attention of the request's queries from `first` on, over what it holds. New entries are held from here on."""
    keys, values, queries = numbers(request.number, layer)
    rows = []
    for head, held in enumerate(request.kept[layer]):
        held.extend(range(first, end))
        logits = queries[head * GROUP : (head + 1) * GROUP, first:end] @ keys[head, held].t() * SCALING
        if biases := request.state.get(layer, {}).get(BIAS):
            logits += torch.tensor([biases[head].get(position, 0.0) for position in held])
        future = torch.tensor(held)[None] > torch.arange(first, end)[:, None]
        rows.append(logits.masked_fill(future, float("-inf")).softmax(-1) @ values[head, held])
    return torch.cat(rows).transpose(0, 1)


def observe(request: Request, layer: int, recipe: Recipe, at: int) -> Observation:
    """The observation of one layer."""
    heads = [[position for position in head if position < at] for head in request.kept[layer]]
    most = max(map(len, heads))
    all_keys, all_values, all_queries = numbers(request.number, layer)
    keys, values = torch.zeros(1, KV_HEADS, most, DIM), torch.zeros(1, KV_HEADS, most, DIM)
    positions = torch.zeros(1, KV_HEADS, most, dtype=torch.long)
    valid = torch.zeros(1, KV_HEADS, most, dtype=torch.bool)
    remembered = request.state.get(layer, {})
    state = {name: torch.zeros(1, KV_HEADS, most) for name in remembered}
    for head, held in enumerate(heads):
        keys[0, head, : len(held)], values[0, head, : len(held)] = all_keys[head, held], all_values[head, held]
        positions[0, head, : len(held)] = torch.tensor(held)
        valid[0, head, : len(held)] = True
        for name, column in state.items():
            column[0, head, : len(held)] = torch.tensor([remembered[name][head].get(place, 0.0) for place in held])
    window = torch.arange(at - recipe.method.traits.needs.window, at)
    queries = all_queries[:, window.clamp(min=0)].masked_fill((window < 0)[:, None], 0.0)
    seen = Observation(
        keys=keys, values=values, positions=positions, valid=valid, queries=queries[None] if len(window) else None,
        query_positions=window[None] if len(window) else None, lengths=torch.tensor([at]),
        prompts=torch.tensor([request.prompt]), softmax=Softmax(SCALING), layer=layer, layers=range(len(LAYERS)),
        state=state,
    )  # fmt: skip
    if at == request.prompt:
        return seen
    return seen.with_features(
        {
            of: of.made(seen, min(of.window, recipe.schedule.every))
            for of in recipe.method.traits.needs.of(WindowAttention)
        }
    )
