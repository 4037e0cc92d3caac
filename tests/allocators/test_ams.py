from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from keepset import Budget, KeepsetError, Observation, Recipe
from keepset.allocators.ams import AMS
from keepset.allocators.segments import top_of_segments, trimmed
from keepset.core.features.moments import QueryDistribution, QueryMoments
from keepset.core.keep_set import LayerKeepSet
from keepset.methods.tova import TOVA
from tests.allocators.test_segments import lengths_of, naive_cuts, naive_shares
from tests.methods.naive import EXACT, SHAPES, Given, Shape, kept, length_of, observe, window_attention
from tests.tiers import examples

SMALL: dict[str, Any] = dict(window=4, kernel=3, segment_mass=0.15, min_segment=2, max_segment=6)


def naive_mass(observation: Observation, method: AMS, request: int, head: int) -> list[float]:
    """Equation 1 over a request's own entries."""
    assert observation.queries is not None
    group = observation.queries.shape[1] // observation.keys.shape[1]
    entries, newest = length_of(observation, request), int(observation.lengths[request])
    usage = [0.0] * entries
    for query_head in range(head * group, (head + 1) * group):
        for row in window_attention(observation, request, query_head, method.window):
            for place, weight in enumerate(row):
                usage[place] += weight / (group * method.window)
    usage = [0.0 if math.isnan(value) else value for value in usage]
    # Of the window's queries so many came before the entry.
    positions = observation.positions[request, head].tolist()
    missed = [max(method.window - (newest - positions[place]), 0) for place in range(entries)]
    best = max((value for value, number in zip(usage, missed, strict=True) if number), default=0.0)
    full = [value + best * number / method.window for value, number in zip(usage, missed, strict=True)]
    if method.padding == "positions":
        full = [max(usage) if positions[place] >= newest - method.window else usage[place] for place in range(entries)]
    half = method.kernel // 2
    padded = [sum(full[max(place - half, 0) : place + half + 1]) / method.kernel for place in range(entries)]
    total = sum(max(value, 0.0) + 1e-12 for value in padded)
    return [(max(value, 0.0) + 1e-12) / total for value in padded]


def naive_choice(
    mass: list[float], scores: list[float], positions: list[int], newest: int, keep: int, budget: Budget, method: AMS
) -> tuple[list[int], list[int], list[float]]:
    """Algorithm 1 from line 13 on: places that stay, the segments' lengths and the shares that they may claim."""
    entries = len(mass)
    lengths = naive_cuts(mass, method.segment_mass, method.min_segment, method.max_segment)
    segment = [index for index, length in enumerate(lengths) for _ in range(length)]
    weight = [sum(m for m, s in zip(mass, segment, strict=True) if s == index) for index in range(len(lengths))]
    least, rest = [0] * len(lengths), keep
    for index in sorted(range(len(lengths)), key=lambda index: -weight[index]):
        rest -= min(method.min_quota, lengths[index])
        if rest < 0:
            break
        least[index] = min(method.min_quota, lengths[index])
    shares = naive_shares(keep, weight, lengths, [float(low) for low in least])
    quotas = [math.floor(share + 1e-9) for share in shares]
    for index in sorted(range(len(lengths)), key=lambda index: quotas[index] - shares[index]):
        if sum(quotas) < keep:
            quotas[index] += 1
    # Lines 34 to 36: by score alone.
    chosen: set[int] = set()
    for index, quota in enumerate(quotas):
        mine = [place for place in range(entries) if segment[place] == index]
        chosen |= set(sorted(mine, key=lambda place: (scores[place], place), reverse=True)[:quota])
    # Line 31: when feasible.
    must = [place for place in range(entries) if positions[place] < budget.sinks][:keep]
    room = min(keep - len(must), budget.recent)
    must += [place for place in range(entries) if positions[place] >= newest - room and place not in must]
    # Lines 38 to 41.
    others = sorted(chosen - set(must), key=lambda place: (scores[place], place), reverse=True)
    stays = must + others[: keep - len(must)]
    left = sorted(set(range(entries)) - set(stays), key=lambda place: (scores[place], place), reverse=True)
    return sorted(stays + left[: keep - len(stays)]), lengths, shares


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", ["observations", "positions"])
def test_mass(shape: Shape, padding: str) -> None:
    observation, method = observe(shape), AMS(TOVA(), credit=False, padding=padding, **SMALL)
    mass = method.segments(observation, Budget(4)).mass
    for request in range(shape.batch):
        for head in range(shape.kv_heads):
            entries = length_of(observation, request)
            expected = torch.tensor(naive_mass(observation, method, request, head))
            torch.testing.assert_close(mass[request, head, :entries], expected, **EXACT)
            assert not mass[request, head, entries:].any()


