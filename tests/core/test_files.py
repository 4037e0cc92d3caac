"""Files of tensors: what is written is read again as safetensors reads it, and whatever else is one sentence."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from torch import Tensor

from keepset import KeepsetError
from keepset.core import statistics, tables
from keepset.core.files import TensorFile, opened, quoted
from keepset.core.statistics import Statistics
from keepset.lab.report import page
from tests.core.test_tables import PROVENANCE, TENSORS, random_tables
from tests.methods.naive import Shape, random_statistics

FILE = TensorFile("x", 1, foreign="foreign.", other="other {found}.", damaged="damaged {path}.")
MODEL: dict[str, Any] = {"model": {"name": "some", "layers": [1, 4]}, "seed": 3}


def some_statistics(*layers: int) -> Statistics:
    layers = layers or (1, 4)
    return Statistics(random_statistics(Shape((5,), 2, 3, 6, 4), layers).layers, {**MODEL, "model": {"layers": layers}})


@dataclass(frozen=True)
class Kind:
    """A kind of file, with two contents, and what its sentences say."""

    save: Callable[[Any, Path], None]
    load: Callable[[str], Any]
    one: Callable[[], Any]
    other: Callable[[], Any]
    metadata: str
    foreign: str
    damaged: str
    version: str
    absent: str

    def __str__(self) -> str:
        return self.metadata


KINDS = [
    Kind(
        *(statistics.save, statistics.load, some_statistics, lambda: some_statistics(2), "keepset_statistics"),
        foreign="is no file of keepset calibrate",
        damaged="is damaged: run keepset calibrate again",
        version="has format 7 of statistics, and this keepset reads format 5",
        absent="There is no file 'absent' with statistics",
    ),
    Kind(
        *(tables.save, tables.load, random_tables, lambda: random_tables(layers=5), "keepset_tables"),
        foreign="is no file of CompilerKV's tables",
        damaged="is damaged: compile its tables again",
        version="has format 7 of tables, and this keepset reads format 1",
        absent="There is no file 'absent' with tables",
    ),
]
STATISTICS, TABLES = KINDS
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def written(kind: Kind, folder: Path) -> Path:
    kind.save(kind.one(), folder / "file")
    return folder / "file"


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}, dict(file.metadata())


def refusal(kind: Kind, file: object) -> str:
    with pytest.raises(KeepsetError) as caught:
        kind.load(str(file))
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    return str(caught.value)


def check_read(read: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


# --- any file


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to a pipe", "loop"])
def test_nothing_but_a_file_is_replaced(kind: str, tmp_path: Path) -> None:
    path, pipe = tmp_path / "place", tmp_path / "pipe"
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/null"),
        "loop": lambda: path.symlink_to(path),
        "link to a pipe": lambda: (os.mkfifo(pipe), path.symlink_to(pipe)),
    }
    make[kind]()
    before = os.lstat(path)
    for write in (lambda: page.write(path, "page"), lambda: FILE.write(path, {"a": torch.ones(2)}, {"format": 1})):
        with pytest.raises(KeepsetError, match="cannot be written"):
            write()
    assert os.lstat(path).st_ino == before.st_ino and len(list(tmp_path.iterdir())) <= 2


@pytest.mark.parametrize("name", ["n" * 5000, "a\0b", "n" * 300])
def test_a_name_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(KeepsetError, match="cannot be written") as caught:
        page.write(tmp_path / name, "page")
    assert len(str(caught.value)) < 400 and len(quoted(name)) < 250
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next write of its name; what another process is writing, and other names, stay."""
    path, longest, tensors = tmp_path / "place", tmp_path / ("n" * 255), {"a": torch.ones(2)}
    for written in (path, path, longest):
        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
            killed.setattr(Path, "unlink", Mock())  # which a process that is gone never comes to
            FILE.write(written, tensors, {"format": 1})
    left = sorted(tmp_path.iterdir())
    assert len(left) == 3 and all(file.name.endswith(".unfinished") for file in left)
    FILE.write(path, tensors, {"format": 1})
    assert {*tmp_path.iterdir()} == {path, *left}
    for file in left[1:]:
        os.utime(file, (0, time.time() - 25 * 3600))
    FILE.write(path, tensors, {"format": 1})
    FILE.write(longest, tensors, {"format": 1})
    assert {*tmp_path.iterdir()} == {path, longest, left[0]}


