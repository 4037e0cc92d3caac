"""An answer ends where it should, not a token later; draws are repeatable."""

from __future__ import annotations

import functools
import time
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keepset
from keepset.bench.analysis.diagnostics import repetition_rate
from keepset.bench.generation import Answer, StopCriterion, Stream, picker, step
from keepset.bench.tasks.task import Generation
from keepset.hf.cache import Cache
from tests.bench.sweep.asked import scripted, watched
from tests.bench.sweep.letters import letters
from tests.hf.models import prompt, tiny
from tests.tiers import examples

TOKENIZER = letters()
END = "<eos>"


def decoded(model: Any, streams: list[Stream]) -> list[Answer]:
    """All answers, to their ends."""
    going = streams
    while going:
        step(model, going)
        assert all(stream.error is None for stream in going)
        going = [stream for stream in going if not stream.over]
    return [stream.answer for stream in streams]


def say(text: str, generation: Generation) -> tuple[str, bool, int, int]:
    """The answer of a model that says this text, whether it is finished, its tokens and the model's calls for them."""
    model, ids = tiny("llama"), prompt(1, 9)
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    with scripted(model, tokens, ids.shape[1]) as calls, torch.no_grad():
        cache = keepset.Cache(model, "streaming_llm(keep=1.0)")
        first = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        ending = StopCriterion(model, TOKENIZER, generation)
        [answer] = decoded(model, [Stream(cache, first, picker(0.0, torch.device("cpu")), ending, lambda: None)])
    assert answer.ids == tokens[: len(answer.ids)] and isinstance(answer.reply, str)
    return answer.reply, answer.finished, len(answer.ids), len(calls) - 1


@pytest.mark.parametrize(
    "text, generation, answer, finished, tokens",
    [
        ("Oslo.\nIt is", Generation(20, ("\n",)), "Oslo.", True, 6),
        ("Oslo.\nIt is", Generation(20, ("it", ".\nI", "")), "Oslo", True, 7),
        ("Oslo" + END + "more", Generation(20), "Oslo", True, 5),
        (END, Generation(20, ("\n",)), "", True, 1),
        ("Oslo and more", Generation(4), "Oslo", False, 4),
        ("Oslo\n", Generation(5, ("\n",)), "Oslo", True, 5),
        ("Oslo\n", Generation(4, ("\n",)), "Oslo", False, 4),
        ("Oslo" + END, Generation(5), "Oslo", True, 5),
        ("éàé.", Generation(9, ("é.",)), "éà", True, 4),
        ("abcab", Generation(5, ("ca", "bc")), "a", True, 3),
        ("The answer is 4. Question: why", Generation(40, ("Question:",)), "The answer is 4. ", True, 26),
    ],
)
def test_an_answer_ends_at_its_end(text: str, generation: Generation, answer: str, finished: bool, tokens: int) -> None:
    assert say(text, generation) == (answer, finished, tokens, tokens - 1)


SPANS = st.tuples(st.integers(0, 14), st.integers(1, 5))


@examples(40, derandomize=False)
@given(st.text("ab\né", min_size=12, max_size=12), st.lists(SPANS, min_size=1, max_size=3))
def test_no_token_more_than_an_end_needs(text: str, spans: list[tuple[int, int]]) -> None:
    until = [text[start : start + length] or "abab" for start, length in spans]
    ends = [text.find(end) + len(end) for end in until if end in text]
    expected = min([12, *ends])
    answer, finished, tokens, calls = say(text, Generation(12, tuple(until)))
    assert (tokens, calls, finished) == (expected, expected - 1, bool(ends))
    assert text.startswith(answer) and not any(end in answer for end in until)


