"""A sweep goes on where it was stopped, and makes no cell twice."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from keepset.errors import KeepsetError
from keepset.lab.candidate import Candidate
from keepset.lab.record import FULL, Record
from keepset.lab.sweep.engine import Skipped
from keepset.lab.sweep.store import Store
from keepset.lab.sweep.sweep import SweepGrid, digest, run
from keepset.lab.tasks.task import Example, Question, Task
from tests.lab.sweep.sweeping import (
    CONFIGURATION,
    Counting,
    Scripted,
    cells,
    complete,
    expected,
    grid,
    in_order,
    portions_of,
    sweep,
)

RECIPES = [FULL, "knorm(keep=0.5)", "tova(keep=0.5)"]


def made(notes: Path) -> list[str]:
    """Which cells were made, whoever made them."""
    return [line.partition(" ")[2] for line in notes.read_text().splitlines()]


def names(records: Sequence[Record]) -> list[str]:
    return sorted(f"{each.task} {each.seed} {each.example} {each.recipe}" for each in records)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sweep.jsonl"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@dataclass
class Watched(Scripted):
    """Is told of each cell before it is given away, and may raise an error or give something else."""

    note: Callable[[Scripted, Any], Skipped | None] = lambda engine, record: None

    def cells(self, task: Task, example: Example, todo: Sequence[Candidate], seed: int) -> Iterator[Record | Skipped]:
        for record in super().cells(task, example, todo, seed):
            yield self.note(self, record) or record


def test_every_recipe_meets_every_example_once(path: Path, notes: Path) -> None:
    assert sweep(path, grid(), Scripted(notes)) == 36
    assert cells(path) == expected(grid())
    assert {each.recipe for each in cells(path)} == set(RECIPES)
    assert sweep(path, grid(), Scripted(notes)) == 0
    assert len(made(notes)) == 36


def test_recipes_tasks_and_seeds_can_be_added(path: Path, notes: Path) -> None:
    sweep(path, grid(["counting@8"], [0], "knorm"), Scripted(notes))
    more = grid(["counting@8", "counting@16"], [0, 1], "tova, knorm, random")
    sweep(path, more, Scripted(notes))
    assert sorted(made(notes)) == names(expected(more))
    assert in_order(cells(path)) == in_order(expected(more))


@pytest.mark.full
@pytest.mark.parametrize(("stop_at", "decodes"), [(8, False), (1, True), (2, True), (8, True)])
def test_a_killed_sweep_loses_only_what_was_under_way(path: Path, notes: Path, stop_at: int, decodes: bool) -> None:
    asked = grid(decodes=decodes)
    engine = Scripted(notes, stop_at=stop_at)
    killed = get_context("fork").Process(target=sweep, args=(path, asked, engine))
    killed.start()
    while killed.is_alive() and not notes.with_name("waiting").exists():
        time.sleep(0.01)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and len(cells(path)) == stop_at - 1
    assert decodes or cells(path) == expected(asked)[: stop_at - 1]
    sweep(path, asked, Scripted(notes))
    assert in_order(cells(path)) == in_order(expected(asked))
    assert sorted(made(notes)) == names(expected(asked))


def test_of_tasks_that_decode_a_recipe_comes_to_all_examples_before_the_next(path: Path, notes: Path) -> None:
    asked = grid(decodes=True)
    assert sweep(path, asked, Scripted(notes)) == 36
    assert in_order(cells(path)) == in_order(expected(asked))
    parts = [line.split(" ", 3) for line in made(notes)]
    assert list(dict.fromkeys((task, recipe) for task, _, _, recipe in parts)) == [
        (name, recipe) for name in ("counting@8", "counting@16") for recipe in RECIPES
    ]
    # Side by side, seeds too: of two examples the second is done first.
    assert [seed + example for _, seed, example, _ in parts[:6]] == ["01", "00", "10", "02", "12", "11"]


def test_where_memory_is_not_enough_the_next_run_tries_again(path: Path, notes: Path) -> None:
    skipped = Skipped("counting@8", RECIPES[1], "memory was not enough")

    def note(engine: Scripted, record: Record) -> Skipped | None:
        return skipped if record.example == "1" and record.recipe == RECIPES[1] else None

    asked = grid(["counting@8"], [0])
    with Store.begin(path, "model", CONFIGURATION) as store:
        assert complete(store, asked, Watched(notes, note=note)) == [skipped]
        assert len(store.done()) == 8 and not asked.is_done(store)
        assert complete(store, asked, Scripted(notes)) == []
        assert asked.is_done(store)
    assert in_order(cells(path)) == in_order(expected(asked))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError(), RuntimeError("a bug")])
def test_what_ends_a_sweep_leaves_its_cells(path: Path, notes: Path, error: BaseException) -> None:
    def note(engine: Scripted, record: Record) -> None:
        if engine.made == 6:
            raise error

    with pytest.raises(type(error)):
        sweep(path, grid(), Watched(notes, note=note))
    assert cells(path) == expected(grid())[:5]


def test_is_done_when_every_cell_is_there(path: Path, notes: Path) -> None:
    asked = grid()
    with Store.begin(path, "model", CONFIGURATION) as store:
        assert not asked.is_done(store)
        portions = portions_of(asked, store)
        run(store, portions[1:], Scripted(notes), lambda: None)
        assert not asked.is_done(store)
        run(store, portions[:1], Scripted(notes), lambda: None)
        assert asked.is_done(store)
        assert not grid(seeds=[0, 1, 2]).is_done(store)
        assert not grid(recipes="random").is_done(store)


def test_examples_that_changed_or_come_twice_are_refused(path: Path, notes: Path) -> None:
    class Other(Counting):
        ids: Sequence[str] = ("0",)

        def examples(self, tokenizer: Any, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
            return [Example(each, "It is 1.", (Question(" What?", 1),)) for each in self.ids]

    asked, other = grid(["counting@8"]), Other()
    sweep(path, asked, Scripted(notes))
    with pytest.raises(KeepsetError, match=r"counting@8.s examples with seed 0 differ from those in"):
        sweep(path, SweepGrid([other], [0], asked.candidates, 3), Scripted(notes))
    other.ids = ("0", "1", "0")
    with pytest.raises(KeepsetError, match="counting@8 has several examples of one id"):
        sweep(path, SweepGrid([other], [0], asked.candidates, 3), Scripted(notes))


def test_a_sample_is_of_the_seed_in_the_order_of_the_data_and_larger_ones_hold_smaller(path: Path) -> None:
    def drawn(sample: int | float | None, name: str = "many", seeds: Sequence[int] = (0,)) -> list[int]:
        asked = SweepGrid([Counting(name, most=40)], seeds, {name: []}, None, sample)
        with Store.begin(path.with_name(uuid4().hex), "model", {}) as store:
            return [int(example.id) for portion in portions_of(asked, store) for _, example in portion.examples]

    ten = drawn(10)
    assert ten == sorted(ten) == drawn(0.25) and len(set(ten)) == 10 and ten != list(range(10))
    assert set(drawn(0.1)) == set(drawn(4)) < set(ten) < set(drawn(0.9))
    assert drawn(None) == drawn(1.0) == drawn(99) == list(range(40))
    assert drawn(10, name="others") != ten and drawn(10, seeds=(1,)) != ten and len(drawn(0.001)) == 1


def test_a_digest_is_of_everything_that_is_asked() -> None:
    task, verbatim, question = Counting(), Counting(), Question(" What?", 1)
    verbatim.chat = False
    one = Example("0", "It is 1.", (question,), {"depth": 0.5})
    changed = ({"text": " What? "}, {"target": 2}, {"prefix": "It"}, {"choices": ("1",)}, {"target": object()})
    asked = [*((replace(question, **change),) for change in changed), (question, Question(" Who?", 1))]
    changes = [{"id": "1"}, {"context": "It is 2."}, {"facts": {"depth": 0.6}}, *({"questions": q} for q in asked)]
    others = [replace(one, **change) for change in changes]
    digests = [*(digest(task, [each]) for each in [one, *others]), digest(task, [one, one]), digest(verbatim, [one])]
    assert len(set(digests)) == len(digests)
    assert digest(Counting("another"), [one]) == digests[0]
    another = replace(one, questions=(replace(question, target=object()),))
    assert digest(task, [another]) == digest(task, others[-2:-1])  # whatever object() it is
