"""Texts as passages of tokens, in an order that a seed decides."""

import hashlib
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from keepset.texts import adds_bos, essay, essays

_LEFT_OUT = "worked"
"""The essay that `keepset compare` and the demo read: what is measured must not have seen it."""


def default_texts() -> list[str]:
    """The essays, less the one that recipes are compared on; a `KeepsetError` where they are not installed."""
    return [essay(name) for name in essays() if name != _LEFT_OUT]


def shuffled_passages(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, length: int, shortest: int, seed: int
) -> list[list[int]]:
    """The texts' tokens in passages that do not overlap, shuffled.

    Args:
        texts: cut one by one, so that a text's last passage may be shorter than others.
        length: tokens of a passage with the beginning that the model expects.
        shortest: passages with fewer tokens are left out.
    """
    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    size = length - len(begin)
    # One long text at a time is meant: the tokenizer's warning about its length is not.
    ids = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    passages = [[*begin, *text[first : first + size]] for text in ids for first in range(0, len(text), size)]
    passages = [passage for passage in passages if len(passage) >= shortest]
    order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(seed))
    return [passages[index] for index in order.tolist()]


def digest(texts: Sequence[str]) -> str:
    """By which texts are known again, all together."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
