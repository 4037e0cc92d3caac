"""Promises of every registered method, whatever the text, the batch and the budget."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from keepset import METHODS, Budget, KeepSet, Method, Observation, Recipe
from keepset.core.features.attention import PromptQueryAttention, SecondPassColumns
from keepset.core.features.queries import PaddedQueries, Reference, ReferenceQueries
from keepset.core.features.runtime_features import OutputProjection
from keepset.core.method import Allocator
from keepset.kernels.softmax import Softmax
from tests.methods.naive import (
    DTYPES,
    SMALL,
    SUM,
    Shape,
    alone,
    features_of,
    kept,
    length_of,
    observe,
    several,
    thinned,
)
from tests.tiers import FULL, examples

INSIDE = ["keydiff", "lagkv", "r_kv", "rpc", "chunkkv", "ams"]

NAMES = [*sorted(METHODS), *(f"adakv({scorer})" for scorer in INSIDE)]
QUICK = [*sorted(METHODS), "adakv(lagkv)", "adakv(chunkkv)"]
every_method = pytest.mark.parametrize("name", NAMES if FULL else QUICK)
# The same examples in every run: a near tie must not fail once in a thousand runs.
some_examples = examples(16)


def make(name: str) -> Method:
    """A method that reads no more than short texts have; allocators around SnapKV unless the name says otherwise."""
    outer, _, inner = name.partition("(")
    kind, parameters = METHODS[outer], SMALL.get(outer, {})
    scorer = [make(inner.rstrip(")") or "snapkv")] if issubclass(kind, Allocator) else []
    return kind(*scorer, **parameters)


@dataclass(frozen=True)
class Case:
    """All layers of a small model at one compression event, and a budget."""

    shape: Shape
    layers: tuple[int, ...]
    budget: Budget
    seed: int
    dropped: int
    dtype: torch.dtype

    @functools.cache  # noqa: B019  # every method is asked about the same ones
    def observations(self) -> list[Observation]:
        """Return the layers; after an earlier compression every head has lost other entries, never the newest."""
        return [
            observe(
                self.shape,
                layer=layer,
                layers=self.layers,
                seed=self.seed + layer,
                dtype=self.dtype,
                positions=thinned(self.shape, self.seed + layer, self.dropped, newest=1) if self.dropped else None,
            )
            for layer in self.layers
        ]

    @functools.cache  # noqa: B019
    def alone(self, request: int) -> list[Observation]:
        """Return the layers of one request."""
        return [alone(observation, request) for observation in self.observations()]

    @functools.cache  # noqa: B019
    def in_order(self, order: tuple[int, ...]) -> list[Observation]:
        """Return the layers of the same requests in another order."""
        return [permuted(observation, list(order)) for observation in self.observations()]

    @functools.cache  # noqa: B019
    def in_batches(self, first: int) -> list[Observation]:
        """Return so many layers as one batch, and the others as another."""
        layers = self.observations()
        return [several(group) for group in (layers[:first], layers[first:]) if group]

    def wanted(self, length: int, parts: int = 1, heads: int = 1) -> int:
        """Entries that parts keep together of `length` in each head, on average over a part's heads, in whole numbers.

        No fraction goes below what always stays, and one.
        """
        keep, least = self.budget.keep, min(max(1, self.budget.sinks + self.budget.recent), length)
        if isinstance(keep, float):
            return max(parts * least, parts * heads * length * round(keep * 100) // 100 // heads)
        assert keep is not None
        return min(keep, length) * parts


@st.composite
def cases(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES, requests: int = 1, layers: int = 1) -> Case:
    shape = Shape(
        lengths=tuple(draw(st.lists(st.integers(1, 24), min_size=requests, max_size=3))),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 6)),
        value_dim=draw(st.integers(1, 4)),
    )
    sinks, recent = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    fraction = st.integers(1, 100).map(lambda percent: percent / 100)
    number = st.integers(max(1, sinks + recent), 30)
    return Case(
        shape=shape,
        layers=tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=layers, max_size=max(layers, 3))))),
        budget=Budget(draw(fraction | number), sinks, recent),
        seed=draw(st.integers(0, 1000)),
        dropped=draw(st.sampled_from([0, 0, 5])),
        dtype=draw(st.sampled_from(dtypes)),
    )


def entries_of(observation: Observation, request: int, head: int) -> list[int]:
    return observation.positions[request, head, : length_of(observation, request)].tolist()


def always(case: Case, observation: Observation, request: int, head: int) -> list[int]:
    """Return the entries that always stay, the most important first: sinks, then the newest ones backwards."""
    entries, newest = entries_of(observation, request, head), int(observation.lengths[request])
    sinks = [entry for entry in entries if entry < case.budget.sinks]
    recent = [entry for entry in reversed(entries) if entry >= newest - case.budget.recent and entry not in sinks]
    return sinks + recent


@every_method
@some_examples
@given(case=cases())
def test_keeps_exactly_what_was_asked_for_sorted_and_what_always_stays(name: str, case: Case) -> None:
    method, observations = make(name), case.observations()
    keep_set = method.select_all(observations, case.budget)
    check_counts(method, case, keep_set)
    for observation in observations:
        for request in range(case.shape.batch):
            for head in range(case.shape.kv_heads):
                positions = kept(keep_set, observation, request, head)
                assert positions == sorted(set(positions))
                assert set(positions) <= set(entries_of(observation, request, head))
                assert set(always(case, observation, request, head)[: len(positions)]) <= set(positions)


def check_counts(method: Method, case: Case, keep_set: KeepSet) -> None:
    traits, heads, layers = method.traits, case.shape.kv_heads, len(case.layers)
    # What entries are there after an earlier compression may be too few for what layers or heads aim at.
    short = case.dropped and isinstance(case.budget.keep, int) and not traits.across_layers and not traits.equal_layers
    for request, length in enumerate(case.shape.lengths):
        count, counts = case.wanted(length), keep_set.counts[:, request].tolist()
        assert all(0 <= head <= length for layer in counts for head in layer)
        if traits.equal_heads:
            assert all(len(set(layer)) == 1 for layer in counts)
        if traits.across_layers:
            assert all(head >= 1 for layer in counts for head in layer)
        if short:
            continue
        if traits.equal_layers and (traits.equal_heads or not traits.across_layers):
            assert [sum(layer) for layer in counts] == [count * heads] * layers
        elif traits.equal_heads:
            total = case.wanted(length, layers, heads) if traits.across_layers else count * layers
            assert sum(layer[0] for layer in counts) == total
        else:
            assert sum(map(sum, counts)) == case.wanted(length, layers * heads)
            assert all(head >= 1 for layer in counts for head in layer)


@functools.cache
def after_prompts(
    shape: Shape, layers: tuple[int, ...], seed: int, recent: int, prompts: tuple[int, ...]
) -> list[Observation]:
    """Return layers where every head holds the whole prompts, and lost other entries of what followed."""
    positions = {layer: thinned(shape, seed + layer, 7, recent, prompts) for layer in layers}
    options = dict(layers=layers, seed=seed, prompts=torch.tensor(prompts))
    return [observe(shape, layer=layer, positions=positions[layer], **options) for layer in layers]


@every_method
@some_examples
@given(data=st.data(), recent=st.integers(0, 5), extra=st.integers(0, 20), seed=st.integers(0, 1000))
def test_keeps_a_protected_prompt_and_exactly_its_number(
    name: str, data: st.DataObject, recent: int, extra: int, seed: int
) -> None:
    """An event after others: every head holds the whole prompt, and each lost other entries of what followed.

    The whole prompt is protected, by itself or because it is short, or a range that is part of every one.
    """
    prompts = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    bounds = st.lists(st.integers(0, min(prompts)), min_size=2, max_size=2, unique=True).map(sorted)
    span = data.draw(st.none() | bounds)
    lengths = tuple(prompt + data.draw(st.integers(1, 12)) for prompt in prompts)
    shape = Shape(lengths, data.draw(st.integers(1, 3)), 2, 3, 2)
    keep, layers = max(1, recent) + extra, (0, 2, 3)
    observations, method = after_prompts(shape, layers, seed, recent, tuple(prompts)), make(name)
    is_short = data.draw(st.booleans())
    by_itself = {"short": 13} if is_short else {"protect_prompt": True}
    budget = Budget(keep, 0, recent, **(by_itself if span is None else {"protect": [span]}))
    keep_set = method.select_all(observations, budget)
    for request, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        protected = set(range(prompt) if span is None else range(*span))
        count = min(max(keep, len(protected) + recent), length)
        counts = keep_set.counts[:, request]
        if method.traits.equal_layers:
            assert counts.sum(-1).tolist() == [count * shape.kv_heads] * len(layers)
        for observation in observations:
            newest = int(observation.lengths[request])
            for head in range(shape.kv_heads):
                head_positions = set(entries_of(observation, request, head))
                always = protected | (set(range(newest - recent, newest)) & head_positions)
                assert always <= set(kept(keep_set, observation, request, head))


@every_method
@some_examples
@given(case=cases(), beyond=st.integers(0, 3))
def test_keeps_all_under_a_full_budget(name: str, case: Case, beyond: int) -> None:
    observations, method = case.observations(), make(name)
    if name == "duo_attention":  # After an event retrieval heads aim at the whole text, not at what heads hold.
        assume(not case.dropped)
    for keep in (1.0, case.shape.entries + case.budget.sinks + case.budget.recent + beyond):
        keep_set = method.select_all(observations, Budget(keep, case.budget.sinks, case.budget.recent))
        for observation, request in itertools.product(observations, range(case.shape.batch)):
            for head in range(case.shape.kv_heads):
                assert kept(keep_set, observation, request, head) == entries_of(observation, request, head)


@every_method
@some_examples
@given(case=cases(dtypes=[torch.float32], requests=2), data=st.data())
def test_every_request_is_decided_by_itself_wherever_it_is_in_the_batch(
    name: str, case: Case, data: st.DataObject
) -> None:
    order = tuple(data.draw(st.permutations(range(case.shape.batch))))
    method, observations = make(name), case.observations()
    together = method.select_all(observations, case.budget)
    turned = method.select_all(case.in_order(order), case.budget)
    for request in range(case.shape.batch):
        single = method.select_all(case.alone(request), case.budget)
        for observation in observations:
            for head in range(case.shape.kv_heads):
                positions = kept(together, observation, request, head)
                assert positions == kept(single, observation, 0, head)
                assert positions == kept(turned, observation, order.index(request), head)


@pytest.mark.parametrize(
    "name", [name for name in (NAMES if FULL else QUICK) if not make(name).traits.needs.of(OutputProjection)]
)
@some_examples
@given(case=cases(dtypes=[torch.float32], layers=4), data=st.data())
def test_layers_that_are_shown_as_one_batch_keep_what_they_keep_one_by_one(
    name: str, case: Case, data: st.DataObject
) -> None:
    """Paged runtimes show layers this way to all methods that they serve, as many at a time as there is room for."""
    method, single_layers, batch = make(name), case.observations(), case.shape.batch
    first = data.draw(st.sampled_from([1, 2, 4]))
    shown = case.in_batches(first)
    expected, answer = method.select_all(single_layers, case.budget), method.select_all(shown, case.budget)
    for observation in shown:
        kept = answer.layer(observation.layer_ids[0])
        for index, layer in enumerate(observation.layer_ids):
            right, rows = expected.layer(layer), slice(index * batch, (index + 1) * batch)
            assert torch.equal(kept.counts[rows], right.counts)
            starts = kept.cu_seqlens[:: right.counts.shape[1] * batch]
            assert torch.equal(kept.packed_positions[starts[index] : starts[index + 1]], right.packed_positions)
            assert kept.state.keys() == right.state.keys()
            for column, numbers in right.state.items():  # a product's sums may be added up in another order
                torch.testing.assert_close(kept.state[column][rows], numbers, rtol=1e-5, atol=0)


@every_method
def test_what_another_step_remembers_stays_with_its_entries(name: str) -> None:
    """Whatever the method remembers itself: what is around it in a recipe may remember something, too."""
    shape, layers = Shape((20, 13), 2, 2, 4, 4), (0, 3)
    numbers = {layer: torch.rand(2, 2, 20, generator=torch.Generator().manual_seed(layer)) for layer in layers}
    observations = [
        observe(shape, layer=layer, layers=layers, seed=layer, state={"another": numbers[layer]}) for layer in layers
    ]
    keep_set = make(name).select_all(observations, Budget(6, sinks=1, recent=2))
    for layer in layers:
        assert torch.equal(keep_set.layer(layer).state["another"], numbers[layer])


@every_method
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_numbers_that_overflowed_change_no_count(name: str, poison: float) -> None:
    observation = observe(Shape((20, 13), 2, 2, 4, 4))
    passes = [value for value in observation.features.values() if isinstance(value, SecondPassColumns)]
    statistics = [tensor for columns in passes for tensor in columns.statistics.values()]
    statistics += [
        value for feature, value in observation.features.items() if isinstance(feature, PromptQueryAttention)
    ]
    for tensor in (observation.keys, observation.values, observation[SUM], *statistics):
        tensor[0, 0, 3] = poison
        tensor[1, :, 5:] = poison
    keep_set = make(name).select(observation, Budget(6, sinks=1, recent=2))
    assert keep_set.counts[0].sum(-1).tolist() == [12, 12]
    for request, newest in ((0, 19), (1, 12)):
        for head in range(2):
            assert {0, newest - 1, newest} <= set(kept(keep_set, observation, request, head))


def permuted(observation: Observation, order: list[int]) -> Observation:
    """Return an observation of the same requests in another order."""
    names = ("keys", "values", "queries", "positions", "valid", "lengths", "query_positions")
    return Observation(
        **{name: getattr(observation, name)[order] for name in names},
        features=features_of(observation, order),
        layer=observation.layer,
        layers=observation.layers,
    )


# --- a budget of `keep=1.0` under every method's own defaults, and what the guide says about it

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
LENGTH, HEADS, LAYERS = 200, 2, (0, 1, 4)


def is_the_full_cache(text: str, keep: int | float) -> bool:
    """Return whether everything stays, every number as it was."""
    method, shape = Recipe.parse(text).method, Shape((LENGTH,), HEADS, 2, 8, 8)
    # Attention that is sharp, or all entries are wanted by some query.
    sharp = [
        observe(shape, window=64, layer=layer, layers=LAYERS, seed=layer, softmax=Softmax(2.0)) for layer in LAYERS
    ]
    reference = PaddedQueries(sharp[0].newest_queries(64)[0], torch.ones(1, 64, dtype=torch.bool))
    observations = [
        observation.with_features({ReferenceQueries(64, 64): Reference(reference, reference)}) for observation in sharp
    ]
    answer = method.select_all(observations, Budget(keep, method.traits.sinks, method.traits.recent))
    for observation in observations:
        kept = answer.layer(observation.layer)
        if kept.counts.tolist() != [[LENGTH] * HEADS] or kept.entry_bytes != observation.entry_bytes:
            return False
        # What `match` has fitted is a solution of linear equations in float32.
        bias = kept.state.get("bias", torch.zeros(1))
        torch.testing.assert_close(bias, torch.zeros_like(bias), atol=1e-3, rtol=0)
        if kept.values is not None:
            torch.testing.assert_close(kept.values, observation.values.flatten(0, 2), atol=1e-3, rtol=0)
    return True


@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
@pytest.mark.parametrize("name", METHODS)
def test_a_full_budget_is_the_full_cache_unless_the_guide_says_otherwise(name: str) -> None:
    text = f"{name}(snapkv)" if issubclass(METHODS[name], Allocator) else name
    parts = GUIDE.read_text(encoding="utf-8").split("\n\n")
    (paragraph,) = (part for part in parts if part.startswith("With `keep=1.0`"))
    excepted = set(re.findall(r"`(\w+)`", paragraph)) & METHODS.keys()
    assert [is_the_full_cache(text, keep) for keep in (1.0, LENGTH)] == [name not in excepted] * 2
