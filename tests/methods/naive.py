"""Random observations, and attention written out number by number, to hold the methods against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset import METHODS, Budget, Method, Observation
from keepset.core.feature import Feature
from keepset.core.features.attention import AttentionColumns, PromptQueryAttention, SecondPass, SecondPassColumns
from keepset.core.features.moments import HiddenDistribution, HiddenMoments, QueryDistribution, QueryMoments
from keepset.core.features.runtime_features import ModelStatistics, OutputProjection
from keepset.core.method import Allocator
from keepset.core.statistics import LayerStatistics, Predictor, Statistics
from keepset.kernels.columns import ColumnStatistic

ROPE_BASE = 100.0
HIDDEN = 7
"""Size of hidden states."""
SUM, MAX = AttentionColumns(ColumnStatistic.SUM), AttentionColumns(ColumnStatistic.MAX)


@dataclass(frozen=True)
class Shape:
    """Sizes of an observation; `lengths` says how many entries each request has, the rest are holes."""

    lengths: tuple[int, ...]
    kv_heads: int
    group: int
    head_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"{self.lengths} in {self.kv_heads}x{self.group} of {self.head_dim} and {self.value_dim}"

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def entries(self) -> int:
        return max(self.lengths)


SHAPES = [
    Shape((17,), 3, 1, 5, 5),
    Shape((29, 22), 2, 3, 7, 11),
    Shape((12,), 1, 8, 16, 4),
    Shape((1,), 2, 2, 3, 3),
    Shape((5, 8, 1), 2, 2, 4, 6),  # about a window
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
DTYPES = [torch.float32, torch.bfloat16]

EXACT = dict(rtol=1e-5, atol=1e-6)
"""The tolerance for sums of a few dozen float32 products: a handful of roundings of 2**-24 each."""
ROUNDED_LOGITS = dict(rtol=0.04, atol=1e-4)
"""The tolerance for logits rounded to bfloat16's 8 bits: that changes |logit| < 8 by up to 8 * 2**-9, which a softmax
sees twice, in the numerator and in the sum."""


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Return how far attention may be from the naive one."""
    return EXACT if dtype == torch.float32 else ROUNDED_LOGITS


SMALL: dict[str, dict[str, Any]] = {
    "expected_attention": dict(future=16),
    "snapkv": dict(window=3, kernel=3),
    "rpc": dict(window=3, kernel=3),
    "compilerkv": dict(window=3, elastic=False),  # no threshold: what stays is what keep says
    "r_kv": dict(window=5, kernel=3),
    "lagkv": dict(lag=3, skip=1),
    "chunkkv": dict(chunk=3),
    "zigzag": dict(window=4),
    "dynamic": dict(interval=2),
    "ams": dict(window=4, kernel=3, segment_mass=0.2, min_segment=2, max_segment=6),
    "match": dict(window=4),
    "gvote": dict(p_nuc=1.0, future=3),  # everything has a vote: what stays is what keep says
}
"""Parameters for methods that would read more than short texts have."""


