"""Every scorer's formula a second time, in loops over plain numbers.

A formula returns the scores of one head's entries: `formula(observation, method, request, head) -> list[float]`. It is
registered with the methods that it is checked for; `test_formulas.py` compares each of them in every shape.
"""

from __future__ import annotations

import cmath
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from keepset import Method, Observation
from keepset.core.features.attention import PromptQueryAttention, SecondPass
from keepset.core.features.moments import QueryMoments
from keepset.core.features.runtime_features import ModelStatistics, OutputProjection
from keepset.core.statistics import LayerStatistics
from keepset.methods.distilled import Distilled
from keepset.methods.expected_attention import ExpectedAttention
from keepset.methods.keys import KeyDiff, Knorm, LagKV
from keepset.methods.measured import QFilter, TriAttention
from keepset.methods.positions import StreamingLLM
from keepset.methods.second_pass import PromptQueries, SecondPassAttention
from keepset.methods.window import H2O, RKV, RPC, TOVA, SnapKV
from tests.methods.naive import (
    EXACT,
    MAX,
    ROPE_BASE,
    ROUNDED_LOGITS,
    SUM,
    Shape,
    attention_of,
    dot,
    length_of,
    observe,
    of_a_second_pass,
    softmax,
    window_attention,
)

Scores = Callable[[Observation, Any, int, int], list[float]]
Matrix = list[list[float]]


@dataclass(frozen=True)
class Formula:
    """A formula, the methods that it is checked for, and how near they are in float32 and in bfloat16."""

    scores: Scores
    methods: tuple[Method, ...]
    exact: dict[str, float]
    rounded: dict[str, float]


FORMULAS: dict[str, Formula] = {}
"""Formulas by the names of their methods."""


def formula(
    *methods: Method, exact: dict[str, float] = EXACT, rounded: dict[str, float] | None = None
) -> Callable[[Scores], Scores]:
    """Register a formula.

    Args:
        *methods: one method with different parameters.
        exact: the tolerance in float32.
        rounded: the tolerance in bfloat16, where that differs: where logits are rounded.
    """

    def register(scores: Scores) -> Scores:
        FORMULAS[methods[0].name] = Formula(scores, methods, exact, rounded or exact)
        return scores

    return register


def naive_scores(method: Method, observation: Observation, request: int) -> list[list[float]]:
    """Return the scores of one request by the method's formula, `[kv_heads][entries]`."""
    heads = range(observation.keys.shape[1])
    return [FORMULAS[method.name].scores(observation, method, request, head) for head in heads]


def observed(method: Method, shape: Shape, **options: Any) -> Observation:
    """Return a random observation with everything that a method looks at."""
    size = (shape.batch, shape.kv_heads * shape.group, shape.entries)
    squares, columns = torch.rand(2, *size, generator=torch.Generator().manual_seed(options.get("seed", 0))) + 0.1
    needs = method.traits.needs
    features = dict.fromkeys(needs.of(SecondPass), of_a_second_pass(columns))
    features |= dict.fromkeys(needs.of(PromptQueryAttention), squares)
    return observe(shape, features=features, skips=(0, 2, 4), **options)


# --- what several formulas use


def rows_of(states: Tensor, observation: Observation, request: int, head: int) -> Matrix:
    return states[request, head, : length_of(observation, request)].double().tolist()


def positions_of(observation: Observation, request: int, head: int) -> list[int]:
    return observation.positions[request, head, : length_of(observation, request)].tolist()


def group_of(observation: Observation, head: int) -> range:
    """Return the query heads that share a KV head."""
    assert observation.queries is not None
    group = observation.queries.shape[1] // observation.keys.shape[1]
    return range(head * group, (head + 1) * group)


def heads_that_agree(observation: Observation, request: int, head: int) -> range:
    """Return all KV heads if they hold the same entries, else this head alone."""
    heads = range(observation.keys.shape[1])
    agree = all(
        positions_of(observation, request, kv_head) == positions_of(observation, request, 0) for kv_head in heads
    )
    return heads if agree else range(head, head + 1)


def mean_window(observation: Observation, request: int, heads: range, window: int) -> list[float]:
    """Return the mean attention of the window's queries over some KV heads' query heads; missing queries give zero."""
    received = [0.0] * length_of(observation, request)
    members = [member for head in heads for member in group_of(observation, head)]
    for member in members:
        for row in window_attention(observation, request, member, window):
            for entry, weight in enumerate(row):
                received[entry] += weight / (len(members) * window)
    return received


