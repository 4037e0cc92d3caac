"""Texts as passages of tokens, in an order that depends on a seed."""

import hashlib
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from keepset.lab.texts import adds_bos, essay, essays

_LEFT_OUT = "worked"
"""The essay that `keepset compare` and the demo read. No measurement may have seen it."""
_REPORTED = (
    *("addiction", "aord", "apple", "avg", "before", "bias", "boss", "copy", "corpdev", "desres", "diff", "ecw"),
    *("gap", "langdes", "philosophy", "useful"),
)
"""The essays on which results are reported; the tasks with hidden facts use the first twelve by name."""


def default_texts() -> list[str]:
    """Return the essays without the one that recipes are compared on; raise `KeepsetError` if none are installed."""
    return [essay(name) for name in essays() if name != _LEFT_OUT]


def texts_to_fit() -> list[str]:
    """Return the essays to which networks may be fitted: those without reported results."""
    return [essay(name) for name in essays() if name != _LEFT_OUT and name not in _REPORTED]


def shuffled_passages(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, length: int, shortest: int, seed: int
) -> list[list[int]]:
    """Return non-overlapping passages of the texts' tokens, in shuffled order.

    Args:
        texts: the texts. Each is cut separately, so its last passage may be shorter.
        length: tokens of a passage, with the model's first token of a text.
        shortest: passages with fewer tokens are left out.
        seed: seed of the order.
    """
    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    size = length - len(begin)
    # verbose=False: no warning that a whole text is longer than the model's context.
    ids = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    passages = [[*begin, *text[first : first + size]] for text in ids for first in range(0, len(text), size)]
    passages = [passage for passage in passages if len(passage) >= shortest]
    order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(seed))
    return [passages[index] for index in order.tolist()]


def digest(texts: Sequence[str]) -> str:
    """Return a hash of all texts together."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
