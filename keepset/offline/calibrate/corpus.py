"""`Corpus`: texts as passages of tokens, drawn in an order that a seed decides."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.errors import KeepsetError
from keepset.texts import adds_bos, essay, essays

if TYPE_CHECKING:
    import transformers

SHORTEST = 16
"""Tokens of a passage that is worth measuring."""
TOKENS, LENGTH, SEED = 16384, 1024, 0
"""How much is measured unless said otherwise: all in all, in one passage, and the seed of their order."""
_LEFT_OUT = "worked"
"""The essay that `keepset compare` and the demo read: what is measured must not have seen it."""


def default_texts() -> list[str]:
    """The essays, less the one that recipes are compared on.

    Raises:
        KeepsetError: they are not installed.
    """
    return [essay(name) for name in essays() if name != _LEFT_OUT]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Passages of equal length, except where a text ends, and what is to be remembered of them.

    Attributes:
        passages: token ids, each passage with the beginning that the model expects.
        sha256: of all texts, drawn or not.
        seed: of the order in which passages were drawn.
    """

    passages: list[Int[Tensor, " _"]]
    sha256: str
    seed: int

    @property
    def tokens(self) -> int:
        """In all passages."""
        return sum(len(passage) for passage in self.passages)

    @classmethod
    def draw(
        cls,
        tokenizer: transformers.PreTrainedTokenizerBase,
        texts: Sequence[str],
        *,
        tokens: int,
        length: int,
        seed: int,
    ) -> Corpus:
        """Passages of up to `length` tokens until they have `tokens`, or all that there are.

        Raises:
            KeepsetError: the texts are too short for one.
        """
        begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
        size = length - len(begin)
        pieces = [[*begin, *piece] for piece in cut(tokenizer, texts, size)]
        pieces = [piece for piece in pieces if len(piece) >= min(SHORTEST, length)]
        if not pieces:
            raise KeepsetError(f"The texts have fewer than {SHORTEST} tokens: give longer ones.")
        passages, left = [], tokens
        for index in order(len(pieces), seed):
            if left < min(SHORTEST, length):
                break
            passages.append(torch.tensor(pieces[index][:left]))
            left -= len(passages[-1])
        return cls(passages, digest(texts), seed)


def cut(tokenizer: transformers.PreTrainedTokenizerBase, texts: Sequence[str], size: int) -> list[list[int]]:
    """The texts' tokens, in pieces of this size; a text's last one may be shorter."""
    # One long text at a time is meant: the tokenizer's warning about its length is not.
    ids = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    return [text[first : first + size] for text in ids for first in range(0, len(text), size)]


def order(count: int, seed: int) -> list[int]:
    """So many indices, shuffled."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def digest(texts: Sequence[str]) -> str:
    """By which texts are known again, all together."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def default_corpus(tokenizer: transformers.PreTrainedTokenizerBase) -> Corpus:
    """Passages from the essays."""
    return Corpus.draw(tokenizer, default_texts(), tokens=TOKENS, length=LENGTH, seed=SEED)
