"""Texts cut into pieces of equal length: a prompt, perhaps with hidden facts, and the text that follows it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.bench.tasks.task import Tokenizer
from keepset.bench.tune.halving import ROUNDS
from keepset.errors import KeepsetError
from keepset.texts import CITIES, Needle, adds_bos, chat_parts, encode, insert, secret_number

SIZES = (2048, 1024, 512, 256)
"""Tokens of a piece: the largest size with enough pieces is used."""
PIECES = ROUNDS[-1]
SHARE = 16
"""A piece's continuation is the last of this many parts. Continuations never overlap; prompts may."""
FACTS = 4
"""Facts hidden in each piece."""
ANSWER_TOKENS = 8
"""Tokens of an answer: enough for a number, because the words before it are given."""
_ROOM = {False: 1, True: 512}
"""Tokens that a piece takes beyond its size, with facts: the facts, the chat template, question and answer."""


@dataclass(frozen=True, eq=False)
class TextPiece:
    """A prompt that is compressed and the text that follows it; facts that it hides, and a question about each."""

    prompt: Int[Tensor, "1 tokens"]
    continuation: Int[Tensor, "1 n"]
    facts: tuple[Needle, ...] = ()
    questions: tuple[str, ...] = ()


def cut(
    tokenizer: Tokenizer, texts: Sequence[str], *, retrieval: bool, longest: int | None, seed: int
) -> list[TextPiece]:
    """Return `PIECES` pieces with the least overlap; the seed determines their order and their facts.

    Args:
        tokenizer: the model's tokenizer.
        texts: the texts from which all pieces are taken.
        retrieval: whether facts are hidden in the pieces.
        longest: tokens of the model's context; None if unknown.
        seed: seed of order and facts.

    Raises:
        KeepsetError: the texts or the context are too short.
    """
    ids = [encode(tokenizer, text) for text in texts]
    if longest is not None and longest < SIZES[-1] + _ROOM[retrieval]:
        raise KeepsetError(
            f"The model's context of {longest} tokens is too short for pieces of {SIZES[-1]} tokens and what follows "
            "them: use a model with a longer one."
        )
    for size in SIZES:
        if longest is not None and size + _ROOM[retrieval] > longest:
            continue
        places = _places([len(text) for text in ids], size)
        if len(places) >= PIECES:
            break
    else:
        total, least = sum(map(len, ids)), SIZES[-1] + (PIECES - 1) * SIZES[-1] // SHARE
        raise KeepsetError(
            f"The text has {total} tokens, too few for {PIECES} pieces of {SIZES[-1]}: give one of {least} tokens or "
            "more, or several."
        )
    chance = random.Random(seed)
    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    pieces = []
    for text, start in chance.sample(places, PIECES):
        end = start + size - size // SHARE
        body, after = ids[text][start:end], ids[text][end : start + size]
        if retrieval:
            pieces.append(_with_facts(tokenizer, body, after, chance))
        else:
            pieces.append(TextPiece(torch.tensor([begin + body]), torch.tensor([after])))
    return pieces


def _places(lengths: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return where pieces may begin, as text and token, so that they overlap as little as possible."""
    places: list[tuple[int, int]] = []
    for parts in (1, 2, 4, 8, SHARE):
        step = size // parts
        places = [(text, at) for text, length in enumerate(lengths) for at in range(0, length - size + 1, step)]
        if len(places) >= PIECES:
            break
    return places


def _with_facts(tokenizer: Tokenizer, body: list[int], after: list[int], chance: random.Random) -> TextPiece:
    """Return a piece whose prompt begins a user's message, with facts at evenly spaced depths."""
    text, facts = str(tokenizer.decode(body)), []
    for number, city in enumerate(chance.sample(CITIES, FACTS)):
        fact = secret_number(city, str(chance.randrange(1000, 10000)))
        text = insert(text, fact, (number + 0.5) / FACTS)
        facts.append(fact)
    parts = [chat_parts(tokenizer, text, fact.question) for fact in facts]
    questions = tuple(
        f"{question}{'' if question[-1].isspace() else ' '}{fact.opening}"
        for (_, question), fact in zip(parts, facts, strict=True)
    )
    return TextPiece(torch.tensor([encode(tokenizer, parts[0][0])]), torch.tensor([after]), tuple(facts), questions)
