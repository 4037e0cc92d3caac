"""`keepset methods`: the catalogue."""

from __future__ import annotations

from typing import Any

from keepset.cli import console
from keepset.cli.options import Json


def methods(as_json: Json = False) -> None:
    """List the methods: what they are, what they look at, their parameters and papers."""
    from keepset.registry import catalogue

    entries = catalogue()
    if as_json:
        console.print_json(entries)
        return
    table = console.table("method and defaults", "kind", "looks at", "paper")
    for entry in entries:
        cells = (
            f"{entry['name']}({_parameters(entry['parameters'])})",
            entry["family"] if entry["layout"] == "dense" else entry["layout"],
            ", ".join(entry["needs"]) or "keys, values",
            entry["paper"],
        )
        table.add_row(*map(console.cell, cells))
    console.show(table)


def _parameters(parameters: dict[str, Any]) -> str:
    return ", ".join(name if value is None else f"{name}={value!r}" for name, value in parameters.items())
