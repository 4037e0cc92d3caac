"""A report as one HTML file that needs neither a server nor a network.

A page is described by data: a lead, facts, and sections, which are tables, charts, choices between sections, or texts
with what is kept of them. One script draws any such description. All that a user, a model or a server wrote reaches the
page as JSON in a data block, and the script puts it into the document as text only. The page's content security policy
allows its own scripts by their hashes and no other.
"""

import base64
import contextlib
import gzip
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

from keepset.bench.report.origin import origin
from keepset.core.files import check_replaceable
from keepset.errors import KeepsetError

Section = dict[str, Any]
"""A part of a page, as `page.js` draws it."""
Facts = Sequence[tuple[str, str | None]]
"""Names and values; those that are None are left out."""


def page(
    command: str,
    model: str,
    sections: Sequence[Section],
    figures: Any,
    *,
    conclusion: str = "",
    lead: str = "",
    facts: Facts = (),
    settings: Facts = (),
) -> str:
    """Return a page as HTML.

    Args:
        command: the command that makes it, which is its title.
        model: the model's name.
        sections: its parts, in their order.
        figures: all figures as JSON, which a reader can open at the end.
        conclusion: the sentence that it opens with.
        lead: what was measured, in a few sentences.
        facts: stand below the lead.
        settings: stand at the end, with how the page was made.
    """
    data = {
        "model": model,
        "conclusion": conclusion,
        "lead": lead,
        "facts": _known(facts),
        "sections": list(sections),
        "origin": [*origin().items(), *_known(settings)],
        "figures": figures,
    }
    packed = resources.files(__package__).joinpath("plotly-cartesian.min.js.gz").read_bytes()
    script = "".join(map(asset, ("elements.js", "page.js", "kept.js")))
    digests = (base64.b64encode(hashlib.sha256(each).digest()) for each in (gzip.decompress(packed), script.encode()))
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
    """Return a section that shows the sections of one option at a time.

    Args:
        name: the control's id in the document.
        label: stands before the control.
        options: names and their sections; the first is shown at first.
        radio: whether the options are buttons rather than a list.
    """
    named = [{"name": text, "sections": list(sections)} for text, sections in options]
    return {"kind": "choice", "id": name, "label": label, "options": named, "radio": radio}


def errors(items: Sequence[str]) -> Section:
    """Return a section that lists what went wrong."""
    return {"kind": "errors", "items": list(items)}


def _known(facts: Facts) -> list[tuple[str, str]]:
    return [(name, value) for name, value in facts if value is not None]


def write(path: Path, html: str) -> None:
    """Write a file so that `path` holds either what it held before or the whole new text.

    Raises:
        KeepsetError: the place cannot be written to, or what is there is no regular file.
    """
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

    Numbers that JSON has no words for become the strings "NaN", "Infinity" and "-Infinity".
    """
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def asset(name: str) -> str:
    """Return the text of one of the pages' parts: markup, style or script."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
