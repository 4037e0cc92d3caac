"""`keepset methods`: the catalogue."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the methods: what they are, what they look at, their parameters and papers."""
    from rich.table import Table
    from rich.text import Text

    from keepset.cli.console import out, printable
    from keepset.registry import catalogue

    entries = catalogue()
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("method and defaults", "kind", "looks at", "paper"):
        table.add_column(title, overflow="fold")
    for entry in entries:
        cells = (
            f"{entry['name']}({_parameters(entry['parameters'])})",
            entry["family"] if entry["layout"] == "dense" else entry["layout"],
            ", ".join(entry["needs"]) or "keys, values",
            entry["paper"],
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    out.print(table)


def _parameters(parameters: dict[str, Any]) -> str:
    return ", ".join(name if value is None else f"{name}={value!r}" for name, value in parameters.items())
