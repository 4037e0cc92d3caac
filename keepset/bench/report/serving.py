"""The HTML report of `keepset bench serve`."""

from collections.abc import Sequence
from typing import Any

from keepset.bench.report.page import assemble


def render(result: dict[str, Any], rows: Sequence[Sequence[str]]) -> str:
    """The report as one self-contained HTML page of what `keepset bench serve --json` writes.

    Rows are its figures as text: a name, then one cell per server and, of two servers, their ratio.
    """
    servers = [
        {
            "name": server["name"],
            "errors": server["summary"]["errors"],
            "rounds": [
                {
                    "seconds": each["seconds"],
                    "samples": each["samples"],
                    # The page draws no single chunks, and there may be millions.
                    "requests": [{**request, "chunks": len(request["chunks"])} for request in each["requests"]],
                }
                for each in server["rounds"]
            ],
        }
        for server in result["servers"]
    ]
    head = {name: result[name] for name in ("model", "recipe", "load", "options", "keepset")}
    return assemble("serving", "keepset bench serve", {**head, "servers": servers, "rows": [list(row) for row in rows]})
