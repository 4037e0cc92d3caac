import math

import pytest
import torch

from keepset import KeepsetError, Observation
from keepset.core.feature import Needs
from keepset.core.features.attention import PromptQueryAttention
from keepset.core.features.moments import HiddenMoments, QueryDistribution, QueryMoments
from keepset.core.features.runtime_features import RecentQueries
from tests.methods.naive import (
    DTYPES,
    EXACT,
    MAX,
    SHAPES,
    SUM,
    Rope,
    Shape,
    length_of,
    observe,
    tolerance,
    window_attention,
)


def bare(**parts: object) -> Observation:
    options = dict(keys=torch.zeros(2, 2, 6, 4), values=torch.zeros(2, 2, 6, 3))
    return Observation(**{**options, **parts})


def test_defaults_describe_a_whole_prompt() -> None:
    observation = bare(queries=torch.zeros(2, 4, 3, 4))
    assert observation.valid.all()
    assert observation.positions.tolist() == [[[0, 1, 2, 3, 4, 5]] * 2] * 2
    assert observation.lengths.tolist() == observation.prompts.tolist() == [6, 6]
    assert observation.query_positions is not None
    assert observation.query_positions.tolist() == [[3, 4, 5]] * 2
    assert observation.scaling == pytest.approx(1 / math.sqrt(4))
    assert (observation.layer, observation.layers, observation.depths.tolist()) == (0, (0,), [0, 0])


def test_shorter_requests_end_earlier() -> None:
    valid = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])[:, None].expand(2, 2, 6)
    observation = bare(queries=torch.zeros(2, 4, 3, 4), valid=valid)
    assert observation.lengths.tolist() == [6, 2]
    assert observation.query_positions is not None
    assert observation.query_positions.tolist() == [[3, 4, 5], [-1, 0, 1]]


def test_lengths_count_dropped_entries_too() -> None:
    positions = torch.tensor([[[0, 1, 5, 6, 8, 9], [0, 2, 3, 7, 8, 9]]] * 2)
    assert bare(positions=positions).lengths.tolist() == [10, 10]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_window_attention_is_causal_attention(shape: Shape, window: int, dtype: torch.dtype) -> None:
    observation = observe(shape, dtype=dtype)
    attention = observation.window_attention(window)
    assert attention.shape == (shape.batch, shape.kv_heads * shape.group, min(window, shape.entries), shape.entries)
    assert attention.dtype == torch.float32
    for request in range(shape.batch):
        length = length_of(observation, request)
        for head in range(shape.kv_heads * shape.group):
            expected = window_attention(observation, request, head, window)
            rows = attention[request, head]
            existing = rows[rows.shape[0] - len(expected) :, :length]
            torch.testing.assert_close(existing, torch.tensor(expected), **tolerance(dtype))
            # Nothing for holes, and nothing from queries before the first token.
            assert not rows[:, length:].any()
            assert not rows[: rows.shape[0] - len(expected)].any()


def test_window_attention_after_entries_were_dropped() -> None:
    positions = torch.tensor([[[0, 3, 4, 8, 9], [1, 2, 7, 8, 9]]])
    observation = observe(Shape((5,), 2, 3, 4, 4), positions=positions, window=4, scaling=0.3)
    for head in range(6):
        expected = torch.tensor(window_attention(observation, 0, head, 4))
        torch.testing.assert_close(observation.window_attention(4)[0, head], expected)