def test_credit_lives_with_its_entries() -> None:
    shape = Shape((14, 9), 2, 3, 4, 4)
    method = AMS(TOVA(), decay=0.7, mix=0.6, **SMALL)
    budget = Budget(6, sinks=1, recent=2)
    observation = observe(shape)
    first = [[naive_mass(observation, method, request, head) for head in range(2)] for request in range(2)]
    recipe = Recipe(method, budget)
    keep = recipe.select(observation)
    credit = keep.layer(0).state["credit"]
    assert not observation.state
    for request in range(2):
        for head in range(2):
            found = credit[request, head, : shape.lengths[request]]
            torch.testing.assert_close(found, 0.3 * torch.tensor(first[request][head]), **EXACT)
    # The next event: what stayed has its credit, three new entries have none.
    order = torch.zeros(2, 2, 9, dtype=torch.long)
    old = torch.zeros(2, 2, 9)
    for request in range(2):
        for head in range(2):
            stayed = kept(keep, observation, request, head)
            order[request, head] = torch.tensor([*stayed, *range(shape.lengths[request], shape.lengths[request] + 3)])
            old[request, head, :6] = credit[request, head, stayed]
    valid = torch.ones(2, 2, 9, dtype=torch.bool)
    later = observe(Shape((9, 9), 2, 3, 4, 4), seed=5, positions=order, valid=valid, state={"credit": old.clone()})
    looked = method.segments(later, budget).mass
    after = recipe.select(later).layer(0).state["credit"]
    assert torch.equal(later.state["credit"], old)
    for request in range(2):
        for head in range(2):
            now = naive_mass(later, method, request, head)
            before = old[request, head].tolist()
            new = [0.7 * b + 0.3 * m for b, m in zip(before, now, strict=True)]
            torch.testing.assert_close(after[request, head], torch.tensor(new), **EXACT)
            mixed = [0.6 * m + 0.4 * c / sum(new) for m, c in zip(now, new, strict=True)]
            torch.testing.assert_close(looked[request, head], torch.tensor(mixed), **EXACT)


def test_what_is_useful_at_one_event_after_another_gains() -> None:
    """Section 3.3: after two events of the same mass an old entry's credit is to a new one's as 1 + decay to 1."""
    shape = Shape((12,), 1, 1, 4, 4)
    method = AMS(TOVA(), decay=0.9, **SMALL)
    observation = observe(shape)
    budget = Budget(8, sinks=1, recent=1)
    first = Recipe(method, budget).select(observation).layer(0).state["credit"]
    old = first.clone()
    old[..., 6:] = 0.0  # as if these were new at the second event
    again = Recipe(method, budget).select(replace(observation, state={"credit": old})).layer(0).state["credit"]
    ratio = again / (0.1 * method.segments(replace(observation, state={}), budget).mass)
    torch.testing.assert_close(ratio[0, 0, :6], torch.full((6,), 1.9), **EXACT)
    torch.testing.assert_close(ratio[0, 0, 6:], torch.ones(6), **EXACT)


def test_where_all_may_stay_there_was_no_event() -> None:
    observation = observe(Shape((12, 5), 2, 2, 4, 4))
    credit = Recipe(AMS(TOVA(), **SMALL), Budget(5, sinks=1, recent=1)).select(observation).layer(0).state["credit"]
    assert credit[0].all() and not credit[1].any()


