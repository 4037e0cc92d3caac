"""Every nesting of two or three allocators, post-processors and presets is refused, or keeps what its budget says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, Method, Recipe, Schedule
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.method import forecast_quotas
from keepset.errors import RecipeError
from keepset.paged.eviction import EvictionSchedule
from tests.allocators.nestings import AROUND, CAPS, HEADS, LAYERS, Held, Nesting, allowed, made, refusals
from tests.methods.naive import Shape, random_statistics
from tests.tiers import examples

WHOLE_ENTRIES = {"composite", "dynamic", "kvcompose", "zigzag"}
"""Methods that divide a number of entries per head among layers."""

MEASURED = random_statistics(Shape((1,), HEADS, 2, 4, 3), LAYERS)
FILES = {ModelStatistics(""): MEASURED, ModelStatistics("", predictors=True): MEASURED}


def test_it_is_made_or_refused_in_one_sentence() -> None:
    for sentence in filter(None, refusals().values()):
        assert sentence.endswith(".") and sentence.count(". ") == 0 and "\n" not in sentence, sentence
    found = {depth: sum(len(nesting) == depth + 1 for nesting in allowed()) for depth in (1, 2, 3)}
    assert found[1] < found[2] < found[3]


@pytest.mark.parametrize(
    ("texts", "because"),
    [
        ("adakv(adakv(snapkv)) adakv(uniform(adakv(knorm))) adakv(pyramid(adakv(tova)))", "one inside another .* once"),
        ("pyramid(pyramid(knorm)) pyramid(adakv(pyramid(knorm)))", "use it once"),
        ("chunkkv(adakv(knorm)) chunkkv(uniform(chunkkv(knorm)))", "chooses the entries of every head itself"),
        ("criticalkv(adakv(knorm)) criticalkv(chunkkv(knorm)) chunkkv(gvote)", "and so does"),
        ("chunkkv(criticalkv(knorm)) ams(criticalkv(knorm))", "criticalkv"),
        ("ams(pyramid(chunkkv(tova)))", "cannot wrap chunkkv"),
        ("ams(adakv(tova))", r"cannot wrap adakv, which chooses too: .* adakv\(ams\(tova\)\)"),
        ("ams(tova,kernel=4)", "has no middle"),
        ("ams(tova,max_segment=20)", "less than twice min_segment=16"),
        (
            "zigzag(pyramid(tova)) dynamic(adakv(pyramid(tova))) zigzag(dynamic(tova))",
            "both set how much every layer keeps",
        ),
        ("uniform(zigzag(tova)) adakv(dynamic(tova)) criticalkv(zigzag(tova))", r"inside, as in (zigzag|dynamic)\("),
        ("pool(adakv(tova)) pool(pyramid(tova)) pool(composite(tova)) pool(uniform(adakv(tova)))", "leave one of them"),
        ("pool(kvcompose) composite(kvcompose)", "use it alone"),
        ("adakv(duo_attention) pyramid(duo_attention)", "duo_attention itself sets how much every head keeps"),
        ("pool(compilerkv)", "itself sets how much every head keeps"),
        ("adakv(int8(snapkv)) match(int8(snapkv))", r"last step: write quantized\(...\) around"),
        ("adakv(match(snapkv)) pool(match(tova))", "last step"),
        ("int8(int8(tova)) match(match(snapkv))", "(quantized|match) is there twice"),
    ],
)
def test_says_why_it_is_refused(texts: str, because: str) -> None:
    for text in texts.split():
        with pytest.raises(RecipeError, match=because):
            Recipe.parse(text)


@pytest.mark.parametrize(
    ("text", "layout", "sinks", "recent", "across"),
    [
        ("kvcompose", "layer-ragged", 0, 0, True),
        ("kvcompose(structured=False)", "head-ragged", 0, 0, True),
        ("duo_attention", "head-ragged", 16, 64, False),  # as its gates were measured
        ("pool(snapkv)", "head-ragged", 0, 64, True),
        ("match(snapkv)", "dense", 0, 64, False),
        ("match(reread)", "head-ragged", 4, 8, True),
        ("int8(match(reread))", "head-ragged", 4, 8, True),
    ],
)
def test_traits_are_those_of_all_parts(text: str, layout: str, sinks: int, recent: int, across: bool) -> None:
    traits = Recipe.parse(text).method.traits
    assert (traits.layout, traits.sinks, traits.recent, traits.across_layers) == (layout, sinks, recent, across)
    assert traits.biased == ("match" in text) and traits.counts_from_data == across


def check_a_fraction(
    nesting: Nesting, prompt: int, percent: int, sinks: int, recent: int, seed: int, extra: bool = False
) -> None:
    method, budget = made(nesting), Budget(percent / 100, sinks, recent, recent_extra=extra)
    state = Held.of_prompt(prompt)
    kept = state.compressed(method, budget, prompt, prompt, seed)
    heads, least = HEADS * len(LAYERS), min(max(1, sinks + recent), prompt)
    added = min(recent, prompt) if extra else 0
    per_head = min(max(least, prompt * percent // 100 + added), prompt)
    together = min(max(least * heads, prompt * percent * heads // 100 + added * heads), prompt * heads)
    # A fraction may be taken of all layers together, and not of each head.
    total = together if method.traits.across_layers or not method.traits.fixed_total else per_head * heads
    if WHOLE_ENTRIES & {*nesting}:
        total -= total % HEADS
    check_counts(method, kept, total, per_head, exact=nesting[-1] not in CAPS)
    check_forecast(method, budget, state, prompt, prompt, kept)


def check_entries(nesting: Nesting, prompt: int, budget: Budget, every: int, seed: int) -> None:
    """Check the prompt's end, unless it is protected, and two events after it, if the method works there."""
    method, cap = made(nesting), nesting[-1] in CAPS
    recipe = Recipe(method, budget, Schedule(every=every))
    schedules = [EvictionSchedule(recipe, layer, LAYERS, HEADS, 4, 1) for layer in LAYERS]
    state, length = Held.of_prompt(prompt), prompt
    events = 1 if any(feature.prompt_only for feature in method.traits.needs) else 3
    for event in range(events):
        if event or not budget.protect_prompt:
            aim = budget.keep
            assert isinstance(aim, int)
            aim += min(budget.recent, length) if budget.recent_extra else 0
            if budget.protect_prompt:
                aim = max(aim, min(prompt + budget.recent, length))
            kept = state.compressed(method, budget, length, prompt, seed + 100 * event)
            total = sum(min(aim * HEADS, sum(layer)) for layer in state.counts)
            if method.traits.across_layers:
                total = min(aim * HEADS * len(LAYERS), sum(map(sum, state.counts)))
            # Layers that aim at different numbers keep what they have where that is less.
            exact = not cap and (method.traits.equal_layers or method.traits.across_layers or not event)
            check_counts(method, kept, total if exact else aim * HEADS * len(LAYERS), aim, exact)
            check_forecast(method, budget, state, length, prompt, kept)
            for schedule, layer in zip(schedules, kept.counts, strict=True):
                if schedule.fixed:
                    assert length - schedule.dropped(prompt, length) == -(-sum(layer) // HEADS)
            state = kept
        state, length = state.grown(length, every), length + every


def check_counts(method: Method, kept: Held, total: int, per_head: int, exact: bool) -> None:
    """Never more than the budget's entries in all, and just so many where nothing but the budget says how many."""
    found = sum(map(sum, kept.counts))
    assert found == total if exact else found <= total, (kept.counts, total)
    if method.traits.equal_layers and not method.traits.across_layers:
        assert all(sum(layer) <= per_head * HEADS for layer in kept.counts), (kept.counts, per_head)
    if method.traits.equal_heads:
        assert all(len(set(layer)) == 1 for layer in kept.counts), kept.counts


def check_forecast(method: Method, budget: Budget, state: Held, length: int, prompt: int, kept: Held) -> None:
    """Check that the forecast of an event is what it keeps."""
    if not method.traits.count_known_on_host:
        return
    for layer, before, after in zip(LAYERS, state.counts, kept.counts, strict=True):
        average = [sum(before) // HEADS] * HEADS if method.traits.fixed_total else before
        quotas = forecast_quotas(method, budget, [average], [length], [prompt], (layer,), LAYERS, FILES)
        assert int(quotas.sum()) == sum(after), (before, after, quotas)


nestings = st.deferred(lambda: st.sampled_from(allowed()))
few = st.integers(0, 4)


@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
@examples(160)
@given(nestings, st.integers(1, 40), st.integers(1, 100), few, few, st.integers(0, 99), st.booleans())
def test_a_fraction_is_kept(
    nesting: Nesting, prompt: int, percent: int, sinks: int, recent: int, seed: int, extra: bool
) -> None:
    check_a_fraction(nesting, prompt, percent, sinks, recent, seed, extra)


@st.composite
def numbers(draw: st.DrawFn) -> Budget:
    sinks, recent, extra = draw(few), draw(few), draw(st.booleans())
    keep = max(1, sinks + (0 if extra else recent)) + draw(st.integers(0, 20))
    return Budget(keep, sinks, recent, draw(st.booleans()), recent_extra=extra)


@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
@examples(80)
@given(nestings, st.integers(1, 40), numbers(), st.integers(1, 8), st.integers(0, 99))
def test_a_number_is_kept_event_after_event(
    nesting: Nesting, prompt: int, budget: Budget, every: int, seed: int
) -> None:
    check_entries(nesting, prompt, budget, every, seed)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
@pytest.mark.parametrize("outermost", AROUND)
def test_so_are_those_of_each_nesting(outermost: str) -> None:
    for nesting in allowed():
        if nesting[0] == outermost:
            check_a_fraction(nesting, 37, 29, 2, 3, 0)
            check_entries(nesting, 37, Budget(13, 2, 3), 6, 0)
