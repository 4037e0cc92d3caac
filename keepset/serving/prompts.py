"""The prompts of a load: texts with a given number of tokens, each from another place of the essays."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from keepset.errors import KeepsetError
from keepset.serving.load import Load
from keepset.texts import encode, essay, essays

_TRIES = 50
"""Places of the text that are tried to get a piece of exactly the wanted length."""
_WORD = re.compile(r"[\u0120\u2581][A-Za-z]+")
"""A token that is a whole word, with the mark of a space before it."""
_RANDOM = 100_000


@dataclass(frozen=True)
class TextSource:
    """A long text to cut prompts from: its tokens, and a note if it is not the essays."""

    tokenizer: Any
    ids: list[int]
    note: str | None = None

    def places(self, draw: random.Random) -> Iterator[int]:
        """Yield the places at which words begin, in random order, again and again."""
        tokens = self.tokenizer.convert_ids_to_tokens(self.ids)
        places = [place for place, token in enumerate(tokens) if token.startswith(("\u0120", "\u2581"))]
        places = places or list(range(len(tokens)))
        while True:
            yield from draw.sample(places, len(places))

    def cut(self, places: Iterator[int], count: int, after: str = "") -> str:
        """Cut a piece out of the text, which is treated as a loop; with `count` tokens if one of some places has one.

        The piece follows the text `after`, whose tokens must not change by it.

        Raises:
            KeepsetError: every piece changes the tokens before it.
        """
        before, piece = self.encode(after) if after else [], None
        length = count if after else count - len(self.encode(""))
        for place in islice(places, _TRIES):
            text = self.tokenizer.decode([self.ids[(place + i) % len(self.ids)] for i in range(length)]).rstrip()
            text = f" {text}" if after and not text.startswith(" ") else text
            whole = self.encode(after + text)
            if whole[: len(before)] == before:
                piece = text
                if len(whole) == len(before) + count:
                    break
            length = max(1, length + len(before) + count - len(whole))
        if piece is None:
            raise KeepsetError("The model's tokenizer joins a document with a question, so no context can be used.")
        return piece

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens on a server, with those that the tokenizer adds."""
        return encode(self.tokenizer, text, special=True)


def text_source(folder: str) -> TextSource:
    """Return the essays in the tokens of a model (folder or hub name); random words if they are not installed.

    Raises:
        KeepsetError: the model's tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise KeepsetError(
            f"The tokenizer of {folder!r} cannot be loaded: give MODEL, a folder or a name on the Hugging Face Hub."
        ) from error
    try:
        text = "\n\n".join(essay(name) for name in essays())
    except KeepsetError as error:
        words = sorted(index for token, index in tokenizer.get_vocab().items() if _WORD.fullmatch(token))
        if not words:
            raise
        return TextSource(tokenizer, random.Random(0).choices(words, k=_RANDOM), f"Prompts are random words. {error}")
    return TextSource(tokenizer, encode(tokenizer, text))


@dataclass(frozen=True)
class LoadPrompts:
    """The texts of a load: a request before it, its documents, and the prompts of all requests, round by round."""

    warm_up: str
    documents: list[str]
    texts: list[str]


def make_prompts(source: TextSource, load: Load) -> LoadPrompts:
    """Cut a load's prompts; the same seed gives the same prompts."""
    places = source.places(random.Random(load.seed))
    warm_up = source.cut(places, load.prompt_tokens)
    if not load.question_tokens:
        count = load.rounds * load.requests
        return LoadPrompts(warm_up, [], [source.cut(places, load.prompt_tokens) for _ in range(count)])
    documents = [source.cut(places, load.prompt_tokens) for _ in range(load.requests)]
    texts = [text + source.cut(places, load.question_tokens, after=text) for text in documents * load.rounds]
    return LoadPrompts(warm_up, documents, texts)
