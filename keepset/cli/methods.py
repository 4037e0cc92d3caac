"""`keepset methods`: the catalogue."""

from typing import Any

from keepset.cli.console import cell, output, show, table
from keepset.cli.options import Json


def methods(json_file: Json = None) -> None:
    """List the methods: what they are, what they look at, their parameters and papers."""
    from keepset.registry import catalogue

    entries = catalogue()
    output(entries, json_file, lambda: _print(entries))


def _print(entries: list[dict[str, Any]]) -> None:
    grid = table("method and defaults", "kind", "looks at", "paper")
    for entry in entries:
        parameters = (name if value is None else f"{name}={value!r}" for name, value in entry["parameters"].items())
        cells = (
            f"{entry['name']}({', '.join(parameters)})",
            entry["family"] if entry["layout"] == "dense" else entry["layout"],
            ", ".join(entry["needs"]) or "keys, values",
            entry["paper"],
        )
        grid.add_row(*map(cell, cells))
    show(grid)
