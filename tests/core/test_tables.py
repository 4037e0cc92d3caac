"""CompilerKV's tables: what is written is read again, and whatever else is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from keepset import KeepsetError
from keepset.core.tables import Tables, load, neutral, save

PROVENANCE = {"model": "some/model", "corpus": "0f3a", "seed": 3, "keepset": "1.2"}
TENSORS = ("weights", "gate", "entropy_edges", "perplexity_edges", "budgets", "counts")


def random_tables(layers: int = 3, heads: int = 4, budgets: tuple[int, ...] = (8, 64), seed: int = 0) -> Tables:
    draw = torch.Generator().manual_seed(seed)
    return Tables(
        weights=torch.randn(len(budgets), layers, heads, generator=draw),
        gate=0.8 + 0.2 * torch.rand(len(budgets), layers, 20, 4, generator=draw),
        entropy_edges=torch.linspace(0.5, 3.5, 19),
        perplexity_edges=torch.tensor([2.0, 5.0, 20.0]),
        budgets=torch.tensor(budgets),
        counts=torch.randint(0, 9, (20, 4), generator=draw),
        provenance=dict(PROVENANCE),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tables.safetensors"
    save(random_tables(), path)
    return path


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}, dict(file.metadata())


def refusal(file: Any) -> str:
    with pytest.raises(KeepsetError) as caught:
        load(str(file))
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_what_is_written_is_read_again(path: Path) -> None:
    read, written = load(str(path)), random_tables()
    for name in TENSORS:
        assert torch.equal(getattr(read, name), getattr(written, name))
    assert read.provenance == {**PROVENANCE, "format": 1, "layers": 3, "query_heads": 4}
    assert read.name == str(path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_same_tables_make_the_same_bytes(path: Path) -> None:
    again = path.with_name("again")
    save(random_tables(), again)
    assert again.read_bytes() == path.read_bytes()
    with pytest.raises(KeepsetError, match="cannot be written"):
        save(random_tables(), path.parent / "absent" / "tables")


def test_a_file_is_read_once_until_it_changes(path: Path) -> None:
    first = load(str(path))
    assert load(str(path)) is first
    save(random_tables(layers=5), path)
    assert load(str(path)).weights.shape[1] == 5


def test_no_tables(path: Path) -> None:
    assert "There is no file 'absent' with tables" in refusal("absent")
    assert "There is no file" in refusal("a\0b")
    for content in (b"", b"words", b"\xff" * 100, path.read_bytes()[:-9], path.read_bytes()[:50]):
        path.write_bytes(content)
        assert "is no file of CompilerKV's tables" in refusal(path)
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path)
    assert "is no file of CompilerKV's tables" in refusal(path)
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path, {"keepset_statistics": '{"format": 1}'})
    assert "is no file of CompilerKV's tables" in refusal(path)


def test_a_version_to_come(path: Path) -> None:
    tensors, _ = contents(path)
    safetensors.torch.save_file(tensors, path, {"keepset_tables": '{"format": 2}'})
    assert "has format 2 of tables, and this keepset reads format 1" in refusal(path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("weights", torch.ones(2, 3, 5)),
        ("weights", torch.ones(1, 3, 4)),
        ("weights", torch.ones(2, 3, 4, dtype=torch.float16)),
        ("weights", torch.full((2, 3, 4), torch.nan)),
        ("gate", torch.ones(2, 3, 4, 20)),
        ("gate", torch.full((2, 3, 20, 4), 1.5)),
        ("gate", torch.full((2, 3, 20, 4), -0.1)),
        ("entropy_edges", torch.ones(19)),
        ("entropy_edges", torch.arange(20.0)),
        ("perplexity_edges", torch.tensor([1.0, 2.0, torch.inf])),
        ("perplexity_edges", torch.tensor([3.0, 2.0, 1.0])),
        ("budgets", torch.tensor([64, 8])),
        ("budgets", torch.tensor([0, 8])),
        ("budgets", torch.tensor([8.0, 64.0])),
        ("budgets", torch.tensor([], dtype=torch.long)),
        ("counts", torch.full((20, 4), -1)),
        ("counts", torch.zeros(4, 20, dtype=torch.long)),
    ],
)
def test_damaged_tensors(path: Path, name: str, tensor: torch.Tensor) -> None:
    tensors, metadata = contents(path)
    assert name in tensors
    safetensors.torch.save_file({**tensors, name: tensor}, path, metadata)
    assert "is damaged: compile its tables again" in refusal(path)


@pytest.mark.parametrize("name", TENSORS)
def test_missing_tensors(path: Path, name: str) -> None:
    tensors, metadata = contents(path)
    del tensors[name]
    safetensors.torch.save_file(tensors, path, metadata)
    assert "is damaged" in refusal(path)


@pytest.mark.parametrize(
    "written",
    ["", "{", "[]", "{}", "[" * 9999, '{"format": 1}', '{"format": 1, "layers": 3, "query_heads": 5}'],
    ids=range(7),
)
def test_damaged_provenance(path: Path, written: str) -> None:
    tensors, _ = contents(path)
    safetensors.torch.save_file(tensors, path, {"keepset_tables": written})
    assert "is damaged" in refusal(path)


def test_more_than_is_known_does_no_harm(path: Path) -> None:
    tensors, metadata = contents(path)
    known = json.loads(metadata["keepset_tables"])
    safetensors.torch.save_file(
        {**tensors, "rewards": torch.zeros(2)}, path, {"keepset_tables": json.dumps({**known, "alpha": 0.5})}
    )
    assert load(str(path)).provenance["alpha"] == 0.5


def test_a_model_of_another_shape_is_refused() -> None:
    tables = dataclasses.replace(random_tables(), name="file")
    tables.check(3, 4)
    with pytest.raises(KeepsetError, match="theirs has 3 layers of 4 query heads, this one 4 of 3"):
        tables.check(4, 3)


@pytest.mark.parametrize(
    ("wanted", "found", "places"),
    [(1, 4, [0]), (4, 1, [0, 0, 0, 0]), (2, 5, [0, 4]), (3, 4, [0, 2, 3]), (5, 3, [0, 1, 1, 2, 2]), (7, 3, None)],
)
def test_other_models_take_what_stands_at_their_relative_place(
    wanted: int, found: int, places: list[int] | None
) -> None:
    """Ends meet ends, order stays, and of two equally near places it is the later."""
    if places is None:
        near = [[(abs(i / (wanted - 1) - j / (found - 1)), -j) for j in range(found)] for i in range(wanted)]
        places = [-min(row)[1] for row in near]
    tables = dataclasses.replace(random_tables(layers=found, heads=found), name=f"{wanted} of {found}")
    fitted = tables.fitted(wanted, wanted)
    fitted.check(wanted, wanted)
    for budget in range(2):
        for layer, of_layer in enumerate(places):
            assert torch.equal(fitted.gate[budget, layer], tables.gate[budget, of_layer])
            for head, of_head in enumerate(places):
                assert fitted.weights[budget, layer, head] == tables.weights[budget, of_layer, of_head]


def test_nearest_budget_and_bins() -> None:
    tables = random_tables(budgets=(8, 64, 512))
    asked = torch.tensor([1, 8, 35, 36, 37, 288, 289, 9999])
    assert tables.nearest(asked).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    entropies = torch.tensor([-1.0, 0.0, 0.5, 2.0, 3.4, 3.5, 9.0, torch.inf, torch.nan])
    perplexities = torch.tensor([1.0, 1.99, 2.0, 4.9, 5.0, 19.0, 20.0, torch.inf, torch.nan])
    of_entropy, of_perplexity = tables.bins(entropies, perplexities)
    edges = tables.entropy_edges.tolist()
    assert of_entropy.tolist() == [sum(edge <= risk for edge in edges) for risk in entropies[:-1].tolist()] + [19]
    assert of_perplexity.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3]


def test_neutral_tables_prefer_nothing() -> None:
    tables = neutral(2, 3, 0.9)
    assert tables.weights.unique().tolist() == [1.0]
    assert tables.gate.unique().tolist() == [torch.tensor(0.9).item()]
    tables.check(2, 3)
