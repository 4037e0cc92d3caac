"""Token ids of what is asked, said a second time in words: the tokens of the tests are letters."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset import KeepsetError
from keepset.lab.sweep.prompts import Asking, Prompt, PromptBuilder, TokenizedQuestion
from keepset.lab.tasks.task import Example, Question
from tests.lab.sweep.asked import CHAT, Exact, letters

PLAIN, TALKS, BEGINS = letters(), letters(CHAT), letters()
BEGINS.add_bos_token = True
CHATS: dict[str, Any] = dict(tokenizer=TALKS, chat=True)
WHAT = Question(" What?", "x", prefix=" It ")
WHERE = Question("\nWhere? ", 0, choices=(" here", "there", "\n"))


def example(context: str, *questions: Question) -> Example:
    return Example("one", context, questions)


def text(ids: Any) -> str:
    return PLAIN.decode(ids).replace("<bos>", "^")


def asked(prompt: Prompt) -> list[str]:
    return [text(question.ids) for question in prompt.questions]


def choices(question: TokenizedQuestion) -> list[str]:
    return list(map(text, question.choices))


def prompts(
    of: Example,
    tokenizer: Any = PLAIN,
    answer: int = 5,
    longest: int | None = None,
    task_aware: bool = False,
    **options: Any,
) -> list[Prompt]:
    asking = Asking(**{"chat": False, **options})
    return PromptBuilder(tokenizer, Exact(answer), asking, longest).of(of, task_aware=task_aware)


def test_a_question_that_is_known_belongs_to_the_prompt_and_else_follows() -> None:
    one, other = prompts(example("Long text.", WHAT, Question("", "y")))
    assert (text(one.ids), text(other.ids)) == ("Long text. What? It ", "Long text.")
    assert asked(one) == asked(other) == [""]
    [found] = prompts(example("Long text.", WHAT, WHERE), mode="agnostic")
    assert (text(found.ids), asked(found)) == ("Long text.", [" What? It ", "\nWhere?"])
    assert [each.question for each in found.questions] == [WHAT, WHERE]
    # White space before a choice belongs to the choice.
    for mode in ("prompt", "agnostic"):
        [found] = prompts(example("Long text.", WHERE), mode=mode)
        assert text(found.ids + found.questions[0].ids) == "Long text.\nWhere?"
        assert choices(found.questions[0]) == ["  here", " there", " \n"]
    # A chat has the answer's beginning after its template.
    [aware] = prompts(example("Long text.", WHAT), **CHATS)
    assert text(aware.ids) == "^U:Long text. What?.\nA: It "
    [agnostic] = prompts(example("Long text.", WHAT, WHERE), mode="agnostic", **CHATS)
    assert (text(agnostic.ids), asked(agnostic)) == ("^U:Long text.", [" What?.\nA: It ", "\nWhere? .\nA:"])
    assert choices(agnostic.questions[1]) == [" here", "there", "\n"]


def test_a_question_is_told_or_is_the_prompts_end_and_the_same_is_cut_from_a_context() -> None:
    of = example("Long text.", WHAT, WHERE)
    [told] = prompts(of, mode="task", task_aware=True, **CHATS)
    assert text(told.ids) == "^U:Long text." and list(map(text, told.tasks)) == [" What?", "\nWhere? "]
    assert asked(told) == [" What?.\nA: It ", "\nWhere? .\nA:"]
    one, other = prompts(of, mode="task", **CHATS)
    assert (text(one.ids), text(other.ids)) == ("^U:Long text. What?", "^U:Long text.\nWhere? ")
    assert asked(one) + asked(other) == [".\nA: It ", ".\nA:"]
    assert one.tasks == other.tasks == () and told.questions[1].choices == other.questions[0].choices
    for each, question in zip((one, other), told.questions, strict=True):
        assert each.ids + each.questions[0].ids == told.ids + question.ids
    of = example("abcdefghijklmnopqrst", Question("????", "x", prefix="!!"))
    options = dict(answer=3, longest=20, mode="task")
    [told], [other] = prompts(of, task_aware=True, **options), prompts(of, **options)
    assert text(told.ids) == "abcdef" + "pqrst" and told.cut == other.cut == 9
    assert text(other.ids) == "abcdef" + "pqrst" + "????" and asked(other) == ["!!"]
    of = example("x" * 50, Question("?", "a"), Question("??????", "b"), Question("", 0, choices=("c", "dddddddd")))
    [found] = prompts(of, longest=40, answer=4, mode="agnostic")
    assert len(found.ids) == 40 - 6 - 4
    cuts = [one.cut for one in prompts(of, longest=40, answer=4)]
    assert cuts == [50 + 1 + 4 - 40, 50 + 6 + 4 - 40, 50 + 8 - 40]


def test_special_tokens_are_the_tokenizers_own_and_come_once() -> None:
    assert BEGINS("a")["input_ids"] == [1, *PLAIN("a")["input_ids"]]
    for context in ("ab", "<bos>ab"):
        assert text(prompts(example(context, WHAT), BEGINS)[0].ids) == "^ab What? It "
    [agnostic] = prompts(example("ab", WHAT, WHERE), BEGINS, mode="agnostic")
    assert text(agnostic.ids) == "^ab" and asked(agnostic)[0] == " What? It "
    assert choices(agnostic.questions[1]) == ["  here", " there", " \n"]
    [scored] = prompts(example("ab", WHERE), BEGINS)
    assert text(scored.ids) == "^ab\nWhere?" and choices(scored.questions[0])[0] == "  here"
    for tokenizer in (PLAIN, BEGINS):  # where there is no text a text begins
        [found] = prompts(example("", Question(" ", 0, choices=("a", "bc"))), tokenizer)
        assert text(found.ids) == "^" and choices(found.questions[0]) == [" a", " bc"]


@given(st.integers(0, 60), st.integers(0, 6), st.integers(1, 6), st.integers(12, 60), st.booleans(), st.booleans())
def test_what_is_too_long_loses_the_middle_of_its_context(
    length: int, marks: int, answer: int, longest: int, chat: bool, agnostic: bool
) -> None:
    context = "".join(chr(ord("!") + index) for index in range(length))
    before, after = ("^U:", ".\nA:") if chat else ("", "")
    end = "?" * marks + after
    room = longest - answer - len(before) - len(end)
    of = example(context, Question("?" * marks, "x"))
    options = dict(answer=answer, longest=longest, chat=chat, mode="agnostic" if agnostic else "prompt")
    if (agnostic or not (before + end)) and not context:
        return
    if length > room and room < 1:
        with pytest.raises(KeepsetError, match=f"Example one does not fit the model's context of {longest} tokens"):
            prompts(of, TALKS, **options)
        return
    [found] = prompts(of, TALKS, **options)
    left = min(length, room)
    kept = context if left == length else context[: (left + 1) // 2] + context[length - left // 2 :]
    said = text(found.ids + found.questions[0].ids)
    assert said == before + kept + end and found.cut == length - left and len(said) + answer <= longest


@pytest.mark.parametrize(
    "of, options, sentence",
    [
        (example(" ", WHAT), dict(mode="agnostic"), "Example one has no context that could be compressed before"),
        (example(" ", WHAT), dict(mode="task"), "Example one has no context that could be compressed before"),
        (example("a", WHAT, Question("", "x")), dict(mode="task"), "Example one has no question that could be told"),
        (example("a", Question("", 0, choices=("b", ""))), {}, "The choice '' has no tokens"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(of: Example, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KeepsetError, match=sentence):
        prompts(of, **options)
