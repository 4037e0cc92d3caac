"""`Corpus`: texts as passages of tokens, drawn in an order that a seed decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keepset.errors import KeepsetError
from keepset.offline.corpus import default_texts, digest, shuffled_passages

SHORTEST = 16
"""Tokens of a passage that is worth measuring."""
TOKENS, LENGTH, SEED = 16384, 1024, 0
"""How much is measured unless said otherwise: all in all, in one passage, and the seed of their order."""


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
        cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, tokens: int, length: int, seed: int
    ) -> Self:
        """Passages of up to `length` tokens until they have `tokens`, or all that there are, but at least one."""
        shortest = min(SHORTEST, length)
        candidates = shuffled_passages(tokenizer, texts, length=length, shortest=shortest, seed=seed)
        if not candidates:
            raise KeepsetError(f"The texts have fewer than {SHORTEST} tokens: give longer ones.")
        passages, left = [], tokens
        for candidate in candidates:
            if left < shortest:
                break
            passages.append(torch.tensor(candidate[:left]))
            left -= len(passages[-1])
        return cls(passages, digest(texts), seed)


def default_corpus(tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Passages from the essays."""
    return Corpus.draw(tokenizer, default_texts(), tokens=TOKENS, length=LENGTH, seed=SEED)
