"""Planner, tables, windows and compaction together, in the least engine: every step attends to the right entries."""

from __future__ import annotations

import random

import pytest

from keepset import Recipe
from keepset.paged.eviction import EvictionSchedule
from tests.paged.engine import BLOCK, Engine, Request
from tests.tiers import FULL

RECIPES = [
    "dated(bytes=0.6)", "dated(keep=9, every=5, protect_prompt=True)", "streaming_llm(keep=10, every=7, prefill=False)",
    "adakv(snapkv(window=4, kernel=3), floor=0, keep=10, every=9)", "pyramid(dated, beta=3, keep=12, every=5)",
    "snapkv(window=9, kernel=3, keep=11, every=4)",
    "ams(tova, window=11, kernel=3, min_segment=2, max_segment=4, keep=13, recent=4, every=8)",
    "loud(window=4, keep=10, every=4)", "mass(window=4, share=0.7, every=6)",
    "pool(snapkv(window=4, kernel=3), keep=11, recent=4, every=7)",
]  # fmt: skip
FURTHER = [
    "rpc(window=6, kernel=3, keep=12, recent=3, every=13, prefill=False)", "r_kv(window=7, kernel=3, keep=13, every=5)",
    "dated(keep=13, every=6)", "snapkv(window=5, kernel=3, keep=11, every=6)", "adakv(dated, keep=13, every=6)",
    "adakv(r_kv(window=3, group='max'), floor=0, keep=12, every=9)",
    "compilerkv(window=5, elastic=False, global_mean=False, keep=11, every=6)",
]  # fmt: skip
"""Whose layouts and windows others have, too."""
BEHIND = [
    "leaning(window=4, kernel=3, keep=12, every=9)", "snapkv(window=4, kernel=3, keep=10, every=9)",
    "adakv(snapkv(window=4, kernel=3), floor=0, keep=10, every=9)", "adakv(r_kv(window=3), floor=0, keep=12, every=9)",
    "adakv(loud(window=4), floor=0, keep=10, every=5)", "adakv(leaning(window=4, kernel=3), floor=0, keep=10, every=9)",
    "ams(tova, window=5, kernel=3, min_segment=2, max_segment=4, keep=13, recent=4, every=8)",
    "rpc(window=6, kernel=3, keep=12, recent=3, every=13)",
    "pool(snapkv(window=4, kernel=3), keep=11, recent=4, every=7)",
]  # fmt: skip
DRAFTED = [recipe for recipe in RECIPES if recipe.startswith(("adakv", "snapkv", "ams", "mass", "pool"))]
"""A recipe of each layout, and of each thing that is looked at."""
MORE_DRAFTED = [recipe for recipe in [*RECIPES[3:], *FURTHER] if recipe not in DRAFTED]
pytestmark = pytest.mark.filterwarnings("ignore:compilerkv has no tables")
PROMPTS, TOKENS = ((23, 9, 40), 20) if FULL else ((23, 40), 14)
BLOCKS = 200


@pytest.mark.parametrize("recipe", [*RECIPES, *(pytest.param(one, marks=pytest.mark.full) for one in FURTHER)])
def test_requests_come_run_are_preempted_and_go(recipe: str) -> None:
    assert run(recipe, recipe) == 0


@pytest.mark.few(2)
@pytest.mark.spread
@pytest.mark.parametrize("drafts", [1, 3, 2 * BLOCK + 1])
@pytest.mark.parametrize("recipe", [*DRAFTED, *(pytest.param(one, marks=pytest.mark.full) for one in MORE_DRAFTED)])
def test_drafts_that_are_taken_back_are_nowhere(recipe: str, drafts: int) -> None:
    assert run(recipe, f"{recipe} {drafts}", drafts) > 0


def run(recipe: str, seed: str, drafts: int = 0) -> int:
    """Run requests to their ends, and return how many drafts were taken back."""
    draw, engine, taken_back = random.Random(seed), Engine(recipe, BLOCKS, drafts), 0
    schedule, running = engine.groups[0].schedule, {}  # type: ignore[var-annotated]
    events = 0
    for step in range(56):
        if step % 7 == 0 and step // 7 < len(PROMPTS):
            running[step // 7] = Request(step // 7, PROMPTS[step // 7])
        if not running:
            break  # all have come and gone
        order = list(running)
        draw.shuffle(order)
        if len(order) > 1 and draw.random() < 0.1:
            order.pop()
        new = {number: tokens(running[number], draw, schedule, drafts) for number in order}
        after_prompt = [number for number in order if is_drafted(running[number], new[number])]
        wrong = {number: draw.randrange(new[number]) for number in after_prompt}
        engine.step(new, running, wrong)
        taken_back += sum(wrong.values())
        for number, request in list(running.items()):
            if step in (13, 25) and number == 0:
                engine.leave(request)
                running[number] = request.restart()
                running[number].recomputed = request.length
            elif request.length >= request.prompt + TOKENS:
                events += len(request.events)
                engine.leave(running.pop(number))
    for request in running.values():
        engine.leave(request)
    assert events > 0
    assert sorted(engine.free) == list(range(1, BLOCKS))
    return taken_back


def is_drafted(request: Request, new: int) -> bool:
    """Whether the newest of so many new tokens are drafts."""
    return new > 1 and request.length >= max(request.prompt, request.recomputed)


def tokens(request: Request, draw: random.Random, schedule: EvictionSchedule, drafts: int) -> int:
    """A chunk of what is to be computed again or for the first time, or the next token and drafts."""
    if (left := max(request.prompt, request.recomputed) - request.length) > 0:
        return min(draw.randint(1, 11), left)
    most = schedule.draftable(request.prompt, request.length)
    room = drafts if most is None else min(drafts, max(most - request.length - 1, 0))
    return 1 + draw.randint(0, room)


@pytest.mark.parametrize("recipe", [BEHIND[0], *(pytest.param(one, marks=pytest.mark.full) for one in BEHIND[1:])])
def test_steps_that_end_in_the_window_of_the_next_event(recipe: str) -> None:
    """Entries behind an event of their own step: so it is when a preempted request is computed again."""
    engine, every = Engine(recipe, BLOCKS), Recipe.parse(recipe).schedule.every
    assert every is not None
    for number, behind in enumerate((every - 1, 2 * every - 2)):
        request = Request(number, 23)
        for chunk in (11, 12 + behind, *[1] * (every + 3)):
            engine.step({number: chunk}, {number: request})
        assert len(request.events) > 1
        engine.leave(request)


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", [11, 8, 13])
def test_blocks_are_held_as_long_as_something_is_in_them(keep: int) -> None:
    """Counted by hand: one request, compressed every 6 tokens from its 21st on."""
    engine, request = Engine(f"dated(keep={keep}, every=6)", 40), Request(0, 21)
    for length in range(21, 70):
        engine.step({0: 21 if length == 21 else 1}, {0: request})
        newest = (length - 1 - 21) // 6 * 6 + 21 if length > 21 else 0
        dropped = newest - keep if newest else 0
        assert 39 - len(engine.free) == -(-length // BLOCK) - dropped // BLOCK
        assert [block > 0 for block in request.blocks[0]].index(True) == dropped // BLOCK
