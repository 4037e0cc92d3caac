"""The figures of events against sets, and repetition against a loop over n-grams."""

import math
import random
from functools import partial
from itertools import pairwise
from statistics import correlation, fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keepset
from keepset import Budget, KeepSet, Observation, Recipe
from keepset.lab.analysis.events import (
    EventFigures,
    HeadSegments,
    by_depth,
    head_segments,
    longest_run,
    middle_retention,
    proxy_segments,
    repetition_rate,
    wipeout_rate,
)
from keepset.methods.window import TOVA
from tests.hf.models import prompt, tiny
from tests.methods.naive import Given
from tests.tiers import examples

Sets = list[list[set[int]]]  # [layer][head] -> kept positions


def kept(sets: Sets, length: int) -> torch.Tensor:
    return torch.tensor([[[t in s for t in range(length)] for s in heads] for heads in sets])


def wiped(kept: set[int], length: int, region: int = 16) -> float:
    regions = [set(range(at, min(at + region, length))) for at in range(0, length, region)]
    return sum(not part & kept for part in regions) / len(regions)


def middle(kept: set[int], length: int) -> float:
    third = [t for t in range(length) if length // 3 <= t < length - length // 3]
    return sum(t in kept for t in third) / len(third)


@st.composite
def events(draw: st.DrawFn) -> tuple[Sets, int]:
    """What each head has kept of a text, and the text's length."""
    layers, heads = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 8]))
    chance = random.Random(draw(st.integers(0, 10**6)))
    length, share = draw(st.sampled_from([1, 2, 3, 7, 16, 17, 33, 54])), chance.choice([0.0, 0.1, 0.5, 1.0])
    return [
        [{t for t in range(length) if chance.random() < share} for _ in range(heads)] for _ in range(layers)
    ], length


@examples(200, derandomize=False)
@given(event=events(), region=st.sampled_from([1, 2, 5, 16, 100]))
def test_every_event_against_sets(event: tuple[Sets, int], region: int) -> None:
    def runs(kept: set[int], length: int) -> int:
        return sum(t - 1 not in kept for t in kept)

    def run_length(kept: set[int], length: int) -> float:
        return len(kept) / max(1, runs(kept, length))

    mask = kept(*event)
    numbers, lengths = proxy_segments(mask)
    for measured, naive in (
        (numbers, runs),
        (lengths, run_length),
        (wipeout_rate(mask, region), partial(wiped, region=region)),
        (middle_retention(mask), middle),
    ):
        expected = torch.tensor([[naive(s, event[1]) for s in heads] for heads in event[0]], dtype=torch.float64)
        torch.testing.assert_close(measured.double(), expected, rtol=1e-6, atol=1e-6)


def test_by_hand() -> None:
    assert wipeout_rate(kept([[{0, 1, 33}, {15, 16, 32}, set()]], 34))[0].tolist() == pytest.approx([1 / 3, 0, 1])
    assert middle_retention(kept([[{0, 1, 2, 7, 8, 9}, {3, 4, 5, 6}, {3, 9}]], 10))[0].tolist() == [0, 1, 0.25]


@examples(60, derandomize=False)
@given(rows=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4))
def test_longest_run(rows: list[list[bool]]) -> None:
    def naive(row: list[bool]) -> int:
        return max(len(run) for run in "".join("x" if flag else " " for flag in row).split(" "))

    assert longest_run(torch.tensor(rows)).tolist() == [naive(row) for row in rows]
    assert longest_run(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("layers", "early", "late"), [(1, 0, 0), (2, 1, 1), (3, 1, 1), (4, 1, 1), (5, 1, 1), (28, 8, 8), (30, 9, 9)]
)
def test_depth(layers: int, early: int, late: int) -> None:
    values = torch.rand(layers, 2, 3, generator=torch.Generator().manual_seed(layers))
    numbers = values.flatten(1).double().mean(-1).tolist()
    parts = {"early": numbers[:early], "middle": numbers[early : layers - late], "late": numbers[layers - late :]}
    expected = {name: math.fsum(part) / len(part) for name, part in parts.items() if part}
    assert by_depth(values) == pytest.approx(expected, rel=1e-5)


