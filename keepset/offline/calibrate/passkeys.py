"""Texts in which words are to be found again: passkeys hidden between passages and asked for at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keepset.errors import UnsupportedModelError

LENGTH, PASSKEYS, WORDS = 512, 4, 8
"""Tokens of a text, passkeys in it, and words of a passkey."""
_WORDS = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
)
_ORDINALS = ("first", "second", "third", "fourth")


@dataclass(frozen=True, eq=False)
class Passkeys:
    """The tokens of one text, and from where on passkeys are asked for and told."""

    ids: Int[Tensor, " tokens"]
    asked: int


def draw(
    tokenizer: PreTrainedTokenizerBase,
    passages: Sequence[Int[Tensor, " _"]],
    *,
    count: int,
    length: int = LENGTH,
    seed: int,
) -> list[Passkeys]:
    """So many texts of this length, passkeys and their places drawn by chance, passages in between."""
    chance, alphabet = torch.Generator().manual_seed(seed), _WORDS.split()

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=chance))

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    haystack = [token for passage in passages for token in passage.tolist()]
    texts = []
    for _ in range(count):
        keys = [" ".join(alphabet[number(len(alphabet))] for _ in range(WORDS)) for _ in range(PASSKEYS)]
        named = list(zip(_ORDINALS, keys, strict=True))
        needles = [tokens(f"\n\nRemember: the {which} passkey is {key}.\n\n") for which, key in named]
        answers = [tokens(f"\n\nWhat is the {which} passkey? It is {key}.") for which, key in named]
        between = length - sum(map(len, needles)) - sum(map(len, answers))
        if between < 1:
            raise UnsupportedModelError(
                f"Passkeys and the questions for them do not fit the model's context of {length} tokens: retrieval "
                "heads cannot be found; leave them out with --gate-steps 0."
            )
        first = number(len(haystack))
        rest = (haystack * (between // len(haystack) + 2))[first : first + between]
        # What is asked for is never near: the last part of the passage has no passkey.
        places = sorted(number(max(1, between * 3 // 4)) for _ in needles)
        ids: list[int] = []
        for begin, end, needle in zip([0, *places], [*places, between], [*needles, []], strict=True):
            ids += rest[begin:end] + needle
        texts.append(Passkeys(torch.tensor(ids + [token for answer in answers for token in answer]), len(ids)))
    return texts
