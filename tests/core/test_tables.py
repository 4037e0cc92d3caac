"""Tables and statistics as numbers: bins, nearest budgets, other models, rotations."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from keepset.core.statistics import RowStatistics
from keepset.core.tables import Tables, neutral
from tests.methods.naive import Shape, random_statistics

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


@pytest.mark.parametrize(
    ("length", "found", "sources"),
    [(1, 4, [0]), (4, 1, [0, 0, 0, 0]), (2, 5, [0, 4]), (3, 4, [0, 2, 3]), (5, 3, [0, 1, 1, 2, 2]), (7, 3, None)],
)
def test_other_models_take_what_stands_at_their_relative_place(
    length: int, found: int, sources: list[int] | None
) -> None:
    """Ends meet ends, order stays, and of two equally near places it is the later."""
    if sources is None:
        near = [[(abs(i / (length - 1) - j / (found - 1)), -j) for j in range(found)] for i in range(length)]
        sources = [-min(row)[1] for row in near]
    tables = dataclasses.replace(random_tables(layers=found, heads=found), name=f"{length} of {found}")
    fitted = tables.fitted(length, length)
    fitted.check(length, length)
    for layer, of_layer in enumerate(sources):
        assert torch.equal(fitted.gate[:, layer], tables.gate[:, of_layer])
        for head, of_head in enumerate(sources):
            assert torch.equal(fitted.weights[:, layer, head], tables.weights[:, of_layer, of_head])


def test_nearest_budget_and_bins() -> None:
    tables = random_tables(budgets=(8, 64, 512))
    budget = torch.tensor([1, 8, 35, 36, 37, 288, 289, 9999])
    assert tables.nearest(budget).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
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


@pytest.mark.parametrize("size", [1, 5, 6])
def test_rotation_at_one_place_and_the_mean_of_many(size: int) -> None:
    layer = random_statistics(Shape((5,), 1, 1, size, 4), (0,)).layers[0]
    rows = torch.randn(2, 3, 4, size, generator=torch.Generator().manual_seed(1))
    positions, half = torch.tensor([[3, 9, 2], [0, 0, 7]]), size // 2
    expected = torch.zeros_like(rows, dtype=torch.float64)
    for request in range(2):
        for at in positions[request].tolist():
            for number in range(size):
                gain, row = float(layer.gain[number]), rows[request, ..., number].double()
                if number >= 2 * half:
                    expected[request, ..., number] += row / 3
                    continue
                angle = torch.tensor(at * 100.0 ** -((number % half) / half), dtype=torch.float64)
                partner, sign = (number + half, -1) if number < half else (number - half, 1)
                turned = row * angle.cos() + sign * rows[request, ..., partner].double() * angle.sin()
                expected[request, ..., number] += gain * turned / 3
    rotated = RowStatistics(lambda name: getattr(layer, name)[None]).rotate(rows, positions)
    torch.testing.assert_close(rotated.double(), expected, rtol=1e-5, atol=1e-5)
