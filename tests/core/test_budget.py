"""Budgets against counts of whole numbers, and against sets of the tokens that always stay."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, KeepsetError, Observation, Recipe
from tests.observations import changed
from tests.tiers import examples


def observation(*lengths: int) -> Observation:
    """Requests of these lengths, holes at the end of the shorter ones."""
    shape = len(lengths), 2, max(lengths)
    valid = (torch.arange(shape[2]) < torch.tensor(lengths)[:, None, None]).expand(shape)
    nothing = torch.zeros(1, 1, 1, 1).expand(*shape, 1)
    return Observation(keys=nothing, values=nothing, valid=valid)


def marked(mask: torch.Tensor, request: int, length: int) -> list[int]:
    return [entry for entry in mask[request, 0].nonzero()[:, 0].tolist() if entry < length]


@examples(100)
@given(
    lengths=st.lists(st.integers(1, 300) | st.integers(1, 200_000), min_size=1, max_size=3), part=st.integers(1, 1000)
)
def test_a_fraction_of_every_request_is_rounded_down_exactly(lengths: list[int], part: int) -> None:
    quotas = Budget(part / 1000).quotas(observation(*lengths).sizes)
    assert quotas.tolist() == [[max(1, math.floor(length * Fraction(part, 1000)))] * 2 for length in lengths]


@pytest.mark.parametrize(
    ("budget", "counts"),
    [
        (Budget(0.29), {100: 29}),
        (Budget(0.57), {100: 57}),
        (Budget(0.001), {50: 1}),
        (Budget(1.0), {50: 50}),
        (Budget(1), {50: 1}),
        (Budget(50), {49: 49, 50: 50, 51: 50}),
        (Budget(None), {50: 50}),
        (Budget(6, sinks=4, recent=2), {100: 6}),
        # A fraction is never less than what always stays.
        (Budget(0.25, sinks=2, recent=5), {1: 1, 5: 5, 7: 7, 8: 7, 28: 7, 32: 8, 100: 25}),
    ],
    ids=str,
)
def test_counts(budget: Budget, counts: dict[int, int]) -> None:
    assert budget.quotas(observation(*counts).sizes).tolist() == [[count] * 2 for count in counts.values()]


@examples(100)
@given(
    length=st.integers(1, 300) | st.integers(1, 200_000),
    part=st.integers(1, 1000),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 256)),
    case=st.integers(0, 5),
)
def test_a_share_of_bytes_is_rounded_down_exactly(length: int, part: int, sizes: tuple[int, int], case: int) -> None:
    numbers = sum(sizes)
    few = sum(math.ceil(size / 2) for size in sizes) if part < 75 else numbers  # 4 bits below bytes=0.075
    text, entry = [
        ("knorm", 2 * numbers + 4),
        ("quantized(knorm)", few + 4 + 4),
        ("quantized(knorm, bits=8)", numbers + 4 + 4),
        ("match(knorm)", 2 * numbers + 4 + 4),
        ("quantized(match(knorm))", few + 4 + 4 + 4),
        ("match(knorm, biases=False)", 2 * numbers + 4),
    ][case]
    budget = Recipe.parse(text).with_budget(bytes=part / 1000).budget_of_sizes([sizes])
    (quotas,) = budget.quotas(observation(length).sizes).tolist()
    assert quotas == [min(max(1, math.floor(length * Fraction(part, 1000) * 2 * numbers / entry)), length)] * 2


def test_layers_of_several_sizes_that_share_a_budget_are_given_their_share_together() -> None:
    budget = Recipe.parse("pool(knorm, bytes=0.25)").budget_of_sizes([(16, 16), (32, 8), (16, 16)])
    assert budget == Budget(0.25 * 2 * (32 + 40 + 32) / (2 * (32 + 40 + 32) + 3 * 4))


def test_bytes_without_a_recipe_say_nothing_of_entries() -> None:
    for method in ("knorm", "pyramid(knorm)", "pool(knorm)", "dynamic(knorm)"):
        with pytest.raises(KeepsetError, match=r"take Recipe\.budget_for"):
            Recipe.parse(method).method.select(observation(9), Budget(bytes=0.25))


def test_budgets_are_equal_if_they_say_the_same() -> None:
    budgets = [Budget(), Budget(1), Budget(1.0), Budget(bytes=1), Budget(9), Budget(9, recent_extra=True), Budget(9, 1)]
    budgets += [Budget(9, protect=[[2, 9]]), Budget(9, protect_prompt=True), Budget(9, short=3), Budget(9, recent=1)]
    assert len({*budgets, Budget(bytes=1.0), Budget(9, protect=[(2, 5), [4, 9]])}) == len(budgets)
    assert Budget(bytes=1) == Budget(bytes=1.0)


def test_ranges_that_meet_are_one() -> None:
    assert Budget(9, protect=[[7, 9], (2, 5), [4, 7]]) == Budget(9, protect=((2, 9),)) != Budget(9)


parts = st.lists(st.tuples(st.sampled_from(["image", "text"]), st.integers(1, 20)), max_size=6)


@examples(300)
@given(
    requests=st.lists(parts, min_size=1, max_size=3),
    layers=st.integers(1, 2),
    keep=st.integers(14, 70) | st.integers(1, 100).map(lambda percent: percent / 100),
    always=st.tuples(st.integers(0, 5), st.integers(0, 9)),
    protects=st.sampled_from(["", "prompt", "short", "image", "text"]),
    ranges=st.lists(st.lists(st.integers(0, 70), min_size=2, max_size=2, unique=True).map(sorted), max_size=4),
    short=st.integers(1, 70),
    extra=st.booleans(),
    data=st.data(),
)
def test_what_always_stays_and_counts(
    requests: list[list[tuple[str, int]]],
    layers: int,
    keep: float,
    always: tuple[int, int],
    protects: str,
    ranges: list[list[int]],
    short: int,
    extra: bool,
    data: st.DataObject,
) -> None:
    """Of each request: sinks, newest tokens, ranges, and its prompt, its prompt if that is short, its images or text.

    Newest tokens may stay in addition: a window of 64 beside `keep=64` leaves 64 others, and none if it counts.
    """
    texts = [[name for name, count in parts for _ in range(count)] or ["text"] for parts in requests]
    prompts = [data.draw(st.integers(1, len(text))) for text in texts] * layers
    shown = changed(observation(*[len(text) for text in texts] * layers), prompts=torch.tensor(prompts))
    images = [tuple((at, at + 1) for at, name in enumerate(text) if name == "image") for text in texts]
    sizes, (sinks, recent) = replace(shown.sizes, layer_ids=tuple(range(layers))), always
    kinds = [protects] if protects in ("image", "text") else []
    options = dict(protect_prompt=protects == "prompt", short=short if protects == "short" else 0, recent_extra=extra)
    recipe_budget = Budget(keep, sinks, recent, protect=[*kinds, *ranges], **options)
    budget = recipe_budget.located(images)
    if kinds:
        with pytest.raises(KeepsetError, match="says nothing of positions yet"):
            recipe_budget.always(sizes)
    assert recipe_budget.protects == bool(protects or ranges)
    for row, (text, prompt) in enumerate(zip(texts * layers, prompts, strict=True)):
        length, whole = len(text), protects == "prompt" or (protects == "short" and prompt < short)
        first = set(range(min(max(sinks, prompt if whole else 0), length)))
        first |= {at for at in range(length) if text[at] == protects or any(a <= at < b for a, b in ranges)}
        newest = set(range(max(length - recent, 0), length))
        assert marked(budget.is_protected(shown), row, length) == sorted(first)
        assert marked(budget.is_recent(shown), row, length) == sorted(newest)
        if sinks + recent <= length:  # of a short text they may be the same tokens, and count twice
            before = keep if isinstance(keep, int) else length * round(100 * keep) // 100
            count = max(1, before + recent * extra, len(first | newest))
            assert min(int(budget.always(sizes)[row]), length) == len(first | newest)
            assert budget.quotas(sizes)[row].tolist() == [min(count, length)] * 2


def test_images_that_nobody_knows_of() -> None:
    with pytest.raises(KeepsetError, match="protect='image' takes the token ids of the text"):
        Budget(9, protect="image").located(None)
    plain = Budget(9, protect=[[0, 4]])
    assert plain.located(None) is plain and Budget(9, protect="text").kinds == ("text",)
    assert Budget(9, protect=[[2, 5], "text", "image"]) == Budget(9, protect=("image", "text", (2, 5)))
    assert Budget(9, protect="image").located([((2, 4),)] * 2) == Budget(9, protect=((2, 4),))
    located = Budget(9, protect="image").located([((2, 4),), ()])
    assert located != Budget(9, protect="image").located([(), ((2, 4),)]) and replace(located, keep=3).protects


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ("from 1", [dict(keep=0), dict(keep=-3)]),
        ("fraction in (0, 1]", [dict(keep=keep) for keep in (0.0, 1.5, -0.5, math.nan, math.inf)]),
        ("in (0, 1], such as 0.25", [dict(bytes=share) for share in (0, 0.0, 1.5, 2, -0.5, math.nan, math.inf)]),
        ("bytes='half' is not a number", [dict(bytes="half")]),
        ("bytes=True is not a number", [dict(bytes=True)]),
        ("both say how much stays: leave one of them out", [dict(bytes=0.5, keep=keep) for keep in (0.5, 3)]),
        ("not a number", [dict(keep=True), dict(keep="half")]),
        ("sinks=-1", [dict(sinks=-1)]),
        ("sinks=1.0", [dict(sinks=1.0)]),
        ("recent=", [dict(recent=True), dict(recent=None)]),
        ("is out of range; did you mean bytes=0.05? Use a share of the bytes", [dict(bytes=5), dict(bytes=5.0)]),
        ("is out of range: use a share of the bytes", [dict(bytes=2), dict(bytes=4.9), dict(bytes=101)]),
        # keep=1 would be one entry.
        ("is out of range; did you mean keep=1.0? Use a fraction", [dict(keep=100.0)]),
        ("is out of range; did you mean keep=0.25? Use a fraction", [dict(keep=25.0)]),
        ("such as 512.", [dict(keep=250.0), dict(keep=1.5)]),
        ("short=-1 is not a number of tokens", [dict(short=-1)]),
        ("short=True is not a number of tokens", [dict(short=True)]),
        ("protect_prompt=1 is neither True nor False", [dict(protect_prompt=1)]),
        ("recent_extra=1 is neither True nor False", [dict(recent_extra=1)]),
        ("counts every entry, and recent_extra=True does not", [dict(bytes=0.5, recent_extra=True)]),
        ("protect='images' is no list of ranges", [dict(protect="images")]),
        ("protect=['image', 7] is no list of ranges", [dict(protect=["image", 7])]),
        ("protect=[[5, 2]] is no list of ranges", [dict(protect=((5, 2),)), dict(protect=([5, 2],))]),
        ("no list of ranges", [dict(protect=bad) for bad in (7, [3], [[5, 5]], [[-1, 4]], [[0, 1.0]])]),
        ("below the 6 entries that always stay (sinks=4, recent=2)", [dict(keep=5, sinks=4, recent=2)]),
        ("below the 4 entries that always stay (sinks=4)", [dict(keep=3, sinks=4, recent=2, recent_extra=True)]),
    ],
)
def test_refuses_in_one_sentence(says: str, options: list[dict[str, object]]) -> None:
    for arguments in options:
        with pytest.raises(KeepsetError) as refusal:
            Budget(**arguments)
        assert says in str(refusal.value) and str(refusal.value).endswith(".") and "\n" not in str(refusal.value)