@examples(60, derandomize=False)
@given(ids=st.lists(st.integers(0, 3), max_size=30), n=st.integers(1, 5))
def test_repetition_is_the_share_of_ngrams_that_occurred_before(ids: list[int], n: int) -> None:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    again = sum(gram in grams[:i] for i, gram in enumerate(grams))
    expected = again / len(grams) if grams else 0.0
    assert repetition_rate(torch.tensor(ids, dtype=torch.long), n) == pytest.approx(expected)
    if n == 4:
        assert repetition_rate(torch.tensor(ids, dtype=torch.long)) == pytest.approx(expected)


def watched(recipe: Recipe, ids: torch.Tensor, begin: int, model: str = "llama") -> tuple[keepset.Cache, EventFigures]:
    """A text fed after its first tokens, one by one, to a cache that is watched."""
    watcher = EventFigures(recipe.method)
    cache = keepset.Cache(tiny(model), recipe, history=True, observer=watcher.observe)
    with torch.no_grad():
        for part in (ids[:, :begin], *ids[:, begin:].split(1, 1)):
            tiny(model)(part, past_key_values=cache, use_cache=True)
            watcher.look(cache)
    return cache, watcher


def kept_by(cache: keepset.Cache, layers: int, heads: int) -> list[Sets]:
    """What every event kept, layer by layer and head by head."""
    sets = [event.keep_set for event in cache.events]
    assert all(sets)
    return [
        [[{*each.positions(layer, 0, head).tolist()} for head in range(heads)] for layer in range(layers)]
        for each in sets
        if each is not None
    ]


def test_figures_are_means_over_sets() -> None:
    layers, heads, lengths = 4, 2, [60, 65, 70, 75]
    recipe = Recipe.parse("adakv(snapkv(window=4), keep=8, every=5)")
    cache, watcher = watched(recipe, prompt(1, 76), 60, "llama_deep")
    assert [row.length for row in watcher.events] == lengths
    kept = kept_by(cache, layers, heads)

    def gap(s: set[int], length: int) -> float:
        return max(b - a - 1 for a, b in pairwise([-1, *sorted(s), length]))

    for name, of in (("wipeout", wiped), ("middle", middle), ("longest_gap", gap)):
        rows = [fmean(of(s, n) for layer in e for s in layer) for e, n in zip(kept, lengths, strict=True)]
        assert [row.figures[name] for row in watcher.events] == pytest.approx(rows)
        assert watcher.means[name] == pytest.approx(fmean(rows))
    assert not {"iou", "survived"} & watcher.events[0].figures.keys()
    shares: dict[str, Any] = {"iou": lambda a, b: len(a & b) / len(a | b), "survived": lambda a, b: len(a & b) / len(a)}
    for name, share in shares.items():
        by_layer = [
            fmean(share(a, b) for one, two in pairwise(kept) for a, b in zip(one[i], two[i], strict=True))
            for i in range(layers)
        ]
        assert watcher.means[name] == pytest.approx(fmean(by_layer))
        if name == "iou":
            stages = {"early": by_layer[0], "middle": fmean(by_layer[1:-1]), "late": by_layer[-1]}
            assert {stage: watcher.means[f"iou_{stage}"] for stage in stages} == pytest.approx(stages)
    assert [row.kept for row in watcher.events] == [layers * heads * 8] * 4
    assert [row.entries for row in watcher.events] == [layers * heads * n for n in (60, 13, 13, 13)]


def test_high_mass_in_short_segments_is_a_correlation_below_0_and_no_event_has_no_figures() -> None:
    _, watcher = watched(Recipe.parse("tova(keep=9, prefill=False, every=9)"), prompt(1, 7), 5)
    assert watcher.events == [] and watcher.means == {}
    mass = torch.tensor([0.3, 0.3, 0.1, 0.05, 0.05, 0.05, 0.05, 0.04, 0.03, 0.03])
    head = HeadSegments(mass, torch.tensor([1, 2, 5, 10]))
    density = [0.3, 0.3, 0.2 / 3, 0.2 / 5]
    assert head.length_by_mass() == pytest.approx(correlation([1, 1, 3, 5], density), rel=1e-5)
    assert HeadSegments(mass, torch.tensor([5, 10])).length_by_mass() is None


def test_a_method_without_segments_has_its_runs_of_neighbours_in_their_place() -> None:
    cache, watcher = watched(Recipe.parse("tova(keep=9, every=4)"), prompt(1, 40), 24)
    kept = [[each for layer in event for each in layer] for event in kept_by(cache, 2, 2)]
    runs = [[sum(t - 1 not in each for t in each) for each in event] for event in kept]
    assert watcher.means["segments"] == pytest.approx(fmean(map(fmean, runs)))
    assert watcher.means["segment_length"] == pytest.approx(fmean(fmean(9 / run for run in event) for event in runs))
    assert "length_by_mass" not in watcher.means


