"""LongBench v2 on two records made up in the form of the official file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keepset import KeepsetError
from keepset.bench.tasks import longbench2
from keepset.bench.tasks.find import find
from keepset.bench.tasks.task import Example, Question, TaskSettings
from tests.bench.tasks.scaffold import examples_of, make_task, write_items

RECORD = {
    "_id": "66f3",
    "domain": "Multi-Document QA",
    "sub_domain": "Academic",
    "difficulty": "hard",
    "length": "short",
    "question": " Which one is it? ",
    "choice_A": "The first",
    "choice_B": "The second ",
    "choice_C": "Neither",
    "choice_D": "Both",
    "answer": "B",
    "context": "A long text.\n",
}
PROMPT = """Please read the following text and answer the question below.

<text>
A long text.
</text>

What is the correct answer to this question: Which one is it?
Choices:
(A) The first
(B) The second
(C) Neither
(D) Both

Format your response as follows: "The correct answer is (insert answer here)"."""


def examples(folder: Path, *records: dict[str, Any], name: str = "longbench2_multi") -> Sequence[Example]:
    write_items(folder / "longbench2.jsonl", *records)
    return examples_of(make_task(name, folder))


def test_the_prompt_is_the_authors_and_the_text_is_its_context(tmp_path: Path) -> None:
    other = {**RECORD, "_id": "other", "domain": "Code Repository Understanding"}
    [example] = examples(tmp_path, other, RECORD)
    [question] = example.questions
    assert example.context + question.text == PROMPT and example.context.endswith("</text>")
    assert (example.id, question.target, question.prefix, question.choices) == ("66f3", "B", "", ())
    assert example.facts == {"sub_domain": "Academic", "difficulty": "hard", "length": "short"}
    assert [one.id for one in examples(tmp_path, other, RECORD, name="longbench2_code")] == ["other"]


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("The correct answer is (B).", True),
        ("**The correct answer is** (B)", True),
        ("Well. The correct answer is B, I think", True),
        ("The correct answer is A. No: The correct answer is (B)", True),  # brackets come first
        ("The correct answer is (A), or The correct answer is (B)", False),
        ("the correct answer is (B)", False),
        ("The correct answer is The second", False),
        ("(B)", False),
        ("", False),
    ],
)
def test_an_answer_is_found_as_the_authors_find_it(reply: str, right: bool) -> None:
    assert make_task("longbench2_single").judge(Question("?", target="B"), reply) == {"accuracy": float(right)}


def test_longbench2_is_six_domains_with_generated_answers() -> None:
    tasks = find(["longbench2"], TaskSettings())
    assert [made.name for made in tasks] == list(longbench2.NAMES[:-1]) and len(tasks) == 6
    assert all(made.generation.tokens == 128 and not made.decodes for made in tasks)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeepsetError, match="has no item of the domain 'Single-Document QA'"):
        examples(tmp_path, RECORD, name="longbench2_single")
    with pytest.raises(KeepsetError, match="line 1, has the answer 'E', which is none of A, B, C and D"):
        examples(tmp_path, {**RECORD, "answer": "E"})
    with pytest.raises(KeepsetError, match="line 1, lacks the field 'choice_D'"):
        examples(tmp_path, {name: value for name, value in RECORD.items() if name != "choice_D"})