def test_tensors_are_what_safetensors_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    types = ["float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "uint8"]
    tensors = {name: (torch.randn(3, 5) * 50).to(getattr(torch, name)) for name in types}
    tensors |= {"truth": torch.rand(7) > 0.5, "none": torch.ones(0, 4), "single": torch.tensor(3)}
    tensors |= {"row": torch.ones(1, 1, 9)}
    safetensors.torch.save_file(tensors, tmp_path / "file", {"said": "something"})
    with opened(tmp_path / "file") as file:
        assert file.metadata == {"said": "something"}
        read = {name: file[name] for name in file.layout}
    check_read(read, tensors)
    check_read(read, safetensors.torch.load_file(tmp_path / "file"))


def test_what_was_read_stays_as_it_was(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(100_000), "b": torch.ones(100_000)}, tmp_path / "file")
    with opened(tmp_path / "file") as file:
        first = file["a"]
        os.truncate(tmp_path / "file", 1000)  # a mapped file would end the process here
        assert first.sum() == 100_000
        with pytest.raises(ValueError, match="ends early"):
            file["b"]


# --- statistics and tables


@every_kind
def test_the_same_contents_make_the_same_bytes_and_are_read_once(kind: Kind, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    kind.save(kind.one(), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again", "file"]
    first = kind.load(str(path))
    assert kind.load(str(path)) is first
    kind.save(kind.other(), path)
    assert kind.load(str(path)).provenance != first.provenance
    with pytest.raises(KeepsetError, match="cannot be written"):
        kind.save(kind.one(), tmp_path / "absent" / "file")


@every_kind
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_is_interrupted_leaves_the_old_file(
    kind: Kind, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(tensors: Any, name: Path, metadata: Any) -> None:
        name.write_bytes(b"half")
        raise error

    path = written(kind, tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", half)
    said = "cannot be written .No space left on device.: name another file" if isinstance(error, OSError) else None
    with pytest.raises(KeepsetError if said else KeyboardInterrupt, match=said):
        kind.save(kind.other(), path)
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["file"]


@every_kind
def test_what_is_no_such_file(kind: Kind, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    tensors, _ = contents(path)
    assert kind.absent in refusal(kind, "absent") and "There is no file" in refusal(kind, "a\0b")
    assert kind.foreign in refusal(kind, tmp_path)
    for content in (b"", b"words", b"\xff" * 100, path.read_bytes()[:-9], path.read_bytes()[:50]):
        path.write_bytes(content)
        assert kind.foreign in refusal(kind, path)
    for metadata in (None, {"keepset": '{"format": 1}'}):
        safetensors.torch.save_file({"weight": torch.zeros(3)}, path, metadata)
        assert kind.foreign in refusal(kind, path)
    safetensors.torch.save_file(tensors, path, {kind.metadata: '{"format": 7}'})
    assert kind.version in refusal(kind, path)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        *((kind, said) for kind in KINDS for said in ("", "{", "[]", "{}", "[" * 9999)),
        *((STATISTICS, said) for said in ('{"format": 5}', '{"format": 5, "model": {"layers": []}}')),
        *((TABLES, said) for said in ('{"format": 1}', '{"format": 1, "layers": 3, "query_heads": 5}')),
    ],
    ids=range(14),
)
def test_damaged_provenance(kind: Kind, said: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    safetensors.torch.save_file(contents(path)[0], path, {kind.metadata: said})
    assert kind.damaged in refusal(kind, path)


def gates(*numbers: float, **options: Any) -> dict[str, Tensor]:
    return {"layers.1.retrieval": torch.zeros(2), "layers.4.retrieval": torch.tensor(numbers, **options)}


def networks(**damage: Tensor) -> dict[str, Tensor]:
    predictors = random_statistics(Shape((5,), 2, 3, 6, 4), (1, 4)).predictors
    parts = {
        f"layers.{index}.{name}": part
        for index, predictor in predictors.items()
        for name, part in predictor._asdict().items()
    }
    return parts | {f"layers.4.{name}": part for name, part in damage.items()}


NAN = torch.nan
DAMAGES: list[tuple[Kind, dict[str, Tensor | None]]] = [
    (STATISTICS, {"layers.1.mean": torch.zeros(6, 5)}),
    (STATISTICS, {"layers.1.mean": torch.zeros(5, 6)}),
    (STATISTICS, {"layers.4.gain": torch.full((6,), NAN)}),
    (STATISTICS, {"layers.4.gain": torch.ones(6, dtype=torch.float64)}),
    *((STATISTICS, {"layers.4.partner": torch.tensor([3, 4, 5, 0, 1, last])}) for last in (1, 99)),
    (STATISTICS, {"layers.4.partner": torch.tensor([-3, -2, -1, 0, 1, 2])}),
    (STATISTICS, {"layers.1.retrieval": torch.zeros(2)}),  # of one layer of two
    *((STATISTICS, gates(*other)) for other in ((0, 0, 0.0), (0.5, 1.5), (0.5, NAN))),
    (STATISTICS, gates(0, 0, dtype=torch.float64)),
    (STATISTICS, {"layers.1.linear": torch.zeros(2, 10)}),  # of one layer of two, and without its hidden layer
    (STATISTICS, networks(linear=torch.zeros(2, 2, 11))),
    (STATISTICS, networks(output_bias=torch.zeros(3, 2))),
    (STATISTICS, networks(hidden=torch.full((2, 6, 12), NAN))),
    (STATISTICS, networks(output=torch.zeros(2, 2, 5))),
    *((STATISTICS, networks(age=torch.zeros(shape))) for shape in ((3, 4, 4), (2, 0, 4), (2, 4), (2,))),
    (TABLES, {"weights": torch.ones(2, 3, 5)}),
    (TABLES, {"weights": torch.ones(1, 3, 4)}),
    (TABLES, {"weights": torch.ones(2, 3, 4, dtype=torch.float16)}),
    (TABLES, {"weights": torch.full((2, 3, 4), NAN)}),
    (TABLES, {"gate": torch.ones(2, 3, 4, 20)}),
    *((TABLES, {"gate": torch.full((2, 3, 20, 4), value)}) for value in (1.5, -0.1)),
    *((TABLES, {"entropy_edges": edges}) for edges in (torch.ones(19), torch.arange(20.0))),
    *((TABLES, {"perplexity_edges": torch.tensor(edges)}) for edges in ([1.0, 2.0, torch.inf], [3.0, 2.0, 1.0])),
    *((TABLES, {"budgets": torch.tensor(budgets)}) for budgets in ([64, 8], [0, 8], [8.0, 64.0])),
    (TABLES, {"budgets": torch.tensor([], dtype=torch.long)}),
    (TABLES, {"counts": torch.full((20, 4), -1)}),
    (TABLES, {"counts": torch.zeros(4, 20, dtype=torch.long)}),
    # Of these there is none.
    *((kind, {name: None}) for kind, *names in ((STATISTICS, "layers.4.norm"), (TABLES, *TENSORS)) for name in names),
]


@pytest.mark.parametrize(("kind", "damage"), DAMAGES, ids=range(len(DAMAGES)))
def test_damaged_tensors(kind: Kind, damage: dict[str, Tensor | None], tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    tensors, metadata = contents(path)
    assert damage.keys() <= tensors.keys() or any(part in str(damage) for part in ("retrieval", "linear"))
    left = {name: tensor for name, tensor in {**tensors, **damage}.items() if tensor is not None}
    safetensors.torch.save_file(left, path, metadata)
    assert kind.damaged in refusal(kind, path)


def test_statistics_are_read_as_they_were_written(tmp_path: Path) -> None:
    whole_statistics = random_statistics(Shape((5,), 2, 3, 6, 4), (1, 4))
    for retrieval, predictors in (
        ({}, {}),
        (whole_statistics.retrieval, {}),
        (whole_statistics.retrieval, whole_statistics.predictors),
    ):
        whole = Statistics(whole_statistics.layers, MODEL, retrieval=retrieval, predictors=predictors)
        statistics.save(whole, tmp_path / "file")
        read = statistics.load(str(tmp_path / "file"))
        assert list(read.layers) == [1, 4] and read.provenance == {"format": 5, **MODEL}
        said = {name: json.loads(text) for name, text in contents(tmp_path / "file")[1].items()}
        assert said == {"keepset_statistics": {"format": 5, **MODEL}}
        for index, layer in read.layers.items():
            check_read(vars(layer), vars(whole_statistics.layers[index]))
        check_read(read.retrieval, retrieval)
        assert read.predictors.keys() == predictors.keys()
        for index, predictor in predictors.items():
            check_read(read.predictors[index]._asdict(), predictor._asdict())
    assert torch.equal(read.gates(), torch.stack([whole_statistics.retrieval[index] for index in (1, 4)]))


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = written(TABLES, tmp_path)
    read, original = tables.load(str(path)), random_tables()
    check_read(*({name: getattr(table, name) for name in TENSORS} for table in (read, original)))
    provenance = {**PROVENANCE, "format": 1, "layers": 3, "query_heads": 4}
    assert read.provenance == provenance and read.name == str(path)
    # More than is known does no harm.
    metadata = {"keepset_tables": json.dumps({**provenance, "alpha": 0.5})}
    safetensors.torch.save_file({**contents(path)[0], "rewards": torch.zeros(2)}, path, metadata)
    assert tables.load(str(path)).provenance["alpha"] == 0.5


def test_without_a_file_statistics_are_those_offered_for_the_model(tmp_path: Path) -> None:
    path = written(STATISTICS, tmp_path)
    statistics.offer("offered", lambda: path)
    assert statistics.load("", "offered") is statistics.load(str(path))
    for model, said in (("other", "other"), ("", "MODEL")):
        with pytest.raises(KeepsetError, match=f"`keepset calibrate --model {said} --out stats.safetensors`"):
            statistics.load("", model)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_that_the_umask_says(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        FILE.write(tmp_path / "file", {"a": torch.zeros(2)}, {})
        (tmp_path / "other").write_text("")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in sorted(tmp_path.iterdir())]
    assert modes == [0o666 & ~mask] * 2
