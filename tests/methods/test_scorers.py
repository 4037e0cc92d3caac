"""Statements that papers make about scorers in words: what stays by itself, and what a parameter changes."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from keepset import Budget, KeepsetError, Observation, Recipe
from keepset.core.feature import Needs
from keepset.core.features.attention import AttentionColumns, PromptQueryAttention, SecondPass
from keepset.core.features.moments import QueryDistribution, QueryMoments
from keepset.core.features.runtime_features import ModelStatistics, OutputProjection
from keepset.core.statistics import Statistics
from keepset.kernels.columns import ColumnStatistic
from keepset.kernels.softmax import Softmax
from keepset.methods import expected_attention, window
from keepset.methods.expected_attention import ExpectedAttention
from keepset.methods.gvote import GVote
from keepset.methods.keys import LagKV
from keepset.methods.measured import QFilter, TriAttention
from keepset.methods.positions import Random
from keepset.methods.second_pass import PromptQueries, SecondPassAttention
from keepset.methods.window import H2O, RKV, RPC, SnapKV
from tests.methods.formulas import FORMULAS, matmul, mean_rotation, naive_scores, observed, transposed
from tests.methods.naive import (
    EXACT,
    SHAPES,
    SUM,
    Rope,
    Shape,
    check_scores,
    dot,
    every_shape,
    heads_of,
    observe,
    random_statistics,
)
from tests.observations import changed


def stay(text: str, observation: Observation, request: int = 0) -> list[list[int]]:
    """Return what each head of a request keeps under a recipe."""
    recipe = Recipe.parse(text)
    return heads_of(recipe.method, observation, recipe.budget, request)


@pytest.mark.parametrize(
    ("refused", "because"),
    [
        *((lambda kind=kind: kind(kernel=4), "odd") for kind in (SnapKV, RPC, RKV)),
        (lambda: SecondPassAttention(task="self", statistic="rms"), "needs a second pass"),
        (lambda: GVote(p_nuc=1.5), "p_nuc=1.5 is out of range: use 0.0 to 1.0"),
        (lambda: GVote(samples=0), "samples=0 is out of range"),
        (lambda: GVote(future=0), "future=0 is out of range"),
        (lambda: GVote(skip=-1), "skip=-1 is out of range"),
    ],
)
def test_parameters_that_are_refused(refused: Callable[[], object], because: str) -> None:
    with pytest.raises(KeepsetError, match=because):
        refused()


@pytest.mark.parametrize(
    ("text", "feature"),
    [
        ("gvote(skip=2)", "HiddenMoments(skip=2)"),
        ("expected_attention(skip=3)", "QueryMoments(skip=3"),
        ("qfilter(stats='other')", "ModelStatistics(file='other')"),
        ("duo_attention(stats='mine')", "ModelStatistics(file='mine')"),
    ],
)
def test_what_is_missing_is_asked_for(text: str, feature: str) -> None:
    observation = observe(Shape((6,), 1, 1, 4, 4), skips=(5,))
    with pytest.raises(KeepsetError) as refusal:
        Recipe.parse(text).method.select(observation, Budget(4))
    assert f"give Observation(features={{{feature}" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "always"),
    [
        ("snapkv(window=5, keep=9)", [35, 36, 37, 38, 39]),
        ("tova(keep=6)", [39]),
        ("rpc(window=5, keep=9)", [0, 1, 2, 3, 35, 36, 37, 38, 39]),
        ("r_kv(keep=12)", [0, 1, 2, 3, 32, 33, 34, 35, 36, 37, 38, 39]),
        ("streaming_llm(keep=6, sinks=1)", [0, 35, 36, 37, 38, 39]),
        ("prompt_queries(keep=12)", [0, 1, 2, 3, 32, 33, 34, 35, 36, 37, 38, 39]),
        ("expected_attention(keep=6)", [0, 1, 2, 3]),
    ],
)
def test_what_always_stays(text: str, always: list[int]) -> None:
    for head in stay(text, observe(Shape((40,), 3, 2, 5, 5))):
        assert set(always) <= set(head)


def test_only_what_is_looked_at_is_needed() -> None:
    again = SecondPass(frozenset({ColumnStatistic.SQUARE}), chunk=0)
    for method, needs in (
        (PromptQueries(stride=3), Needs(PromptQueryAttention(3))),
        (PromptQueries(second_pass=True), Needs(PromptQueryAttention(1), again)),
        (ExpectedAttention(stats="file"), Needs(ModelStatistics("file"))),
    ):
        assert method.traits.needs == needs and needs.unrotated == (method.name == "prompt_queries")
    for task, statistic, values in product(("context", "self"), ("max", "mean"), ("none", "norm", "projected")):
        needs = SecondPassAttention(task=task, statistic=statistic, values=values, chunk=5).traits.needs
        column = ColumnStatistic.MAX if statistic == "max" else ColumnStatistic.SUM
        looked_at = AttentionColumns(column) if task == "self" else SecondPass(frozenset({column}), chunk=5)
        assert needs == Needs(looked_at, *([OutputProjection()] if values == "projected" else []))


# --- chance


def chances(seed: int = 0, layer: int = 0, head: int = 0) -> Tensor:
    return Random(seed=seed).score(observe(Shape((4000,), 2, 1, 1, 1), layer=layer))[0, head]


@pytest.mark.parametrize("changes", [dict(seed=1), dict(layer=1), dict(head=1), dict(seed=2**31 - 1)])
def test_seeds_layers_and_heads_draw_independently(changes: dict[str, int]) -> None:
    first, second = chances(), chances(**changes)
    assert torch.equal(second, chances(**changes)) and int((first == second).sum()) <= 1
    assert abs(float(torch.stack([first, second]).corrcoef()[0, 1])) < 4 / math.sqrt(len(first))


@pytest.mark.parametrize("head", [0, 1])
def test_chances_are_about_uniform(head: int) -> None:
    drawn = chances(head=head)
    assert drawn.min() >= 0 and drawn.max() <= 1
    counts = torch.bincount((drawn * 20).long().clamp(max=19), minlength=20)
    expected = len(drawn) / 20
    # Exceeded by one in a thousand, for 19 degrees of freedom.
    assert float(((counts - expected).square() / expected).sum()) < 43.8
    assert abs(float(torch.stack([drawn[1:], drawn[:-1]]).corrcoef()[0, 1])) < 4 / math.sqrt(len(drawn))


def test_chance_depends_on_the_position_and_not_on_the_place_in_the_cache() -> None:
    whole = Random().score(observe(Shape((40,), 2, 1, 3, 3)))
    thinned = observe(Shape((14,), 2, 1, 3, 3), positions=torch.arange(0, 40, 3).expand(1, 2, -1))
    assert torch.equal(Random().score(thinned), whole[:, :, ::3])


# --- positions, keys and values


@every_shape
def test_streaming_llm_keeps_the_first_four_and_the_newest(shape: Shape) -> None:
    for request, length in enumerate(shape.lengths):
        expected = [t for t in range(length) if t < 4 or t >= length - 3]
        assert stay("streaming_llm(keep=7)", observe(shape), request) == [expected] * shape.kv_heads


def test_a_channel_that_does_not_vary_counts_as_zero() -> None:
    observation, method = observe(Shape((8,), 1, 1, 3, 3)), LagKV(lag=4, skip=0)
    observation.keys[..., 4:, 1] = 2.0
    assert not math.isnan(method.score(observation).sum())
    check_scores(method, observation, [naive_scores(method, observation, 0)], **EXACT)


# --- the newest queries


@pytest.mark.parametrize("block", [1, 60])
def test_blocks_of_similarities_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_BLOCK", block)
    method = RKV(window=3, threshold=0.2)
    for shape in SHAPES:
        observation = observed(method, shape)
        check_scores(method, observation, [naive_scores(method, observation, r) for r in range(shape.batch)], **EXACT)


def test_of_keys_that_repeat_the_newest_stays_and_the_windows_make_nothing_redundant() -> None:
    method = RKV(window=2, mix_lambda=0)
    observation = observe(Shape((30,), 1, 1, 16, 4), window=2)
    scores = method.score(observation)[..., :28]
    observation.keys[0, 0, 28:] = observation.keys[0, 0, 11].clone()
    assert torch.equal(method.score(observation)[..., :28], scores)
    repeated = {3, 8, 13, 18, 23}
    observation.keys[0, 0, sorted(repeated)] = observation.keys[0, 0, 3].clone()
    assert repeated & set(heads_of(method, observation, Budget(26, recent=2))[0]) == {23}


# --- the whole prompt


@pytest.mark.parametrize(
    ("keep", "share", "newest"),
    [(100, 0.29, 29), (200, 0.265, 53), (300, 0.21, 63), (7, 0.5, 3), (50, 0.0, 0), (50, 1.0, 50), (1, 0.9, 0)],
)
def test_the_newest_share_of_h2o_is_exact(keep: int, share: float, newest: int) -> None:
    falling = torch.arange(700.0, 0, -1).view(1, 1, -1)
    observation = observe(Shape((700,), 1, 1, 1, 1), features={SUM: falling})
    expected = [*range(keep - newest), *range(700 - newest, 700)]
    assert heads_of(H2O(recent_share=share), observation, Budget(keep)) == [expected]


# --- distributions of queries


def test_what_nothing_looks_at_counts_by_a_hundredth_of_its_values_norm() -> None:
    observation = observe(Shape((9,), 1, 1, 4, 4), skips=(0,))
    moments = observation[QueryMoments(0)]
    # One key along the mean query draws all attention; the others look away from it, where exp is 0 in float32.
    ahead = matmul([moments.mean[0, 0].double().tolist()], transposed(mean_rotation(4, 9, 1)))[0]
    keys = torch.tensor([[1e4 * (1 if entry == 2 else -entry - 1) * x for x in ahead] for entry in range(9)])
    observation = changed(observation, keys=keys[None, None])
    norms = [math.sqrt(dot(value, value)) for value in observation.values[0, 0].double().tolist()]
    expected = [(1.01 if entry == 2 else 0.01) * norms[entry] for entry in range(9)]
    scores = ExpectedAttention(future=1, skip=0, covariance=False).score(observation)[0, 0]
    assert scores.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("skip", [0, 4])
def test_statistics_of_a_file_take_the_place_of_the_texts_own(skip: int) -> None:
    method = ExpectedAttention(future=7, skip=skip)
    for shape in SHAPES:
        measured = random_statistics(shape, (0,), gain=1.0)
        observation = observe(shape, skips=(), features={ModelStatistics("file"): measured})
        layer, batch, rope = measured.layers[0], (shape.batch, -1, -1), Rope(tuple(observation.lengths.tolist()))
        moments = QueryDistribution(layer.mean.expand(*batch), layer.covariance.expand(*batch, -1), rope)
        with_moments = observe(shape, skips=(), features={QueryMoments(skip): moments})
        expected = [naive_scores(method, with_moments, request) for request in range(shape.batch)]
        check_scores(replace(method, stats="file"), observation, expected, **FORMULAS[method.name].exact)


def test_the_models_own_scaling_cap_and_sinks_are_used() -> None:
    sinks = torch.tensor([-0.5, 1.5])
    for softmax in Softmax(0.9), Softmax(0.9, 1.0), Softmax(0.9, None, sinks), Softmax(0.9, 1.0, sinks):
        method, observation = ExpectedAttention(future=5), observe(Shape((15,), 1, 2, 6, 6), softmax=softmax)
        check_scores(method, observation, [naive_scores(method, observation, 0)], **FORMULAS[method.name].exact)


def test_expected_attention_is_what_sampled_queries_pay_on_average() -> None:
    size, draws = 4, 200_000
    observation = observe(Shape((12,), 1, 1, size, size), softmax=Softmax(0.4), skips=(0,))
    moments = observation[QueryMoments(0)]
    rotation = torch.tensor(mean_rotation(size, 12, 3), dtype=torch.float64)
    factor = torch.linalg.cholesky(moments.covariance[0, 0].double())
    noise = torch.randn(draws, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    queries = (moments.mean[0, 0].double() + noise @ factor.T) @ rotation.T
    paid = (queries @ observation.keys[0, 0].double().T * 0.4).exp().mean(0)
    scores = ExpectedAttention(future=3, skip=0, value_norm=False).score(observation)[0, 0]
    torch.testing.assert_close(scores.double(), paid / paid.sum(), rtol=0.02, atol=0)


@pytest.mark.parametrize("device", ["cpu", "make-believe"])
@pytest.mark.parametrize("block", [1, 50, 2**18])
@pytest.mark.parametrize("size", [1, 3, 6, 17])
def test_expected_logits_are_those_of_each_key(
    size: int, block: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrices need not be symmetric: rounding leaves none that is."""
    monkeypatch.setattr(expected_attention, "CACHE_BLOCK" if device == "cpu" else "DEVICE_BLOCK", block)
    draw = torch.Generator().manual_seed(size)
    keys, matrices = torch.randn(2, 3, 11, size, generator=draw), torch.randn(2, 3, 2, size, size, generator=draw)
    vectors = torch.randn(2, 3, 2, size, generator=draw)
    if device == "cpu":
        logits = expected_attention._expected_logits(keys, vectors, matrices)
    else:
        pytest.importorskip("triton")
        from tests.posing import Gpu, Posing

        with Gpu(monkeypatch):
            logits = expected_attention._expected_logits(*(Posing(part) for part in (keys, vectors, matrices)))
        assert isinstance(logits, Posing)
        logits = logits.held
    key, vector, matrix = (part.double() for part in (keys[:, :, :, None], vectors[:, :, None], matrices[:, :, None]))
    expected = (key * vector).sum(-1) + (key[..., None] * matrix * key[..., None, :]).sum((-1, -2))
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)


