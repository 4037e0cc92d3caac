"""What an Observation says by default, of several layers, and of the newest queries, number by number."""

import math
from collections.abc import Callable

import pytest
import torch

from keepset import KeepsetError, Observation
from keepset.core.feature import Needs
from keepset.core.features.attention import PromptQueryAttention
from keepset.core.features.moments import HiddenMoments, QueryMoments
from keepset.core.features.runtime_features import RecentQueries
from tests.kernels.test_attention import other_softmax
from tests.methods.naive import DTYPES, EXACT, MAX, SHAPES, SUM, Shape, length_of, observe, tolerance, window_attention

DROPPED = torch.tensor([[[0, 3, 4, 8, 9], [1, 2, 7, 8, 9]]])


def bare(**parts: object) -> Observation:
    return Observation(**{"keys": torch.zeros(2, 2, 6, 4), "values": torch.zeros(2, 2, 6, 3), **parts})


def test_defaults_describe_a_whole_prompt() -> None:
    observation = bare(queries=torch.zeros(2, 4, 3, 4))
    assert observation.valid.all()
    assert observation.positions.tolist() == [[[0, 1, 2, 3, 4, 5]] * 2] * 2
    assert observation.lengths.tolist() == observation.prompts.tolist() == [6, 6]
    assert observation.query_positions is not None and observation.query_positions.tolist() == [[3, 4, 5]] * 2
    assert observation.scaling == pytest.approx(1 / math.sqrt(4))
    assert (observation.layer, observation.layers, observation.depths.tolist()) == (0, (0,), [0, 0])
    assert bare(layer=9, layers=[2, 9, 11]).depths.tolist() == [1, 1]


def test_shorter_requests_end_earlier_and_holes_are_never_kept() -> None:
    valid = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])[:, None].expand(2, 2, 6)
    observation = bare(queries=torch.zeros(2, 4, 3, 4), valid=valid)
    assert observation.lengths.tolist() == [6, 2]
    assert observation.query_positions is not None and observation.query_positions.tolist() == [[3, 4, 5], [-1, 0, 1]]
    assert observation.keep(torch.ones(2, 2, 6, dtype=torch.bool)).counts.tolist() == [[[6, 6], [2, 2]]]


def test_lengths_count_dropped_entries_too() -> None:
    positions = torch.tensor([[[0, 1, 5, 6, 8, 9], [0, 2, 3, 7, 8, 9]]] * 2)
    assert bare(positions=positions).lengths.tolist() == [10, 10]


def check_window(observation: Observation, window: int, attention: dict[str, float], sums: dict[str, float]) -> None:
    """Attention and its sums against attention number by number: nothing for holes and from queries before a text."""
    rows, usage = observation.window_attention(window), observation.window_usage(window)
    assert observation.queries is not None and rows.dtype == usage.dtype == torch.float32
    batch, heads = observation.queries.shape[:2]
    entries = observation.keys.shape[2]
    assert rows.shape == (batch, heads, min(window, observation.queries.shape[2]), entries)
    assert usage.shape == (batch, heads, entries)
    for request in range(batch):
        length = length_of(observation, request)
        assert not usage[request, :, length:].any()
        for head in range(heads):
            expected = torch.tensor(window_attention(observation, request, head, window))
            missing = rows.shape[2] - len(expected)
            assert not rows[request, head, :, length:].any() and not rows[request, head, :missing].any()
            torch.testing.assert_close(rows[request, head, missing:, :length], expected, **attention)
            torch.testing.assert_close(usage[request, head, :length], expected.sum(0), **sums)


@pytest.mark.few
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("block", [1, 40, 2**18])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_the_window_is_causal_attention(
    shape: Shape, block: int, window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepset.kernels.window.CACHE_BLOCK", block)
    check_window(observe(shape, dtype=dtype), window, tolerance(dtype), EXACT)


def test_attention_of_the_window_after_entries_were_dropped() -> None:
    for softmax in other_softmax(6):
        check_window(observe(Shape((5,), 2, 3, 4, 4), positions=DROPPED, window=4, softmax=softmax), 4, EXACT, EXACT)


def test_queries_that_see_nothing_use_nothing() -> None:
    """Positions 6 and 7 were looked at before anything that is still there came."""
    queries = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(1))
    observation = observe(Shape((2,), 1, 2, 3, 3), positions=torch.tensor([[[8, 9]]]), queries=queries)
    assert not observation.window_attention(4)[:, :, :2].any()
    check_window(observation, 4, EXACT, EXACT)


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


def test_of_several_layers_each_row_has_its_own() -> None:
    """Two requests in three layers, layer after layer."""
    nothing = torch.zeros(6, 2, 5, 4)
    several = bare(keys=nothing, values=nothing, layer_ids=(9, 11, 12), layers=[2, 9, 11, 12])
    assert several.indices.tolist() == [9, 9, 11, 11, 12, 12]
    assert several.depths.tolist() == [1, 1, 2, 2, 3, 3]
    assert several.repeat_per_request(torch.tensor([[5, 0], [6, 0], [7, 0]]))[:, 0].tolist() == [5, 5, 6, 6, 7, 7]
    assert several.repeat_per_layer(torch.tensor([[3, 0], [4, 0]]))[:, 0].tolist() == [3, 4, 3, 4, 3, 4]
    rows = torch.arange(6)
    assert several.split_layers(rows).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert torch.equal(several.merge_layers(several.split_layers(rows)), rows)


def test_needs_of_two_methods_serve_both() -> None:
    first, second = Needs(RecentQueries(3), SUM, QueryMoments(4)), Needs(RecentQueries(8), MAX, HiddenMoments(2))
    joined = first | second
    assert joined == Needs(HiddenMoments(2), QueryMoments(4), MAX, SUM, RecentQueries(8)) != first
    assert joined.unrotated and first.unrotated and second.unrotated and not Needs(RecentQueries(3), SUM).unrotated
    assert joined.hidden_states and second.hidden_states and not first.hidden_states
    assert joined.names() == [
        "window of 8 queries",
        "column sum",
        "query moments",
        "column max",
        "hidden-state moments",
    ]


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
        (lambda: bare(layer_ids=(9, 11), layers=[9, 11]).layer, "shows the layers (9, 11) as one batch"),
        (lambda: bare(layer_ids=(2, 11), layers=[2, 9, 11]), "no neighbours among the observed layers"),
    ],
)
def test_says_what_is_missing(refused: Callable[[], object], says: str) -> None:
    with pytest.raises(KeepsetError) as refusal:
        refused()
    assert says in str(refusal.value) and str(refusal.value).endswith(".")
