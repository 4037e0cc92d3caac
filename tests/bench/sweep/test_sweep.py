"""A sweep goes on where it was stopped, and makes no cell twice."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from keepset.bench.candidate import Candidate
from keepset.bench.record import FULL, Record
from keepset.bench.sweep import sweep as sweep_module
from keepset.bench.sweep.store import Store
from keepset.bench.sweep.sweep import Skipped, SweepGrid, run
from keepset.bench.tasks.task import Example, Question, Task
from keepset.errors import KeepsetError
from tests.bench.sweep.sweeping import CONFIGURATION, Counting, Scripted, cell, complete, grid, sweep

RECIPES = [FULL, "knorm(keep=0.5)", "tova(keep=0.5)"]


def cells(path: Path) -> list[Record]:
    with Store.open(path) as store:
        return store.cells()


def expected(asked: SweepGrid) -> list[Record]:
    """Every cell by itself, in the order in which one process comes to them."""
    return [
        cell(task, example, candidate, seed)
        for task in asked.tasks
        for seed in asked.seeds
        for example in task.examples(None, limit=asked.limit, seed=seed)
        for candidate in asked.candidates[task.name]
    ]


def notes_of(path: Path) -> list[str]:
    """Which cells were made, whoever made them."""
    return [line.partition(" ")[2] for line in path.read_text().splitlines()]


def start(path: Path, notes: Path, asked: SweepGrid | None = None, **options: int) -> ForkProcess:
    """A process of its own that sweeps."""
    process = get_context("fork").Process(target=sweep, args=(path, asked or grid(), Scripted(notes, **options)))
    process.start()
    return process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sweep.sqlite"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def test_every_recipe_meets_every_example(path: Path, notes: Path) -> None:
    assert sweep(path, grid(), Scripted(notes)) == 36
    assert cells(path) == expected(grid())
    assert len(cells(path)) == 36
    assert {each.recipe for each in cells(path)} == set(RECIPES)


def test_what_is_there_is_not_made_again(path: Path, notes: Path) -> None:
    sweep(path, grid(), Scripted(notes))
    assert sweep(path, grid(), Scripted(notes)) == 0
    assert len(notes_of(notes)) == 36


def test_recipes_tasks_and_seeds_can_be_added(path: Path, notes: Path) -> None:
    sweep(path, grid(["counting@8"], [0], "knorm"), Scripted(notes))
    more = grid(["counting@8", "counting@16"], [0, 1], "tova, knorm, random")
    sweep(path, more, Scripted(notes))
    assert Counter(notes_of(notes)) == Counter(
        f"{each.task} {each.seed} {each.example} {each.recipe}" for each in expected(more)
    )
    assert sorted(map(str, cells(path))) == sorted(map(str, expected(more)))


@pytest.mark.full
def test_a_killed_sweep_goes_on_and_ends_like_one_that_was_not(path: Path, notes: Path) -> None:
    killed = start(path, notes, stop_at=8)  # the second cell of the third group
    while killed.is_alive() and not notes.with_name("waiting").exists():
        time.sleep(0.01)
    killed.kill()
    killed.join()
    assert cells(path) == expected(grid())[:7]
    sweep(path, grid(), Scripted(notes))
    assert killed.exitcode == -signal.SIGKILL
    assert cells(path) == expected(grid())
    assert sorted(notes_of(notes)) == sorted(f"{c.task} {c.seed} {c.example} {c.recipe}" for c in expected(grid()))


def test_of_tasks_that_decode_a_recipe_comes_to_all_examples_before_the_next(path: Path, notes: Path) -> None:
    asked = grid(decodes=True)
    assert sweep(path, asked, Scripted(notes)) == 36
    assert sorted(map(str, cells(path))) == sorted(map(str, expected(asked)))
    made = [line.split(" ", 3) for line in notes_of(notes)]
    assert list(dict.fromkeys((task, recipe) for task, _, _, recipe in made)) == [
        (name, recipe) for name in ("counting@8", "counting@16") for recipe in RECIPES
    ]
    # Side by side, seeds too: of two examples the second is done first.
    assert [(seed, example) for _, seed, example, _ in made[:6]] == [
        *[("0", "1"), ("0", "0"), ("1", "0"), ("0", "2"), ("1", "2"), ("1", "1")],
    ]


@pytest.mark.full
@pytest.mark.parametrize("stop_at", [1, 2, 8])
def test_a_killed_sweep_of_tasks_that_decode_loses_only_what_was_under_way(
    path: Path, notes: Path, stop_at: int
) -> None:
    asked = grid(decodes=True)
    killed = start(path, notes, asked, stop_at=stop_at)
    while killed.is_alive() and not notes.with_name("waiting").exists():
        time.sleep(0.01)
    killed.kill()
    killed.join()
    assert len(cells(path)) == stop_at - 1
    sweep(path, asked, Scripted(notes))
    assert sorted(map(str, cells(path))) == sorted(map(str, expected(asked)))
    assert len(notes_of(notes)) == len(set(notes_of(notes))) == 36


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you...")],
)
def test_where_memory_is_not_enough_the_others_are_made_and_the_next_run_tries_again(
    path: Path, notes: Path, error: Exception
) -> None:
    class Large(Scripted):
        def run(self, task: Task, example: Example, todo: Sequence[Candidate], seed: int) -> Iterator[Record]:
            for made in super().run(task, example, todo, seed):
                if example.id == "1" and made.recipe == RECIPES[1]:
                    raise error
                yield made

    asked = grid(["counting@8"], [0])
    with Store.begin(path, "model", CONFIGURATION) as store:
        lost = complete(store, asked, Large(notes))
        assert lost == [Skipped("counting@8", RECIPES[1], "memory was not enough")]
        assert len(store.done()) == 8 and not asked.is_done(store)
        assert complete(store, asked, Scripted(notes)) == []
        assert asked.is_done(store)
    assert sorted(map(str, cells(path))) == sorted(map(str, expected(asked)))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError(), RuntimeError("a bug")])
def test_what_ends_a_sweep_leaves_its_cells(path: Path, notes: Path, error: BaseException) -> None:
    class Ends(Scripted):
        def run(self, task: Task, example: Example, todo: Sequence[Candidate], seed: int) -> Iterator[Record]:
            for made in super().run(task, example, todo, seed):
                yield made
                if self.made == 5:
                    raise error

    with pytest.raises(type(error)):
        sweep(path, grid(), Ends(notes))
    assert cells(path) == expected(grid())[:5]


def test_an_error_of_a_recipe_is_a_result(path: Path, notes: Path) -> None:
    asked = grid(["counting@8"], [0], "snapkv", keeps=[0.5, 8])  # fewer than its window
    sweep(path, asked, Scripted(notes))
    wrong = [each for each in cells(path) if each.error is not None]
    assert len(cells(path)) == 9 and len(wrong) == 3
    sweep(path, asked, Scripted(notes))
    assert len(notes_of(notes)) == 9


def test_is_done_when_every_cell_is_there(path: Path, notes: Path) -> None:
    asked = grid()
    with Store.begin(path, "model", CONFIGURATION) as store:
        assert not asked.is_done(store)
        groups = asked.groups(store, None)  # type: ignore[arg-type]
        run(store, groups[1:], Scripted(notes), lambda: None)
        assert not asked.is_done(store)
        run(store, groups[:1], Scripted(notes), lambda: None)
        assert asked.is_done(store)
        assert not grid(seeds=[0, 1, 2]).is_done(store)
        assert not grid(recipes="random").is_done(store)


def test_examples_that_changed_are_refused(path: Path, notes: Path) -> None:
    class Other(Counting):
        def examples(self, tokenizer: Any, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
            return [Example("0", "It is 1.", (Question(" What?", 1),))]

    sweep(path, grid(["counting@8"]), Scripted(notes))
    asked = grid(["counting@8"])
    with pytest.raises(KeepsetError, match=r"counting@8.s examples with seed 0 are not those that .* has cells of"):
        sweep(path, SweepGrid([Other()], [0], asked.candidates, 3), Scripted(notes))


def test_a_sample_is_of_the_seed_in_the_order_of_the_data_and_larger_ones_hold_smaller(path: Path) -> None:
    def drawn(sample: int | float | None, name: str = "many", seeds: Sequence[int] = (0,)) -> list[int]:
        asked = SweepGrid([Counting(name, most=40)], seeds, {name: []}, None, sample)
        with Store.begin(path.with_name(uuid4().hex), "model", {}) as store:
            return [int(group.example.id) for group in asked.groups(store, None)]  # type: ignore[arg-type]

    ten = drawn(10)
    assert ten == sorted(ten) == drawn(0.25) and len(set(ten)) == 10 and ten != list(range(10))
    assert set(drawn(0.1)) == set(drawn(4)) < set(ten) < set(drawn(0.9))
    assert drawn(None) == drawn(1.0) == drawn(99) == list(range(40))
    assert drawn(10, name="others") != ten and drawn(10, seeds=(1,)) != ten and len(drawn(0.001)) == 1


def test_ids_that_come_twice_are_refused(path: Path, notes: Path) -> None:
    class Twice(Counting):
        def examples(self, tokenizer: Any, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
            return [*super().examples(tokenizer), *super().examples(tokenizer)]

    with pytest.raises(KeepsetError, match="counting@8 has several examples of one id"):
        sweep(path, SweepGrid([Twice()], [0], grid().candidates, 3), Scripted(notes))


def test_a_digest_is_of_everything_that_is_asked() -> None:
    task = Counting()
    example = Example("0", "It is 1.", (Question(" What?", 1),), {"depth": 0.5})
    others = [
        Example("1", "It is 1.", (Question(" What?", 1),), {"depth": 0.5}),
        Example("0", "It is 2.", (Question(" What?", 1),), {"depth": 0.5}),
        Example("0", "It is 1.", (Question(" What? ", 1),), {"depth": 0.5}),
        Example("0", "It is 1.", (Question(" What?", 2),), {"depth": 0.5}),
        Example("0", "It is 1.", (Question(" What?", 1, "It"),), {"depth": 0.5}),
        Example("0", "It is 1.", (Question(" What?", 1, choices=("1",)),), {"depth": 0.5}),
        Example("0", "It is 1.", (Question(" What?", 1), Question(" Who?", 1)), {"depth": 0.5}),
        Example("0", "It is 1.", (Question(" What?", 1),), {"depth": 0.6}),
        Example("0", "It is 1.", (Question(" What?", object()),), {"depth": 0.5}),
    ]
    digests = [sweep_module.digest(task, [each]) for each in [example, *others]]
    digests.append(sweep_module.digest(task, [example, example]))
    verbatim = Counting()
    verbatim.chat = False
    digests.append(sweep_module.digest(verbatim, [example]))
    assert len(set(digests)) == len(digests)
    assert sweep_module.digest(Counting("another"), [example]) == digests[0]
    assert sweep_module.digest(task, [others[-1]]) == digests[-3]  # whatever object() it is
