"""An answer ends where it should, not a token later; draws are repeatable."""

import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset.hf.cache import Cache
from keepset.lab.generation import Answer, StopCriterion, picker, step
from keepset.lab.tasks.task import Generation
from tests.hf.models import prompt, tiny
from tests.lab.sweep.asked import letters, scripted, watched
from tests.tiers import examples

TOKENIZER = letters()
END = "<eos>"


def decoded(model: Any, answers: list[Answer]) -> list[Answer]:
    """All answers, to their ends."""
    going = answers
    while going:
        step(model, going)
        assert all(answer.error is None for answer in going)
        going = [answer for answer in going if not answer.over]
    return answers


def begun(model: Any, recipe: str, ids: torch.Tensor, ending: StopCriterion, *draw: object, **options: Any) -> Answer:
    """An answer that begins after a prefill; drawn if it is said for what."""
    cache = Cache(model, recipe)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    pick = picker(1.5 if draw else 0.0, torch.device("cpu"), *draw)
    return Answer(cache, logits, pick, ending, **{"on_token": lambda: None, **options})


def say(text: str, generation: Generation) -> tuple[str, bool, int, int]:
    """The answer of a model that says this text, whether it is finished, its tokens and the model's calls for them."""
    model, ids = tiny("llama"), prompt(1, 9)
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    with scripted(model, tokens, ids.shape[1]) as calls, torch.no_grad():
        ending = StopCriterion(model, TOKENIZER, generation)
        [answer] = decoded(model, [begun(model, "streaming_llm(keep=1.0)", ids, ending)])
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
        ("Oslo\n", Generation(4, ("\n",)), "Oslo", False, 4),
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
    model = tiny("llama")
    recipes = ["streaming_llm(keep=1.0)", "snapkv(window=4, keep=12, every=5)", "adakv(snapkv(window=4), keep=0.3)"] * 3
    ending = StopCriterion(model, TOKENIZER, Generation(30, ("th", *"abcdefghij")))

    def answers(grown: list[int]) -> list[Answer]:
        return [
            begun(model, recipe, prompt(1, 20 + row, seed=row), ending, row, on_token=partial(grown.append, row))
            for row, recipe in enumerate(recipes)
        ]

    alone = [decoded(model, [one])[0] for one in answers([])]
    grown: list[int] = []
    waiting, began = answers(grown), time.perf_counter()
    going, together = waiting[:5], list(waiting)
    del waiting[:5]
    with watched(model) as calls:
        rows = []
        while going:  # where one ends another begins
            rows.append(len(going))
            step(model, going)
            going = [one for one in going if not one.over]
            while waiting and len(going) < 5:
                going.append(waiting.pop(0))
    taken = time.perf_counter() - began
    assert [said.ids for said in together] == [said.ids for said in alone]
    assert [(said.reply, said.finished) for said in together] == [(said.reply, said.finished) for said in alone]
    assert len({len(said.ids) for said in alone}) > 2
    # A row is fed as long as its answer goes on, and no longer.
    assert sum(row for row, _ in calls) == sum(len(said.ids) - 1 for said in alone)
    assert [grown.count(row) for row in range(9)] == [len(said.ids) - 1 for said in alone]
    assert max(row for row, _ in calls) == 5 and all(tokens == 1 for _, tokens in calls)
    assert sum(said.beside for said in together) == sum(row * row for row in rows)
    assert all(said.beside == len(said.ids) for said in alone)
    assert 0 < sum(said.seconds for said in together) <= taken


def test_what_an_event_takes_is_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    ending = StopCriterion(model, TOKENIZER, Generation(5))
    ending._ends = set()
    lengths: list[int] = []
    answers = [begun(model, recipe, prompt(1, 9), ending) for recipe in ("knorm(keep=4, every=3)", "knorm(keep=4)")]
    answers[1].on_token = lambda: lengths.append(answers[1].cache.get_seq_length())
    before = sum(event.seconds for event in answers[0].cache.events)
    selects = type(answers[0].cache.recipe.method).select_all

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.2)
        return selects(self, *args)

    monkeypatch.setattr(type(answers[0].cache.recipe.method), "select_all", slow)
    first, second = decoded(model, answers)
    assert lengths == [10, 11, 12, 13]  # it is told after every token that the cache takes
    own = sum(event.seconds for event in answers[0].cache.events) - before
    assert own >= 0.2  # of both layers, which are chosen from together
    assert first.seconds - own == pytest.approx(second.seconds)


def test_the_tokenizers_own_end_counts_beside_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = StopCriterion(tiny("llama"), TOKENIZER, Generation(9))
    assert ending.reached([5, 2]) and not ending.reached([5, 4])
    monkeypatch.setattr(tiny("llama").generation_config, "eos_token_id", [4, 7])
    ending = StopCriterion(tiny("llama"), TOKENIZER, Generation(9))
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
