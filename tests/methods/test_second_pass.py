"""SecondPassAttention attention against equations 14 to 16, number by number."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset import KeepsetError, Observation
from keepset.core.feature import Needs
from keepset.core.features.attention import AttentionColumns, SecondPass
from keepset.core.features.runtime_features import OutputProjection
from keepset.kernels.columns import ColumnStatistic
from keepset.methods.second_pass import SecondPassAttention
from tests.methods.naive import EXACT, MAX, SHAPES, SUM, Shape, check_scores, dot, length_of, observe, of_a_second_pass

OPTIONS = [
    dict(task=task, statistic=statistic, aggregate_group=group, mean_term=mean_term, values=values)
    for task, statistic in [
        ("context", "max"),
        ("context", "mean"),
        ("context", "rms"),
        ("self", "max"),
        ("self", "mean"),
    ]
    for group, mean_term, values in [
        ("mean", True, "none"),
        ("max", False, "none"),
        ("mean", True, "norm"),
        ("max", True, "projected"),
        ("mean", False, "projected"),
    ]
]


def received_of(method: SecondPassAttention, shape: Shape, **options: Any) -> Observation:
    """A random observation with what this method looks at."""
    size = (shape.batch, shape.kv_heads * shape.group, shape.entries)
    columns = torch.rand(size, generator=torch.Generator().manual_seed(3)) + 0.1
    passes = dict.fromkeys(method.traits.needs.of(SecondPass), of_a_second_pass(columns))
    return observe(shape, features=passes, **options)


def naive_scores(method: SecondPassAttention, observation: Observation, request: int) -> list[list[float]]:
    """Scores of one request, `[kv_heads][entries]`."""
    length, kv_heads = length_of(observation, request), observation.keys.shape[1]

    def numbers(columns: Tensor) -> list[list[float]]:
        return columns[request, :, :length].double().tolist()

    if method.task == "self":
        received = numbers(observation[{"max": MAX, "mean": SUM}[method.statistic]])
        tokens = int(observation.lengths[request])
    else:
        (needed,) = method.traits.needs.of(SecondPass)
        told = observation[needed]
        (name,) = needed.statistics
        received, tokens = numbers(told.statistics[name]), int(told.tokens[request])
    if method.statistic == "mean":
        received = [[number / tokens for number in row] for row in received]
    if method.statistic == "rms":
        received = [[math.sqrt(number / tokens) for number in row] for row in received]
    group = len(received) // kv_heads
    for head, row in enumerate(received):
        values = observation.values[request, head // group, :length].double().tolist()
        weights = observation[OutputProjection()][head].double().T.tolist()
        for entry, value in enumerate(values):
            if method.values == "norm":
                row[entry] *= math.sqrt(dot(value, value))
            if method.values == "projected":
                row[entry] *= math.sqrt(sum(dot(value, column) ** 2 for column in weights))
    scores = []
    for head in range(kv_heads):
        rows = received[head * group : (head + 1) * group]
        entries = list(zip(*rows, strict=True))
        scores.append([max(e) if method.aggregate_group == "max" else sum(e) / group for e in entries])
    if method.mean_term:
        means = [sum(entry) / kv_heads for entry in zip(*scores, strict=True)]
        scores = [[own + mean for own, mean in zip(row, means, strict=True)] for row in scores]
    return scores


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_equations_14_to_16(shape: Shape, options: dict[str, object]) -> None:
    method = SecondPassAttention(**options)  # type: ignore[arg-type]
    observation = received_of(method, shape)
    check_scores(
        method, observation, [naive_scores(method, observation, request) for request in range(shape.batch)], **EXACT
    )


def test_only_what_is_looked_at_is_needed() -> None:
    for task, statistic, values in product(("context", "self"), ("max", "mean"), ("none", "norm", "projected")):
        needs = SecondPassAttention(task=task, statistic=statistic, values=values, chunk=5).traits.needs
        column = ColumnStatistic.MAX if statistic == "max" else ColumnStatistic.SUM
        assert bool(needs.of(OutputProjection)) == (values == "projected")
        if task == "self":
            assert needs.of(AttentionColumns) == [AttentionColumns(column)] and not needs.of(SecondPass)
        else:
            (needed,) = needs.of(SecondPass)
            assert needed.statistics == {column} and needed.chunk == 5 and not needs.of(AttentionColumns)
    assert Needs(*SecondPassAttention().traits.needs.of(SecondPass)) == SecondPassAttention().traits.needs


def test_a_root_of_squares_needs_a_second_pass() -> None:
    with pytest.raises(KeepsetError, match="needs a second pass"):
        SecondPassAttention(task="self", statistic="rms")
