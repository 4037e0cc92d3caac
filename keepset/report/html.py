"""The HTML report of `keepset compare`: one file that needs nothing else, neither a server nor a network.

Everything that a user or a model wrote reaches the page as JSON in a data block, and the page's script puts
it into the document as text only. The page's content security policy allows the report's own scripts by their
hashes and no other.
"""

import base64
import contextlib
import hashlib
import json
import math
import os
import secrets
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from torch import Tensor

from keepset.errors import KeepsetError

_RANK = 3  # layers, KV heads, tokens


def render(comparison: dict[str, Any], tokens: Sequence[str], kept: Sequence[Tensor | None]) -> str:
    """The report as one self-contained HTML page.

    Args:
        comparison: what `keepset compare --json` prints.
        tokens: the text of each prompt token.
        kept: for each row of the comparison the boolean `[layers, kv_heads, tokens]` tensor of what it kept,
            or None where the row failed.
    """
    rows = comparison["rows"]
    if len(kept) != len(rows):
        raise KeepsetError(f"the report needs one kept tensor or None for each of {len(rows)} rows, not {len(kept)}.")
    shapes = {tuple(mask.shape) for mask in kept if mask is not None}
    if len(shapes) > 1 or any(len(shape) != _RANK or shape[-1] != len(tokens) for shape in shapes):
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

    from plotly.offline import get_plotlyjs

    plotly: str = get_plotlyjs()
    page = _asset("page.js")
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in (plotly, page))
    return Template(_asset("template.html")).substitute(
        script_hashes=hashes, style=_asset("page.css"), plotly=plotly, data=script_json(data), page=page
    )


def write(path: Path, html: str) -> None:
    """Write the page so that `path` holds either what it held before or the whole new page."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # The hashes of the scripts hold for "\n" only.
        temporary.write_text(html, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    except OSError as error:
        raise KeepsetError(f"cannot write the report to {path}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def script_json(value: Any) -> str:
    """`value` as ASCII JSON that cannot end or open any markup around it.

    Numbers that JSON has no words for become the strings "NaN", "Infinity" and "-Infinity".
    """
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def pack(kept: Tensor) -> str:
    """A boolean tensor as base64 of its bits, row-major, the first bit highest."""
    return base64.b64encode(np.packbits(kept.bool().cpu().numpy()).tobytes()).decode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