@examples(150)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    keep=st.integers(1, 50),
    sinks=st.integers(0, 4),
    recent=st.integers(0, 8),
    least=st.integers(0, 3),
    seed=st.integers(0, 1000),
    spoilt=st.sampled_from(["", "nan", "zero", "ties"]),
)
def test_a_whole_event(
    lengths: list[int], keep: int, sinks: int, recent: int, least: int, seed: int, spoilt: str
) -> None:
    shape = Shape(tuple(lengths), 2, 2, 4, 4)
    observation = observe(shape, seed=seed)
    scores = torch.randn(observation.valid.shape, generator=torch.Generator().manual_seed(seed))
    if spoilt == "ties":
        scores = scores.round()
    if spoilt == "zero":
        observation.keys.zero_()
    if spoilt == "nan":
        observation.keys[:, 0, 0] = math.nan
    observation = replace(observation, state={"scores": scores})
    method = AMS(Given(), credit=False, min_quota=least, **SMALL)
    keep = max(keep, sinks + recent)
    budget = Budget(keep, sinks, recent)
    found = Recipe(method, budget).select(observation)
    parts = method.segments(observation, budget)
    for request, entries in enumerate(lengths):
        for head in range(2):
            stayed = kept(found, observation, request, head)
            assert len(stayed) == min(keep, entries)
            assert set(range(min(sinks, entries))) <= set(stayed)
            mass = parts.mass[request, head, :entries].double().tolist()
            of_head = scores[request, head, :entries].tolist()
            expected, sizes, shares = naive_choice(
                mass, of_head, list(range(entries)), entries, min(keep, entries), budget, method
            )
            segment = parts.segment[request, head]
            assert lengths_of(segment, observation.valid[request, head]) == sizes
            quotas = parts.quotas[request, head, : len(sizes)].tolist()
            assert sum(quotas) == min(keep, entries)
            if sum(min(least, size) for size in sizes) <= min(keep, entries):
                assert all(quota >= min(least, size) for quota, size in zip(quotas, sizes, strict=True))
            assert all(abs(quota - share) < 1 + 1e-6 for quota, share in zip(quotas, shares, strict=True))
            remainders = sorted((share - math.floor(share + 1e-9)) for share in shares)
            if all(later - sooner > 1e-6 for sooner, later in pairwise(remainders)):
                assert stayed == expected


def test_switches() -> None:
    """Each of table 7's variants is what it says."""
    observation, budget = observe(Shape((300,), 2, 2, 8, 8)), Budget(40, sinks=4, recent=8)
    scorer = TOVA()
    whole = AMS(scorer, window=8)
    one = Recipe(AMS(scorer, segmented=False), budget).select(observation)
    plain = Recipe(scorer, budget).select(observation)
    assert [kept(one, observation, 0, head) for head in range(2)] == [
        kept(plain, observation, 0, head) for head in range(2)
    ]
    fixed = AMS(scorer, window=8, adaptive=False).segments(observation, budget)
    assert fixed.segment[0, 0].tolist() == [place // 128 for place in range(300)]
    by_length = AMS(scorer, window=8, weighted=False).segments(observation, budget)
    assert torch.equal(by_length.segment, whole.segments(observation, budget).segment)
    sizes = [int((by_length.segment[0, 0] == index).sum()) for index in range(by_length.quotas.shape[-1])]
    spread = [(q - 1) / size for q, size in zip(by_length.quotas[0, 0].tolist(), sizes, strict=True) if size]
    assert max(spread) - min(spread) < 2 / min(size for size in sizes if size)
    keep_set = Recipe(AMS(scorer, window=8, credit=False), budget).select(observation)
    assert "credit" not in keep_set.layer(0).state
    assert AMS(scorer, weighted=False, adaptive=False).traits.needs.window == 1


def test_a_region_of_low_scores_is_not_wiped_out() -> None:
    """A region that a global top-k drops as a whole keeps its share of what it receives."""
    observation = observe(Shape((200,), 1, 2, 8, 8), state={"scores": torch.arange(200.0)[None, None]})
    budget = Budget(40, sinks=0, recent=0)
    plain = kept(Recipe(Given(), budget).select(observation), observation, 0, 0)
    ams = kept(Recipe(AMS(Given(), window=8), budget).select(observation), observation, 0, 0)
    assert min(plain) == 160
    regions = [sum(start <= place < start + 40 for place in ams) for start in range(0, 200, 40)]
    assert all(regions) and len(ams) == 40


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ams(tova, kernel=4, keep=64)", "has no middle"),
        ("ams(tova, max_segment=20, keep=64)", "less than twice min_segment=16"),
        ("ams(adakv(tova), keep=64)", r"cannot wrap adakv, which chooses too: .* adakv\(ams\(tova\)\)"),
        ("ams(pyramid(chunkkv(tova)), keep=64)", "cannot wrap chunkkv"),
    ],
)
def test_refusals(text: str, sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence):
        Recipe.parse(text)


