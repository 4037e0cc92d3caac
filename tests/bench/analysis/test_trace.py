"""The tracer against caches that are fed by hand, and its figures against sets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import correlation, fmean
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import keepset
from keepset import Budget, Observation, Recipe
from keepset.bench.analysis.diagnostics import repetition_rate
from keepset.bench.analysis.trace import EventFigures, HeadSegments, Trace, Tracer, figures, head_segments
from keepset.methods.tova import TOVA
from tests.hf.models import generate, prompt, same_keep_set, tiny
from tests.methods.naive import Given

OPTIONS: dict[str, Any] = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
RECIPES = ["tova(keep=9, every=4)", "adakv(snapkv(window=4), keep=12, every=5)", "pyramid(tova, keep=10, every=4)"]
LENGTH, NEW = 19, 14


def check_events(trace: Trace, cache: Any) -> None:
    assert [mine.length for mine in trace.events] == [event.length for event in cache.events]
    for mine, event in zip(trace.events, cache.events, strict=True):
        assert event.keep_set is not None and same_keep_set(mine.keep_set, event.keep_set)
        assert mine.entries == event.entries and mine.segments == {}


@pytest.mark.parametrize("text", [*RECIPES, "knorm(keep=0.5)", "tova(keep=9, prefill=False, every=6)"])
def test_events_are_those_of_a_cache(text: str) -> None:
    model, ids, recipe = tiny("llama"), prompt(1, LENGTH), Recipe.parse(text)
    tokens: list[int] = []
    tracer = Tracer(model, recipe, on_token=tokens.append)
    tracer.generate(ids, max_new_tokens=NEW, **OPTIONS)
    cache = keepset.Cache(model, recipe, history=True)
    expected = generate(model, ids, cache, max_new_tokens=NEW).sequences[0]
    trace = tracer.trace
    assert torch.equal(trace.ids, expected) and trace.prompt == LENGTH
    assert trace.recipe == str(recipe) and sum(tokens) == NEW
    assert trace.tokens_per_second is not None and trace.tokens_per_second > 0
    check_events(trace, cache)


@pytest.mark.parametrize("text", RECIPES)
def test_following_is_feeding_one_by_one(text: str) -> None:
    model, ids = tiny("llama"), prompt(1, LENGTH + NEW)
    tracer = Tracer(model, Recipe.parse(text))
    tracer.follow(ids[0], LENGTH)
    cache = keepset.Cache(model, text, history=True)
    with torch.no_grad():
        for part in (ids[:, :LENGTH], *ids[:, LENGTH:].split(1, 1)):
            model(part, past_key_values=cache, use_cache=True)
    trace = tracer.trace
    assert torch.equal(trace.ids, ids[0]) and trace.tokens_per_second is None and len(trace.events) > 2
    check_events(trace, cache)


def test_figures_are_means_over_sets() -> None:
    tracer = Tracer(tiny("llama_deep"), Recipe.parse("adakv(snapkv(window=4), keep=8, every=5)"))
    tracer.follow(prompt(1, 40)[0], 24)
    trace = tracer.trace
    told = figures(trace, region=3)
    layers, heads, lengths = 4, 2, [24, 29, 34, 39]
    assert [row["length"] for row in told["events"]] == lengths
    kept = [
        [[set(mine.keep_set.positions(i, 0, h).tolist()) for h in range(heads)] for i in range(layers)]
        for mine in trace.events
    ]

    def wipeout(s: set[int], length: int) -> float:
        return fmean(not s & set(range(a, a + 3)) for a in range(0, length, 3))

    def middle(s: set[int], length: int) -> float:
        return fmean(t in s for t in range(length // 3, length - length // 3))

    measured = {
        "wipeout": [[[wipeout(s, n) for s in layer] for layer in e] for e, n in zip(kept, lengths, strict=True)],
        "middle": [[[middle(s, n) for s in layer] for layer in e] for e, n in zip(kept, lengths, strict=True)],
        "iou": [
            [[len(a & b) / len(a | b) for a, b in zip(one, two, strict=True)] for one, two in zip(*pair, strict=True)]
            for pair in pairwise(kept)
        ],
        "survived": [
            [[len(a & b) / len(a) for a, b in zip(one, two, strict=True)] for one, two in zip(*pair, strict=True)]
            for pair in pairwise(kept)
        ],
    }
    for name, events in measured.items():
        by_layer = [fmean(value for event in events for value in event[layer]) for layer in range(layers)]
        assert told["by_layer"][name] == pytest.approx(by_layer)
        assert told["mean"][name] == pytest.approx(fmean(by_layer))
        expected = {"early": by_layer[0], "middle": fmean(by_layer[1:-1]), "late": by_layer[-1]}
        assert told["by_depth"][name] == pytest.approx(expected)
        rows = [row[name] for row in told["events"]]
        assert (rows[0] is None) == (name in ("iou", "survived"))
        assert rows[-len(events) :] == pytest.approx([fmean(x for layer in e for x in layer) for e in events])
    assert [row["kept"] for row in told["events"]] == [layers * heads * 8] * 4
    assert [row["entries"] for row in told["events"]] == [layers * heads * n for n in (24, 13, 13, 13)]
    assert told["repetition"] == repetition_rate(trace.ids[24:])
    assert told["segments"] is None and told["layers"] == [0, 1, 2, 3] and told["kv_heads"] == 2


def test_no_event_has_no_figures() -> None:
    tracer = Tracer(tiny("llama"), Recipe.parse("tova(keep=9, prefill=False, every=9)"))
    tracer.follow(prompt(1, 7)[0], 5)
    told = figures(tracer.trace)
    assert told["events"] == [] and told["mean"] == {} and told["layers"] == []


@pytest.mark.parametrize(
    "text", ["tova(keep=9, every=4)", "ams(tova, min_segment=2, max_segment=6, keep=9, every=4, sinks=0, recent=2)"]
)
def test_an_answers_figures_are_means_over_its_events(text: str) -> None:
    """A method without segments has its runs of neighbours in their place."""
    model, ids, recipe = tiny("llama"), prompt(1, 40), Recipe.parse(text)
    watcher = EventFigures(recipe.method)
    cache = keepset.Cache(model, recipe, history=True, observer=watcher.observe)
    tracer = Tracer(model, recipe)
    tracer.follow(ids[0], 24)
    with torch.no_grad():
        for part in (ids[:, :24], *ids[:, 24:].split(1, 1)):
            model(part, past_key_values=cache, use_cache=True)
            watcher.look(cache)
    told = figures(tracer.trace)
    for name in ("iou", "survived", "wipeout", "middle", "longest_gap"):
        assert watcher.means[name] == pytest.approx(told["mean"][name], rel=1e-5)
    heads = [head for event in tracer.trace.events for layer in event.segments.values() for head in layer]
    if heads:
        assert watcher.means["segments"] == pytest.approx(fmean(len(head.ends) for head in heads))
        found = [value for head in heads if (value := head.length_by_mass()) is not None]
        assert watcher.means["length_by_mass"] == pytest.approx(fmean(found))
        return
    kept = [
        [set(event.keep_set.positions(layer, 0, head).tolist()) for layer in range(2) for head in range(2)]
        for event in tracer.trace.events
    ]
    runs = [[sum(t - 1 not in each for t in each) for each in event] for event in kept]
    assert watcher.means["segments"] == pytest.approx(fmean(map(fmean, runs)))
    assert watcher.means["segment_length"] == pytest.approx(fmean(fmean(9 / run for run in event) for event in runs))
    assert "length_by_mass" not in watcher.means


def test_high_mass_in_short_segments_is_a_correlation_below_0() -> None:
    mass = torch.tensor([0.3, 0.3, 0.1, 0.05, 0.05, 0.05, 0.05, 0.04, 0.03, 0.03])
    head = HeadSegments(mass, torch.tensor([1, 2, 5, 10]), torch.ones(4))
    density = [0.3, 0.3, 0.2 / 3, 0.2 / 5]
    assert head.length_by_mass() == pytest.approx(correlation([1, 1, 3, 5], density), rel=1e-5)
    assert HeadSegments(mass, torch.tensor([5, 10]), torch.ones(2)).length_by_mass() is None


@dataclass(frozen=True)
class Halves(TOVA):
    """TOVA that calls the two halves of the cache segments."""

    name: ClassVar[str] = "halves"

    def segments(self, observation: Observation, budget: Budget) -> SimpleNamespace:
        entries = observation.valid.shape[2]
        segment = (torch.arange(entries) >= entries // 2).long().expand(observation.valid.shape)
        mass = torch.full(observation.valid.shape, 1 / entries)
        return SimpleNamespace(mass=mass, segment=segment, quotas=torch.tensor([[[4, 5]]]).expand(1, 2, 2))


def test_segments_of_every_layer() -> None:
    tracer = Tracer(tiny("llama"), Recipe.of(Halves(), keep=9, every=4))
    tracer.generate(prompt(1, LENGTH), max_new_tokens=8, **OPTIONS)
    trace = tracer.trace
    assert [mine.length for mine in trace.events] == [19, 23]
    for mine, entries in zip(trace.events, (19, 13), strict=True):
        assert list(mine.segments) == [0, 1]
        for head in (head for heads in mine.segments.values() for head in heads):
            assert head.ends.tolist() == [entries // 2, entries]
            assert head.quotas.tolist() == [4, 5] and head.mass.shape == (entries,)
    assert figures(trace)["segments"] == pytest.approx({"count": 2, "length": (19 + 13) / 4})
    tracer.follow(prompt(1, 15)[0], 15)
    assert [list(mine.segments) for mine in tracer.trace.events] == [[0, 1]] and tracer.trace.tokens_per_second is None


def test_segments_of_ams_are_those_that_it_kept_by() -> None:
    # With credit the mass depends on the state from before the event, which ams itself overwrites.
    # Without sinks and suffix nothing joins what the segments chose, and nothing is trimmed.
    segments = "window=6, min_segment=2, max_segment=8, mix=0.2"
    recipe = Recipe.parse(f"ams(tova, {segments}, keep=14, sinks=0, recent=0, every=6)")
    tracer = Tracer(tiny("llama"), recipe)
    tracer.follow(prompt(1, 60)[0], 30)
    trace = tracer.trace
    assert [mine.length for mine in trace.events] == [30, 36, 42, 48, 54, 60]
    held = {(layer, head): list(range(30)) for layer in range(2) for head in range(2)}
    for mine in trace.events:
        for (layer, head), positions in held.items():
            told = mine.segments[layer][head]
            stays = set(mine.keep_set.positions(layer, 0, head).tolist())
            ends = told.ends.tolist()
            parts = [positions[start:end] for start, end in pairwise([0, *ends])]
            assert ends[-1] == len(positions) == len(told.mass)
            assert [len(stays & set(part)) for part in parts] == told.quotas.tolist()
            assert float(told.mass.sum()) == pytest.approx(1, abs=1e-5)
            held[layer, head] = sorted(stays) + list(range(mine.length, mine.length + 6))


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
    assert [head.quotas.tolist() for head in told] == [[2, 1, 1], [1, 2]]
    for head, expected in zip(told, (mass[0, 0], mass[0, 1, :3]), strict=True):
        assert torch.equal(head.mass, expected.float())