def norm(row: list[float]) -> float:
    return math.sqrt(dot(row, row))


# --- positions, keys and values


@formula(StreamingLLM(), exact=dict(rtol=0, atol=0))
def streaming_llm(observation: Observation, method: StreamingLLM, request: int, head: int) -> list[float]:
    return [float(position) for position in positions_of(observation, request, head)]


@formula(Knorm())
def knorm(observation: Observation, method: Knorm, request: int, head: int) -> list[float]:
    return [-norm(key) for key in rows_of(observation.keys, observation, request, head)]


@formula(KeyDiff(), exact={**EXACT, "rtol": 1e-4})
def keydiff(observation: Observation, method: KeyDiff, request: int, head: int) -> list[float]:
    """Minus the cosine of each key to the mean of the normalised keys."""
    keys = rows_of(observation.keys, observation, request, head)
    unit = [[x / norm(key) for x in key] for key in keys]
    anchor = [sum(column) / len(unit) for column in zip(*unit, strict=True)]
    return [-dot(key, anchor) / (norm(key) * norm(anchor)) for key in keys]


@formula(LagKV(lag=4, skip=2), LagKV(lag=3, skip=0), LagKV(lag=7, skip=1), LagKV())
def lagkv(observation: Observation, method: LagKV, request: int, head: int) -> list[float]:
    """Ranks within a partition by the deviation over channels on the next partition's scale."""
    keys, values = (rows_of(states, observation, request, head) for states in (observation.keys, observation.values))
    scores, start, length = [1.0] * len(keys), method.skip, len(keys)

    def information(states: Matrix, following: Matrix) -> list[float]:
        columns = [(min(column), max(column)) for column in zip(*following, strict=True)]
        spread = []
        for row in states:
            scaled = [(x - a) / (b - a) if b > a else 0.0 for x, (a, b) in zip(row, columns, strict=True)]
            spread.append(statistics.stdev(scaled) if len(scaled) > 1 else 0.0)
        return softmax(spread)

    while start + 2 * method.lag <= length:
        middle, end = start + method.lag, start + 2 * method.lag
        parts = [information(states[start:middle], states[middle:end]) for states in (keys, values)]
        summed = [k + v for k, v in zip(*parts, strict=True)]
        for index, score in enumerate(summed):
            worse = sum(
                another < score or (another == score and before < index) for before, another in enumerate(summed)
            )
            scores[start + index] = worse / method.lag
        start = middle
    return scores


# --- the newest queries


@formula(TOVA(), rounded=ROUNDED_LOGITS)
def tova(observation: Observation, method: TOVA, request: int, head: int) -> list[float]:
    return mean_window(observation, request, heads_that_agree(observation, request, head), 1)


@formula(SnapKV(window=3), SnapKV(window=8, kernel=1), SnapKV(window=5, kernel=9), rounded=ROUNDED_LOGITS)
def snapkv(observation: Observation, method: SnapKV, request: int, head: int) -> list[float]:
    """The window's mean attention, each entry averaged with its neighbours before the window."""
    received = mean_window(observation, request, range(head, head + 1), method.window)
    begins = int(observation.lengths[request]) - method.window
    counted = [
        weight if position < begins else 0.0
        for weight, position in zip(received, positions_of(observation, request, head), strict=True)
    ]
    half = method.kernel // 2
    return [sum(counted[max(0, e - half) : e + half + 1]) / method.kernel for e in range(len(counted))]


@formula(
    RPC(window=3),
    RPC(window=8, kernel=1),
    RPC(window=5, kernel=9),
    RPC(window=5, aggregation="all"),
    RPC(window=4, kernel=3, aggregation="all"),
    rounded=ROUNDED_LOGITS,
)
def rpc(observation: Observation, method: RPC, request: int, head: int) -> list[float]:
    """The window's mean attention, averaged with its neighbours."""
    heads = heads_that_agree(observation, request, head) if method.aggregation == "all" else range(head, head + 1)
    received, half = mean_window(observation, request, heads, method.window), method.kernel // 2
    return [sum(received[max(0, e - half) : e + half + 1]) / method.kernel for e in range(len(received))]


