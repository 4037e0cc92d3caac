"""What was kept of a text, as data for a page: packed bits of every layer and KV head."""

import base64
import gzip
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from keepset.bench.report.page import Section


def pack(kept: Tensor) -> str:
    """Return a boolean tensor as base64 of its zipped bits, row-major, the first bit highest."""
    return base64.b64encode(gzip.compress(np.packbits(kept.bool().cpu().numpy()).tobytes(), mtime=0)).decode("ascii")


def kept_text(
    title: str,
    tokens: Sequence[str | None],
    choices: Sequence[tuple[str, Tensor | None]],
    *,
    first: int | None = None,
    answer: str = "",
) -> Section:
    """Return a section that shades a text by the share of heads that keep a token.

    Args:
        title: the section's heading.
        tokens: the text, token by token; None for one that only continues the character before it.
        choices: each recipe and what it kept, bool `[layers, kv_heads, tokens]`, all of one shape; None if it failed.
        first: the number of the choice that is shown at first.
        answer: words of the text that are underlined.
    """
    layers, heads = next((mask.shape[:2] for _, mask in choices if mask is not None), (0, 0))
    return {
        "kind": "kept",
        "title": title,
        "tokens": list(tokens),
        "layers": layers,
        "heads": heads,
        "choices": [(name, None if mask is None else pack(mask)) for name, mask in choices],
        "first": first,
        "needle": _place(tokens, answer),
    }


def _place(tokens: Sequence[str | None], answer: str) -> tuple[int, int] | None:
    """Return the first token of the words and one past their last; None if they are not in the text."""
    begin = "".join(token or "" for token in tokens).find(answer) if answer else -1
    if begin < 0:
        return None
    at, inside = 0, []
    for number, token in enumerate(tokens):
        before, at = at, at + len(token or "")
        if before < begin + len(answer) and at > begin:
            inside.append(number)
    return inside[0], inside[-1] + 1
