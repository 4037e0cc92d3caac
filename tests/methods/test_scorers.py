"""Statements that papers make about scorers in words: what stays by itself, and what a parameter changes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from keepset import Budget, KeepsetError, Method, Observation, Recipe
from keepset.core.feature import Needs
from keepset.core.features.attention import AttentionColumns, PromptQueryAttention, SecondPass
from keepset.core.features.runtime_features import ModelStatistics, OutputProjection
from keepset.kernels.columns import ColumnStatistic
from keepset.methods import r_kv
from keepset.methods.h2o import H2O
from keepset.methods.keydiff import KeyDiff
from keepset.methods.knorm import Knorm
from keepset.methods.lagkv import LagKV
from keepset.methods.prompt_queries import PromptQueries
from keepset.methods.qfilter import QFilter
from keepset.methods.r_kv import RKV
from keepset.methods.rpc import RPC
from keepset.methods.second_pass import SecondPassAttention
from keepset.methods.snapkv import SnapKV
from keepset.methods.streaming_llm import StreamingLLM
from tests.methods.formulas import naive_scores, observed
from tests.methods.naive import EXACT, SHAPES, SUM, Shape, check_scores, kept, length_of, observe, softmax


def heads_of(text: str, observation: Observation) -> list[list[int]]:
    """Return what each head of the only request keeps under a recipe."""
    keep_set = Recipe.parse(text).select(observation)
    return [kept(keep_set, observation, 0, head) for head in range(observation.keys.shape[1])]


@pytest.mark.parametrize("method", [SnapKV, RPC, RKV])
def test_an_even_kernel_is_refused(method: type[SnapKV]) -> None:
    with pytest.raises(KeepsetError, match="odd"):
        method(kernel=4)


@pytest.mark.parametrize(
    ("text", "always"),
    [
        ("snapkv(window=5, keep=9)", [35, 36, 37, 38, 39]),
        ("tova(keep=6)", [39]),
        ("rpc(window=5, keep=9)", [0, 1, 2, 3, 35, 36, 37, 38, 39]),
        ("r_kv(keep=12)", [0, 1, 2, 3, 32, 33, 34, 35, 36, 37, 38, 39]),
        ("streaming_llm(keep=6, sinks=1)", [0, 35, 36, 37, 38, 39]),
        ("prompt_queries(keep=12)", [0, 1, 2, 3, 32, 33, 34, 35, 36, 37, 38, 39]),
    ],
)
def test_what_always_stays(text: str, always: list[int]) -> None:
    for head in heads_of(text, observe(Shape((40,), 3, 2, 5, 5))):
        assert set(always) <= set(head)
    assert str(Recipe.parse("r_kv(keep=12, sinks=0)")) == "r_kv(keep=12, sinks=0)"


# --- positions, keys and values


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", [4, 7, 8])
def test_streaming_llm_keeps_the_first_four_and_the_newest(shape: Shape, keep: int) -> None:
    observation = observe(shape)
    keep_set = Recipe.of(StreamingLLM(), keep=keep).select(observation)
    for request in range(shape.batch):
        length = length_of(observation, request)
        expected = [t for t in range(length) if t < 4 or t >= length - (keep - 4)]
        for head in range(shape.kv_heads):
            assert kept(keep_set, observation, request, head) == expected


def test_knorm_drops_keys_that_are_not_numbers_first() -> None:
    observation = observe(Shape((9,), 1, 2, 4, 4))
    observation.keys[0, 0, 2] = math.inf
    observation.keys[0, 0, 5] = math.nan
    assert kept(Knorm().select(observation, Budget(8)), observation, 0, 0) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert kept(Knorm().select(observation, Budget(7)), observation, 0, 0) == [0, 1, 3, 4, 6, 7, 8]


def test_of_equal_norms_the_later_stays() -> None:
    observation = observe(Shape((9,), 1, 1, 4, 4))
    observation.keys.fill_(1.0)
    observation.keys[0, 0, 1] = 0.5
    assert kept(Knorm().select(observation, Budget(4)), observation, 0, 0) == [1, 6, 7, 8]


def test_a_keys_length_plays_no_part_in_keydiff() -> None:
    observation = observe(Shape((19,), 2, 1, 6, 6))
    before = KeyDiff().score(observation)
    observation.keys[:, :, ::3] *= 50
    torch.testing.assert_close(KeyDiff().score(observation), before, **EXACT)


def test_the_key_that_points_elsewhere_is_the_best() -> None:
    observation = observe(Shape((12,), 1, 1, 4, 4))
    observation.keys[:] = 1 + observation.keys / 10
    observation.keys[0, 0, 5] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert KeyDiff().score(observation)[0, 0].argmax() == 5


def test_every_partition_of_lagkv_keeps_the_same_share() -> None:
    observation = observe(Shape((50,), 2, 1, 5, 5))
    keep_set = LagKV(lag=10, skip=4).select(observation, Budget(4 + 16 + 3 * 4, sinks=4, recent=10))
    for head in range(2):
        positions = kept(keep_set, observation, 0, head)
        assert [sum(start <= p < start + 10 for p in positions) for start in (4, 14, 24)] == [4, 4, 4]
        assert set(range(4)) | set(range(34, 50)) <= set(positions)


def test_a_channel_that_does_not_vary_counts_as_zero() -> None:
    observation = observe(Shape((8,), 1, 1, 3, 3))
    observation.keys[..., 4:, 1] = 2.0
    method = LagKV(lag=4, skip=0)
    assert not math.isnan(method.score(observation).sum())
    check_scores(method, observation, [naive_scores(method, observation, 0)], **EXACT)


# --- the newest queries


def test_heads_share_one_set_where_their_attention_is_averaged() -> None:
    observation = observe(Shape((40,), 3, 2, 4, 4), window=5)
    for text, sets in (
        ("tova(keep=20)", 1),
        ("rpc(window=5, keep=20)", 3),
        ("rpc(window=5, aggregation='all', keep=20)", 1),
    ):
        assert len({tuple(head) for head in heads_of(text, observation)}) == sets


@pytest.mark.parametrize("block", [1, 60])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_similarities_change_nothing(shape: Shape, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r_kv, "_BLOCK", block)
    method = RKV(window=3, threshold=0.2)
    observation = observed(method, shape)
    check_scores(method, observation, [naive_scores(method, observation, r) for r in range(shape.batch)], **EXACT)


def test_keys_of_the_window_make_nothing_redundant() -> None:
    observation = observe(Shape((30,), 1, 1, 16, 4), window=4)
    method = RKV(window=4, mix_lambda=0)
    scores = method.score(observation)[..., :26]
    observation.keys[0, 0, 26:] = observation.keys[0, 0, 11].clone()
    torch.testing.assert_close(method.score(observation)[..., :26], scores, rtol=0, atol=0)


def test_of_keys_that_repeat_the_newest_stays() -> None:
    observation = observe(Shape((30,), 1, 1, 16, 4), window=2)
    observation.keys[0, 0, [3, 8, 13, 18, 23]] = observation.keys[0, 0, 3].clone()
    positions = kept(RKV(window=2, mix_lambda=0).select(observation, Budget(26, recent=2)), observation, 0, 0)
    assert {3, 8, 13, 18, 23} & set(positions) == {23}


# --- the whole prompt


def test_h2o_keeps_half_newest_half_heavy_hitters_of_the_whole_causal_attention() -> None:
    length, keep = 21, 9
    logits = torch.randn(length, length, generator=torch.Generator().manual_seed(1)).tolist()
    received = [0.0] * length
    for query in range(length):
        for entry, weight in enumerate(softmax(logits[query][: query + 1])):
            received[entry] += weight
    observation = observe(Shape((length,), 1, 1, 4, 4), features={SUM: torch.tensor([[received]])})

    newest = set(range(length - keep // 2, length))
    others = sorted(set(range(length)) - newest, key=lambda entry: received[entry], reverse=True)
    expected = sorted(newest | set(others[: keep - len(newest)]))
    assert kept(H2O().select(observation, Budget(keep)), observation, 0, 0) == expected


@pytest.mark.parametrize(
    ("keep", "share", "newest"),
    [(100, 0.29, 29), (200, 0.265, 53), (300, 0.21, 63), (7, 0.5, 3), (50, 0.0, 0), (50, 1.0, 50), (1, 0.9, 0)],
)
def test_the_newest_share_of_h2o_is_exact(keep: int, share: float, newest: int) -> None:
    falling = torch.arange(700.0, 0, -1).view(1, 1, -1)
    observation = observe(Shape((700,), 1, 1, 1, 1), features={SUM: falling})
    expected = [*range(keep - newest), *range(700 - newest, 700)]
    assert kept(H2O(recent_share=share).select(observation, Budget(keep)), observation, 0, 0) == expected


SQUARES = SecondPass(frozenset({ColumnStatistic.SQUARE}), chunk=0)


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        (PromptQueries(), Needs(PromptQueryAttention(1))),
        (PromptQueries(stride=3), Needs(PromptQueryAttention(3))),
        (PromptQueries(second_pass=True), Needs(PromptQueryAttention(1), SQUARES)),
    ],
)
def test_the_prompts_queries_are_needed(method: Method, needs: Needs) -> None:
    assert method.traits.needs == needs and method.traits.needs.unrotated


def test_only_what_is_looked_at_of_a_second_pass_is_needed() -> None:
    for task, statistic, values in product(("context", "self"), ("max", "mean"), ("none", "norm", "projected")):
        needs = SecondPassAttention(task=task, statistic=statistic, values=values, chunk=5).traits.needs
        column = ColumnStatistic.MAX if statistic == "max" else ColumnStatistic.SUM
        looked_at = AttentionColumns(column) if task == "self" else SecondPass(frozenset({column}), chunk=5)
        assert needs == Needs(looked_at, *([OutputProjection()] if values == "projected" else []))


def test_a_root_of_squares_needs_a_second_pass() -> None:
    with pytest.raises(KeepsetError, match="needs a second pass"):
        SecondPassAttention(task="self", statistic="rms")


# --- statistics of the model


def test_the_key_that_reaches_farthest_along_the_direction_stays() -> None:
    observation = observe(Shape((9,), 2, 1, 4, 4))
    observation.keys[0, 1, 6] = 100 * observation[ModelStatistics("")].layers[0].direction[1]
    assert kept(QFilter().select(observation, Budget(1)), observation, 0, 1) == [6]


def test_each_file_has_its_own_statistics() -> None:
    observation = observe(Shape((6,), 1, 1, 4, 4))
    with pytest.raises(KeepsetError, match=r"Observation\(features=\{ModelStatistics\(file='other'\): \.\.\.\}\)"):
        QFilter(stats="other").score(observation)


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        (Shape((6,), 1, 4, 4, 4), (0, 1)),
        (Shape((6,), 2, 2, 6, 4), (0, 1)),
        (Shape((6,), 2, 2, 4, 4), (0, 1, 2)),
        (Shape((6,), 2, 2, 4, 4), (0, 3)),
    ],
    ids=["kv_heads", "head_dim", "fewer_layers", "other_layers"],
)
def test_statistics_of_another_model_are_refused(shape: Shape, layers: tuple[int, ...]) -> None:
    theirs = observe(Shape((6,), 2, 2, 4, 4), layers=(0, 1)).features
    keys = torch.zeros(1, shape.kv_heads, 6, shape.head_dim)
    observation = Observation(keys=keys, values=keys, layers=layers, features=theirs)
    with pytest.raises(KeepsetError, match="are of another model: theirs has 2 layers with 2 KV heads of size 4"):
        QFilter().score(observation)
