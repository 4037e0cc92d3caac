"""CompilerKV against its equations 6 to 16 in loops, and the bound of its theorem 4.1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keepset import Budget, KeepsetError, Observation
from keepset.core.features.runtime_features import ModelTables, Perplexity
from keepset.core.tables import Tables, load, save
from keepset.methods.compilerkv import CompilerKV
from tests.core.test_tables import random_tables
from tests.methods.naive import DTYPES, Shape, kept, length_of, observe, sets_of, thinned, window_attention
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:compilerkv has no tables")
WINDOW = 5


def layers_of(
    shape: Shape,
    layers: int,
    perplexities: Sequence[float],
    seed: int = 0,
    file: str = "",
    positions: Sequence[Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Observation]:
    features: dict[Any, Any] = {Perplexity(WINDOW): torch.tensor(perplexities)}
    if file:
        features[ModelTables(file)] = load(file)
    layer_positions = positions or [None] * layers
    same: dict[str, Any] = dict(window=WINDOW, layers=range(layers), dtype=dtype, features=features)
    return [observe(shape, layer=i, seed=seed + i, positions=layer_positions[i], **same) for i in range(layers)]


def mean_attention(observations: Sequence[Observation], request: int) -> list[float]:
    """Equation 6, summed over the window, for every position."""
    total = [0.0] * int(observations[0].lengths[request])
    heads = 0
    for observation in observations:
        assert observation.queries is not None
        group = observation.queries.shape[1] // observation.keys.shape[1]
        for head in range(observation.queries.shape[1]):
            heads += 1
            for row in window_attention(observation, request, head, WINDOW):
                for entry, weight in enumerate(row):
                    total[int(observation.positions[request, head // group, entry])] += weight
    return [weight / heads for weight in total]


def utilities(
    observations: Sequence[Observation], layer: int, request: int, weights: Sequence[float], method: CompilerKV
) -> list[list[float]]:
    """Equations 7 to 10: of every KV head and entry, of all heads together where these hold the same entries."""
    observation, alpha = observations[layer], mean_attention(observations, request)
    kv_heads, length = observation.keys.shape[1], length_of(observation, request)
    group = len(weights) // kv_heads
    best = [[-math.inf] * length for _ in range(kv_heads)]
    for head, weight in enumerate(weights):
        of = head // group
        norms = [
            math.sqrt(sum(x * x for x in value)) for value in observation.values[request, of, :length].double().tolist()
        ]
        usage = [sum(column) for column in zip(*window_attention(observation, request, head, WINDOW), strict=True)]
        for entry in range(length):
            attention = alpha[int(observation.positions[request, of, entry])] if method.global_mean else usage[entry]
            relative = norms[entry] / (sum(norms) / length) if method.relative_norm else 1.0
            best[of][entry] = max(best[of][entry], attention * relative * (weight if method.head_table else 1.0))
    positions = observation.positions[request, :, :length].tolist()
    if all(head == positions[0] for head in positions):
        return [[max(column) for column in zip(*best, strict=True)]] * kv_heads
    return best


def entropy_of(observations: Sequence[Observation], request: int) -> float:
    """Equations 11 and 12."""
    alpha = mean_attention(observations, request)
    rows = min(WINDOW, int(observations[0].lengths[request]))
    return -sum(weight / rows * math.log(weight / rows) for weight in alpha if weight)


def threshold_of(tables: Tables, row: int, layer: int, entropy: float, perplexity: float) -> float:
    of_entropy = sum(edge <= entropy for edge in tables.entropy_edges.tolist())
    of_perplexity = sum(edge <= perplexity for edge in tables.perplexity_edges.tolist())
    return float(tables.gate[row, layer, of_entropy, of_perplexity])


def best_first(scores: list[float], budget: Budget) -> tuple[list[int], list[int]]:
    """Entries that always stay, and the rest from the best; of equal ones the later."""
    entries = range(len(scores))
    always = [e for e in entries if e < budget.sinks or e >= len(scores) - budget.recent]
    compared = [entry for entry in entries if entry not in always]
    return always, sorted(compared, key=lambda entry: (scores[entry], entry), reverse=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, int, Budget, list[float], int]:
    lengths = tuple(draw(st.lists(st.integers(10, 18) | st.integers(1, 6), min_size=1, max_size=2)))
    heads = draw(st.sampled_from([(1, 8), (3, 1), (2, 3)]))
    shape = Shape(lengths, *heads, draw(st.sampled_from([3, 4])), 5)
    keep = draw(st.integers(8, 20) | st.integers(10, 100).map(lambda percent: percent / 100))
    sinks, recent = (draw(st.integers(0, 2)), draw(st.integers(0, 3))) if isinstance(keep, int) else (0, 0)
    perplexities = [draw(st.sampled_from([1.0, 3.0, 7.0, 300.0, math.inf])) for _ in lengths]
    return shape, draw(st.integers(1, 3)), Budget(keep, sinks, recent), perplexities, draw(st.integers(0, 99))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def written(
    folder: Path, layers: int, heads: int, seed: int = 0, budgets: tuple[int, ...] = (4, 12), **filled: Any
) -> tuple[Tables, str]:
    """Tables whose weights differ in sign and whose thresholds differ widely, unless given, and their file."""
    tables, path = random_tables(layers, heads, budgets, seed), folder / str(hash((layers, heads, seed, str(filled))))
    tables.gate.copy_(torch.rand(tables.gate.shape, generator=torch.Generator().manual_seed(seed)))
    for name, values in filled.items():
        getattr(tables, name).copy_(torch.as_tensor(values).expand_as(getattr(tables, name)))
    if not path.exists():
        save(tables, path)
    return tables, str(path)


def literally_kept(
    method: CompilerKV, utility: list[float], tau: float, budget: Budget, count: int
) -> tuple[list[int], int]:
    """Equations 15 and 16, of one layer, and how many candidates there are; what always stays is one by itself."""
    always, compared = best_first(utility, budget)
    queries = min(WINDOW, len(utility))
    # The attention of that many queries adds up to their number: its mean over the text is this.
    mean = queries / len(utility) if method.threshold == "mean" else 1.0
    candidates = [t for t in range(len(utility)) if t in always or utility[t] >= tau * mean]
    if method.elastic and not candidates:
        return compared[:1], 0
    if method.elastic and len(candidates) <= count:
        return candidates, len(candidates)
    best = [t for t in always + compared if t in candidates or not method.elastic]
    return sorted(best[:count]), len(candidates)


@examples(160)
@given(
    case=cases(),
    switches=st.fixed_dictionaries(
        {name: st.booleans() for name in ("elastic", "head_table", "gate", "global_mean", "relative_norm")}
        | {"threshold": st.sampled_from(["utility", "mean"])}
    ),
)
def test_equations_6_to_16(
    folder: Path, case: tuple[Shape, int, Budget, list[float], int], switches: dict[str, Any]
) -> None:
    shape, layers, budget, perplexities, seed = case
    tables, file = written(folder, layers, shape.kv_heads * shape.group)
    method = CompilerKV(tables=file, window=WINDOW, **switches)
    observations = layers_of(shape, layers, perplexities, seed, file)
    keep_set = method.select_all(observations, budget)
    for request, length in enumerate(shape.lengths):
        keep = budget.keep
        assert keep is not None
        count = min(keep, length) if isinstance(keep, int) else max(1, length * round(keep * 100) // 100)
        row = min(range(2), key=lambda i: (abs(count - tables.budgets.tolist()[i]), i))
        for layer, observation in enumerate(observations):
            scores = utilities(observations, layer, request, tables.weights[row, layer].tolist(), method)
            entropy = entropy_of(observations, request)
            tau = threshold_of(tables, row, layer, entropy, perplexities[request]) if method.gate else 0.9
            stay, _ = literally_kept(method, scores[0], tau, budget, count)
            assert all(kept(keep_set, observation, request, head) == stay for head in range(shape.kv_heads))


@pytest.mark.parametrize(("threshold", "tau"), [("utility", 0.2), ("mean", 1.0)])
def test_both_branches_of_equation_16(folder: Path, threshold: str, tau: float) -> None:
    """Under the budget all candidates stay and no more, above it the best of them; at the budget both are the same."""
    shape = Shape((40,), 2, 2, 4, 5)
    tables, file = written(folder, 1, 4, budgets=(8,), weights=1.0, gate=tau)
    method = CompilerKV(file, window=WINDOW, elastic=True, threshold=threshold)
    observations = layers_of(shape, 1, [2.0], 0, file)
    utility = utilities(observations, 0, 0, [1.0] * 4, method)[0]
    _, count = literally_kept(method, utility, float(tables.gate[0, 0, 0, 0]), Budget(40, recent=WINDOW), 40)
    assert count - 1 > WINDOW and count + 1 < 40
    for keep in (count - 1, count, count + 1, 40):
        budget = Budget(keep, recent=WINDOW)
        stay, _ = literally_kept(method, utility, float(tables.gate[0, 0, 0, 0]), budget, keep)
        assert len(stay) == min(keep, count)
        assert kept(method.select_all(observations, budget), observations[0], 0, 0) == stay


def test_few_entries_can_reach_a_threshold_of_the_utility_itself() -> None:
    """Utilities under weights of 1 add up to the window's length where values are alike, however long the text is."""
    shape = Shape((400,), 1, 1, 4, 4)
    observations = layers_of(shape, 2, [1.0])
    for observation in observations:
        observation.keys.zero_()  # all that is visible is looked at alike
        observation.values.fill_(1.0)
    method = CompilerKV(window=WINDOW)
    utility = utilities(observations, 0, 0, [1.0], method)[0]
    assert sum(utility) == pytest.approx(WINDOW, rel=1e-6)
    methods = {name: CompilerKV(window=WINDOW, elastic=True, threshold=name) for name in ("utility", "mean")}
    counts = {
        name: int(variant.select_all(observations, Budget(400)).counts[0, 0, 0]) for name, variant in methods.items()
    }
    # Nothing reaches 0.9, and one entry stays all the same; all but the window's last reach 0.9 of the mean.
    assert counts == {"utility": 1, "mean": sum(u >= 0.9 * WINDOW / 400 for u in utility)}


