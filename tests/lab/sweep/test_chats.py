"""Conversations of a tiny model, against `generate` on whole prompts that are joined by hand."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch

from keepset import Cache
from keepset.lab.candidate import FULL_CACHE, Candidate
from keepset.lab.record import FULL, Record
from keepset.lab.sweep import chats
from keepset.lab.sweep.engine import Engine, Portion, Skipped
from keepset.lab.sweep.prompts import Asking
from keepset.lab.sweep.sweep import cost
from keepset.lab.tasks.chat import Answers, ChatTask, MadeTask, RecordedTask
from keepset.lab.tasks.chat_example import ChatExample, ChatQuestion, Message
from keepset.lab.tasks.recorded import Recording
from keepset.recipe import Recipe
from tests.hf.models import hooks_on, tiny, untrained, with_random_weights
from tests.lab.sweep.asked import letters, watched

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TOKENIZER = letters(TEMPLATE)
SEEN: Message = {"role": "assistant", "content": "I see."}
TOLD = ("A cat is red.", "The big dog is blue.", "One bird is a green one.", "No, the cat is now black.")
ASKED = (("The cat is", " black", 4), ("The dog is", " blue", 2), ("The bird is", " green", 3))


def example(*, by_tool: bool = False) -> ChatExample:
    """Four turns; if a tool says what is told, all but one of its results are taken away before the questions."""
    turns, cleared = list[tuple[Message, ...]](), list[Message]()
    for number, text in enumerate(TOLD):
        before = ({"role": "user", "content": "Go"},) if by_tool else ()
        turns.append((*before, {"role": "tool" if by_tool else "user", "content": text}, SEEN))
        cleared += [*before, {"role": "tool", "content": text if number == 3 else ""}, SEEN]
    questions = tuple(
        ChatQuestion("And?", end, begin, told=turn, groups=("told 1 to 2" if turn < 3 else "told 3 to 4",))
        for begin, end, turn in ASKED
    )
    return ChatExample("0", "", questions, {"length": 200}, tuple(turns), tuple(cleared) if by_tool else ())


def task(compactions: int = 2, kind: str = "chat", answers: Answers = "none") -> ChatTask:
    return MadeTask(kind, 200, len(TOLD), compactions, answers=answers)


def recipe(text: str) -> Candidate:
    return Candidate.of(Recipe.parse(text), None, None)


def play(candidate: Candidate, made: ChatTask, of: ChatExample, model: Any = None) -> Record:
    engine = Engine(model or tiny("llama"), TOKENIZER, Asking())
    [cell] = engine.answer(Portion(made, [(0, of)], [candidate]))
    assert isinstance(cell, Record) and not isinstance(cell, Skipped)
    return cell


def text_of(messages: Sequence[Message]) -> str:
    return "".join(f"{message['role'][0]}:{message['content']}|" for message in messages)


def generated(prompt: str, tokens: int, model: str = "llama") -> torch.Tensor:
    """The tokens that a fresh model says, with no cache of ours."""
    ids = TOKENIZER(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    said = tiny(model).generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return said[0, ids.shape[1] :]


def answered(prompt: str, tokens: int, model: str = "llama") -> str:
    return str(TOKENIZER.decode(generated(prompt, tokens, model), skip_special_tokens=True))


def answers(history: str, *, stay: Answers = "none", model: str = "llama") -> list[str]:
    """The answers to all questions after a history, each with what stays of those before."""
    replies = []
    for begin, end, _ in ASKED:
        replies.append(answered(f"{history}u:And?|a:{begin}", 5, model))
        said = {"none": "", "right": f"u:And?|a:{begin} {end}.|", "own": f"u:And?|a:{begin}{replies[-1]}|"}
        history += said[stay]
    return replies


@pytest.mark.parametrize("stay", ["none", "right", "own"])
@pytest.mark.parametrize("compactions", [1, 3])
@pytest.mark.parametrize("candidate", [FULL_CACHE, recipe("adakv(streaming_llm, keep=1.0, turns=True)")])
def test_with_everything_kept_answers_are_those_of_one_prompt(
    stay: Answers, compactions: int, candidate: Candidate
) -> None:
    made = example()
    cell = play(candidate, task(compactions, answers=stay), made)
    assert cell.replies == answers(text_of(made.messages), stay=stay)
    tokens = len(text_of(made.messages))
    assert cell.figures["keep"] == pytest.approx(1.0)
    assert tokens - 7 <= cell.figures["computed"] <= tokens  # a conversation computes "I see.|" with what follows


@pytest.mark.parametrize("model", ["llama", "gemma3", pytest.param("falcon_h1", marks=pytest.mark.full)])
def test_the_full_cache_reads_a_cleared_history_anew_from_there(model: str) -> None:
    made = example(by_tool=True)
    cell = play(FULL_CACHE, task(2, "chat_cleared"), made, tiny(model))
    whole, cleared = text_of(made.messages), text_of(made.cleared)
    assert cell.replies == answers(cleared, model=model)
    # Windows and recurrent states cannot go back, so such a model begins anew.
    common = (
        0
        if model != "llama"
        else next(at for at, pair in enumerate(zip(whole, cleared, strict=False)) if pair[0] != pair[1])
    )
    assert cell.figures["computed"] == len(whole) - len("I see.|") + len(cleared) - common
    assert cell.figures["share"] == pytest.approx(len(cleared) / len(whole))


@pytest.mark.parametrize("size", ["keep=75", "bytes=0.5", "keep=10"])
@pytest.mark.parametrize("compactions", [1, 2])
def test_the_newest_turns_that_fit_are_all_that_is_known(size: str, compactions: int) -> None:
    candidate = next(each for each in chats.baselines([size]) if each.method == chats.NEWEST)
    made, number = example(), float(size.partition("=")[2])
    parts = [text_of(turn) for turn in made.turns]
    known, done, computed = "", 0, 0
    for end in task(compactions).ends(len(TOLD)):
        computed += len("".join(parts[done:end])) - len("I see.|")
        room = number if number > 1 else int(number * len("".join(parts[:end])))
        held = ["".join(parts[first:end]) for first in range(end)]
        known, done = next((text for text in held if len(text) <= room), ""), end
        computed += len(known)
    cell = play(candidate, task(compactions), made)
    assert cell.replies == answers(known) and cell.figures["computed"] == computed
    assert cell.figures["share"] == pytest.approx(len(known) / len("".join(parts)))
    assert cell.recipe == f"newest_turns({size})" and cell.figures["kv_bytes"] == 4 * 2 * 2 * 2 * 16 * len(known)


def test_a_summary_takes_the_place_of_all_that_was_said() -> None:
    candidate = next(each for each in chats.baselines(["keep=90"]) if each.method == chats.SUMMARY)
    made = example()
    history, begins = text_of(made.messages), chats._SUMMED_UP
    room = 90 - len(f"u:{begins}|a:I see.|")
    asked = f"u:{chats._SUM_UP}|a:{begins}"
    ids = generated(history + asked, room)
    summary = str(TOKENIZER.decode(ids, skip_special_tokens=True))
    known = f"u:{begins}{summary.rstrip()}|a:I see.|"
    cell = play(candidate, task(1), made)
    assert cell.error is None and cell.replies == answers(known)
    assert cell.figures["computed"] == len(history) + len(asked) + len(ids) - 1 + len(known)
    assert len(known) <= 90 and cell.figures["share"] == pytest.approx(len(known) / len(history))


@pytest.mark.parametrize("text", ["snapkv(window=8, keep=40, turns=True)", "pool(knorm, keep=0.5, turns=True)"])
@pytest.mark.parametrize("compactions", [1, 2, 4])
def test_recipes_compress_as_often_as_asked_and_compute_what_is_new(
    text: str, compactions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, compact = [], Cache.compact

    def counted(cache: Cache, *arguments: Any) -> None:
        before = len(cache.events)
        compact(cache, *arguments)
        lengths.extend(event.length for event in cache.events[before:])

    monkeypatch.setattr(Cache, "compact", counted)
    made, model = example(), with_random_weights(untrained("llama"))  # on which no other test has left hooks
    ask, calls = chats._ask, list[tuple[int, int]]()
    with watched(model) as seen:
        monkeypatch.setattr(chats, "_ask", lambda *rest: calls.extend(seen) or ask(*rest))
        cell = play(recipe(text), task(compactions), made, model)
    assert cell.figures["computed"] == sum(tokens for _, tokens in calls)
    parts = [len(text_of(turn)) for turn in made.turns]
    assert lengths == [sum(parts[:end]) - len("I see.|") for end in task(compactions).ends(len(TOLD))]
    assert cell.figures["keep"] == pytest.approx(40 / lengths[-1] if "40" in text else 0.5, abs=0.02)
    assert not hooks_on(model)


def test_scores_are_means_over_the_questions_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "_ask", lambda *_: [" black.", " grey.", " no"])
    cell = play(FULL_CACHE, task(1), example())
    assert cell.metric == "right" and cell.recipe == FULL
    assert cell.scores == {"right": fmean([1, 0, 0]), "told 3 to 4": fmean([1, 0]), "told 1 to 2": 0.0}
    assert Record.from_json(cell.to_json()) == cell


def test_what_a_recipe_cannot_do_is_noted_and_the_others_go_on() -> None:
    engine = Engine(tiny("llama"), TOKENIZER, Asking())
    todo = [recipe("snapkv(keep=64)"), FULL_CACHE, Candidate(None, "snapkv", "snapkv", "keep=20", "It cannot.")]
    wrong, right, noted = engine.answer(Portion(task(1), [(0, example())], todo))
    assert isinstance(wrong, Record) and "add turns=True to it" in str(wrong.error)
    assert isinstance(right, Record) and right.error is None
    assert isinstance(noted, Record) and noted.error == "It cannot."


def test_what_memory_is_not_enough_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(chats, "_hear", fail)
    [skipped] = Engine(tiny("llama"), TOKENIZER, Asking()).answer(Portion(task(), [(0, example())], [FULL_CACHE]))
    assert skipped == Skipped(task().name, FULL, "memory was not enough")


def test_costs_count_every_candidate_and_the_summaries() -> None:
    todo = [FULL_CACHE, *chats.baselines(["bytes=0.25", "keep=30"])]
    total = cost([Portion(task(2), [(0, example())], todo)], TOKENIZER, Asking())
    assert (total.cells, total.examples, total.prompt_tokens) == (5, 1, 5 * 200)
    assert total.answer_tokens == 5 * 3 * 5 + (25 + 50) + (30 + 30)


@pytest.mark.parametrize("candidate", [FULL_CACHE, recipe("adakv(streaming_llm, keep=1.0, turns=True)")])
def test_a_recorded_answer_is_as_likely_as_in_one_prompt(candidate: Candidate) -> None:
    said, tokens = "Black, I think.", len("Black, I think.")
    question = ChatQuestion("And?", tokens, choices=(said,))
    made = replace(example(), questions=(question,))
    judge = RecordedTask(Recording("sharegpt", False, ()), 200, 2, 1, "none")
    cell = play(candidate, judge, made)
    ids = TOKENIZER(f"{text_of(made.messages)}u:And?|a:{said}", add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = tiny("llama")(ids).logits[0, -tokens - 1 : -1].log_softmax(-1, torch.float32)
    expected = logits.gather(-1, ids[0, -tokens:, None]).mean().exp()
    assert cell.metric == "likelihood" and cell.scores == {"likelihood": pytest.approx(float(expected), rel=1e-4)}
    [[[likelihood, greedy]]] = cell.to_json()["outcome"]["replies"]
    assert likelihood == pytest.approx(tokens * float(expected.log()), rel=1e-4)
    assert greedy is bool((logits.argmax(-1) == ids[0, -tokens:]).all())
