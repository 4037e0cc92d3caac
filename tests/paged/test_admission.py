"""A request is let in only where the pool will do for it and for all that run, whatever step comes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from keepset import Recipe
from keepset.paged.admission import Footprint, required_blocks
from keepset.paged.eviction_schedule import EvictionSchedule
from tests.tiers import examples

LAYERS = (0, 1)
RECIPES = [
    "knorm(keep={}, every={})",
    "adakv(knorm, keep={}, every={})",
    "knorm(keep={}, every={}, prefill=False)",
    "random(keep={}, every={}, protect_prompt=True)",
]


@dataclass
class Running:
    """A request as the scheduler knows it: which of its blocks it holds, and how many tokens were processed."""

    eviction_schedule: EvictionSchedule
    prompt: int
    length: int
    blocks: set[int]

    @classmethod
    def of(cls, eviction_schedule: EvictionSchedule, prompt: int, length: int) -> Running:
        held = range(eviction_schedule.freed(prompt, length), -(-length // eviction_schedule.block_size))
        return cls(eviction_schedule, prompt, length, set(held))

    def step(self) -> None:
        """Frees what the tokens so far have emptied, then takes blocks for the next tokens."""
        freed = self.eviction_schedule.freed(self.prompt, self.length)
        self.blocks = {block for block in self.blocks if block >= freed}
        self.length = self.prompt if self.length < self.prompt else self.length + 1
        self.blocks |= set(
            range(max(self.blocks, default=-1) + 1, -(-self.length // self.eviction_schedule.block_size))
        )


@st.composite
def situations(draw: st.DrawFn) -> tuple[EvictionSchedule, list[Footprint], int]:
    every, keep = draw(st.integers(1, 40)), draw(st.integers(1, 50))
    recipe = Recipe.parse(draw(st.sampled_from(RECIPES)).format(keep, every))
    eviction_schedule = EvictionSchedule(recipe, 0, LAYERS, 3, draw(st.sampled_from([1, 4, 16])))
    running = draw(
        st.lists(
            st.builds(Footprint, st.integers(1, 90), st.integers(0, 200)),
            max_size=6,
        )
    )
    return eviction_schedule, running, draw(st.integers(1, 120))


KNORM = EvictionSchedule(Recipe.parse("knorm(keep=16, every=16)"), 0, LAYERS, 3, 4)


@examples(300)
@given(situations())
@example((KNORM, [], 64))
@example((KNORM, [Footprint(20, 20)], 64))
def test_it_is_what_will_be_held_at_the_worst_moment(situation: tuple[EvictionSchedule, list[Footprint], int]) -> None:
    eviction_schedule, footprints, tokens = situation
    needed = -(-tokens // eviction_schedule.block_size)
    required = required_blocks(eviction_schedule, footprints, tokens, needed)
    requests = [Running.of(eviction_schedule, *footprint) for footprint in footprints]
    now = sum(len(request.blocks) for request in requests)
    requests.append(Running(eviction_schedule, tokens, 0, set()))
    every = eviction_schedule.recipe.schedule.every
    assert every is not None
    peak = 0
    for _ in range(every + 1):
        for request in requests:
            request.step()
        peak = max(peak, sum(len(request.blocks) for request in requests) - now)
    assert required == peak


def test_requests_out_of_step_need_less_than_their_worst_moments_together() -> None:
    apart = [Footprint(64, 64 + 4 * more) for more in range(4)]
    together = [Footprint(64, 64)] * 4
    assert required_blocks(KNORM, apart, 64, 16) <= required_blocks(KNORM, together, 64, 16)


def test_the_newcomers_prompt_counts_whole() -> None:
    assert required_blocks(KNORM, [], 400, 100) == 100
    assert required_blocks(KNORM, [], 400, 90) == 90  # ten of its blocks are cached
