"""The HTML report of `keepset bench latency`."""

from typing import Any

from keepset.bench.report.page import assemble


def render(result: dict[str, Any]) -> str:
    """The report as one self-contained HTML page, of what `keepset bench latency --json` writes."""
    return assemble("latency", "keepset bench latency", result)
