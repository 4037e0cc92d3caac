"""`TextTask`: a prompt, the text that follows it, and a question whose answer is known."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.bench.tasks.task import Tokenizer
from keepset.errors import KeepsetError
from keepset.texts import Needle, chat_parts, insert

ANSWER_TOKENS = 12
"""Tokens that are decoded as the answer to the question, and for timing."""


@dataclass(frozen=True, eq=False)
class TextTask:
    """What a comparison runs: a prompt that is compressed, the text that follows it, and what is asked instead of that.

    Attributes:
        continuation: of no tokens where something is asked and the full cache's own answer is to follow.
        needle: what the question is about; None when nothing is asked.
        answer_tokens: of an answer, at most.
        left_out: what of the text neither the prompt nor its needle has.
    """

    prompt: Int[Tensor, "1 tokens"]
    continuation: Int[Tensor, "1 n"]
    question: Int[Tensor, "1 m"] | None = None
    needle: Needle | None = None
    answer_tokens: int = ANSWER_TOKENS
    left_out: str = ""

    def to(self, device: torch.device) -> "TextTask":
        """The same there, where the model is that is to read it."""
        question = None if self.question is None else self.question.to(device)
        return replace(
            self, prompt=self.prompt.to(device), continuation=self.continuation.to(device), question=question
        )

    def doubt(self, found: bool) -> str:
        """Why what recipes answer says nothing, given whether the full cache's answer is right; "" if it does."""
        if self.needle is None or found:
            return ""
        if self.needle.answer.lower() in self.left_out.lower():
            return (
                "The answer stands in what the prompt leaves out of the text, so no cache can know it: raise "
                "--prompt-tokens, or leave --continuation out."
            )
        return "The full cache does not give the answer either, so what recipes answer says nothing."


def make_text_task(
    tokenizer: Tokenizer,
    text: str,
    *,
    tokens: int | None,
    continuation: int,
    needle: Needle | None = None,
    depth: float = 0.5,
    longest: int | None = None,
    answer_tokens: int = ANSWER_TOKENS,
) -> TextTask:
    """Cuts a text into a prompt of about `tokens` tokens, or of no fewer than there are, and a continuation.

    With a needle its sentence is inserted at `depth` of the prompt, unless it is empty because the text
    holds the answer already, and the prompt is the part of a user's message before the question.
    """
    question = None if needle is None else _ids(tokenizer, chat_parts(tokenizer, "", needle.question)[1])
    after = continuation + answer_tokens if question is None else max(continuation, question.shape[1] + answer_tokens)
    body = _ids(tokenizer, text)
    total, around = body.shape[1], _ids(tokenizer, _wrap(tokenizer, "", needle)).shape[1]
    if tokens is None:
        tokens = (
            total - continuation + around if longest is None else min(total - continuation + around, longest - after)
        )
    check_fits(tokens, after, longest)
    if tokens <= around:
        raise KeepsetError(
            f"{tokens} tokens of prompt leave no room for the text, because {around} stand around it: "
            "ask for more tokens."
        )
    length = min(tokens - around, total - continuation)
    if length < 1:
        raise KeepsetError(
            f"The text has {total} tokens, too few for a prompt and {continuation} tokens of continuation: "
            "give a longer text, or ask for a shorter continuation."
        )
    start = str(tokenizer.decode(body[0, :length]))
    if needle is not None and needle.sentence:
        start = insert(start, needle, depth)
    prompt = _ids(tokenizer, _wrap(tokenizer, start, needle), special=needle is None)
    left_out = str(tokenizer.decode(body[0, length:]))
    return TextTask(prompt, body[:, length : length + continuation], question, needle, answer_tokens, left_out)


def check_fits(tokens: int, after: int, longest: int | None) -> None:
    """Refuses more tokens than the model's context holds; `longest` is None where it says nothing."""
    if longest is not None and tokens + after > longest:
        raise KeepsetError(
            f"{tokens} tokens of prompt and {after} after it do not fit the model's context of "
            f"{longest}: ask for fewer tokens."
        )


def _wrap(tokenizer: Any, text: str, needle: Needle | None) -> str:
    if needle is None:
        return text
    gap = needle.sentence + " " if not text else ""
    return chat_parts(tokenizer, gap + text, needle.question)[0]


def _ids(tokenizer: Any, text: str, special: bool = False) -> Tensor:
    # verbose=False: a long text is cut before the model sees it, so its length is nothing to warn of.
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return torch.tensor([ids], dtype=torch.long)