@formula(
    RKV(window=3),
    RKV(kernel=1, mix_lambda=0.6),
    RKV(window=5, kernel=9, threshold=0.2),
    RKV(mix_lambda=1),
    RKV(window=3, mix_lambda=0.5, group="max"),
    rounded=ROUNDED_LOGITS,
)
def r_kv(observation: Observation, method: RKV, request: int, head: int) -> list[float]:
    begins = int(observation.lengths[request]) - method.window
    positions = positions_of(observation, request, head)
    before = [entry for entry, position in enumerate(positions) if position < begins]
    keys = rows_of(observation.keys, observation, request, head)
    importance = _importance(observation, method, request, head, keys, before)
    redundancy = _redundancy(method, [keys[entry] for entry in before]) + [0.0] * (len(keys) - len(before))
    return [method.mix_lambda * a - (1 - method.mix_lambda) * b for a, b in zip(importance, redundancy, strict=True)]


def _importance(
    observation: Observation, method: RKV, request: int, head: int, keys: Matrix, before: list[int]
) -> list[float]:
    """Return what entries before the window receive on average from its queries, max-pooled."""
    assert observation.queries is not None
    count = min(method.window, observation.queries.shape[2], int(observation.lengths[request]))
    received, members = [0.0] * len(keys), list(group_of(observation, head))
    for back in range(1, count + 1):
        queries = observation.queries[request, members, -back].double().tolist()
        logits = [[dot(query, keys[entry]) * observation.scaling for entry in before] for query in queries]
        if method.group == "max":
            logits = [[max(column) for column in zip(*logits, strict=True)]]
        for row in logits:
            for entry, share in zip(before, softmax(row), strict=True):
                received[entry] += share / (len(logits) * count)
    half = method.kernel // 2
    return [max(received[max(0, entry - half) : entry + half + 1]) for entry in range(len(keys))]


def _redundancy(method: RKV, keys: Matrix) -> list[float]:
    """Return a softmax over the mean cosines between the keys before the window."""
    unit = [[x / norm(key) for x in key] for key in keys]
    cosines = [[0.0 if i == j else dot(a, b) for j, b in enumerate(unit)] for i, a in enumerate(unit)]
    for row in cosines:
        similar = [j for j, cosine in enumerate(row) if cosine > method.threshold]
        if similar:
            row[similar[-1]] = 0.0
    return softmax([sum(column) / len(keys) for column in zip(*cosines, strict=True)])


# --- the whole prompt


@formula(H2O())
def h2o(observation: Observation, method: H2O, request: int, head: int) -> list[float]:
    length = length_of(observation, request)
    columns = [observation[SUM][request, member].double().tolist() for member in group_of(observation, head)]
    return [sum(column[entry] for column in columns) for entry in range(length)]


@formula(PromptQueries(), PromptQueries(stride=3), PromptQueries(second_pass=True))
def prompt_queries(observation: Observation, method: PromptQueries, request: int, head: int) -> list[float]:
    """The group's mean root of mean squares, and half of that of a second pass."""
    length, members = length_of(observation, request), group_of(observation, head)
    squares = observation[PromptQueryAttention(method.stride)][request].tolist()
    received = [[math.sqrt(square) for square in squares[member][:length]] for member in members]
    for needed in method.traits.needs.of(SecondPass):
        root_squares, tokens = (
            observation[needed].statistics["square"][request],
            int(observation[needed].tokens[request]),
        )
        for row, member in zip(received, members, strict=True):
            for entry, square in enumerate(root_squares[member, :length].tolist()):
                row[entry] += math.sqrt(square / tokens) / 2
    return [sum(column) / len(members) for column in zip(*received, strict=True)]


WHAT = [("context", "max"), ("context", "mean"), ("context", "rms"), ("self", "max"), ("self", "mean")]
HOW = [("mean", True, "none"), ("max", False, "none"), ("mean", True, "norm")]
HOW += [("max", True, "projected"), ("mean", False, "projected")]


@formula(*(SecondPassAttention(*what, *how) for what, how in product(WHAT, HOW)))
def second_pass(observation: Observation, method: SecondPassAttention, request: int, head: int) -> list[float]:
    """Equations 14 to 16."""
    scores = _one_head(observation, method, request, head)
    if not method.mean_term:
        return scores
    heads = heads_that_agree(observation, request, head)
    rows = [_one_head(observation, method, request, kv_head) for kv_head in heads]
    return [a + sum(column) / len(heads) for a, *column in zip(scores, *rows, strict=True)]


