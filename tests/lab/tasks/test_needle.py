"""A fact in essays: where it lies, how long they are, and that the embedded model finds it with the full cache."""

import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepset import KeepsetError
from keepset.lab.tasks.task import Example, Task
from keepset.lab.texts import chat_parts, essay, essays
from tests.lab.tasks.scaffold import make_task


def needle(length: int) -> Task:
    return make_task("needle", length=length)


def prompt(tokenizer: Any, example: Example) -> str:
    """All of it in a chat, as one text."""
    [question] = example.questions
    before, after = chat_parts(tokenizer, example.context, question.text)
    return before + after.replace("\n\n" + question.text, question.text) + question.prefix


@pytest.mark.parametrize("length", [192, 600, 1500])
def test_examples_fill_their_length_and_hold_the_fact_at_its_depth(length: int, tokenizer: Any) -> None:
    made = needle(length)
    for example in made.examples(tokenizer, limit=10):
        [question] = example.questions
        said = f"{question.prefix.strip()} {question.target}."
        before, after = example.context.split(said)
        assert re.fullmatch(r"The secret number of \w+ is \d{4}\.", said)
        assert question.text == f"\n\nWhat is the secret number of {said.split()[4]}?"
        # Sentences are long: the nearest break between two may be far in a short text.
        assert len(before) / len(before + after) == pytest.approx(
            example.facts["depth"], abs=0.05 if length > 1e3 else 0.3
        )
        taken = len(tokenizer(prompt(tokenizer, example))["input_ids"]) + made.generation.tokens
        assert 0.9 * length < taken <= length
        assert example.facts["length"] == length


def test_hay_is_a_part_of_the_essays_depths_take_turns_and_a_number_is_found(tokenizer: Any) -> None:
    first, second = needle(500).examples(tokenizer, limit=2)
    for example, name in zip((first, second), essays(), strict=False):
        sentence = f"{example.questions[0].prefix.strip()} {example.questions[0].target}. "
        assert essay(name).startswith(example.context.replace(sentence, "")[:500])
    depths = [float(example.facts["depth"]) for example in needle(200).examples(tokenizer, limit=20)]
    assert sorted(depths[:10]) == pytest.approx([(part + 0.5) / 10 for part in range(10)])
    assert depths[10:] == depths[:10]
    for few in (4, 5):
        assert (
            max(b - a for a, b in zip([0.0, *sorted(depths[:few])], [*sorted(depths[:few]), 1.0], strict=True)) <= 0.35
        )
    made = needle(256)
    assert made.examples(tokenizer, limit=6)[:2] == made.examples(tokenizer, limit=2)
    assert made.examples(tokenizer, limit=2, seed=1) != made.examples(tokenizer, limit=2)
    assert len({example.id for example in made.examples(tokenizer)}) == 50
    made = needle(256)
    [question] = made.examples(tokenizer, limit=1)[0].questions
    assert made.judge(question, f" {question.target}.\nMore") == {"found": 1.0}
    assert made.judge(question, f" {question.target[:3]} {question.target[3]}") == {"found": 0.0}
    with pytest.raises(KeepsetError, match="60 tokens leave no room"):
        needle(60).examples(tokenizer, limit=1)


@pytest.mark.full
def test_the_embedded_model_finds_it(embedded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = embedded
    made = needle(256)
    for example in made.examples(tokenizer, limit=2):
        ids = torch.tensor([tokenizer(prompt(tokenizer, example), add_special_tokens=False)["input_ids"]])
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=made.generation.tokens, do_sample=False
        )
        assert made.judge(example.questions[0], str(tokenizer.decode(answer[0, ids.shape[1] :]))) == {"found": 1.0}