@dataclass(frozen=True)
class Given(Method):
    """A scorer whose scores the test writes into the observation."""

    name = "given"
    paper = "none"

    def score(self, observation: Observation) -> Tensor:
        return observation.state["scores"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding at the mean of the `future` positions after each request's last token.

    As in many models the halves of a head are the two coordinates of each plane; an odd last number is
    not rotated.
    """

    lengths: tuple[int, ...]

    def __call__(self, rows: Tensor, future: int) -> Tensor:
        half = rows.shape[-1] // 2
        frequencies = ROPE_BASE ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
        at = torch.tensor(self.lengths)[:, None] + torch.arange(future)
        angles = at[:, None, None, :, None] * frequencies
        cos, sin = angles.cos().mean(-2), angles.sin().mean(-2)
        x, y, unrotated = rows.double().split([half, half, rows.shape[-1] - 2 * half], -1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin, unrotated], -1).to(rows.dtype)


@dataclass(frozen=True, eq=False)
class Project:
    """Queries of hidden states: a projection, then the mean rotation."""

    weights: Tensor
    rope: Rope

    def __call__(self, hidden: Tensor, future: int) -> Tensor:
        queries = torch.einsum("bni,ihd->bhnd", hidden.float(), self.weights)
        return self.rope(queries, future).to(hidden.dtype)


@cache
def random_statistics(shape: Shape, layers: tuple[int, ...], gain: float = 1.3) -> Statistics:
    """Statistics of a model whose heads `Rope` rotates, scaled by `gain` as some models do."""
    draw = torch.Generator().manual_seed(7)
    heads, size = shape.kv_heads * shape.group, shape.head_dim
    half = size // 2
    itself = torch.arange(size)
    partner = torch.cat([itself[half : 2 * half], itself[:half], itself[2 * half :]])
    angle = ROPE_BASE ** -(torch.arange(half, dtype=torch.float64) / max(half, 1)).float()
    frequency = torch.cat([-angle, angle, torch.zeros(size - 2 * half)])

    def layer() -> LayerStatistics:
        mean = torch.randn(heads, size, generator=draw)
        root = torch.randn(heads, size, size, generator=draw) * 0.4
        long = 1 + torch.rand(heads, half, generator=draw)
        plane = torch.cat([mean[:, :half].hypot(mean[:, half : 2 * half]) * long] * 2, -1)
        return LayerStatistics(
            direction=torch.randn(shape.kv_heads, size, generator=draw),
            mean=mean,
            covariance=root @ root.transpose(-1, -2),
            norm=torch.cat([plane, mean[:, 2 * half :].abs() + 0.3], -1),
            partner=partner,
            frequency=frequency,
            gain=torch.where(frequency == 0, 1.0, gain),
        )

    statistics = {index: layer() for index in layers}
    gates = {index: torch.rand(shape.kv_heads, generator=draw) for index in layers}
    predictors = {index: random_predictor(shape.kv_heads, size + shape.value_dim, draw) for index in layers}
    return Statistics(statistics, retrieval=gates, predictors=predictors)


def random_predictor(kv_heads: int, numbers: int, draw: torch.Generator, width: int = 6) -> Predictor:
    """Networks with random weights for keys and values of so many numbers together; outputs are some units apart."""
    inputs = numbers + 2
    shapes = [(2, inputs), (width, inputs), (width,), (2, width), (2,), (5, 4)]  # texts up to 16, ages up to 8
    return Predictor(*(torch.randn(kv_heads, *shape, generator=draw) * 0.4 for shape in shapes))


def observe(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    window: int = 8,
    skips: Sequence[int] = (4,),
    seed: int = 0,
    positions: Tensor | None = None,
    **parts: Any,
) -> Observation:
    """Random tensors for everything that a method may ask for.

    Holes, and queries that shorter requests do not have, are NaN: whoever reads them shows it.
    """
    draw = torch.Generator().manual_seed(seed)
    batch, query_heads = shape.batch, shape.kv_heads * shape.group

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw)

    keys = normal(batch, shape.kv_heads, shape.entries, shape.head_dim).to(dtype)
    values = normal(batch, shape.kv_heads, shape.entries, shape.value_dim).to(dtype)
    window = min(window, shape.entries)
    queries = normal(batch, query_heads, window, shape.head_dim).to(dtype)
    columns = normal(batch, query_heads, shape.entries).exp()
    valid = torch.arange(shape.entries) < torch.tensor(shape.lengths)[:, None, None]
    valid = valid.expand(-1, shape.kv_heads, -1)
    lengths = shape.lengths
    if positions is not None:
        lengths = tuple((positions.masked_fill(~valid, -1).amax((1, 2)) + 1).tolist())
    for request, length in enumerate(shape.lengths):
        for tensor in (keys, values):
            tensor[request, :, length:] = math.nan
        columns[request, :, length:] = math.nan
        queries[request, :, : max(0, window - lengths[request])] = math.nan
    projection = torch.randn(query_heads, shape.value_dim, 5, generator=torch.Generator().manual_seed(seed + 99))
    half = normal(batch, query_heads, shape.head_dim, shape.head_dim) * 0.4
    moments = QueryDistribution(
        normal(batch, query_heads, shape.head_dim), half @ half.transpose(-1, -2), Rope(lengths)
    )
    mean, variance = normal(batch, HIDDEN), normal(batch, HIDDEN).square()
    project = Project(normal(HIDDEN, query_heads, shape.head_dim), Rope(lengths))
    hidden = HiddenDistribution(mean, variance, project)
    measured = random_statistics(shape, tuple(parts.get("layers", [parts.get("layer", 0)])))
    features: dict[Feature[Any], Any] = {
        SUM: columns,
        MAX: columns / (1 + columns),
        **{QueryMoments(skip): moments for skip in skips},
        **{HiddenMoments(skip): hidden for skip in skips},
        OutputProjection(): projection.to(dtype),
        **dict.fromkeys(of_methods(SecondPass), of_a_second_pass(columns)),
        **dict.fromkeys(of_methods(PromptQueryAttention), (columns / (1 + columns)).square()),
        ModelStatistics(""): measured,
        ModelStatistics("", predictors=True): measured,
    }
    options: dict[str, Any] = dict(keys=keys, values=values, queries=queries, positions=positions)
    options["valid"] = None if set(shape.lengths) == {shape.entries} else valid
    return Observation(**{**options, **parts, "features": {**features, **parts.get("features", {})}})


def thinned(shape: Shape, seed: int, dropped: int, newest: int = 0, prompts: Sequence[int] | None = None) -> Tensor:
    """Return positions after an earlier event, at which every head lost `dropped` other entries of each request.

    The prompts are all there, and so are the newest ones as far as there are so many after the prompt.
    """
    draw = torch.Generator().manual_seed(seed)
    positions = torch.zeros(shape.batch, shape.kv_heads, shape.entries, dtype=torch.long)
    for request, length in enumerate(shape.lengths):
        prompt = prompts[request] if prompts else 0
        end, first = length + dropped, length + dropped - min(newest, length - prompt)
        for head in range(shape.kv_heads):
            older = torch.randperm(first - prompt, generator=draw)[: length - prompt - (end - first)].sort().values
            positions[request, head, :length] = torch.cat(
                [torch.arange(prompt), older + prompt, torch.arange(first, end)]
            )
    return positions


@cache
def of_methods(kind: type[Feature[Any]]) -> list[Feature[Any]]:
    """Return the features of one kind that registered methods look at by default."""
    kinds = [method for method in METHODS.values() if not issubclass(method, Allocator)]
    return [feature for method in kinds for feature in method().traits.needs.of(kind)]


def of_a_second_pass(columns: Tensor, tokens: int = 7) -> SecondPassColumns:
    """Return what entries received from a number of tokens, made of some positive numbers."""
    largest = columns / (1 + columns)
    received = [largest * (1 + tokens) / 2, largest, largest.square() * (1 + tokens) / 2]
    statistics = dict(zip((ColumnStatistic.SUM, ColumnStatistic.MAX, ColumnStatistic.SQUARE), received, strict=True))
    return SecondPassColumns(statistics, torch.full(columns.shape[:1], tokens))


def alone(observation: Observation, request: int) -> Observation:
    """One request of a batch by itself, without holes."""
    length = int(observation.valid[request, 0].sum())
    row, entries = slice(request, request + 1), slice(length)
    queries = observation.queries
    assert queries is not None
    newest = int(observation.lengths[request])
    window = min(queries.shape[2], newest)
    return Observation(
        keys=observation.keys[row, :, entries],
        values=observation.values[row, :, entries],
        queries=queries[row, :, queries.shape[2] - window :],
        positions=None if newest == length else observation.positions[row, :, entries],
        features=features_of(observation, [request], entries),
        state={name: column[row, :, entries] for name, column in observation.state.items()},
        softmax=observation.softmax,
        layer=observation.layer,
        layers=observation.layers,
    )


def features_of(observation: Observation, requests: list[int], entries: slice = slice(None)) -> dict[Feature[Any], Any]:
    """Return the features of some requests of a batch, for some of their entries."""
    rope = Rope(tuple(observation.lengths[requests].tolist()))

    def part(feature: Feature[Any], value: Any) -> Any:
        if isinstance(value, QueryDistribution):
            return QueryDistribution(value.mean[requests], value.covariance[requests], rope)
        if isinstance(value, HiddenDistribution):
            project = Project(value.queries.weights, rope)  # type: ignore[attr-defined]
            return HiddenDistribution(value.mean[requests], value.variance[requests], project)
        if isinstance(value, SecondPassColumns):
            columns = {name: column[requests][..., entries] for name, column in value.statistics.items()}
            return SecondPassColumns(columns, value.tokens[requests])
        of_entries = isinstance(feature, AttentionColumns | PromptQueryAttention)
        return value[requests][..., entries] if of_entries else value

    return {feature: part(feature, value) for feature, value in observation.features.items()}


def several(observations: Sequence[Observation]) -> Observation:
    """Layers of the same requests as one batch, layer after layer."""
    first = observations[0]
    names = ("keys", "values", "queries", "positions", "valid", "lengths", "prompts", "query_positions")
    rope = Rope(tuple(torch.cat([observation.lengths for observation in observations]).tolist()))

    def joined(values: Sequence[Any]) -> Any:
        if isinstance(values[0], QueryDistribution):
            means, covariances = zip(*((value.mean, value.covariance) for value in values), strict=True)
            return QueryDistribution(torch.cat(means), torch.cat(covariances), rope)
        if isinstance(values[0], HiddenDistribution):
            means, variances = zip(*((value.mean, value.variance) for value in values), strict=True)
            return HiddenDistribution(torch.cat(means), torch.cat(variances), each_its_own(values))
        if isinstance(values[0], SecondPassColumns):
            columns = {name: torch.cat([value.statistics[name] for value in values]) for name in values[0].statistics}
            return SecondPassColumns(columns, torch.cat([value.tokens for value in values]))
        return torch.cat(list(values)) if isinstance(values[0], Tensor) else values[0]

    def each_its_own(values: Sequence[HiddenDistribution]) -> Callable[[Tensor, int], Tensor]:
        def queries(hidden: Tensor, future: int) -> Tensor:
            parts = zip(values, hidden.chunk(len(values)), strict=True)
            return torch.cat([value.queries(part, future) for value, part in parts])

        return queries

    return Observation(
        **{name: torch.cat([getattr(observation, name) for observation in observations]) for name in names},
        features={of: joined([observation.features[of] for observation in observations]) for of in first.features},
        layer_ids=[observation.layer for observation in observations],
        layers=first.layers,
    )


def projection(observation: Observation) -> Tensor:
    """Return the weights that make queries of hidden states, `[hidden, query_heads, head_dim]`."""
    (hidden, *_) = (value for value in observation.features.values() if isinstance(value, HiddenDistribution))
    assert isinstance(hidden.queries, Project)
    return hidden.queries.weights


def length_of(observation: Observation, request: int) -> int:
    """Return how many entries a request has."""
    return int(observation.valid[request, 0].sum())


def kept(keep_set: object, observation: Observation, request: int, head: int) -> list[int]:
    """The positions that one head keeps, as a list."""
    return keep_set.positions(observation.layer, request, head).tolist()  # type: ignore[attr-defined]


def sets_of(
    method: Method, observations: Sequence[Observation], budget: Budget, request: int = 0
) -> list[list[list[int]]]:
    """Return what every head of one request keeps, `[layer][head]`."""
    keep_set = method.select_all(observations, budget)
    return [
        [kept(keep_set, observation, request, head) for head in range(observation.keys.shape[1])]
        for observation in observations
    ]


def heads_of(method: Method, observation: Observation, budget: Budget, request: int = 0) -> list[list[int]]:
    """Return what every head of one request keeps of one layer."""
    return sets_of(method, [observation], budget, request)[0]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(logits: Sequence[float]) -> list[float]:
    largest = max(logits, default=0.0)
    powers = [math.exp(x - largest) for x in logits]
    return [power / sum(powers) for power in powers]


def attention_of(products: Sequence[float], observation: Observation, query_head: int) -> list[float]:
    """Attention of scaled products, as the model makes it: with its soft cap and the head's sink, if it has them."""
    cap, sinks = observation.softmax.softcap, observation.softmax.sinks
    logits = [product if cap is None else cap * math.tanh(product / cap) for product in products]
    return softmax(logits) if sinks is None else softmax([*logits, float(sinks[query_head])])[:-1]


def window_attention(observation: Observation, request: int, query_head: int, window: int) -> list[list[float]]:
    """Attention of a request's newest queries, those that exist, over its entries: a list per query."""
    assert observation.queries is not None
    group = observation.queries.shape[1] // observation.keys.shape[1]
    length = length_of(observation, request)
    head = query_head // group
    keys = observation.keys[request, head, :length].double().tolist()
    positions = observation.positions[request, head, :length].tolist()
    newest = int(observation.lengths[request])
    count = min(window, observation.queries.shape[2], newest)
    rows = []
    for back in range(count, 0, -1):
        query = observation.queries[request, query_head, -back].double().tolist()
        visible = [entry for entry in range(length) if positions[entry] <= newest - back]
        products = [dot(query, keys[entry]) * observation.scaling for entry in visible]
        attention = attention_of(products, observation, query_head)
        row = [0.0] * length
        for entry, weight in zip(visible, attention, strict=True):
            row[entry] = weight
        rows.append(row)
    return rows


def check_scores(
    method: Method, observation: Observation, expected: list[list[list[float]]], **tolerances: float
) -> None:
    """Scores of every existing entry against `expected[request][head][entry]`."""
    scores = method.score(observation)
    assert scores.shape == observation.valid.shape
    for request, heads in enumerate(expected):
        for head, numbers in enumerate(heads):
            torch.testing.assert_close(
                scores[request, head, : length_of(observation, request)].double(),
                torch.tensor(numbers, dtype=torch.float64),
                **tolerances,
            )
