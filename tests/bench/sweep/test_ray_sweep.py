"""A sweep on two workers of a Ray that runs on this machine: the same cells, and what becomes of workers that die."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keepset import models
from keepset.bench.candidate import Candidate, candidates
from keepset.bench.record import Record
from keepset.bench.sweep import ray_sweep, sweep
from keepset.bench.sweep.ray_sweep import RunnerSource
from keepset.bench.sweep.runner import Runner
from keepset.bench.sweep.store import Store
from keepset.bench.sweep.sweep import Skipped, SweepGrid
from keepset.bench.tasks.find import find
from keepset.bench.tasks.task import Example, Task, TaskSettings
from keepset.errors import KeepsetError
from keepset.recipe import Recipe
from tests.bench.sweep.sweeping import CONFIGURATION, Scripted, cell, grid
from tests.cli.conftest import tiny_model

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "keepset[ray]"')
pytestmark = pytest.mark.full
MEGABYTE = 10**6


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, object_store_memory=100 * MEGABYTE, **options)
    yield
    ray.shutdown()


@dataclass(frozen=True)
class Makes:
    """Makes a stub that notes its cells, in the first `together` processes at the same time."""

    notes: Path
    together: int = 1
    ends_at: str | None = None
    ends_after: int = 1
    error: bool = False

    def __call__(self) -> Any:
        return Ends(
            self.notes, together=self.together, ends_at=self.ends_at, ends_after=self.ends_after, error=self.error
        )


@dataclass
class Ends(Scripted):
    """After a cell of an example: as often as there are words in a file, its process dies; or it is an error."""

    ends_at: str | None = None
    ends_after: int = 1
    error: bool = False

    def run(self, task: Task, example: Example, todo: Sequence[Candidate], seed: int) -> Iterator[Record]:
        for number, made in enumerate(super().run(task, example, todo, seed)):
            if example.id == self.ends_at and number == self.ends_after:
                if self.error:
                    raise KeepsetError("It cannot be had.")
                lives = self.notes.with_name("lives")
                if left := lives.read_text().split():
                    lives.write_text(" ".join(left[1:]))
                    os._exit(1)
            yield made


def run(path: Path, make: Any, asked: SweepGrid, tokenizer: Any = None) -> tuple[list[Skipped], int]:
    """Make the cells that are missing; what was lost, and how many cells were made."""
    made: list[None] = []
    with Store.begin(path, "model", CONFIGURATION) as store:
        groups = sweep.unfinished(asked.groups(store, tokenizer), store.done())
        return ray_sweep.run(store, groups, make, MEGABYTE, lambda: made.append(None)), len(made)


def cells(path: Path) -> list[Record]:
    with Store.open(path) as store:
        return store.cells()


def expected(asked: SweepGrid) -> list[str]:
    return sorted(
        str(cell(task, example, candidate, seed))
        for task in asked.tasks
        for seed in asked.seeds
        for example in task.examples(None, limit=asked.limit, seed=seed)  # type: ignore[arg-type]
        for candidate in asked.candidates[task.name]
    )


def test_two_workers_make_every_cell_once(tmp_path: Path) -> None:
    path, make = tmp_path / "sweep.sqlite", Makes(tmp_path / "notes", together=2)
    lost, made = run(path, make, grid())
    assert lost == [] and made == 36
    assert sorted(map(str, cells(path))) == expected(grid())
    notes = [line.split(" ", 1) for line in make.notes.read_text().splitlines()]
    assert len(notes) == len({what for _, what in notes}) == 36 and len({who for who, _ in notes}) == 2
    _, made = run(path, make, grid(recipes="knorm, tova, random"))
    assert made == 12 and len(make.notes.read_text().splitlines()) == 48


def test_what_a_dead_worker_left_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "lives").write_text("one")
    asked = grid(["counting@8"], [0])
    lost, made = run(tmp_path / "sweep.sqlite", Makes(tmp_path / "notes", ends_at="1"), asked)
    assert lost == [] and made == 9
    assert sorted(map(str, cells(tmp_path / "sweep.sqlite"))) == expected(asked)
    assert (tmp_path / "lives").read_text() == ""


def test_of_tasks_that_decode_a_worker_is_given_several_examples_under_one_recipe(tmp_path: Path) -> None:
    asked = grid(["counting@8"], [0, 1, 2], decodes=True, limit=None)
    with Store.begin(tmp_path / "parcels.sqlite", "model", CONFIGURATION) as store:
        groups = asked.groups(store, None)  # type: ignore[arg-type]
        parcels = list(ray_sweep._parcels(groups))
    assert [len(parcel) for parcel in parcels] == [8, 4] * 3
    assert [{each.text for group in parcel for each in group.candidates} for parcel in parcels] == [
        {candidate.text} for candidate in asked.candidates["counting@8"] for _ in range(2)
    ]
    path, make = tmp_path / "sweep.sqlite", Makes(tmp_path / "notes", together=2)
    lost, made = run(path, make, asked)
    assert lost == [] and made == 36
    assert sorted(map(str, cells(path))) == expected(asked)
    notes = [line.split(" ", 1) for line in make.notes.read_text().splitlines()]
    assert len(notes) == len({what for _, what in notes}) == 36 and len({who for who, _ in notes}) == 2


def test_of_tasks_that_decode_what_a_dead_worker_left_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "lives").write_text("one")
    asked = grid(["counting@8"], [0, 1, 2], decodes=True, limit=None)
    lost, made = run(tmp_path / "sweep.sqlite", Makes(tmp_path / "notes", ends_at="2", ends_after=0), asked)
    assert lost == [] and made == 36
    assert sorted(map(str, cells(tmp_path / "sweep.sqlite"))) == expected(asked)
    assert (tmp_path / "lives").read_text() == ""


def test_what_workers_die_of_again_and_again_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Any) -> Any:
        raise reference

    monkeypatch.setattr(ray, "get", get)
    stream = iter([ray.exceptions.WorkerCrashedError()])
    left_out = Skipped("needle@256", "the rest of an example", "its worker is gone (WorkerCrashedError)")
    assert ray_sweep._next(stream, "needle@256") == left_out  # type: ignore[arg-type]
    assert ray_sweep._next(stream, "needle@256") is None  # type: ignore[arg-type]


def test_an_error_that_is_ours_ends_the_sweep_in_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(KeepsetError) as error:
        run(tmp_path / "sweep.sqlite", Makes(tmp_path / "notes", ends_at="0", error=True), grid(["counting@8"], [0]))
    assert str(error.value) == "It cannot be had."
    assert len(cells(tmp_path / "sweep.sqlite")) >= 1


def test_a_real_model_gives_the_same_cells_as_without_ray(embedded: Any, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "tiny")
    embedded[1].save_pretrained(tmp_path / "tiny")
    tasks = find(["needle"], TaskSettings(lengths=(256,)))
    asked = SweepGrid(tasks, [0], {"needle@256": candidates(Recipe.parse_list("knorm, snapkv(window=8)"), [0.5])}, 3)
    asking = {"mode": "agnostic", "chat": True, "temperature": 0.0}
    model, tokenizer = models.load(str(tmp_path / "tiny"))
    lost, made = run(
        tmp_path / "ray.sqlite", RunnerSource(models.Source(str(tmp_path / "tiny")), **asking), asked, tokenizer
    )
    assert lost == [] and made == 9
    with Store.begin(tmp_path / "local.sqlite", "model", CONFIGURATION) as store:
        groups = asked.groups(store, tokenizer)
        assert sweep.run(store, groups, Runner(model, tokenizer, **asking), lambda: None) == []
    on_ray, local = (
        {(c.example, c.recipe): c for c in cells(tmp_path / name)} for name in ("ray.sqlite", "local.sqlite")
    )
    assert list(on_ray) == list(local) and len(local) == 9
    for key, here in local.items():
        assert here.error is None and on_ray[key].error is None
        assert (on_ray[key].scores, on_ray[key].replies) == (here.scores, here.replies)
        for name in ("keep", "kv_bytes", "tokens"):
            assert on_ray[key].figures[name] == here.figures[name]