def _one_head(observation: Observation, method: SecondPassAttention, request: int, head: int) -> list[float]:
    """Equations 14 and 15."""
    if method.task == "self":
        columns = observation[{"max": MAX, "mean": SUM}[method.statistic]]
        tokens = int(observation.lengths[request])
    else:
        (needed,) = method.traits.needs.of(SecondPass)
        (name,) = needed.statistics
        columns, tokens = observation[needed].statistics[name], int(observation[needed].tokens[request])
    rows = []
    for member in group_of(observation, head):
        row = columns[request, member, : length_of(observation, request)].double().tolist()
        if method.statistic != "max":
            row = [number / tokens for number in row]
        if method.statistic == "rms":
            row = [math.sqrt(number) for number in row]
        weights = observation[OutputProjection()][member].double().T.tolist()
        for entry, value in enumerate(rows_of(observation.values, observation, request, head)):
            if method.values == "projected":
                row[entry] *= norm([dot(value, column) for column in weights])
        rows.append(row)
    together = max if method.aggregate_group == "max" else statistics.fmean
    scores = [together(column) for column in zip(*rows, strict=True)]
    if method.values == "norm":
        values = rows_of(observation.values, observation, request, head)
        scores = [score * norm(value) for score, value in zip(scores, values, strict=True)]
    return scores


# --- distributions of queries


@formula(QFilter())
def qfilter(observation: Observation, method: QFilter, request: int, head: int) -> list[float]:
    direction = observation[ModelStatistics("")].layers[observation.layer].direction[head].tolist()
    return [dot(key, direction) for key in rows_of(observation.keys, observation, request, head)]


def mean_rotation(size: int, start: int, future: int) -> Matrix:
    """The mean of the rotations of the positions `start` ... `start + future - 1`, as a matrix."""
    half = size // 2
    mean = [[0.0] * size for _ in range(size)]
    if size % 2:
        mean[-1][-1] = 1.0
    for position in range(start, start + future):
        for plane in range(half):
            angle = position * ROPE_BASE ** (-plane / half)
            mean[plane][plane] += math.cos(angle) / future
            mean[plane][plane + half] -= math.sin(angle) / future
            mean[plane + half][plane] += math.sin(angle) / future
            mean[plane + half][plane + half] += math.cos(angle) / future
    return mean


def matmul(a: Matrix, b: Matrix) -> Matrix:
    return [[dot(row, column) for column in zip(*b, strict=True)] for row in a]


def transposed(a: Matrix) -> Matrix:
    return [list(row) for row in zip(*a, strict=True)]


@formula(
    ExpectedAttention(),
    ExpectedAttention(epsilon=0.0),
    ExpectedAttention(future=7, skip=0),
    ExpectedAttention(future=30, covariance=False),
    ExpectedAttention(future=1, skip=2, value_norm=False, epsilon=0.01),
    ExpectedAttention(future=9, epsilon=0.02),
    exact={**EXACT, "rtol": 1e-4},
)
def expected_attention(observation: Observation, method: ExpectedAttention, request: int, head: int) -> list[float]:
    """The Gaussian's expectation, normalised over the entries, times the value's norm."""
    moments = observation[QueryMoments(method.skip)]
    keys = rows_of(observation.keys, observation, request, head)
    rotation = mean_rotation(observation.keys.shape[-1], int(observation.lengths[request]), method.future)
    positions = positions_of(observation, request, head)
    counted = [entry for entry, position in enumerate(positions) if position >= method.skip]
    attention, members = [0.0] * len(keys), group_of(observation, head)
    for member in members:
        mean = moments.mean[request, member].double().tolist()
        covariance = moments.covariance[request, member].double().tolist()
        ahead = [dot(row, mean) for row in rotation]
        spread = matmul(matmul(rotation, covariance), transposed(rotation))
        logits = []
        for entry in counted:
            logit = dot(keys[entry], ahead) * observation.scaling
            if method.covariance:
                logit += dot(keys[entry], [dot(row, keys[entry]) for row in spread]) * observation.scaling**2 / 2
            logits.append(logit)
        for entry, weight in zip(counted, attention_of(logits, observation, member) if logits else [], strict=True):
            attention[entry] += weight / len(members)
    if not method.value_norm:
        return attention
    norms = [norm(value) for value in rows_of(observation.values, observation, request, head)]
    return [(weight + method.epsilon) * size for weight, size in zip(attention, norms, strict=True)]


def _between(number: int, knots: int) -> tuple[int, float]:
    """The knot of 1, 2, 4, ... before a number, and how far it is to the next one in the logarithm."""
    exponent = min(math.log2(number), knots - 1)
    before = min(int(exponent), knots - 2)
    return before, exponent - before


