"""The digest by which a saved context is found: that of its text's token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return the bytes whose digest identifies a text."""
    return np.asarray(tokens, dtype="<i8").tobytes()


def text_digest(tokens: Sequence[int]) -> str:
    """Return the digest that a file has of a text's tokens."""
    return hashlib.sha256(token_bytes(tokens)).hexdigest()
