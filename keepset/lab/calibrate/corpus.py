"""`Corpus`: passages of tokens drawn from texts with a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keepset.errors import KeepsetError
from keepset.lab.corpus import default_texts, digest, shuffled_passages

SHORTEST = 16
"""The fewest tokens of a passage that is worth measuring."""
TOKENS, LENGTH, SEED = 16384, 1024, 0
"""Defaults: tokens of all passages, tokens of a passage, and the seed of the order."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Passages of equal length, except where a text ends.

    Attributes:
        passages: token ids of each passage, with the token that begins a text for the model.
        sha256: hash of all texts, drawn or not.
        seed: seed of the order in which passages were drawn.
    """

    passages: list[Int[Tensor, " _"]]
    sha256: str
    seed: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all passages."""
        return sum(len(passage) for passage in self.passages)

    @classmethod
    def draw(
        cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, tokens: int, length: int, seed: int
    ) -> Self:
        """Draw passages from texts.

        Args:
            tokens: the most tokens of all passages together; at least one passage is drawn.
            length: tokens of a passage.
            seed: seed of the order.

        Raises:
            KeepsetError: the texts are too short.
        """
        shortest = min(SHORTEST, length)
        candidates = shuffled_passages(tokenizer, texts, length=length, shortest=shortest, seed=seed)
        if not candidates:
            raise KeepsetError(f"The texts have fewer than {SHORTEST} tokens: give longer ones.")
        passages, left = [], tokens
        for candidate in candidates:
            if left < shortest:
                break
            passages.append(torch.tensor(candidate[:left], dtype=torch.long))
            left -= len(passages[-1])
        return cls(passages, digest(texts), seed)


def default_corpus(tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Return passages from the essays."""
    return Corpus.draw(tokenizer, default_texts(), tokens=TOKENS, length=LENGTH, seed=SEED)