class Spent(TorchDispatchMode):
    """Counts operations that are not views, and the bytes that are held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.launches: Counter[str] = Counter()
        self._sharing: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.launches[str(function)] += not function.is_view
        for tensor in output if isinstance(output, (list, tuple)) else [output]:
            storage = tensor.untyped_storage()
            if not self._sharing[storage._cdata]:
                self.held += storage.nbytes()
            self._sharing[storage._cdata] += 1
            weakref.finalize(tensor, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return output

    def _gone(self, storage: int, nbytes: int) -> None:
        self._sharing[storage] -= 1
        if not self._sharing[storage]:
            self.held -= nbytes


def test_on_a_device_a_long_context_takes_few_launches_and_little_memory() -> None:
    """128k entries in the shape of an 8B model, whose keys alone are 256 MiB; nothing is computed."""
    counted = {}
    for entries in (2**17, 2**18):
        keys = torch.empty(1, 8, entries, 128, device="meta", dtype=torch.bfloat16)
        vectors, matrices = (torch.empty(1, 8, 4, *sizes, device="meta") for sizes in ((128,), (128, 128)))
        with Spent() as spent:
            logits = expected_attention._expected_logits(keys, vectors, matrices)
        counted[entries] = spent.launches.total(), spent.peak - logits.nbytes - keys.nbytes  # a view's counts, too
    (launches, peak), (_, later_peak) = counted.values()
    assert launches <= 64 and later_peak == peak <= 530 * 2**20, counted


# --- statistics of the model


@pytest.mark.parametrize(
    ("heads", "size", "layers"),
    [((4, 4), 4, (0, 1)), ((2, 6), 6, (0, 1)), ((2, 4), 4, (0, 1, 2)), ((2, 4), 4, (0, 3))],
    ids=["kv_heads", "head_dim", "fewer_layers", "other_layers"],
)
def test_statistics_of_another_model_are_refused(heads: tuple[int, int], size: int, layers: tuple[int, ...]) -> None:
    features = observe(Shape((6,), 2, 2, 4, 4), layers=(0, 1)).features
    keys = torch.zeros(1, heads[0], 6, size)
    observation = Observation(keys=keys, values=keys, layers=layers, features=features)
    with pytest.raises(KeepsetError, match="are of another model: theirs has 2 layers with 2 KV heads of size 4"):
        QFilter().score(observation)


def test_a_number_that_overflowed_leaves_the_other_scores_alone() -> None:
    observation = observe(Shape((8,), 1, 2, 4, 4))
    before = TriAttention().score(observation)
    observation.keys[0, 0, 3] = math.inf
    after = TriAttention().score(observation)
    unharmed = [entry for entry in range(8) if entry != 3]
    assert after[0, 0, unharmed].isfinite().all() and before.isfinite().all()


def test_planes_need_not_be_halves() -> None:
    """Neighbours as partners: the same model with its numbers in another order keeps the same."""
    observation = observe(Shape((15,), 2, 2, 6, 4))
    order = [0, 3, 1, 4, 2, 5]
    layer, inverse_order = observation[ModelStatistics("")].layers[0], torch.tensor(order).argsort()
    last = {name: getattr(layer, name)[..., order] for name in ("direction", "mean", "norm", "frequency", "gain")}
    covariance = layer.covariance[:, order][:, :, order]
    turned = replace(layer, covariance=covariance, partner=inverse_order[layer.partner[order]], **last)
    features = {ModelStatistics(""): Statistics({0: turned})}
    reordered = Observation(keys=observation.keys[..., order], values=observation.values, features=features)
    torch.testing.assert_close(TriAttention().score(reordered), TriAttention().score(observation), rtol=1e-5, atol=1e-5)
