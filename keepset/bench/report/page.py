"""A report as one HTML file that needs nothing else, neither a server nor a network.

Everything that a user, a model or a server wrote reaches the page as JSON in a data block, and the page's script puts
it into the document as text only. The page's content security policy allows the report's own scripts by their
hashes and no other.
"""

import base64
import contextlib
import gzip
import hashlib
import json
import math
import os
import secrets
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from keepset.bench.report.origin import origin
from keepset.core.files import check_replaceable
from keepset.errors import KeepsetError


def assemble(name: str, title: str, data: dict[str, Any], conclusion: str = "") -> str:
    """The page made of the markup and the script of that name in the common frame, with plotly and the data inside.

    It opens with the conclusion, a sentence, and ends with how it was made.
    """
    packed = resources.files(__package__).joinpath("plotly-cartesian.min.js.gz").read_bytes()
    script = "".join(map(asset, ("page.js", "plots.js", f"{name}.js")))
    digests = (base64.b64encode(hashlib.sha256(each).digest()) for each in (gzip.decompress(packed), script.encode()))
    hashes = " ".join(f"'sha256-{digest.decode('ascii')}'" for digest in digests)
    return Template(asset("frame.html")).substitute(
        title=title,
        script_hashes=hashes,
        style=asset("page.css"),
        main=asset(f"{name}.html"),
        data=script_json(data),
        about=script_json({"conclusion": conclusion, "origin": origin()}),
        plotly=base64.b64encode(packed).decode("ascii"),
        page=script,
    )


def write(path: Path, html: str) -> None:
    """Write the page so that `path` holds either what it held before or the whole new page.

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
    """`value` as ASCII JSON that cannot end or open any markup around it.

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
    """One of the pages' parts: markup, style or script."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
