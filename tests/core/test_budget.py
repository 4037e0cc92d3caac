import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import Budget, KeepsetError, Observation


def observation(*lengths: int) -> Observation:
    """Requests of these lengths, holes at the end of the shorter ones."""
    shape = len(lengths), 2, max(lengths)
    valid = (torch.arange(shape[2]) < torch.tensor(lengths)[:, None, None]).expand(shape)
    return Observation(keys=torch.zeros(*shape, 1), values=torch.zeros(*shape, 1), valid=valid)


def marked(mask: torch.Tensor, request: int = 0) -> list[int]:
    return mask[request, 0].nonzero()[:, 0].tolist()


@given(entries=st.integers(1, 200_000), thousandths=st.integers(1, 1000))
def test_a_fraction_is_rounded_down_exactly(entries: int, thousandths: int) -> None:
    budget = Budget(thousandths / 1000)
    # Expanded, because only the number of entries matters here and there may be many.
    valid = torch.ones(1, 1, 1, dtype=torch.bool).expand(1, 1, entries)
    keys = torch.zeros(1, 1, 1, 1).expand(1, 1, entries, 1)
    assert budget.quotas(Observation(keys=keys, values=keys, valid=valid).sizes).item() == max(
        1, math.floor(entries * Fraction(thousandths, 1000))
    )


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4), percent=st.integers(1, 100))
def test_quotas_are_the_count_of_every_request(lengths: list[int], percent: int) -> None:
    quotas = Budget(percent / 100).quotas(observation(*lengths).sizes)
    assert quotas.tolist() == [[max(1, length * percent // 100)] * 2 for length in lengths]


@pytest.mark.parametrize(
    ("keep", "entries", "count"),
    [
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.07, 100, 7),
        (0.001, 50, 1),
        (1.0, 50, 50),
        (0.999, 50, 49),
        (7, 50, 7),
        (50, 50, 50),
        (51, 50, 50),
        (1, 50, 1),
        (None, 50, 50),
    ],
)
def test_counts(keep: float | None, entries: int, count: int) -> None:
    assert Budget(keep).quotas(observation(entries).sizes).tolist() == [[count, count]]


@pytest.mark.parametrize(("entries", "count"), [(1, 1), (5, 5), (7, 7), (8, 7), (28, 7), (32, 8), (100, 25)])
def test_a_fraction_is_never_less_than_always_stays(entries: int, count: int) -> None:
    assert Budget(0.25, sinks=2, recent=5).quotas(observation(entries, 1).sizes).tolist() == [[count] * 2, [1, 1]]


def test_one_entry_is_not_the_same_as_everything() -> None:
    assert Budget(1) != Budget(1.0)


def test_sinks_and_suffix_belong_to_each_request() -> None:
    budget, batch = Budget(5, sinks=2, recent=3), observation(9, 4)
    assert [marked(budget.is_protected(batch), request) for request in (0, 1)] == [[0, 1], [0, 1]]
    assert marked(budget.is_recent(batch), 0) == [6, 7, 8]
    assert [entry for entry in marked(budget.is_recent(batch), 1) if entry < 4] == [1, 2, 3]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    data=st.data(),
    sinks=st.integers(0, 5),
    recent=st.integers(0, 9),
)
def test_a_protected_prompt_stays_and_counts(lengths: list[int], data: st.DataObject, sinks: int, recent: int) -> None:
    prompts = [data.draw(st.integers(1, length)) for length in lengths]
    keep = data.draw(st.integers(max(1, sinks + recent), 70))
    seen, batch = observation(*lengths), Budget(keep, sinks, recent, protect_prompt=True)
    seen = replace(seen, prompts=torch.tensor(prompts))
    for request, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        assert batch.quotas(seen.sizes)[request].tolist() == [min(max(keep, prompt + recent), length)] * 2
        first = [entry for entry in marked(batch.is_protected(seen), request) if entry < length]
        assert first == list(range(min(max(sinks, prompt), length)))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    ranges=st.lists(st.lists(st.integers(0, 70), min_size=2, max_size=2, unique=True).map(sorted), max_size=4),
    keep=st.integers(14, 70) | st.floats(0.1, 1),
    sinks=st.integers(0, 5),
    recent=st.integers(0, 9),
)
def test_protected_ranges_stay_and_count(
    lengths: list[int], ranges: list[list[int]], keep: float, sinks: int, recent: int
) -> None:
    seen, budget = observation(*lengths), Budget(keep, sinks, recent, protect=ranges)
    for request, length in enumerate(lengths):
        first = {place for place in range(length) if place < sinks or any(a <= place < b for a, b in ranges)}
        assert [place for place in marked(budget.is_protected(seen), request) if place < length] == sorted(first)
        always = first | {place for place in range(length) if place >= length - recent}
        wanted = keep if isinstance(keep, int) else max(1, math.floor(length * keep + 1e-9))
        quota = budget.quotas(seen.sizes)[request].tolist()
        # Sinks and suffix of a short text may be the same tokens, and count twice.
        assert quota == [min(max(wanted, len(always)), length)] * 2 or sinks + recent > length


def test_ranges_that_meet_are_one() -> None:
    assert Budget(9, protect=[[7, 9], (2, 5), [4, 7]]) == Budget(9, protect=((2, 9),)) != Budget(9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(keep=0), "from 1"),
        (dict(keep=-3), "from 1"),
        (dict(keep=0.0), "fraction in (0, 1]"),
        (dict(keep=1.5), "fraction in (0, 1]"),
        (dict(keep=-0.5), "fraction in (0, 1]"),
        (dict(keep=math.nan), "fraction in (0, 1]"),
        (dict(keep=math.inf), "fraction in (0, 1]"),
        (dict(keep=True), "not a number"),
        (dict(keep="half"), "not a number"),
        (dict(sinks=-1), "sinks=-1"),
        (dict(sinks=1.0), "sinks=1.0"),
        (dict(recent=True), "recent=True"),
        (dict(recent=None), "recent=None"),
        (dict(protect_prompt=1), "protect_prompt=1 is neither True nor False"),
        *(
            (dict(protect=ranges), "no list of ranges of tokens")
            for ranges in (7, [3], [[5, 5]], [[-1, 4]], [[0, 1.0]])
        ),
        (dict(keep=5, sinks=4, recent=2), "below the 6 entries that always stay (sinks=4, recent=2)"),
    ],
)
def test_refuses_in_one_sentence(options: dict[str, object], says: str) -> None:
    with pytest.raises(KeepsetError) as refusal:
        Budget(**options)
    message = str(refusal.value)
    assert says in message
    assert message.endswith(".") and "\n" not in message


def test_a_budget_of_just_what_always_stays_is_allowed() -> None:
    assert Budget(6, sinks=4, recent=2).quotas(observation(100).sizes).unique().tolist() == [6]
