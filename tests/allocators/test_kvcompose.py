"""KVCompose, and the allocators that it is made of, against equations 17 to 24 in loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, KeepsetError, Observation, Recipe
from keepset.allocators.adakv import AdaKV
from keepset.allocators.composite import Composite
from keepset.allocators.pool import Pool
from keepset.allocators.presets import KVCompose
from keepset.allocators.pyramid import Pyramid
from keepset.allocators.uniform import Uniform
from keepset.methods.second_pass import SecondPassAttention
from keepset.methods.snapkv import SnapKV
from tests.allocators.formulas import budgets, composite, given_scores, pool, sets_of
from tests.methods.formulas import naive_scores, observed
from tests.methods.naive import Given, Shape, observe
from tests.tiers import examples


@examples(60)
@given(
    budget=budgets(),
    lengths=st.lists(st.integers(10, 18), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 8), (3, 1), (2, 3)]),
    layers=st.integers(1, 4),
    options=st.fixed_dictionaries(
        dict(
            task=st.sampled_from(["context", "self"]),
            aggregate_task=st.sampled_from(["max", "mean"]),
            aggregate_group=st.sampled_from(["max", "mean"]),
            aggregate_head=st.sampled_from(["max", "mean"]),
            mean_term=st.booleans(),
            values=st.sampled_from(["none", "norm", "projected"]),
            structured=st.booleans(),
            floor=st.sampled_from([0.0, 0.3, 1.0]),
        )
    ),
    seed=st.integers(0, 99),
)
def test_equations_14_to_24(
    budget: Budget, lengths: list[int], heads: tuple[int, int], layers: int, options: dict[str, Any], seed: int
) -> None:
    method = KVCompose(**options)
    scorer = SecondPassAttention(
        options["task"],
        options["aggregate_task"],
        options["aggregate_group"],
        options["mean_term"],
        options["values"],
        chunk=0,
    )
    shape = Shape(tuple(lengths), *heads, 4, 5)
    observations = [observed(scorer, shape, seed=seed + i, layer=i, layers=range(layers)) for i in range(layers)]
    for request in range(len(lengths)):
        scores = [naive_scores(scorer, observation, request) for observation in observations]
        composition: Any = method.composition
        expected = (composite if options["structured"] else pool)(scores, budget, composition)
        assert sets_of(method, observations, budget, request) == expected


def test_the_papers_example_in_words() -> None:
    """Heads may keep different tokens, but as many; the layer with better composite tokens keeps more."""
    observations = given_scores(
        [[9.0, 1.0, 8.0, 1.0], [1.0, 9.0, 1.0, 8.0]],
        [[3.0, 2.0, 2.0, 1.0], [1.0, 2.0, 2.0, 3.0]],
    )
    assert sets_of(Composite(Given()), observations, Budget(1), 0) == [[[0], [1]], [[0], [3]]]
    assert sets_of(Composite(Given()), observations, Budget(2), 0) == [[[0, 2], [1, 3]], [[0, 2], [2, 3]]]
    assert sets_of(Composite(Given()), observations, Budget(0.75), 0)[0] == [[0, 2, 3], [1, 2, 3]]


def test_a_pool_without_a_floor_starves_what_scores_low() -> None:
    rich, poor = [[5.0 + i for i in range(10)]], [[0.1 * i for i in range(10)]]
    for method, least in ((Composite(Given()), 1), (Composite(Given(), floor=0.5), 3), (Pool(Given(), floor=0.5), 2)):
        counts = method.select_all(given_scores(rich, poor), Budget(5)).counts[:, 0, 0].tolist()
        assert counts == [10 - least, least]
    assert Pool(Given(), floor=0.0).select_all(given_scores(rich, poor), Budget(5)).counts[:, 0, 0].tolist() == [9, 1]


def test_of_equal_scores_all_layers_get_as_many() -> None:
    alike = [[1.0] * 12, [1.0] * 12]
    for method in (Composite(Given()), Pool(Given()), Composite(Given(), floor=0.5)):
        counts = method.select_all(given_scores(alike, alike, alike), Budget(4)).counts
        assert counts.unique().tolist() == [4]


@examples(60)
@given(data=st.data(), seed=st.integers(0, 99), keep=st.integers(1, 40), floor=st.sampled_from([0.0, 0.2, 1.0]))
def test_heads_that_hold_different_numbers_share_what_there_is(
    data: st.DataObject, seed: int, keep: int, floor: float
) -> None:
    """At an event after others heads hold different numbers of entries."""
    held = data.draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4))
    length = 20
    observations = []
    for layer, counts in enumerate(held):
        most = max(counts)
        positions = torch.zeros(1, 2, most, dtype=torch.long)
        valid = torch.zeros(1, 2, most, dtype=torch.bool)
        for head, count in enumerate(counts):
            positions[0, head, :count] = torch.arange(length - count, length)
            valid[0, head, :count] = True
        scores = torch.randn(1, 2, most, generator=torch.Generator().manual_seed(seed + layer))
        plain = observe(Shape((most,), 2, 2, 3, 3), layer=layer, layers=range(len(held)), seed=seed)
        observations.append(
            Observation(
                keys=plain.keys,
                values=plain.values,
                positions=positions,
                valid=valid,
                lengths=torch.tensor([length]),
                layer=layer,
                layers=range(len(held)),
                state={"scores": scores},
            )
        )
    budget = Budget(keep, recent=min(keep, 3))
    pool = Pool(Given(), floor=floor).select_all(observations, budget).counts
    assert int(pool.sum()) == min(2 * keep * len(held), sum(map(sum, held)))
    tokens = Composite(Given(), floor=floor).select_all(observations, budget).counts[:, 0]
    wanted = min(keep * len(held), sum(-(-sum(counts) // 2) for counts in held))
    for (mine, other), counts in zip(tokens.tolist(), held, strict=True):
        assert mine == other or min(mine, other) == min(counts)
    assert sum(max(layer) for layer in tokens.tolist()) <= wanted
    for layer, counts in enumerate(held):
        for head, count in enumerate(counts):
            assert 1 <= int(pool[layer, 0, head]) <= count and 1 <= int(tokens[layer, head]) <= count


def test_kvcompose_is_a_composition_under_its_own_name() -> None:
    scorer = SecondPassAttention(mean_term=True, chunk=0)
    observations = [observed(scorer, Shape((30, 21), 2, 3, 4, 4), seed=i, layer=i, layers=range(3)) for i in range(3)]
    for method, same in (
        (KVCompose(), Composite(scorer)),
        (KVCompose(structured=False, floor=0.1), Pool(scorer, floor=0.1)),
    ):
        for budget in (Budget(7), Budget(0.3, sinks=2, recent=3)):
            for request in range(2):
                ours = sets_of(method, observations, budget, request)
                assert ours == sets_of(same, observations, budget, request)


def test_a_layer_alone_keeps_what_it_was_asked_for() -> None:
    for method in (KVCompose(), KVCompose(structured=False), Pool(SecondPassAttention(chunk=0))):
        observation = observed(SecondPassAttention(chunk=0), Shape((30, 21), 2, 3, 4, 4))
        counts = method.select(observation, Budget(7)).counts
        assert counts.sum(-1).tolist() == [[14, 14]]


def test_layouts_follow_the_parameters() -> None:
    assert KVCompose().traits.equal_heads and not KVCompose().traits.equal_layers
    unstructured = KVCompose(structured=False)
    assert not unstructured.traits.equal_heads and not unstructured.traits.equal_layers
    assert not Pool(SnapKV()).traits.equal_layers and not Pool(SnapKV()).traits.equal_heads


@pytest.mark.parametrize(
    "text", ["kvcompose(keep=0.25)", "pool(second_pass(statistic='rms'), keep=0.25, sinks=4, recent=32)"]
)
def test_recipes(text: str) -> None:
    assert str(Recipe.parse(text)) == text


def test_who_else_divides_is_refused() -> None:
    for inner in (AdaKV(SnapKV()), Pyramid(SnapKV()), Composite(SnapKV()), KVCompose(), Uniform(AdaKV(SnapKV()))):
        with pytest.raises(KeepsetError, match=r"leave one of them out|use it alone"):
            Pool(inner)
    with pytest.raises(KeepsetError, match="use it alone"):
        Composite(KVCompose())
    assert Pool(Uniform(SnapKV())).floor == 0.2
