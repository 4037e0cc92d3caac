"""Texts with passkeys that are hidden between passages and asked for at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keepset.errors import UnsupportedModelError

LENGTH, PASSKEYS, WORDS = 512, 4, 8
"""Tokens of a text, number of passkeys in it, and words of a passkey."""
_WORDS = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
)
_ORDINALS = ("first", "second", "third", "fourth")


@dataclass(frozen=True, eq=False)
class Passkeys:
    """A text with passkeys.

    Attributes:
        ids: the text's tokens.
        asked: the token at which the questions for passkeys, with their answers, begin.
    """

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
    """Draw texts with passkeys at random places between passages.

    Args:
        tokenizer: the model's.
        passages: tokens of the passages.
        count: number of texts.
        length: tokens of each text.
        seed: of the passkeys and their places.

    Raises:
        UnsupportedModelError: passkeys and questions do not fit the length.
    """
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
        # No passkey is near its question: the last part of the passage has none.
        places = sorted(number(max(1, between * 3 // 4)) for _ in needles)
        ids: list[int] = []
        for begin, end, needle in zip([0, *places], [*places, between], [*needles, []], strict=True):
            ids += rest[begin:end] + needle
        texts.append(Passkeys(torch.tensor(ids + [token for answer in answers for token in answer]), len(ids)))
    return texts