@examples(60)
@given(case=cases(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
def test_scores_where_heads_hold_different_entries(
    folder: Path, case: tuple[Shape, int, Budget, list[float], int], dtype: torch.dtype, seed: int
) -> None:
    """After an earlier event attention is added up by position, and each KV head has its own heads' maximum."""
    shape, layers, *_ = case
    tables, file = written(folder, layers, shape.kv_heads * shape.group)
    method = CompilerKV(tables=file, window=WINDOW)
    positions = [thinned(shape, 10 * seed + i, 4, newest=1) for i in range(layers)]
    observations = layers_of(shape, layers, [1.0] * shape.batch, positions=positions, dtype=dtype)
    received = method.received_attention(observations)
    for layer, observation in enumerate(observations):
        row = torch.zeros(shape.batch, dtype=torch.long)
        scores = method._utility(observation, received, tables, row)
        for request, length in enumerate(shape.lengths):
            expected = utilities(observations, layer, request, tables.weights[0, layer].tolist(), method)
            close = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.04, atol=0.02)
            right = torch.tensor(expected, dtype=torch.float64)
            torch.testing.assert_close(scores[request, :, :length].double(), right, **close)


def test_one_layers_score_is_what_it_selects_by() -> None:
    shape = Shape((17, 9), 2, 3, 4, 5)
    observation = observe(shape, window=WINDOW)
    method = CompilerKV(window=WINDOW)
    scores = method.score(observation)
    for request, length in enumerate(shape.lengths):
        expected = utilities([observation], 0, request, [1.0] * 6, method)
        torch.testing.assert_close(scores[request, :, :length].tolist(), expected, rtol=1e-4, atol=1e-6)


@examples(60)
@given(case=cases(), seed=st.integers(0, 5))
def test_filled_up_the_threshold_changes_nothing(
    folder: Path, case: tuple[Shape, int, Budget, list[float], int], seed: int
) -> None:
    """By default layers are filled up. What reaches a threshold is the best of what stays then."""
    shape, layers, budget, perplexities, _ = case
    _, file = written(folder, layers, shape.kv_heads * shape.group, seed)
    observations = layers_of(shape, layers, perplexities, seed, file)
    methods = [CompilerKV(file, window=WINDOW, gate=gate) for gate in (True, False)]
    for request in range(shape.batch):
        exact, ungated, elastic = (
            sets_of(variant, observations, budget, request)
            for variant in (*methods, CompilerKV(file, window=WINDOW, elastic=True))
        )
        assert exact == ungated
        for of_layer, filled in zip(elastic, exact, strict=True):
            assert all(head and set(head) <= set(full) for head, full in zip(of_layer, filled, strict=True))


def test_equal_scores_keep_the_later_and_all_heads_the_same() -> None:
    shape = Shape((20,), 3, 2, 4, 4)
    observations = layers_of(shape, 2, [1.0])
    for observation in observations:
        observation.keys.zero_()
        observation.values.fill_(1.0)
    # Entries before the window are seen by all of it alike.
    kept = sets_of(CompilerKV(window=WINDOW, elastic=False), observations, Budget(8, recent=WINDOW))
    assert kept == [[[*range(12, 20)]] * 3] * 2


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_head_that_has_overflowed_does_not_speak_for_the_others(poison: float) -> None:
    method, shape = CompilerKV(window=WINDOW, elastic=False), Shape((20,), 2, 1, 4, 4)
    broken, whole = layers_of(shape, 1, [1.0]), layers_of(shape, 1, [1.0])
    broken[0].values[0, 0].fill_(poison)
    budget = Budget(9, recent=WINDOW)
    always, rest = best_first(utilities(whole, 0, 0, [0.0, 1.0], method)[0], budget)
    assert kept(method.select_all(broken, budget), broken[0], 0, 1) == sorted((always + rest)[:9])


def test_values_of_length_zero_are_equal() -> None:
    observation = observe(Shape((9,), 1, 2, 4, 4), window=WINDOW)
    observation.values.zero_()
    plain = CompilerKV(window=WINDOW, relative_norm=False).score(observation)
    assert torch.equal(CompilerKV(window=WINDOW).score(observation), plain)


@pytest.mark.parametrize("threshold", ["utility", "mean"])
@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_layer_whose_heads_all_weigh_nothing_has_no_candidates(folder: Path, weight: float, threshold: str) -> None:
    shape = Shape((30, 3), 2, 2, 4, 5)
    _, file = written(folder, 1, 4, budgets=(8,), weights=weight)
    observations = layers_of(shape, 1, [1.0, 1.0], file=file)
    method = CompilerKV(file, window=WINDOW, elastic=True, threshold=threshold)
    counts = method.select_all(observations, Budget(12, recent=WINDOW)).counts
    assert counts.tolist() == [[[WINDOW] * 2, [3] * 2]]
    assert method.select_all(observations, Budget(12)).counts.unique().tolist() == [1]


def test_what_it_needs(folder: Path) -> None:
    _, file = written(folder, 2, 2)
    assert CompilerKV().traits.needs.window == CompilerKV().traits.recent == 64
    # Without tables, and without a gate, all thresholds are the same.
    ungated = CompilerKV(file, elastic=True, gate=False)
    for method in (CompilerKV(), CompilerKV(elastic=True), ungated, CompilerKV(file)):
        assert not method.traits.needs.of(Perplexity)
    assert CompilerKV(file, window=7, elastic=True).traits.needs.of(Perplexity) == [Perplexity(7)]
    assert CompilerKV(file).traits.needs.of(ModelTables) == [ModelTables(file)]
    assert not CompilerKV("absent", head_table=False, gate=False).traits.needs.of(ModelTables)  # which reads none
    exact, elastic = CompilerKV().traits, CompilerKV(elastic=True).traits
    assert exact.fixed_total and exact.equal_layers and exact.equal_heads
    assert elastic.equal_heads and elastic.counts_from_data and not elastic.fixed_total


def test_what_is_missing_or_of_another_model_is_refused(folder: Path) -> None:
    _, single = written(folder, 1, 2)
    told = {ModelTables(single): load(single)}
    with pytest.raises(KeepsetError, match=r"features=\{Perplexity"):
        CompilerKV(single, elastic=True).select_all([observe(Shape((9,), 1, 2, 4, 4), features=told)], Budget(5))
    _, other = written(folder, 7, 5)
    seen = layers_of(Shape((9,), 1, 2, 4, 4), 2, [1.0], file=other)
    with pytest.raises(KeepsetError, match="theirs has 7 layers of 5 query heads, this one 2 of 2"):
        CompilerKV(other, window=WINDOW).select_all(seen, Budget(5))


# --- theorem 4.1


def losses(rows: list[list[float]], stay: Sequence[int]) -> tuple[list[float], list[float], float]:
    """Return every row's attention to the dropped and its L1 error (A1), and |E|_F over all rows (A4).

    What stays is renormalised; a row that sees none of it attends to nothing.
    """
    dropped, errors, squares = [], [], 0.0
    for row in rows:
        left = sum(row[j] for j in stay)
        compressed = [row[j] / left if j in stay and left > 0 else 0.0 for j in range(len(row))]
        dropped.append(sum(row[j] for j in range(len(row)) if j not in stay))
        errors.append(sum(abs(a - b) for a, b in zip(row, compressed, strict=True)))
        squares += sum((a - b) ** 2 for a, b in zip(row, compressed, strict=True))
    return dropped, errors, math.sqrt(squares)


def check_theorem(heads: list[list[list[float]]], stay: Sequence[int]) -> None:
    """Check what the proof of theorem 4.1 shows about a layer, with its constants.

    A1 is an equality wherever a row sees something that stays. So a row's error has length sqrt(2) X at most, X being
    its dropped mass, and the mean of |E|_F over heads is within that of sqrt(2 sum X^2), and that within sqrt(2 T) max
    X. Equation 18's first term, sqrt(T) times the mean of X, leaves out the sqrt(2) (A5 is an approximation) and what
    the mean hides; its second is an order, without constants to check.
    """
    error, exact, largest = 0.0, 0.0, 0.0
    for rows in heads:
        dropped, errors, frobenius = losses(rows, stay)
        for row, lost, off in zip(rows, dropped, errors, strict=True):
            assert off <= 2 * lost + 1e-6
            if sum(row[j] for j in stay) > 1e-6:
                assert off == pytest.approx(2 * lost, abs=1e-5)
        error += frobenius / len(heads)
        exact += math.sqrt(2 * sum(x * x for x in dropped)) / len(heads)
        largest = max(largest, *dropped)
    assert error <= exact + 1e-6
    assert exact <= math.sqrt(2 * len(heads[0])) * largest + 1e-6


@examples(60)
@given(length=st.integers(6, 20), keep=st.integers(WINDOW, 20), heads=st.integers(1, 4), seed=st.integers(0, 99))
def test_theorem_4_1_on_random_attention(length: int, keep: int, heads: int, seed: int) -> None:
    """It holds for what the method keeps, and for any other choice, of which some rows may see nothing."""
    observation = layers_of(Shape((length,), heads, 1, 4, 4), 1, [1.0], seed)
    keep_set = CompilerKV(window=WINDOW, elastic=False).select_all(observation, Budget(keep, recent=WINDOW))
    rows = [window_attention(observation[0], 0, head, WINDOW) for head in range(heads)]
    check_theorem(rows, kept(keep_set, observation[0], 0, 0))
    draw = torch.Generator().manual_seed(seed)
    check_theorem(rows, torch.randperm(length, generator=draw)[: 1 + seed % length].tolist())
