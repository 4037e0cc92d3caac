"""Conversations: what is asked was told, corrections come later, and their lengths are what was asked for."""

from typing import Any

import pytest

from keepset import KeepsetError
from keepset.lab.tasks.chat import NAMES, Answers, ChatSettings, MadeTask
from keepset.lab.tasks.chat_example import ChatExample
from keepset.lab.tasks.find import find
from keepset.lab.tasks.task import TaskSettings


def chats(
    kind: str,
    length: int,
    turns: int = 15,
    compactions: int = 1,
    questions: int | None = None,
    answers: Answers = "none",
) -> MadeTask:
    """A task; by default with as many questions as there are facts, if each turn has one."""
    count = turns - turns // 5 if questions is None else questions
    [made] = find([kind], ChatSettings(None, (length,), turns, (compactions,), count, answers))
    assert isinstance(made, MadeTask)
    return made


def told(example: ChatExample) -> list[str]:
    """What the user or a tool says in each turn."""
    texts = []
    for turn in example.turns:
        *_, said, answered = turn
        assert answered["role"] == "assistant" and answered["content"] == "I see."
        texts.append(said["content"])
    return texts


def check(example: ChatExample, turns: int) -> None:
    """Read all turns again for every question: the newest telling counts, and the one before it is out of date."""
    texts, corrected = told(example), set()
    assert len(texts) == turns
    for question in example.asked:
        tellings = {n: text for n, text in enumerate(texts, 1) if f"{question.prefix} " in text}
        *earlier, newest = tellings
        assert question.told == newest and f"{question.prefix} {question.target}." in tellings[newest]
        assert len(earlier) == (1 if question.stale else 0)
        if question.stale:
            assert question.stale != question.target
            assert f"{question.prefix} {question.stale}." in tellings[earlier[0]]
            assert f"This has changed: {question.prefix} {question.target}." in tellings[newest]
            corrected.add(newest)
    newest = sorted(question.told for question in example.asked)
    assert len(set(newest)) == len(newest) == turns - turns // 5
    assert corrected == set(range(5, turns + 1, 5))
    assert len({question.prefix for question in example.asked}) == len(example.asked)


@pytest.mark.parametrize(("kind", "length", "turns"), [("chat", 600, 7), ("chat_tools", 1500, 15), ("chat", 4000, 31)])
def test_what_is_asked_was_told_and_the_newest_counts(kind: str, length: int, turns: int, tokenizer: Any) -> None:
    made = chats(kind, length, turns)
    for example in made.examples(tokenizer, limit=3):
        check(example, turns)
        # By the template that the model has, written by hand.
        said = "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for turn in example.turns
            for message in turn
        )
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        taken = [
            len(
                tokenizer(
                    f"<|im_start|>system\n{system}<|im_end|>\n{said}<|im_start|>user\n{question.text}<|im_end|>\n"
                    f"<|im_start|>assistant\n{question.prefix}"
                )["input_ids"]
            )
            for question in example.questions
        ]
        assert 0.9 * length < max(taken) + made.generation.tokens <= length


