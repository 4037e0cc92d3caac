"""`Passage`: a piece of a text for compilation, and reading such texts from files."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keepset.errors import CorruptFileError, KeepsetError
from keepset.lab.compile.contamination import passage_hashes
from keepset.lab.corpus import digest, shuffled_passages
from keepset.lab.texts import adds_bos, json_lines, read


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
