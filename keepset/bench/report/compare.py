"""The HTML report of `keepset compare`: one file that needs nothing else, neither a server nor a network."""

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from keepset.bench.report.page import assemble
from keepset.errors import KeepsetError


def render(
    comparison: dict[str, Any], tokens: Sequence[str | None], kept: Sequence[Tensor | None], conclusion: str = ""
) -> str:
    """The report as one self-contained HTML page.

    It shows what `keepset compare --json` prints, with `token_texts` of the prompt. For each row of the comparison, a
    boolean `[layers, kv_heads, tokens]` tensor says what it kept; None where the row failed.
    """
    rows = comparison["rows"]
    if len(kept) != len(rows):
        raise KeepsetError(f"the report needs one kept tensor or None for each of {len(rows)} rows, not {len(kept)}.")
    shapes = {tuple(mask.shape) for mask in kept if mask is not None}
    if len(shapes) > 1 or any(len(shape) != 3 or shape[-1] != len(tokens) for shape in shapes):
        raise KeepsetError(
            f"the report's kept tensors need one common shape [layers, kv_heads, {len(tokens)}], not "
            + ", ".join(str(list(shape)) for shape in sorted(shapes))
            + "."
        )
    layers, heads, _ = shapes.pop() if shapes else (0, 0, 0)
    data = {
        "comparison": comparison,
        "tokens": list(tokens),
        "layers": layers,
        "heads": heads,
        "kept": [None if mask is None else pack(mask) for mask in kept],
    }
    return assemble("compare", "keepset compare", data, conclusion)


def pack(kept: Tensor) -> str:
    """A boolean tensor as base64 of its zipped bits, row-major, the first bit highest."""
    return base64.b64encode(gzip.compress(np.packbits(kept.bool().cpu().numpy()).tobytes(), mtime=0)).decode("ascii")
