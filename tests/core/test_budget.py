"""Budgets against counts of whole numbers, and against sets of the tokens that always stay."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, KeepsetError, Observation, Recipe
from tests.tiers import examples

numbers = st.lists(st.integers(1, 60), min_size=1, max_size=4)
sinks_and_recent = st.tuples(st.integers(0, 5), st.integers(0, 9))


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
    text=st.sampled_from(
        [
            "knorm",
            "quantized(knorm)",
            "quantized(knorm, bits=8)",
            "match(knorm)",
            "quantized(match(knorm))",
            "match(knorm, biases=False)",
        ]
    ),
)
def test_a_share_of_bytes_is_rounded_down_exactly(length: int, part: int, sizes: tuple[int, int], text: str) -> None:
    numbers = sum(sizes)
    few = sum(math.ceil(size / 2) for size in sizes) if part < 75 else numbers  # 4 bits below bytes=0.075
    entry = {
        "knorm": 2 * numbers + 4,
        "quantized(knorm)": few + 4 + 4,
        "quantized(knorm, bits=8)": numbers + 4 + 4,
        "match(knorm)": 2 * numbers + 4 + 4,
        "quantized(match(knorm))": few + 4 + 4 + 4,
        "match(knorm, biases=False)": 2 * numbers + 4,
    }[text]
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


def test_one_entry_is_not_the_same_as_everything() -> None:
    assert Budget(1) != Budget(1.0)


def test_shares_of_bytes_are_budgets_of_their_own() -> None:
    assert Budget(bytes=1) == Budget(bytes=1.0) != Budget(1.0) != Budget()
    assert len({Budget(bytes=0.25), Budget(bytes=0.25), Budget(0.25), Budget(bytes=0.5)}) == 3


def test_sinks_and_suffix_belong_to_each_request() -> None:
    budget, batch = Budget(5, sinks=2, recent=3), observation(9, 4)
    assert [marked(budget.is_protected(batch), *each) for each in ((0, 9), (1, 4))] == [[0, 1], [0, 1]]
    assert [marked(budget.is_recent(batch), *each) for each in ((0, 9), (1, 4))] == [[6, 7, 8], [1, 2, 3]]


@examples(100)
@given(
    lengths=numbers,
    keep=st.integers(14, 70) | st.integers(1, 100).map(lambda percent: percent / 100),
    recent=st.integers(0, 9),
)
def test_recent_tokens_can_stay_in_addition(lengths: list[int], keep: float, recent: int) -> None:
    """A window of 64 beside `keep=64` leaves 64 others, where it would leave none if it counted."""
    seen, budget = observation(*lengths), Budget(keep, 0, recent, recent_extra=True)
    for request, length in enumerate(lengths):
        before = keep if isinstance(keep, int) else length * round(100 * keep) // 100
        wanted = max(1, before + min(recent, length))
        assert budget.quotas(seen.sizes)[request].tolist() == [min(wanted, length)] * 2
    assert budget != Budget(keep, 0, recent)


@examples(100)
@given(lengths=numbers, data=st.data(), always=sinks_and_recent)
def test_a_protected_prompt_stays_and_counts(lengths: list[int], data: st.DataObject, always: tuple[int, int]) -> None:
    sinks, recent = always
    prompts = [data.draw(st.integers(1, length)) for length in lengths]
    keep = data.draw(st.integers(max(1, sinks + recent), 70))
    budget = Budget(keep, sinks, recent, protect_prompt=True)
    seen = replace(observation(*lengths), prompts=torch.tensor(prompts))
    for request, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        assert budget.quotas(seen.sizes)[request].tolist() == [min(max(keep, prompt + recent), length)] * 2
        assert marked(budget.is_protected(seen), request, length) == list(range(min(max(sinks, prompt), length)))


@examples(100)
@given(lengths=numbers, data=st.data(), short=st.integers(1, 70), always=sinks_and_recent)
def test_a_short_prompt_is_protected_and_a_longer_one_is_not(
    lengths: list[int], data: st.DataObject, short: int, always: tuple[int, int]
) -> None:
    sinks, recent = always
    prompts = [data.draw(st.integers(1, length)) for length in lengths]
    keep = data.draw(st.integers(max(1, sinks + recent), 70) | st.floats(0.1, 1))
    budget, plain = (Budget(keep, sinks, recent, short=each) for each in (short, 0))
    seen = replace(observation(*lengths), prompts=torch.tensor(prompts))
    for request, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        quota, without = (each.quotas(seen.sizes)[request].tolist() for each in (budget, plain))
        first = max(sinks, prompt) if prompt < short else sinks
        assert marked(budget.is_protected(seen), request, length) == list(range(min(first, length)))
        assert quota == ([min(max(without[0], prompt + recent), length)] * 2 if prompt < short else without)
    assert budget != plain and budget.protects and not plain.protects


@examples(100)
@given(
    lengths=numbers,
    ranges=st.lists(st.lists(st.integers(0, 70), min_size=2, max_size=2, unique=True).map(sorted), max_size=4),
    keep=st.integers(14, 70) | st.floats(0.1, 1),
    always=sinks_and_recent,
)
def test_protected_ranges_stay_and_count(
    lengths: list[int], ranges: list[list[int]], keep: float, always: tuple[int, int]
) -> None:
    sinks, recent = always
    seen, budget = observation(*lengths), Budget(keep, sinks, recent, protect=ranges)
    for request, length in enumerate(lengths):
        first = {place for place in range(length) if place < sinks or any(a <= place < b for a, b in ranges)}
        assert marked(budget.is_protected(seen), request, length) == sorted(first)
        stay = first | set(range(max(length - recent, 0), length))
        wanted = keep if isinstance(keep, int) else max(1, math.floor(length * keep + 1e-9))
        quota = budget.quotas(seen.sizes)[request].tolist()
        # Sinks and suffix of a short text may be the same tokens, and count twice.
        assert quota == [min(max(wanted, len(stay)), length)] * 2 or sinks + recent > length


def test_ranges_that_meet_are_one() -> None:
    assert Budget(9, protect=[[7, 9], (2, 5), [4, 7]]) == Budget(9, protect=((2, 9),)) != Budget(9)


parts = st.lists(st.tuples(st.sampled_from(["image", "text"]), st.integers(1, 20)), max_size=6)


@examples(100)
@given(
    requests=st.lists(parts, min_size=1, max_size=3),
    kind=st.sampled_from(["image", "text"]),
    ranges=st.sampled_from([[], [[3, 9]], [[0, 2], [30, 50]]]),
    layers=st.integers(1, 2),
    always=sinks_and_recent,
)
def test_images_or_text_stay_and_count(
    requests: list[list[tuple[str, int]]], kind: str, ranges: list[list[int]], layers: int, always: tuple[int, int]
) -> None:
    """Each request has its own images; those of the same request are the same in every layer."""
    sinks, recent = always
    texts = [[name for name, count in parts for _ in range(count)] or ["text"] for parts in requests]
    seen = observation(*[len(text) for text in texts] * layers)
    images = [tuple((at, at + 1) for at, name in enumerate(text) if name == "image") for text in texts]
    budget = Budget(14, sinks, recent, protect=[kind, *ranges])
    located, sizes = budget.located(images), replace(seen.sizes, layer_ids=tuple(range(layers)))
    with pytest.raises(KeepsetError, match="says nothing of positions yet"):
        budget.always(sizes)
    for row, text in enumerate(texts * layers):
        length, stays = len(text), [[kind == name] * count for name, count in requests[row % len(texts)]]
        marks = [mark for part in stays for mark in part] or [kind == "text"]
        first = {
            place for place in range(length) if marks[place] or place < sinks or any(a <= place < b for a, b in ranges)
        }
        assert marked(located.is_protected(seen), row, length) == sorted(first)
        stay = first | set(range(max(length - recent, 0), length))
        assert sinks + recent > length or located.always(sizes)[row] == len(stay)
        assert sinks + recent > length or located.quotas(sizes)[row].tolist() == [min(max(14, len(stay)), length)] * 2


def test_images_that_nobody_knows_of() -> None:
    with pytest.raises(KeepsetError, match="protect='image' takes the token ids of the text"):
        Budget(9, protect="image").located(None)
    plain = Budget(9, protect=[[0, 4]])
    assert plain.located(None) is plain and Budget(9, protect="text").kinds == ("text",)
    assert Budget(9, protect=[[2, 5], "text", "image"]) == Budget(9, protect=("image", "text", (2, 5)))
    assert Budget(9, protect="image").located([((2, 4),)] * 2) == Budget(9, protect=((2, 4),))
    each = Budget(9, protect="image").located([((2, 4),), ()])
    assert each != Budget(9, protect="image").located([(), ((2, 4),)]) and replace(each, keep=3).protects


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
        ("is out of range; did you mean bytes=0.03? Use a share of the bytes", [dict(bytes=3), dict(bytes=3.0)]),
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
    for each in options:
        with pytest.raises(KeepsetError) as refusal:
            Budget(**each)
        assert says in str(refusal.value) and str(refusal.value).endswith(".") and "\n" not in str(refusal.value)
