"""What is told, read again from the conversations' texts: each question has one answer, told where it says."""

import re
from typing import Any

import pytest

from keepset.lab.tasks.chat import ChatSettings, MadeTask
from keepset.lab.tasks.chat_example import ChatExample, ChatQuestion, begun, rendered
from keepset.lab.tasks.find import find

HEX = "[0-9a-f]"
UUID = f"{HEX}{{8}}-{HEX}{{4}}-4{HEX}{{3}}-[89ab]{HEX}{{3}}-{HEX}{{12}}"
KINDS = ["chat_kv", "chat_kv_short", "chat_prefix_suffix", "chat_vt"]


def make(kind: str, length: int, turns: int, questions: int = 10) -> MadeTask:
    [task] = find([kind], ChatSettings(None, (length,), turns, (1,), questions))
    assert isinstance(task, MadeTask)
    return task


def lines(example: ChatExample) -> list[tuple[int, str]]:
    """The lines that are told, with their turns."""
    told = []
    for number, (user, _) in enumerate(example.turns, 1):
        begin, *rest = user["content"].split("\n")
        assert begin == "Please keep these lines in mind." and rest
        told += [(number, line) for line in rest]
    return told


def found(kind: str, question: ChatQuestion, example: ChatExample) -> tuple[Any, int]:
    """The answer to a question and the turn in which it was complete, from the lines alone."""
    if kind.startswith("chat_kv"):
        key = question.prefix.split()[3]
        pattern = UUID if kind == "chat_kv" else r"[a-z]{6}"
        assert re.fullmatch(pattern, key)
        matches = [re.fullmatch(rf"The value of {key} is (\S+)\.", line) for _, line in lines(example)]
        [(turn, value)] = [(t, m[1]) for (t, _), m in zip(lines(example), matches, strict=True) if m]
        assert re.fullmatch(UUID if kind == "chat_kv" else r"\d{4}", value)
        return value, turn
    if kind == "chat_prefix_suffix":
        begin, end = re.findall(r"with (\w+)", question.text)
        [(turn, value)] = [(t, line) for t, line in lines(example) if line.startswith(begin) and line.endswith(end)]
        others = [line for _, line in lines(example) if (line.startswith(begin)) != line.endswith(end)]
        assert len(others) >= 1  # a string that only begins, or only ends, alike
        return value, turn
    [value] = re.findall(r"\d{5}", question.text)
    have, newest = {value}, 0
    for turn, line in lines(example):  # an assignment copies a value that was there before
        name, assigned = line.split(" = ")
        assert name not in have
        if assigned in have:
            have.add(name)
            newest = turn
    return have - {value}, newest


@pytest.mark.parametrize("turns", [1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_each_question_has_one_answer_in_what_is_told(kind: str, turns: int, tokenizer: Any) -> None:
    task = make(kind, 1400, turns)
    for example in task.examples(tokenizer, limit=2):
        assert len(example.turns) == turns and len(example.asked) == 10
        for question in example.asked:
            answer, turn = found(kind, question, example)
            assert question.told == turn
            target = set(question.target) if kind == "chat_vt" else question.target
            assert answer == target and (kind != "chat_vt" or len(target) == 3)
            [group] = question.groups
            first, last = map(int, re.findall(r"\d+", group))
            assert first <= turn <= last and last - first <= turns // 3
        asked = [[*example.messages, question.message] for question in example.asked]
        taken = max(len(rendered(begun(tokenizer), messages, asks=True)) for messages in asked)
        assert 0.9 * 1400 < taken + task.generation.tokens <= 1400


def test_the_answers_name_every_variable_that_has_the_value(tokenizer: Any) -> None:
    task = make("chat_vt", 700, 3, 4)
    [example] = task.examples(tokenizer, limit=1)
    for question in example.asked:
        first, second, third = question.target
        assert task.judge(question, f" {third}, {first} and {second}.") == {"right": 1.0}
        assert task.judge(question, f" {second}") == {"right": pytest.approx(1 / 3)}
        assert task.judge(question, "") == {"right": 0.0}


@pytest.mark.parametrize(("turns", "questions"), [(1, 1), (1, 10), (1, 160), (3, 5), (30, 10)])
def test_there_are_facts_for_all_questions(turns: int, questions: int, tokenizer: Any) -> None:
    [example] = make("chat", 9000, turns, questions).examples(tokenizer, limit=1)
    assert len(example.asked) == questions and len(example.turns) == turns
    for question in example.asked:
        text = example.turns[question.told - 1][0]["content"]
        assert f"{question.prefix} {question.target}." in text
        # The newest telling counts, in the same turn as well.
        telling = [begin.start() for begin in re.finditer(f"{re.escape(question.prefix)} ", example.context)]
        assert example.context[telling[-1] :].startswith(f"{question.prefix} {question.target}.")


@pytest.mark.parametrize("kind", ["chat", *KINDS])
def test_the_same_seed_tells_the_same(kind: str, tokenizer: Any) -> None:
    task = make(kind, 900, 4, 5)
    one, two = task.examples(tokenizer, limit=2)
    assert [one] == task.examples(tokenizer, limit=1) and one.asked != two.asked
    assert task.examples(tokenizer, limit=1, seed=1) != [one]
