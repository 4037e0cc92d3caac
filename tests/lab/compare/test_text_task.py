"""A text cut into a prompt, what follows it and a question."""

import copy
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from keepset.errors import KeepsetError
from keepset.lab import texts
from keepset.lab.compare.text_task import ANSWER_TOKENS, make_text_task
from keepset.lab.texts import NEEDLE, Needle

ESSAY = texts.essay()[:24_000]
"""More than 4,096 tokens; the whole one takes longer to be divided into them."""
OWN = Needle(sentence="", question="What did the author do?", answer="write")


@pytest.fixture
def tokenizer(embedded: Any) -> Any:
    return embedded[1]


def decode(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(ids[0]))


def refusal(tokenizer: Any, text: str, **options: Any) -> str:
    with pytest.raises(KeepsetError) as caught:
        make_text_task(tokenizer, text, **options)
    return str(caught.value)


@pytest.mark.few(4)
@pytest.mark.parametrize("tokens", [64, 200, 1024, 4096])
@pytest.mark.parametrize("needle", [None, NEEDLE, OWN], ids=["none", "hidden", "own"])
def test_prompt_is_as_long_as_asked_and_continued(tokenizer: Any, tokens: int, needle: Needle | None) -> None:
    text = ESSAY
    task = make_text_task(tokenizer, text, tokens=tokens, continuation=32, needle=needle)
    assert abs(task.prompt.shape[1] - tokens) <= 3
    assert task.continuation.shape == (1, 32)
    prompt, after = decode(tokenizer, task.prompt), decode(tokenizer, task.continuation)
    if needle is not None and needle.sentence:
        assert prompt.count(f"{needle.sentence} ") == 1
        prompt = prompt.replace(f"{needle.sentence} ", "")
    read = text.index(after)
    assert read > 0 and prompt.endswith(text[:read])
    assert needle is not None or prompt == text[:read]


def test_needle_stands_at_its_depth_and_a_short_text_makes_a_short_prompt(tokenizer: Any) -> None:
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        task = make_text_task(tokenizer, ESSAY, tokens=1024, continuation=8, needle=NEEDLE, depth=depth)
        prompt = decode(tokenizer, task.prompt)
        assert prompt.index(NEEDLE.sentence) / len(prompt) == pytest.approx(depth, abs=0.06)
    text = ESSAY[:1000]
    total = len(tokenizer(text)["input_ids"])
    task = make_text_task(tokenizer, text, tokens=4096, continuation=20)
    assert task.prompt.shape[1] + task.continuation.shape[1] == total
    assert decode(tokenizer, task.prompt) + decode(tokenizer, task.continuation) == text

    assert make_text_task(tokenizer, text, tokens=999, continuation=total - 1).prompt.shape[1] == 1
    message = refusal(tokenizer, text, tokens=999, continuation=total)
    assert message.startswith(f"The text has {total} tokens, too few for a prompt and {total} tokens of continuation")


@pytest.mark.parametrize("needle", [NEEDLE, OWN], ids=["hidden", "own"])
def test_prompt_and_question_are_one_message_of_the_chat(tokenizer: Any, needle: Needle) -> None:
    task = make_text_task(tokenizer, ESSAY, tokens=200, continuation=8, needle=needle)
    assert task.needle is needle and task.question is not None
    said = decode(tokenizer, task.prompt) + decode(tokenizer, task.question)
    head, _, rest = said.partition("<|im_start|>user\n")
    message, _, tail = rest.partition("<|im_end|>")
    assert message.endswith(f"\n\n{needle.question}")
    chat = [{"role": "user", "content": message}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == said
    assert head and tail.endswith("<|im_start|>assistant\n")


@pytest.mark.few(1)
@pytest.mark.parametrize("needle", [None, NEEDLE, OWN], ids=["none", "hidden", "own"])
def test_prompt_begins_once(tokenizer: Any, needle: Needle | None) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    begin = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.backend_tokenizer.post_processor = begin
    task = make_text_task(tokenizer, ESSAY, tokens=100, continuation=8, needle=needle)
    assert task.prompt[0, 0] == 1
    parts = [task.prompt[0], task.continuation[0], *([] if task.question is None else [task.question[0]])]
    assert torch.cat(parts).tolist().count(1) == 1


@pytest.mark.parametrize("needle", [None, NEEDLE], ids=["none", "hidden"])
@pytest.mark.parametrize("continuation", [8, 64])
def test_everything_must_fit_the_context(tokenizer: Any, needle: Needle | None, continuation: int) -> None:
    """Without a question, tokens are decoded after the continuation to measure how quickly."""
    options = dict(tokens=200, continuation=continuation, needle=needle)
    question = make_text_task(tokenizer, ESSAY, **options).question
    after = continuation + ANSWER_TOKENS if question is None else max(continuation, question.shape[1] + ANSWER_TOKENS)
    make_text_task(tokenizer, ESSAY, longest=200 + after, **options)
    message = refusal(tokenizer, ESSAY, longest=200 + after - 1, **options)
    assert f"200 tokens of prompt and {after} after it do not fit the model's context of {199 + after}" in message