def test_questions_that_are_turns_count(tokenizer: Any) -> None:
    for example in chats("chat", 1200, 8, answers="right").examples(tokenizer, limit=2):
        check(example, 8)
        said = "".join(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>I see.<|im_end|>\n" for text in told(example))
        for question in example.questions:
            said += f"<|im_start|>user\n{question.text}<|im_end|>\n"
            said += f"<|im_start|>{question.prefix} {question.target}.<|im_end|>\n"
        assert 1000 < len(tokenizer(said)["input_ids"]) < 1200


def test_the_same_seed_makes_the_same_conversations(tokenizer: Any) -> None:
    made = chats("chat", 500, 6)
    assert made.examples(tokenizer, limit=3)[:2] == made.examples(tokenizer, limit=2)
    first, second = made.examples(tokenizer, limit=2)
    assert [q.prefix for q in first.questions] != [q.prefix for q in second.questions]
    assert made.examples(tokenizer, limit=1, seed=1) != [first]
    assert chats("chat", 900, 6).examples(tokenizer, limit=1)[0].questions == first.questions
    assert len({example.id for example in made.examples(tokenizer, limit=12)}) == 12


def test_parts_of_the_history_have_scores_of_their_own(tokenizer: Any) -> None:
    for turns, parts in ((15, [(1, 5), (6, 10), (11, 15)]), (7, [(1, 3), (4, 5), (6, 7)])):
        [example] = chats("chat", 1200, turns).examples(tokenizer, limit=1)
        for question in example.asked:
            [(first, last)] = [part for part in parts if part[0] <= question.told <= part[1]]
            assert question.groups == (f"told {first} to {last}", f"corrected {'yes' if question.stale else 'no'}")


def test_results_of_tools_are_cleared_but_for_the_newest(tokenizer: Any) -> None:
    [example] = chats("chat_cleared", 1200, 8).examples(tokenizer, limit=1)
    [whole] = chats("chat_tools", 1200, 8).examples(tokenizer, limit=1)
    assert example.turns == whole.turns and not whole.cleared
    check(example, 8)
    assert len(example.cleared) == len(example.messages)
    results = [(was, now) for was, now in zip(example.messages, example.cleared, strict=True) if was != now]
    assert len(results) == 5 and all(was == {**now, "content": was["content"]} for was, now in results)
    assert all(now["role"] == "tool" and not now["content"] and was["content"] for was, now in results)
    assert [now["content"] for now in example.cleared if now["role"] == "tool"][5:] == told(example)[5:]
    for turn in example.turns:
        assert [message["role"] for message in turn] == ["user", "assistant", "tool", "assistant"]
        assert turn[1]["tool_calls"][0]["id"] == turn[2]["tool_call_id"]


@pytest.mark.full
def test_two_hundred_turns_tell_as_many_facts(tokenizer: Any) -> None:
    [example] = chats("chat", 14000, 200).examples(tokenizer, limit=1)
    check(example, 200)


def test_answers_are_judged_by_the_newest_word(tokenizer: Any) -> None:
    made = chats("chat", 700, 7)
    [example] = made.examples(tokenizer, limit=1)
    for question in example.asked:
        assert made.judge(question, f" {question.target}. And") == {"right": 1.0}
        assert made.judge(question, "") == made.judge(question, " xylophone.") == {"right": 0.0}
        if question.stale:
            assert made.judge(question, f" {question.stale}.") == {"right": 0.0}
            assert made.judge(question, f" {question.stale}, or {question.target}") == {"right": 0.0}


@pytest.mark.parametrize(
    ("compactions", "ends"), [(1, [15]), (2, [7, 15]), (4, [3, 7, 11, 15]), (15, list(range(1, 16)))]
)
def test_the_history_is_compressed_after_even_parts(compactions: int, ends: list[int]) -> None:
    assert chats("chat", 700, 15, compactions).ends(15) == ends


def test_what_cannot_be_made_is_refused(tokenizer: Any) -> None:
    assert len({task.name for name in NAMES for task in find([name], TaskSettings(lengths=(512, 1024)))}) == 28
    for count in (0, 16):
        with pytest.raises(KeepsetError, match=f"15 turns cannot be compressed {count} times: ask for 1 to 15"):
            chats("chat", 700, 15, count)
    with pytest.raises(
        KeepsetError, match="201 turns with 161 questions are too many for different facts: ask for at most 200"
    ):
        chats("chat", 700, 201)
    with pytest.raises(KeepsetError, match="300 tokens leave no room for 15 turns and 12 questions: ask for more"):
        chats("chat", 300).examples(tokenizer, limit=1)
    tokenizer = type("Tokenizer", (), {"chat_template": None})()
    with pytest.raises(KeepsetError, match="needs a chat template, and the model's tokenizer has none"):
        chats("chat", 700).examples(tokenizer, limit=1)
