"""RULER's examples from files, told apart by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepset import KeepsetError
from tests.bench.tasks.scaffold import examples_of, make_task, write_items

OWN: dict[str, tuple[str, tuple[str, str, str]]] = {
    "niah_multivalue": (
        "niah_multivalue",
        (
            "Some special magic numbers are hidden within the following text.\nOne of the special magic numbers is 1.",
            "\nWhat are all the special magic numbers for a mentioned in the provided text?",
            " The special magic numbers for a mentioned in the provided text are",
        ),
    ),
    "ruler_vt": (
        "vt",
        (
            "Memorize.\n\nVAR A = 1\nQuestion: Find all variables. Answer: According to it: A\n\nVAR B = 2",
            "\nQuestion: Find all variables that are assigned the value 2 in the text above.",
            " Answer: According to the chain(s) of variable assignment, 1 variables are assigned: ",
        ),
    ),
    "ruler_cwe": (
        "cwe",
        (
            "1. a 2. b\nQuestion: What are the 10 most common words? Answer: a\n1. c 2. d",
            "\nQuestion: What are the 10 most common words in the above list?",
            " Answer: The top 10 words are:",
        ),
    ),
    "ruler_qa_squad": (
        "qa_1",
        (
            "Answer the question based on the given documents. Only.\n\nDocument 1:\nQuestion: not this. Answer: no.",
            "\n\nAnswer the question based on the given documents. Only.\n\nQuestion: Who said Answer: now?",
            " Answer:",
        ),
    ),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("apart", [False, True])
def test_what_the_authors_program_wrote_is_cut_before_question_and_answer(
    name: str, apart: bool, tmp_path: Path
) -> None:
    theirs, (context, question, prefix) = OWN[name]
    whole = {"index": 0, "input": context + question + prefix, "outputs": ["1", "2"], "length": 64}
    if apart:
        whole |= {"input": context + question, "answer_prefix": prefix}
    write_items(tmp_path / "64" / theirs / "validation.jsonl", whole, whole)
    first, _ = examples_of(make_task(name, tmp_path, 64))
    [asked] = first.questions
    assert (first.context, asked.text, asked.prefix) == (context, question, prefix)
    assert asked.target == ("1", "2") and (first.id, first.facts) == ("0", {"length": 64})
    assert examples_of(make_task(name, tmp_path, 64), limit=1) == [first]


def test_kvpress_data_set_has_all_tasks_in_one_file(tmp_path: Path) -> None:
    item = {
        "context": "Text.\n",
        "question": "What? ",
        "answer_prefix": "Answer:",
        "answer": ["7"],
        "max_new_tokens": 9,
    }
    write_items(tmp_path / "ruler@64.jsonl", {**item, "task": "qa_2"}, {**item, "task": "fwe", "context": "Dots.\n"})
    [example] = examples_of(make_task("ruler_fwe", tmp_path, 64))
    [asked] = example.questions
    assert (example.context, asked.text, asked.prefix, asked.target) == ("Dots.\n", "What? ", "Answer:", ("7",))
    assert [one.context for one in examples_of(make_task("ruler_qa_hotpot", tmp_path, 64))] == ["Text.\n"]


def test_lines_that_are_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "64" / "vt" / "validation.jsonl"
    for item, sentence in [
        (
            {"input": "Which? Answer:", "outputs": ["1"]},
            "line 1, has no question as RULER asks it",
        ),
        ({"input": "Question: no", "outputs": ["1"]}, "line 1, has no question as RULER asks it"),
        ({"input": "Question: x Answer:", "outputs": "1"}, "line 1, has outputs that are no list of answers"),
        ({"outputs": ["1"]}, "line 1, lacks the field 'input'"),
    ]:
        write_items(path, item)
        with pytest.raises(KeepsetError, match=sentence):
            examples_of(make_task("ruler_vt", tmp_path, 64))