def test_it_nests() -> None:
    observation = observe(Shape((120,), 3, 2, 8, 8))
    small = "window=8, segment_mass=0.2, min_segment=8, max_segment=64"
    adaptive = Recipe.parse(f"adakv(ams(tova, {small}), keep=60)")
    assert adaptive.select(observation).entries == 3 * 60
    pyramid = Recipe.parse(f"ams(pyramid(snapkv(window=8)), {small}, keep=60)")
    found = pyramid.select(observation)
    assert [len(kept(found, observation, 0, head)) for head in range(3)] == [60] * 3


class Counted(TorchDispatchMode):
    """Counts operations, and what would make a device wait."""

    WAITS = ("_local_scalar_dense", "nonzero", "_to_copy.cpu", "is_nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **kwargs or {})


def counted(observation: Observation, ranked: Tensor) -> Counter[str]:
    method, budget = AMS(TOVA(), window=8), Budget(100, sinks=4, recent=16)
    mass, _ = method._mass(observation)
    quotas = method.quotas(observation.sizes, budget)
    with Counted() as count:
        segment, ends, parts = method._divided(observation, mass, quotas)
        trimmed(ranked, top_of_segments(ranked, segment, ends, parts), quotas, 20)
    del count.calls["aten.clone.default"]  # whether a tensor is contiguous already depends on its sizes
    return count.calls


def test_an_event_does_not_wait_for_a_device_nor_loop_over_heads() -> None:
    """Many heads and segments take the same operations as one, and none of these looks at a value."""
    calls = []
    for heads, batch in ((1, 1), (8, 1), (2, 5)):
        observation = observe(Shape((300,) * batch, heads, 2, 8, 8))
        calls.append(counted(observation, torch.randn(observation.valid.shape)))
    assert calls[0] == calls[1] == calls[2]
    for name in calls[0]:
        assert not any(wait in name for wait in Counted.WAITS), name


@pytest.mark.parametrize("scorer", ["tova", "expected_attention", "snapkv", "keydiff", "knorm", "r_kv", "rpc"])
def test_nothing_is_asked_of_a_device(scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without contents run through a whole choice: whatever needed a value would fail."""

    @dataclass
    class Chosen(Exception):  # noqa: N818
        mask: torch.Tensor
        state: dict[str, torch.Tensor]

    def chosen(layer: int, mask: torch.Tensor, *rest: Any) -> None:
        raise Chosen(mask, rest[2])

    monkeypatch.setattr(LayerKeepSet, "from_mask", chosen)
    made = observe(Shape((200, 200), 2, 2, 8, 8), window=16)
    moments = made[QueryMoments(4)]
    bare = QueryDistribution(moments.mean.to("meta"), moments.covariance.to("meta"), lambda rows, future: rows)
    assert made.queries is not None
    observation = Observation(
        keys=made.keys.to("meta"),
        values=made.values.to("meta"),
        queries=made.queries.to("meta"),
        features={QueryMoments(4): bare},
    )
    recipe = Recipe.parse(f"ams({scorer}, window=8, keep=80)")
    method, budget = recipe.method, recipe.budget
    quotas = method.quotas(observation.sizes, budget)
    ranking = method.ranked(observation, budget, quotas)
    with pytest.raises(Chosen) as caught:
        method.choose(ranking)
    assert caught.value.mask.is_meta and caught.value.mask.shape == observation.valid.shape
    assert caught.value.state["credit"].is_meta