def check_usage(observation: Observation, window: int) -> None:
    """The sum over the window's rows of attention number by number; nothing for holes."""
    usage = observation.window_usage(window)
    assert usage.dtype == torch.float32
    assert observation.queries is not None
    assert usage.shape == (*observation.queries.shape[:2], observation.keys.shape[2])
    for request in range(usage.shape[0]):
        length = length_of(observation, request)
        assert not usage[request, :, length:].any()
        for head in range(usage.shape[1]):
            rows = window_attention(observation, request, head, window)
            expected = torch.tensor([sum(column) for column in zip(*rows, strict=True)])
            torch.testing.assert_close(usage[request, head, :length], expected, **EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("block", [1, 40, 2**18])
@pytest.mark.parametrize("shape", SHAPES)
def test_window_usage_is_attention_summed(
    shape: Shape, block: int, window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepset.kernels.window.CACHE_BLOCK", block)
    check_usage(observe(shape, dtype=dtype), window)


def test_window_usage_after_entries_were_dropped() -> None:
    positions = torch.tensor([[[0, 3, 4, 8, 9], [1, 2, 7, 8, 9]]])
    check_usage(observe(Shape((5,), 2, 3, 4, 4), positions=positions, window=4, scaling=0.3), 4)


def test_queries_that_see_nothing_use_nothing() -> None:
    """Positions 6 and 7 were looked at before anything that is still there came."""
    queries = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(1))
    observation = observe(Shape((2,), 1, 2, 3, 3), positions=torch.tensor([[[8, 9]]]), queries=queries)
    assert not observation.window_attention(4)[:, :, :2].any()
    check_usage(observation, 4)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_overflowed_is_seen_in_its_own_head_only(number: float) -> None:
    observation = observe(Shape((9,), 2, 2, 4, 4), window=3)
    expected = observation.window_usage(3)
    observation.keys[0, 1, 2] = number
    usage = observation.window_usage(3)
    assert torch.equal(usage[:, :2], expected[:, :2]) and usage[:, 2:].isnan().any()


def test_query_heads_are_grouped_as_the_model_groups_them() -> None:
    grouped = bare().by_query_group(torch.arange(2 * 6).view(2, 6).float())
    assert grouped.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


def test_moments_ahead_are_rotated_on_both_sides() -> None:
    size, future = 6, 5
    rope = Rope((11, 3))
    draw = torch.Generator().manual_seed(0)
    mean, half = torch.randn(2, 4, size, generator=draw), torch.randn(2, 4, size, size, generator=draw)
    covariance = half @ half.transpose(-1, -2)
    ahead_mean, ahead_covariance = QueryDistribution(mean, covariance, rope).ahead(future)
    for request in range(2):
        basis = torch.eye(size).expand(2, 1, size, size)
        rotation = rope(basis, future)[request, 0].T  # its columns are the rotated unit vectors
        for head in range(4):
            torch.testing.assert_close(ahead_mean[request, head], rotation @ mean[request, head])
            expected = rotation @ covariance[request, head] @ rotation.T
            torch.testing.assert_close(ahead_covariance[request, head], expected, rtol=1e-5, atol=1e-5)


def test_depths_count_the_compressed_layers_before() -> None:
    assert bare(layer=9, layers=[2, 9, 11]).depths.tolist() == [1, 1]


def test_of_several_layers_each_row_has_its_own() -> None:
    """Two requests in three layers, layer after layer."""
    several = bare(
        keys=torch.zeros(6, 2, 5, 4), values=torch.zeros(6, 2, 5, 4), layer_ids=(9, 11, 12), layers=[2, 9, 11, 12]
    )
    assert several.indices.tolist() == [9, 9, 11, 11, 12, 12]
    assert several.depths.tolist() == [1, 1, 2, 2, 3, 3]
    assert several.repeat_per_request(torch.tensor([[5, 0], [6, 0], [7, 0]]))[:, 0].tolist() == [5, 5, 6, 6, 7, 7]
    assert several.repeat_per_layer(torch.tensor([[3, 0], [4, 0]]))[:, 0].tolist() == [3, 4, 3, 4, 3, 4]
    rows = torch.arange(6)
    assert several.split_layers(rows).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert torch.equal(several.merge_layers(several.split_layers(rows)), rows)
    with pytest.raises(KeepsetError, match=r"shows the layers \(9, 11, 12\) as one batch"):
        _ = several.layer


def test_layers_that_are_no_neighbours_are_refused() -> None:
    with pytest.raises(KeepsetError, match="no neighbours among the observed layers"):
        bare(layer_ids=(2, 11), layers=[2, 9, 11])


def test_bytes_of_an_entry_are_its_keys_and_its_values() -> None:
    assert bare().entry_bytes == 4 * 4 + 3 * 4
    half = dict(keys=torch.zeros(1, 1, 2, 7).bfloat16(), values=torch.zeros(1, 1, 2, 5).bfloat16())
    assert bare(**half).entry_bytes == 7 * 2 + 5 * 2


def test_holes_are_never_kept() -> None:
    valid = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])[:, None].expand(2, 2, 6)
    keep_set = bare(valid=valid).keep(torch.ones(2, 2, 6, dtype=torch.bool))
    assert keep_set.counts.tolist() == [[[6, 6], [2, 2]]]


def test_needs_of_two_methods_serve_both() -> None:
    one = Needs(RecentQueries(3), SUM, QueryMoments(4))
    two = Needs(RecentQueries(8), MAX, HiddenMoments(2))
    both = one | two
    assert both == Needs(HiddenMoments(2), QueryMoments(4), MAX, SUM, RecentQueries(8)) != one
    assert both.unrotated and one.unrotated and two.unrotated
    assert both.hidden_states and two.hidden_states and not one.hidden_states
    assert not Needs(RecentQueries(3), SUM).unrotated
    assert both.names() == ["window of 8 queries", "column sum", "query moments", "column max", "hidden-state moments"]
    assert Needs().names() == []


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: bare().window_attention(2), "queries=..."),
        (lambda: bare().window_usage(2), "queries=..."),
        (lambda: bare()[SUM], "features={AttentionColumns(statistic="),
        (lambda: bare()[MAX], "looks at column max"),
        (lambda: bare()[QueryMoments(4)], "features={QueryMoments(skip=4"),
        (lambda: bare()[PromptQueryAttention(4)], "features={PromptQueryAttention(stride=4): ...}"),
        (lambda: bare(layer=3, layers=[0, 1]), "Layer 3 is not among the observed layers (0, 1)"),
    ],
)
def test_says_what_is_missing(refused: object, says: str) -> None:
    with pytest.raises(KeepsetError) as refusal:
        refused()
    assert says in str(refusal.value) and str(refusal.value).endswith(".")
