"""Files of statistics: what is written is read again, and whatever else is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from keepset import KeepsetError
from keepset.core.statistics import FIELDS, RowStatistics, Statistics, load, offer, save
from tests.methods.naive import Shape, random_statistics

SHAPE = Shape((5,), 2, 3, 6, 4)
PROVENANCE: dict[str, Any] = {"model": {"name": "some", "layers": [1, 4]}, "seed": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "stats.safetensors"
    save(Statistics(random_statistics(SHAPE, (1, 4)).layers, PROVENANCE), path)
    return path


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}, dict(file.metadata())


def refusal(file: Any, model: str = "") -> str:
    with pytest.raises(KeepsetError) as caught:
        load(str(file), model)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_what_is_written_is_read_again(path: Path) -> None:
    written, read = random_statistics(SHAPE, (1, 4)), load(str(path))
    assert list(read.layers) == [1, 4]
    assert read.provenance == {"format": 2, **PROVENANCE}
    assert read.retrieval == {}
    for index, layer in read.layers.items():
        for name in FIELDS:
            assert torch.equal(getattr(layer, name), getattr(written.layers[index], name))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_gates_are_written_and_read_again(path: Path) -> None:
    statistics = random_statistics(SHAPE, (1, 4))
    save(Statistics(statistics.layers, PROVENANCE, retrieval=statistics.retrieval), path)
    read = load(str(path))
    for index, gates in statistics.retrieval.items():
        assert torch.equal(read.retrieval[index], gates)
    assert torch.equal(read.gates(), torch.stack([statistics.retrieval[index] for index in (1, 4)]))


@pytest.mark.parametrize(
    "gates",
    [
        {1: torch.zeros(2)},  # of one layer of two
        {1: torch.zeros(2), 4: torch.zeros(3)},
        {1: torch.zeros(2), 4: torch.tensor([0.5, 1.5])},
        {1: torch.zeros(2), 4: torch.tensor([0.5, float("nan")])},
        {1: torch.zeros(2), 4: torch.zeros(2, dtype=torch.float64)},
    ],
)
def test_gates_that_are_none_are_refused(path: Path, gates: dict[int, torch.Tensor]) -> None:
    tensors, metadata = contents(path)
    tensors |= {f"layers.{index}.retrieval": gate for index, gate in gates.items()}
    safetensors.torch.save_file(tensors, path, metadata)
    assert "is damaged" in refusal(path)


def test_provenance_is_json_in_the_metadata(path: Path) -> None:
    _, metadata = contents(path)
    assert {name: json.loads(text) for name, text in metadata.items()} == {
        "keepset_statistics": {"format": 2, **PROVENANCE}
    }


def test_the_same_statistics_make_the_same_bytes(path: Path) -> None:
    again = path.with_name("again")
    save(Statistics(random_statistics(SHAPE, (1, 4)).layers, PROVENANCE), again)
    assert again.read_bytes() == path.read_bytes()


def test_a_file_is_read_once_until_it_changes(path: Path) -> None:
    first = load(str(path))
    assert load(str(path)) is first
    save(Statistics(random_statistics(SHAPE, (2,)).layers, {"model": {"layers": [2]}}), path)
    assert list(load(str(path)).layers) == [2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_is_interrupted_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def half(tensors: Any, name: Path, metadata: Any) -> None:
        name.write_bytes(b"half")
        raise error

    before = path.read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else KeepsetError):
        save(random_statistics(SHAPE, (2,)), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_there_is_no_such_file(tmp_path: Path) -> None:
    assert "There is no file 'absent'" in refusal("absent")
    assert "is no file of keepset calibrate" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"words", b"\xff" * 100], ids=["empty", "words", "noise"])
def test_no_safetensors(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert "is no file of keepset calibrate" in refusal(path)


def test_safetensors_of_something_else(path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path)
    assert "is no file of keepset calibrate" in refusal(path)


def test_another_version(path: Path) -> None:
    tensors, _ = contents(path)
    safetensors.torch.save_file(tensors, path, {"keepset_statistics": '{"format": 7}'})
    assert "has format 7 of statistics, and this keepset reads format 2" in refusal(path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("layers.1.mean", torch.zeros(6, 5)),
        ("layers.1.mean", torch.zeros(5, 6)),
        ("layers.4.gain", torch.full((6,), torch.nan)),
        ("layers.4.gain", torch.ones(6, dtype=torch.float64)),
        ("layers.4.partner", torch.tensor([3, 4, 5, 0, 1, 1])),
        ("layers.4.partner", torch.tensor([3, 4, 5, 0, 1, 99])),
        ("layers.4.partner", torch.tensor([-3, -2, -1, 0, 1, 2])),
    ],
)
def test_damaged_tensors(path: Path, name: str, tensor: torch.Tensor) -> None:
    tensors, metadata = contents(path)
    assert name in tensors
    safetensors.torch.save_file({**tensors, name: tensor}, path, metadata)
    assert "is damaged: run keepset calibrate again" in refusal(path)


@pytest.mark.parametrize("provenance", ["", "{", "[]", "{}", '{"format": 2}', '{"format": 2, "model": {"layers": []}}'])
def test_damaged_provenance(path: Path, provenance: str) -> None:
    tensors, _ = contents(path)
    safetensors.torch.save_file(tensors, path, {"keepset_statistics": provenance})
    assert "is damaged: run keepset calibrate again" in refusal(path)


def test_a_layer_that_is_missing(path: Path) -> None:
    tensors, metadata = contents(path)
    del tensors["layers.4.norm"]
    safetensors.torch.save_file(tensors, path, metadata)
    assert "run keepset calibrate again" in refusal(path)


def test_without_a_file_what_is_offered_for_the_model(path: Path) -> None:
    offer("offered", lambda: path)
    assert load("", "offered") is load(str(path))
    assert "`keepset calibrate --model other --out stats.safetensors`" in refusal("", "other")
    assert "`keepset calibrate --model MODEL --out" in refusal("")


@pytest.mark.parametrize("size", [1, 5, 6])
def test_rotation_at_one_place_and_the_mean_of_many(size: int) -> None:
    layer = random_statistics(Shape((5,), 1, 1, size, 4), (0,)).layers[0]
    rows = torch.randn(2, 3, 4, size, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[3, 9, 2], [0, 0, 7]])
    half = size // 2
    expected = torch.zeros_like(rows, dtype=torch.float64)
    for request in range(2):
        for at in positions[request].tolist():
            for number in range(size):
                gain, row = float(layer.gain[number]), rows[request, ..., number].double()
                if number >= 2 * half:
                    expected[request, ..., number] += row / 3
                    continue
                angle = torch.tensor(at * 100.0 ** -((number % half) / half), dtype=torch.float64)
                other, sign = (number + half, -1) if number < half else (number - half, 1)
                turned = row * angle.cos() + sign * rows[request, ..., other].double() * angle.sin()
                expected[request, ..., number] += gain * turned / 3
    rotated = RowStatistics(lambda name: getattr(layer, name)[None]).rotate(rows, positions)
    torch.testing.assert_close(rotated.double(), expected, rtol=1e-5, atol=1e-5)
