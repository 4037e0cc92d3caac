"""`TextTask`: a prompt, the text that follows it, and a question whose answer is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.errors import KeepsetError
from keepset.lab.images import Pictured, image_grids
from keepset.lab.tasks.task import Tokenizer
from keepset.lab.texts import Needle, chat_parts, encode, insert

ANSWER_TOKENS = 12
"""Tokens that are decoded for the answer to the question, and for timing."""


@dataclass(frozen=True, eq=False)
class TextTask:
    """A prompt that is compressed, the text that follows it, and a question about it.

    Attributes:
        prompt: the prompt's tokens, `[1, tokens]`.
        continuation: the text after the prompt, `[1, n]`; empty if the full cache's own answer follows.
        question: the question about `needle`, `[1, m]`; None if nothing is asked.
        answer_tokens: the most tokens of an answer.
        images: the model's other inputs for the prompt's images, by name.
        grids: the grid of patches of each image's tokens (`image_grids`).
        left_out: the part of the text that is in neither the prompt nor its needle.
    """

    prompt: Int[Tensor, "1 tokens"]
    continuation: Int[Tensor, "1 n"]
    question: Int[Tensor, "1 m"] | None = None
    needle: Needle | None = None
    answer_tokens: int = ANSWER_TOKENS
    images: Mapping[str, Tensor] = field(default_factory=dict)
    grids: Sequence[tuple[int, int, int]] = ()
    left_out: str = ""

    def to(self, device: torch.device) -> "TextTask":
        """Return the task with its tokens on the model's device."""
        question = None if self.question is None else self.question.to(device)
        return replace(
            self, prompt=self.prompt.to(device), continuation=self.continuation.to(device), question=question
        )

    def doubt(self, found: bool) -> str:
        """Return why the recipes' answers mean nothing, given whether the full cache's is right; "" if they do."""
        if self.needle is None or found:
            return ""
        if self.needle.answer.lower() in self.left_out.lower():
            return (
                "The answer is in the part of the text that the prompt leaves out, so no cache can know it: raise "
                "--prompt-tokens, or leave --continuation out."
            )
        return "The full cache does not give the answer either, so the recipes' answers mean nothing."


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
    pictured: Pictured | None = None,
) -> TextTask:
    """Cut a text into a prompt and a continuation.

    With a needle, its sentence is inserted into the prompt, unless the sentence is empty because the text holds the
    answer already; the prompt is then the part of a user's message before the question.

    Args:
        tokenizer: the model's tokenizer.
        text: the text.
        tokens: about how many tokens the prompt has; None for as many as text and model allow.
        continuation: tokens of the continuation.
        needle: the hidden fact and its question.
        depth: where the needle is inserted, from 0 to 1.
        longest: tokens of the model's context; None if unknown.
        answer_tokens: the most tokens of an answer.
        pictured: images that come before the text.

    Raises:
        KeepsetError: the text is too short, or the model's context is.
    """
    question = None if needle is None else _ids(tokenizer, chat_parts(tokenizer, "", needle.question)[1])
    after = continuation + answer_tokens if question is None else max(continuation, question.shape[1] + answer_tokens)
    body = _ids(tokenizer, text)
    total, around = body.shape[1], _prompt(tokenizer, "", needle, pictured)["input_ids"].shape[1]
    if tokens is None:
        tokens = (
            total - continuation + around if longest is None else min(total - continuation + around, longest - after)
        )
    check_fits(tokens, after, longest)
    if tokens <= around:
        raise KeepsetError(
            f"{tokens} tokens of prompt leave no room for the text, because {around} surround it: ask for more tokens."
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
    inputs = _prompt(tokenizer, start, needle, pictured)
    grids = () if pictured is None else image_grids(pictured.model, inputs)
    prompt, left_out = inputs.pop("input_ids"), str(tokenizer.decode(body[0, length:]))
    after_prompt = body[:, length : length + continuation]
    return TextTask(prompt, after_prompt, question, needle, answer_tokens, inputs, grids, left_out)


def check_fits(tokens: int, after: int, longest: int | None) -> None:
    """Refuse a prompt that does not fit the model's context, together with the tokens after it.

    Args:
        tokens: tokens of the prompt.
        after: tokens after it.
        longest: tokens of the model's context; None if unknown.

    Raises:
        KeepsetError: it does not fit.
    """
    if longest is not None and tokens + after > longest:
        raise KeepsetError(
            f"{tokens} tokens of prompt and {after} after it do not fit the model's context of "
            f"{longest}: ask for fewer tokens."
        )


def _prompt(tokenizer: Any, text: str, needle: Needle | None, pictured: Pictured | None) -> dict[str, Tensor]:
    special = bool(text) and needle is None
    # An empty text serves to count the tokens around the text, which include the inserted sentence.
    text = f"{needle.sentence} " if needle is not None and not text else text
    if pictured is not None:
        return pictured.prompt(text, chat=needle is not None)
    whole = text if needle is None else chat_parts(tokenizer, text, needle.question)[0]
    return {"input_ids": _ids(tokenizer, whole, special)}


def _ids(tokenizer: Any, text: str, special: bool = False) -> Tensor:
    return torch.tensor([encode(tokenizer, text, special)], dtype=torch.long)
