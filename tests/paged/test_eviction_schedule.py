"""The schedule of a request is what happens when it gets one token after another."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Observation, Recipe
from keepset.core.features.moments import QueryDistribution, QueryMoments
from keepset.paged.eviction import GROUPS, EvictionSchedule, group_leader, one_table
from tests.paged.reference import is_executed, newest_event
from tests.tiers import examples

LAYERS = (0, 1, 2, 3, 5)
KV_HEADS, GROUP, DIM = 3, 2, 4
SIZES = st.sampled_from([1, 4, 8])

METHODS = [
    *("streaming_llm(", "knorm(", "tova(", "snapkv(window=3, kernel=3, ", "loud(window=2, "),
    *("expected_attention(future=4, skip=1, buffer=4, ", "pyramid(snapkv(window=3, kernel=3), beta=3, "),
    *("adakv(knorm, ", "adakv(snapkv(window=3, kernel=3), floor=0, ", "adakv(pyramid(tova), "),
]


@dataclass
class Naive:
    """One layer of one request: positions that each head has, and what happened at each length.

    A layer whose heads keep different numbers, or are attended as if they did, is not compressed while less than a
    block could go.
    """

    recipe: Recipe
    layer: int
    block: int
    seed: int
    per_head: bool = False
    heads: list[list[int]] = field(default_factory=lambda: [[] for _ in range(KV_HEADS)])
    compressions: list[tuple[int, list[int]]] = field(default_factory=list)
    length: int = 0

    def append(self, prompt: int) -> None:
        for head in self.heads:
            head.append(self.length)
        self.length += 1
        if newest_event(self.recipe, prompt, self.length - 1, self.length):
            self._compress(prompt)

    def _compress(self, prompt: int) -> None:
        draw = torch.Generator().manual_seed(self.seed * 1000 + self.length)
        most = max(map(len, self.heads))
        positions = torch.zeros(1, KV_HEADS, most, dtype=torch.long)
        valid = torch.zeros(1, KV_HEADS, most, dtype=torch.bool)
        for number, head in enumerate(self.heads):
            positions[0, number, : len(head)] = torch.tensor(head)
            valid[0, number, : len(head)] = True

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw)

        needs = self.recipe.method.traits.needs
        window = torch.arange(self.length - needs.window, self.length)
        moments = QueryDistribution(
            normal(1, KV_HEADS * GROUP, DIM), normal(1, KV_HEADS * GROUP, DIM, DIM), lambda rows, future: rows
        )
        observation = Observation(
            keys=normal(1, KV_HEADS, most, DIM), values=normal(1, KV_HEADS, most, DIM), positions=positions,
            valid=valid, lengths=torch.tensor([self.length]), prompts=torch.tensor([prompt]),
            queries=normal(1, KV_HEADS * GROUP, needs.window, DIM) if needs.window else None,
            query_positions=window[None] if needs.window else None,
            features=dict.fromkeys(needs.of(QueryMoments), moments), layer=self.layer, layers=LAYERS,
        )  # fmt: skip
        kept = self.recipe.select(observation)
        answer = [kept.positions(self.layer, 0, number).tolist() for number in range(KV_HEADS)]
        if is_executed(self.recipe, self.block, self.length, self.heads, answer, self.per_head):
            self.heads = answer
            self.compressions.append((self.length, list(map(len, answer))))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    method = draw(st.sampled_from(METHODS))
    every = draw(st.none() | st.integers(1, 13))
    keep = draw(st.integers(6, 40))
    if every is None:
        options = f"keep={draw(st.sampled_from([keep, 0.1, 0.37, 0.5, 1.0]))}"
    else:
        options = f"keep={keep}, every={every}, prefill={draw(st.booleans())}"
        options += ", protect_prompt=True" if draw(st.booleans()) else ""
    return Recipe.parse(f"{method}{options})")


def timeline_of(recipe: Recipe, layer: int, block: int, per_head: bool = False) -> EvictionSchedule:
    return EvictionSchedule(recipe, layer, LAYERS, KV_HEADS, 16, block, per_head=per_head)


@examples(150)
@given(recipes(), st.sampled_from(LAYERS), st.integers(1, 60), st.integers(0, 50), SIZES, st.integers(), st.booleans())
def test_counts_are_those_of_a_request_that_runs(
    recipe: Recipe, layer: int, prompt: int, more: int, block: int, seed: int, per_head: bool
) -> None:
    """Also where all heads are attended one by one, as beside contexts."""
    schedule = timeline_of(recipe, layer, block, per_head)
    naive = Naive(recipe, layer, block, seed % 1000, per_head)
    before = 0
    for length in range(1, prompt + more + 1):
        naive.append(prompt)
        held = list(map(len, naive.heads))
        dropped = schedule.dropped(prompt, length)
        assert length - dropped == -(-sum(held) // KV_HEADS)
        if recipe.method.traits.equal_heads:
            assert held == [length - dropped] * KV_HEADS
        assert before <= dropped <= length
        before = dropped
        newest = naive.compressions[-1][0] if naive.compressions else 0
        assert schedule.newest_effective_event(prompt, length) == newest
        # What is freed held nothing any more: what is left fits into the rest, with every token to come.
        freed = schedule.freed(prompt, length)
        assert 0 <= freed * block <= max(dropped, 0)
        counts = naive.compressions[-1][1] if naive.compressions else [0] * KV_HEADS
        for later in range(length, length + 2 * block):
            pages = sum(-(-(count + later - newest) // block) for count in counts)
            assert pages <= KV_HEADS * (-(-later // block) - freed)


@examples(200)
@given(recipes(), st.integers(1, 60), st.integers(0, 60))
def test_events_follow_one_another(recipe: Recipe, prompt: int, length: int) -> None:
    schedule = timeline_of(recipe, 0, 4)
    points = [point for point in range(1, 200) if newest_event(recipe, prompt, point - 1, point)]
    coming = min((point for point in points if point > length), default=None)
    assert schedule.newest_event(prompt, length) == newest_event(recipe, prompt, 0, length)
    assert schedule.next_event(prompt, length) == coming
    if coming and schedule.dropped(prompt, coming) == schedule.dropped(prompt, coming - 1):
        assert schedule.upcoming(prompt, length) == (None if schedule.fixed else coming)
    else:
        assert schedule.upcoming(prompt, length) == coming


@examples(150)
@given(recipes(), st.integers(1, 80), SIZES)
def test_no_compression_writes_to_what_is_shared(recipe: Recipe, prompt: int, block: int) -> None:
    """A compression packs what stays into the blocks that are not freed, so the first of those is where it writes.

    What it does not write to is shared, where no query of it is looked at.
    """
    schedule = timeline_of(recipe, LAYERS[0], block)
    untouched, shareable = schedule.untouched(prompt), schedule.shareable(prompt)
    first = prompt if recipe.schedule.prefill else prompt + (recipe.schedule.every or 0)
    if schedule.dropped(prompt, first):
        assert untouched == block * schedule.freed(prompt, first)
    for length in range(1, prompt + 60):
        if schedule.dropped(prompt, length) > schedule.dropped(prompt, length - 1):
            assert untouched is not None
            assert untouched <= schedule.freed(prompt, length) * block
    if untouched is None:
        assert shareable is None
        return
    assert shareable is not None and 0 <= shareable <= untouched
    needs = recipe.method.traits.needs
    assert shareable == 0 or not needs.of(QueryMoments)
    assert shareable <= max(min(prompt, first) - needs.window, 0)


@pytest.mark.parametrize("recipe", ["h2o(keep=0.25)", "expected_attention(keep=0.25)"])
def test_a_prompt_that_is_looked_at_as_a_whole_comes_from_nobody_elses_pages(recipe: str) -> None:
    whole = timeline_of(Recipe.parse(recipe), 0, 4)
    other = timeline_of(Recipe.parse("knorm(keep=0.25)"), 0, 4)
    assert whole.untouched(80) == other.untouched(80) == other.shareable(80) == 60
    assert whole.shareable(80) == 0


def test_nothing_is_foreseen_where_the_data_decide() -> None:
    schedule = timeline_of(Recipe.parse("mass(every=8)"), 0, 4)
    assert not schedule.fixed and schedule.ragged
    assert [schedule.newest_event(20, length) for length in (19, 20, 27, 28, 36)] == [0, 20, 20, 28, 36]
    assert not any(schedule.dropped(20, length) or schedule.freed(20, length) for length in range(100))
    assert schedule.untouched(20) == schedule.shareable(20) == 0


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepset.paged.eviction._CACHED", 20)
    schedule = timeline_of(Recipe.parse("knorm(keep=8, every=1)"), 0, 4)
    for length in range(10, 40):
        assert schedule.dropped(10, length) == length - 8
        assert len(schedule._kept) <= 1 + 20 + length - 10
    for prompt in range(10, 34):
        assert schedule.dropped(prompt, prompt) == prompt - 8
    assert len(schedule._kept) <= 21
    assert schedule.dropped(10, 40) == 40 - 8


@pytest.mark.parametrize(
    ("layers", "groups"), [(1, 1), (5, 5), (7, 6), (12, 6), (13, 6), (14, 3), (16, 4), (28, 6), (32, 5), (48, 6)]
)
def test_groups_leave_little_of_the_memory_to_nobody(layers: int, groups: int) -> None:
    """28 layers are 4 groups of 5 and 2 of 4, for each of which vLLM takes memory for 5. It would divide 6 groups of 2
    and 3 layers, into which 16 could be, into 10 of 2."""
    assert len({group_leader(Recipe.parse("mass"), layer, tuple(range(layers))) for layer in range(layers)}) == groups


def test_layers_share_a_table_where_they_keep_the_same() -> None:
    layers = tuple(range(0, 60, 2))
    uniform, pyramid, mass = map(Recipe.parse, ("adakv(snapkv, keep=96)", "pyramid(snapkv, keep=96)", "mass"))
    assert one_table(uniform) and not one_table(pyramid) and not one_table(mass)
    assert {group_leader(uniform, layer, layers) for layer in layers} == {0}
    assert [group_leader(pyramid, layer, layers) for layer in layers] == list(layers)
    for some in (layers, *(tuple(range(count)) for count in range(1, 100))):
        leaders = [group_leader(mass, layer, some) for layer in some]
        sizes = Counter(leaders).values()
        assert sorted(leaders) == leaders and len(sizes) <= GROUPS
        assert max(sizes) - min(sizes) <= 1
        assert all(leader in some and leader <= layer for layer, leader in zip(some, leaders, strict=True))
        assert all(group_leader(mass, leader, some) == leader for leader in leaders)
