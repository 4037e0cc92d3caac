"""A report as one HTML file that needs neither a server nor a network.

A page is described by data: a lead, facts, and sections. Sections are tables, charts, choices between sections, or
texts shaded by what is kept. One script draws any such description. All words of users, models and servers reach the
page as JSON in a data block, and the script inserts them only as text. The page's content security policy allows only
its own scripts, by their hashes.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import math
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import keepset
from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from torch import Tensor

Section = dict[str, Any]
"""A part of a page, as `page.js` draws it."""
Facts = Sequence[tuple[str, str | None]]
"""Names and values; those that are None are left out."""


def page(
    command: str,
    model: str,
    sections: Sequence[Section],
    *,
    conclusion: str = "",
    lead: str = "",
    facts: Facts = (),
    settings: Facts = (),
) -> str:
    """Return a page as HTML.

    Args:
        command: the command that makes the page, which is its title.
        model: the model's name.
        sections: its parts, in their order.
        conclusion: the opening sentence.
        lead: a few sentences on what was measured.
        facts: facts below the lead.
        settings: settings at the end, beside the page's origin.
    """
    data = {
        "model": model,
        "conclusion": conclusion,
        "lead": lead,
        "facts": _known(facts),
        "sections": list(sections),
        "origin": [*_origin().items(), *_known(settings)],
    }
    packed = resources.files(__package__).joinpath("plotly-cartesian.min.js.gz").read_bytes()
    script = "".join(map(asset, ("elements.js", "page.js", "kept.js")))
    digests = (
        base64.b64encode(hashlib.sha256(content).digest()) for content in (gzip.decompress(packed), script.encode())
    )
    hashes = " ".join(f"'sha256-{digest.decode('ascii')}'" for digest in digests)
    return Template(asset("frame.html")).substitute(
        title=command,
        script_hashes=hashes,
        style=asset("page.css"),
        data=script_json(data),
        plotly=base64.b64encode(packed).decode("ascii"),
        page=script,
    )


def choice(name: str, label: str, options: Sequence[tuple[str, Sequence[Section]]], *, radio: bool = False) -> Section:
    """Return a section that shows the sections of one option at a time, initially the first.

    Args:
        name: the control's id.
        label: the words before it.
        options: the options with their sections.
        radio: whether the control is buttons; else it is a list.
    """
    named = [{"name": text, "sections": list(sections)} for text, sections in options]
    return {"kind": "choice", "id": name, "label": label, "options": named, "radio": radio}


def pack(kept: Tensor) -> str:
    """Return a boolean tensor as base64 of its zipped bits, row-major, the first bit highest."""
    import numpy as np  # not above: commands without figures need not wait for it

    return base64.b64encode(gzip.compress(np.packbits(kept.bool().cpu().numpy()).tobytes(), mtime=0)).decode("ascii")


def kept_text(
    title: str,
    tokens: Sequence[str | None],
    choices: Sequence[tuple[str, Tensor | None]],
    *,
    first: int | None = None,
    answer: str = "",
    grids: Sequence[tuple[int, int, int]] = (),
) -> Section:
    """Return a section that shades a text by the share of heads that keep a token.

    Args:
        title: the section's heading.
        tokens: the text, token by token; None for one that only continues the character before it.
        choices: each recipe and what it kept, bool `[layers, kv_heads, tokens]`, all of one shape; None if it failed.
        first: the number of the choice that is shown initially.
        answer: words of the text that are underlined.
        grids: the first token of each image, and the rows and columns of patches of its tokens.
    """
    layers, heads = next((mask.shape[:2] for _, mask in choices if mask is not None), (0, 0))
    return {
        "kind": "kept",
        "title": title,
        "tokens": list(tokens),
        "grids": list(grids),
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


def _known(facts: Facts) -> list[tuple[str, str]]:
    return [(name, value) for name, value in facts if value is not None]


def _origin() -> dict[str, str]:
    """Return the origin by names that people understand."""
    import torch  # not above: commands without figures need not wait for it

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "Command": shlex.join(["keepset", *sys.argv[1:]]),
        "Date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "Machine": ", ".join([f"{_processor()}, {cores} cores", *gpus]),
        "Threads": str(torch.get_num_threads()),
        "Versions": f"keepset {keepset.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def write(path: Path, html: str) -> None:
    """Write a file so that `path` always holds either the old or the complete new text.

    Args:
        path: the file.
        html: its text.

    Raises:
        KeepsetError: the path cannot be written to, or is not a regular file.
    """
    from keepset.core.files import check_replaceable  # which imports torch

    check_replaceable(path)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
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
    """Return ASCII JSON that cannot end or open any markup around it.

    Numbers that JSON lacks become the strings "NaN", "Infinity" and "-Infinity".
    """

    def word(number: float) -> str:
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"

    text = json.dumps(finite(value, word), allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def finite(value: Any, word: Callable[[float], str | None]) -> Any:
    """Return a value for JSON, which lacks NaN and infinity.

    Args:
        value: any value of lists, dictionaries and numbers.
        word: returns the replacement of a number that is not finite.
    """
    if isinstance(value, dict):
        return {str(key): finite(item, word) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, word) for item in value]
    return word(value) if isinstance(value, float) and not math.isfinite(value) else value


def asset(name: str) -> str:
    """Return the text of one of the pages' parts: markup, style or script."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