@formula(Distilled(), Distilled(threshold=0.3), exact=dict(rtol=1e-4, atol=1e-6))
def distilled(observation: Observation, method: Distilled, request: int, head: int) -> list[float]:
    """The networks of an entry's un-rotated key and value, number by number, each output rounded."""
    statistics = observation[ModelStatistics("", predictors=True)]
    measured, networks = statistics.layers[observation.layer], statistics.predictors[observation.layer]
    linear, hidden, hidden_bias, output, output_bias, age = (part[head].tolist() for part in networks)
    length = int(observation.lengths[request])
    keys, values = (rows_of(states, observation, request, head) for states in (observation.keys, observation.values))
    scores = []
    for key, value, position in zip(keys, values, positions_of(observation, request, head), strict=True):
        plain = [0.0] * len(key)
        for first, second, frequency in _planes(measured):
            point = complex(key[first], 0.0 if second is None else key[second])
            point *= cmath.exp(-1j * frequency * position) / float(measured.gain[first])
            plain[first] = point.real
            if second is not None:
                plain[second] = point.imag
        inputs = [*plain, *value, *(math.log(math.hypot(*numbers)) for numbers in (plain, value))]
        (knot, fraction), (row, of_row) = _between(length - position, len(age[0])), _between(length, len(age))
        nearer, further = (
            between[knot] + fraction * (between[knot + 1] - between[knot]) for between in age[row : row + 2]
        )
        units = [dot(weights, inputs) + bias for weights, bias in zip(hidden, hidden_bias, strict=True)]
        active = [unit * (1 + math.erf(unit / math.sqrt(2))) / 2 for unit in units]
        score, slope = (
            output_bias[index] + dot(linear[index], inputs) + dot(output[index], active) for index in (0, 1)
        )
        score, slope = round(score * 512) / 512, round(max(-511, min(511, slope * 256))) / 256
        octaves = min(math.log2(length - position), len(age[0]) - 1)
        score += slope * (octaves - 6) + nearer + of_row * (further - nearer)
        scores.append(math.exp(score))
    return scores


# Frequencies are float32 numbers, multiplied by up to 65536, on either side.
@formula(TriAttention(), TriAttention(horizon=1), TriAttention(horizon=3), exact=dict(rtol=2e-3, atol=2e-4))
def triattention(observation: Observation, method: TriAttention, request: int, head: int) -> list[float]:
    members = [_of_query_head(observation, method, request, head, member) for member in group_of(observation, head)]
    return [max(scores) for scores in zip(*members, strict=True)]


def _planes(measured: LayerStatistics) -> list[tuple[int, int | None, float]]:
    """The two numbers of every plane, or a number by itself, and its frequency."""
    partner, frequency = measured.partner.tolist(), measured.frequency.double().tolist()
    return [
        (first, None if second == first else second, frequency[second])
        for first, second in enumerate(partner)
        if first <= second
    ]


def _of_query_head(observation: Observation, method: TriAttention, request: int, head: int, member: int) -> list[float]:
    """Return the standardised scores of one query head: keys un-rotated, then the series term by term."""
    measured, newest = observation[ModelStatistics("")].layers[observation.layer], int(observation.lengths[request])
    mean, norms = measured.mean[member].double().tolist(), measured.norm[member].double().tolist()
    offsets = [2**n for n in range(40) if 2**n <= method.horizon]
    keys, positions = rows_of(observation.keys, observation, request, head), positions_of(observation, request, head)
    scores = []
    for key, position in zip(keys, positions, strict=True):
        score = 0.0
        for first, second, frequency in _planes(measured):
            gain = float(measured.gain[first])
            plain, centre = (complex(row[first], 0.0 if second is None else row[second]) for row in (key, mean))
            plain *= cmath.exp(-1j * frequency * position) / gain
            angle = cmath.phase(centre * plain.conjugate())
            for offset in offsets:
                turned = math.cos(frequency * (newest + offset - position) + angle)
                score += gain**2 * abs(centre) * abs(plain) * turned / len(offsets)
            score += gain**2 * (1 - abs(centre) / norms[first]) * norms[first] * abs(plain)
        scores.append(score)
    average = sum(scores) / len(scores)
    deviation = math.sqrt(sum((score - average) ** 2 for score in scores) / len(scores))
    return [(score - average) / max(deviation, 1e-6) for score in scores]