def test_segments_of_ams_are_those_that_it_kept_by() -> None:
    # With credit the mass depends on the state from before the event, which ams itself overwrites.
    # Without sinks and suffix nothing joins what the segments chose, and nothing is trimmed.
    segments = "window=6, min_segment=2, max_segment=8, mix=0.2"
    recipe = Recipe.parse(f"ams(tova, {segments}, keep=14, sinks=0, recent=0, every=6)")
    method: Any = recipe.method
    watcher, told = EventFigures(method), list[tuple[Observation, list[HeadSegments], list[list[int]]]]()

    def observe(observation: Observation, budget: Budget, keep_set: KeepSet) -> None:
        watcher.observe(observation, budget, keep_set)
        heads, whole = head_segments(method, observation, budget), method.segments(observation, budget)
        assert heads is not None
        used = [each.unique() for each in whole.segment[0]]  # segments that have entries
        quotas = [each[at].tolist() for each, at in zip(whole.quotas[0], used, strict=True)]
        told.append((observation, heads, quotas))

    cache = keepset.Cache(tiny("llama"), recipe, history=True, observer=observe)
    ids = prompt(1, 60)
    with torch.no_grad():
        for part in (ids[:, :30], *ids[:, 30:].split(1, 1)):
            tiny("llama")(part, past_key_values=cache, use_cache=True)
            watcher.look(cache)
    assert [event.length for event in cache.events] == [30, 36, 42, 48, 54, 60]
    held = {(layer, head): list(range(30)) for layer in range(2) for head in range(2)}
    by_event = zip(cache.events, [told[at : at + 2] for at in range(0, len(told), 2)], strict=True)
    for event, of_layers in by_event:
        assert event.keep_set is not None and [observation.layer for observation, *_ in of_layers] == [0, 1]
        for (layer, head), positions in held.items():
            _, heads, quotas = of_layers[layer]
            stays = set(event.keep_set.positions(layer, 0, head).tolist())
            ends = heads[head].ends.tolist()
            parts = [positions[start:end] for start, end in pairwise([0, *ends])]
            assert ends[-1] == len(positions) == len(heads[head].mass)
            assert [len(stays & set(part)) for part in parts] == quotas[head]
            assert float(heads[head].mass.sum()) == pytest.approx(1, abs=1e-5)
            held[layer, head] = sorted(stays) + list(range(event.length, event.length + 6))
    every = [head for _, heads, _ in told for head in heads]
    counts = [len(head.ends) for head in every]
    assert watcher.means["segments"] == pytest.approx(fmean(counts))
    lengths = [len(head.mass) / count for head, count in zip(every, counts, strict=True)]
    assert watcher.means["segment_length"] == pytest.approx(fmean(lengths))
    found = [value for head in every if (value := head.length_by_mass()) is not None]
    assert watcher.means["length_by_mass"] == pytest.approx(fmean(found))


class Telling(Given):
    """Says what the test writes into it."""

    told: SimpleNamespace

    def segments(self, observation: Observation, budget: Budget) -> SimpleNamespace:
        return self.told


def test_heads_are_told_without_holes_and_empty_segments() -> None:
    keys = torch.zeros(2, 2, 5, 3)
    valid = torch.tensor([[[True] * 5, [True] * 3 + [False] * 2]]).expand(2, -1, -1)
    mass = torch.rand(2, 2, 5, dtype=torch.bfloat16)
    segment = torch.tensor([[[0, 0, 1, 1, 2], [0, 2, 2, 3, 3]]]).expand(2, -1, -1)
    quotas = torch.tensor([[[2, 1, 1, 0], [1, 0, 2, 5]]]).expand(2, -1, -1)
    Telling.told = SimpleNamespace(mass=mass, segment=segment, quotas=quotas)
    observation = Observation(keys=keys, values=keys, valid=valid)
    told = head_segments(Telling(), observation, Budget(3))
    assert told is not None and head_segments(TOVA(), observation, Budget(3)) is None
    assert [head.ends.tolist() for head in told] == [[2, 4, 5], [1, 3]]
    for head, expected in zip(told, (mass[0, 0], mass[0, 1, :3]), strict=True):
        assert torch.equal(head.mass, expected.float())