def test_answers_of_a_batch_are_those_of_each_alone() -> None:
    model, device = tiny("llama"), torch.device("cpu")
    recipes = ["streaming_llm(keep=1.0)", "snapkv(window=4, keep=12, every=5)", "adakv(snapkv(window=4), keep=0.3)"] * 3
    ending = StopCriterion(model, TOKENIZER, Generation(30, ("th", *"abcdefghij")))

    def streams(grown: list[int]) -> list[Stream]:
        made = []
        for row, recipe in enumerate(recipes):
            cache = Cache(model, recipe)
            with torch.no_grad():
                logits = model(prompt(1, 20 + row, seed=row), past_key_values=cache).logits[:, -1]
            on_token = functools.partial(grown.append, row)
            made.append(Stream(cache, logits, picker(1.5, device, row), ending, on_token))
        return made

    alone = [decoded(model, [stream])[0] for stream in streams([])]
    grown: list[int] = []
    waiting, began = streams(grown), time.perf_counter()
    going, answers = waiting[:5], [stream.answer for stream in waiting]
    del waiting[:5]
    with watched(model) as calls:
        rows = []
        while going:  # where one ends another begins
            rows.append(len(going))
            step(model, going)
            going = [stream for stream in going if not stream.over]
            while waiting and len(going) < 5:
                going.append(waiting.pop(0))
    taken = time.perf_counter() - began
    assert [said.ids for said in answers] == [said.ids for said in alone]
    assert [(said.reply, said.finished) for said in answers] == [(said.reply, said.finished) for said in alone]
    assert len({len(said.ids) for said in alone}) > 2
    # A row is fed as long as its answer goes on, and no longer.
    assert sum(row for row, _ in calls) == sum(len(said.ids) - 1 for said in alone)
    assert [grown.count(row) for row in range(9)] == [len(said.ids) - 1 for said in alone]
    assert max(row for row, _ in calls) == 5 and all(tokens == 1 for _, tokens in calls)
    assert sum(said.beside for said in answers) == sum(row * row for row in rows)
    assert all(said.beside == len(said.ids) for said in alone)
    assert 0 < sum(said.seconds for said in answers) <= taken


def test_what_an_event_takes_is_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    ending = StopCriterion(model, TOKENIZER, Generation(5))
    ending._ends = set()
    streams = []
    for recipe in ("knorm(keep=4, every=3)", "knorm(keep=4)"):
        cache = Cache(model, recipe)
        with torch.no_grad():
            logits = model(prompt(1, 9), past_key_values=cache).logits[:, -1]
        streams.append(Stream(cache, logits, picker(0.0, torch.device("cpu")), ending, lambda: None))
    before = [sum(event.seconds for event in stream.cache.events) for stream in streams]
    selects = type(streams[0].cache.recipe.method).select_all

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.2)
        return selects(self, *args)

    monkeypatch.setattr(type(streams[0].cache.recipe.method), "select_all", slow)
    first, second = decoded(model, streams)
    own = sum(event.seconds for event in streams[0].cache.events) - before[0]
    assert own >= 0.4  # of two layers
    assert first.seconds - own == pytest.approx(second.seconds)


def test_the_tokenizers_own_end_counts_beside_the_models() -> None:
    model: Any = tiny("llama")
    ending = StopCriterion(model, TOKENIZER, Generation(9))
    assert ending.reached([5, 2]) and not ending.reached([5, 4])
    config = model.generation_config
    before = config.eos_token_id
    try:
        config.eos_token_id = [4, 7]
        ending = StopCriterion(model, TOKENIZER, Generation(9))
    finally:
        config.eos_token_id = before
    assert all(ending.reached([5, end]) for end in (2, 4, 7))


def test_a_draw_depends_on_what_it_is_for_and_on_nothing_else() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    device = torch.device("cpu")

    def drawn(*draw: object) -> list[int]:
        pick = picker(1.0, device, *draw)
        torch.rand(3)
        return [int(pick(logits)) for _ in range(20)]

    assert drawn(0, "a", 1) == drawn(0, "a", 1)
    different = [drawn(0, "a", 1), drawn(1, "a", 1), drawn(0, "b", 1), drawn(0, "a", 2)]
    assert len(set(map(tuple, different))) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_temperature_says_how_often_what_is_drawn(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=dtype)
    for temperature in (0.5, 1.0):
        pick = picker(temperature, torch.device("cpu"), "x")
        counts = Counter(int(pick(logits)) for _ in range(4000))
        weights = [2.718281828 ** (value / temperature) for value in (0, 1, 2)]
        for token, weight in enumerate(weights):
            assert counts[token] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)
    assert int(picker(0.0, torch.device("cpu"))(logits)) == 2


@given(st.lists(st.integers(0, 2), max_size=30))
def test_repetition_is_the_share_of_four_grams_that_were_there_before(ids: list[int]) -> None:
    grams = [ids[start : start + 4] for start in range(len(ids) - 3)]
    again = sum(gram in grams[:index] for index, gram in enumerate(grams))
    assert repetition_rate(torch.tensor(ids, dtype=torch.long)) == pytest.approx(again / len(grams) if grams else 0.0)


def test_it_is_told_after_every_token_that_the_cache_takes() -> None:
    model, ids = tiny("llama"), prompt(1, 9)
    cache = Cache(model, "streaming_llm(keep=1.0)")
    lengths: list[int] = []
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits[:, -1]
    ending = StopCriterion(model, TOKENIZER, Generation(5))
    ending._ends = set()
    pick = picker(0.0, torch.device("cpu"))
    decoded(model, [Stream(cache, first, pick, ending, lambda: lengths.append(cache.get_seq_length()))])
    assert lengths == [10, 11, 12, 13]
