"""`Passage`: a piece of a text for compilation, reading such texts from files, and knowing them again.

Tables must not be evaluated on a text from which they were compiled. So an evaluation calls `refuse_contaminated` for
every recipe and context before it runs them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keepset.core.tables import Tables, load
from keepset.errors import CorruptFileError, KeepsetError
from keepset.lab.corpus import digest, shuffled_passages
from keepset.lab.texts import adds_bos, json_lines, read
from keepset.methods.compilerkv import CompilerKV
from keepset.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Passage:
    """A prompt and the text that follows it.

    Attributes:
        ids: tokens of both.
        tokens: the number of the prompt's tokens.
        name: a hash of the tokens.
        marks: the marks by which an evaluation recognises the text; see `passage_hashes`.
    """

    ids: Int[Tensor, " _"]
    tokens: int
    name: str
    marks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ContextPool:
    """Contexts to compile from.

    Attributes:
        contexts: the contexts, in an order that depends on a seed.
        sha256: hash of all texts.
    """

    contexts: list[Passage]
    sha256: str

    @classmethod
    def draw(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[str],
        *,
        tokens: int,
        continuation: int,
        count: int,
        seed: int,
    ) -> Self:
        """Draw non-overlapping contexts from texts.

        Args:
            tokens: tokens of a context's prompt.
            continuation: tokens after the prompt.
            count: the largest number of contexts.
            seed: seed of the order.

        Raises:
            KeepsetError: no text is long enough.
        """
        length = tokens + continuation
        passages = shuffled_passages(tokenizer, texts, length=length, shortest=length, seed=seed)
        if not passages:
            raise KeepsetError(
                f"No text has {length} tokens, a context of {tokens} and the {continuation} that follow "
                "it: give longer ones, or fewer --prompt-tokens."
            )
        contexts: dict[str, Passage] = {}
        for passage in passages:
            if len(contexts) == count:
                break
            ids = torch.tensor(passage, dtype=torch.long)
            name = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
            text = str(tokenizer.decode(passage[1:] if adds_bos(tokenizer) else passage))
            # A repeated text counts as one context.
            contexts[name] = Passage(ids, tokens, name, passage_hashes(text))
        return cls(list(contexts.values()), digest(texts))


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Return the texts of files: the field "text" of every line of a .jsonl file, else the whole file.

    Raises:
        KeepsetError: a file cannot be read, or a line has no text.
    """
    texts: list[str] = []
    for path in paths:
        whole = read(path)
        if path.suffix != ".jsonl":
            texts.append(whole)
            continue
        for number, line in json_lines(whole):
            text = None if line is None else line.get("text")
            if not isinstance(text, str):
                raise CorruptFileError(
                    f'Line {number} of {str(path)!r} is no JSON object with a text in its field "text": write one such '
                    'as {"text": "..."} in every line.'
                )
            texts.append(text)
    return texts


_WORDS, _ONE_IN = 12, 32
"""A mark is the hash of `_WORDS` consecutive words. One of `_ONE_IN` hashes is kept, chosen by its value. So two texts
that share 150 words share a mark in 99 of 100 cases, wherever the texts were cut."""


def passage_hashes(text: str) -> tuple[str, ...]:
    """Return the marks that identify a text; at least one unless it has no words."""
    words = text.split()
    runs = (" ".join(words[first : first + _WORDS]) for first in range(max(len(words) - _WORDS, 0) + 1) if words)
    hashes = {hashlib.blake2b(run.encode("utf-8", "surrogatepass"), digest_size=8).digest() for run in runs}
    chosen = {digest for digest in hashes if digest[-1] % _ONE_IN == 0} or set(sorted(hashes)[:1])
    return tuple(sorted(digest.hex() for digest in chosen))


def is_contaminated(tables: Tables, text: str) -> bool:
    """Return whether a text shares a passage with a context from which tables were compiled.

    Args:
        tables: the tables, whose provenance has the marks of the contexts.
        text: the text.
    """
    compiled = {mark for context in tables.provenance.get("marks", ()) for mark in context}
    return not compiled.isdisjoint(passage_hashes(text))


def refuse_contaminated(recipe: Recipe, text: str) -> None:
    """Refuse to evaluate a recipe on a text from which its tables were compiled.

    Args:
        recipe: the recipe; only steps with tables count.
        text: the text.

    Raises:
        KeepsetError: the tables were compiled from the text, or from one that shares a passage with it.
    """
    for method in recipe.method.steps():
        if isinstance(method, CompilerKV) and method.tables and is_contaminated(load(method.tables), text):
            raise KeepsetError(
                f"The tables {method.tables!r} were compiled from this context, or from one that shares a passage with "
                "it: evaluate on other texts, or compile them from others."
            )
