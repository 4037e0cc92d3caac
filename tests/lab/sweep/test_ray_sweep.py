"""A sweep on two workers of a Ray that runs on this machine: the same cells, and what becomes of workers that die."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keepset import models
from keepset.core.budget import Budget
from keepset.errors import KeepsetError
from keepset.lab.candidate import Candidate, candidates
from keepset.lab.embedded import Source
from keepset.lab.record import Record
from keepset.lab.sweep import ray_sweep, sweep
from keepset.lab.sweep.engine import Engine, Skipped
from keepset.lab.sweep.prompts import Asking
from keepset.lab.sweep.ray_sweep import EngineSource
from keepset.lab.sweep.store import Store
from keepset.lab.sweep.sweep import SweepGrid
from keepset.lab.tasks.find import find
from keepset.lab.tasks.task import Example, Task, TaskSettings
from keepset.recipe import Recipe
from tests.lab.cli.conftest import tiny_model
from tests.lab.sweep.sweeping import CONFIGURATION, Scripted, cells, expected, grid, in_order, portions_of

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install ".[ray]"')
pytestmark = pytest.mark.full
MEGABYTE = 10**6


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    own = {"worker_niceness": 0}  # else its processes get no time beside other tests
    ray.init(address="local", num_cpus=2, object_store_memory=100 * MEGABYTE, _system_config=own, **options)
    yield
    ray.shutdown()


@dataclass(frozen=True)
class Makes:
    """Makes a stub that notes its cells, in the first `together` processes at the same time."""

    notes: Path
    together: int = 1
    ends_at: str | None = None
    error: bool = False

    def __call__(self) -> Any:
        return Ends(self.notes, together=self.together, asked=self)


@dataclass
class Ends(Scripted):
    """After a cell of an example: as often as there are words in a file, its process dies; or it is an error."""

    asked: Makes | None = None

    def cells(self, task: Task, example: Example, todo: Sequence[Candidate], seed: int) -> Iterator[Record | Skipped]:
        assert self.asked is not None
        for number, made in enumerate(super().cells(task, example, todo, seed)):
            if example.id == self.asked.ends_at and number == 1:
                if self.asked.error:
                    raise KeepsetError("It cannot be had.")
                lives = self.notes.with_name("lives")
                if left := lives.read_text().split():
                    lives.write_text(" ".join(left[1:]))
                    os._exit(1)
            yield made


def run(path: Path, make: Any, asked: SweepGrid, tokenizer: Any = None) -> int:
    """Make the cells that are missing, of which none may be lost; how many were made."""
    made: list[None] = []
    with Store.begin(path, "model", CONFIGURATION) as store:
        portions = sweep.unfinished(asked.portions(store, tokenizer), store.done())
        assert ray_sweep.run(store, portions, make, MEGABYTE, lambda: made.append(None)) == []
    return len(made)


SHARED = grid()
DECODED = grid(["counting@8"], [0, 1, 2], decodes=True, limit=None)


@pytest.mark.parametrize("asked", [SHARED, DECODED], ids=["shared", "decoded"])
def test_two_workers_make_every_cell_once(tmp_path: Path, asked: SweepGrid) -> None:
    path, make = tmp_path / "sweep.jsonl", Makes(tmp_path / "notes", together=2)
    assert run(path, make, asked) == 36
    assert in_order(cells(path)) == in_order(expected(asked))
    notes = [line.split(" ", 1) for line in make.notes.read_text().splitlines()]
    assert len(notes) == len({what for _, what in notes}) == 36 and len({who for who, _ in notes}) == 2
    if asked is SHARED:
        assert run(path, make, grid(recipes="knorm, tova, random")) == 12
        assert len(make.notes.read_text().splitlines()) == 48


def test_what_a_dead_worker_left_is_made_again(tmp_path: Path) -> None:
    """Of a parcel too of which some cells were given away."""
    asked = grid(["counting@8"], [0])
    (tmp_path / "lives").write_text("one")
    assert run(tmp_path / "sweep.jsonl", Makes(tmp_path / "notes", ends_at="1"), asked) == len(expected(asked))
    assert in_order(cells(tmp_path / "sweep.jsonl")) == in_order(expected(asked))
    assert (tmp_path / "lives").read_text() == ""


def test_a_worker_has_several_examples_and_deaths_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.begin(tmp_path / "parcels.jsonl", "model", CONFIGURATION) as store:
        parcels = list(ray_sweep._parcels(portions_of(DECODED, store)))
    assert [len(parcel.examples) for parcel in parcels] == [8, 4] * 3
    assert [[each.text for each in parcel.candidates] for parcel in parcels] == [
        [candidate.text] for candidate in DECODED.candidates["counting@8"] for _ in range(2)
    ]

    def get(reference: Any) -> Any:
        raise reference

    monkeypatch.setattr(ray, "get", get)
    stream: Any = iter([ray.exceptions.WorkerCrashedError()])
    left_out = Skipped("needle@256", "the rest of an example", "its worker is gone (WorkerCrashedError)")
    assert ray_sweep._next(stream, "needle@256") == left_out
    assert ray_sweep._next(stream, "needle@256") is None


def test_an_error_that_is_ours_ends_the_sweep_in_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(KeepsetError) as error:
        run(tmp_path / "sweep.jsonl", Makes(tmp_path / "notes", ends_at="0", error=True), grid(["counting@8"], [0]))
    assert str(error.value) == "It cannot be had."
    assert len(cells(tmp_path / "sweep.jsonl")) >= 1


def test_a_real_model_gives_the_same_cells_as_without_ray(embedded: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "tiny")
    tiny_model().save_pretrained(folder)
    embedded[1].save_pretrained(folder)
    model, tokenizer = models.load(folder)
    todo = candidates(Recipe.parse_list("knorm, snapkv(window=8)"), [Budget(0.5)])
    asked = SweepGrid(find(["needle"], TaskSettings(lengths=(256,))), [0], {"needle@256": todo}, 3)
    asking = Asking("agnostic")
    assert run(tmp_path / "ray.jsonl", EngineSource(Source(folder), asking), asked, tokenizer) == 9
    with Store.begin(tmp_path / "local.jsonl", "model", CONFIGURATION) as store:
        portions = asked.portions(store, tokenizer)
        assert sweep.run(store, portions, Engine(model, tokenizer, asking), lambda: None) == []
    local, on_ray = cells(tmp_path / "local.jsonl"), cells(tmp_path / "ray.jsonl")
    assert len(local) == 9 and not any(cell.error for cell in local)
    for here, there in zip(local, on_ray, strict=True):
        assert (here.example, here.recipe, here.scores) == (there.example, there.recipe, there.scores)
        assert here.replies == there.replies
        assert all(here.figures[name] == there.figures[name] for name in ("keep", "kv_bytes", "tokens"))
