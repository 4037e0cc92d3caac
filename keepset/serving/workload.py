"""The prompts of a load: exact numbers of tokens, each from another place of the essays."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepset.errors import KeepsetError
from keepset.serving.load import Load
from keepset.texts import essay, essays


@dataclass(frozen=True)
class TokenSource:
    """The tokens of a text, or every token that may be drawn, and then a note why there is no text."""

    ids: Sequence[int]
    text: bool
    note: str | None = None


def essay_tokens(tokenizer: Any) -> TokenSource:
    """The essays as tokens; random tokens of the vocabulary where the essays are not installed."""
    try:
        text = "\n\n".join(essay(name) for name in essays())
    except KeepsetError as error:
        ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        return TokenSource(ids, text=False, note=f"Prompts are random tokens. {error}")
    return TokenSource(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], text=True)


def token_source(folder: str) -> TokenSource:
    """What prompts for the model in that folder, or of that hub name, are cut from; it must have a tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise KeepsetError(
            f"The tokenizer of {folder!r} cannot be loaded: give MODEL, a folder or a name on the Hugging Face Hub."
        ) from error
    return essay_tokens(tokenizer)


def prompts(source: TokenSource, load: Load) -> list[list[list[int]]]:
    """One prompt to warm up, then for each round one per request: always the same for the same seed."""
    generator, count = random.Random(load.seed), load.rounds * load.requests
    if not load.question_tokens:
        flat = _pieces(source, generator, count + 1, load.prompt_tokens)
    else:
        *documents, other = _pieces(source, generator, load.requests + 1, load.prompt_tokens)
        questions = _pieces(source, generator, count + 1, load.question_tokens)
        texts = [*documents * load.rounds, other]
        flat = [document + question for document, question in zip(texts, questions, strict=True)]
    return [[flat[-1]], *(flat[i * load.requests : (i + 1) * load.requests] for i in range(load.rounds))]


def _pieces(source: TokenSource, generator: random.Random, count: int, length: int) -> list[list[int]]:
    """So many pieces of this length."""
    if not source.text:
        return [generator.choices(source.ids, k=length) for _ in range(count)]
    size = len(source.ids)
    # Different places, so that no piece begins as another does; the text goes round.
    starts = generator.sample(range(size), count) if count <= size else generator.choices(range(size), k=count)
    return [[source.ids[(start + i) % size] for i in range(length)] for start in starts]
