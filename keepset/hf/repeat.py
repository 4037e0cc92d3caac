"""`Repeat`: the words by which a second pass asks a model to repeat its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from keepset.errors import KeepsetError
from keepset.kernels.second_pass import SoftmaxScope

_WHOLE = "\n\nRepeat the previous context exactly."
_PART = "\n\nRepeat the part of the previous context exactly, starting with "
_REMINDER = 8
"""How many of a chunk's last tokens introduce the next chunk."""

_SINKS = 4
"""How many first tokens every chunk's softmax sees if no chat template opens the prompt."""

_TURN = "\n\nAnswer: "
"""The text between the words and their answer if the tokenizer has no chat template."""
_MARK = "keepset"
"""A placeholder for a user's words, which shows what a chat template puts around them."""


@dataclass(frozen=True)
class Repeat:
    """Words by which a model is asked to repeat its prompt (KVzip, 2025, arXiv:2505.23416), in its tokens.

    Attributes:
        opening: the chat template's text before a user's words; a prompt's own opening is not repeated.
        whole: the request for the first chunk.
        part: the request for a later chunk; the last tokens of the chunk before follow it.
        turn: the text between the user's words and the model's.
    """

    opening: tuple[int, ...]
    whole: tuple[int, ...]
    part: tuple[int, ...]
    turn: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Repeat:
        """Return the words in the tokens of the tokenizer beside a model."""
        name = model.config.name_or_path or ""
        words = _words(name)
        known = getattr(model.get_input_embeddings(), "num_embeddings", None)
        if known is not None and max(words.whole + words.part + words.turn) >= known:
            raise KeepsetError(
                f"The tokenizer of {name!r} has tokens that the model does not know: give the model its own."
            )
        return words

    def prefix(self, prompt: Int[Tensor, " tokens"]) -> int:
        """Return how many tokens of a prompt are the chat template's opening; 0 if nothing follows it."""
        length = len(self.opening)
        return length if length < len(prompt) and tuple(prompt[:length].tolist()) == self.opening else 0

    def passes(self, prompt: Int[Tensor, " tokens"], chunk: int) -> Iterator[tuple[Int[Tensor, " more"], SoftmaxScope]]:
        """Yield for each chunk the tokens to run after the prompt, and the entries that they may attend to."""
        prefix = self.prefix(prompt)
        whole, part, turn = (prompt.new_tensor(words) for words in (self.whole, self.part, self.turn))
        before = prompt[:0]
        start = prefix
        for own in prompt[prefix:].split(chunk or len(prompt)):
            words = [part, before] if start > prefix else [whole]
            yield torch.cat([*words, turn, own]), SoftmaxScope(prefix or min(_SINKS, start), start, start + len(own))
            before, start = own[-_REMINDER:], start + len(own)


@cache
def _words(name: str) -> Repeat:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False) if name else None
    except (OSError, ValueError, ImportError, RuntimeError):
        tokenizer = None
    if tokenizer is None:
        raise KeepsetError(
            f"To ask the model to repeat its prompt takes its tokenizer, and {name!r} has none: load the model from a "
            "folder, or by a name on the Hugging Face Hub, that has one."
        )
    opening, turn = "", _TURN
    if tokenizer.chat_template:
        marked = [{"role": "user", "content": _MARK}]
        chat = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        opening, separator, after = chat.rpartition(_MARK)
        turn = after if separator else _TURN
    texts = (opening, _WHOLE, _PART, turn)
    return Repeat(*(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts))
