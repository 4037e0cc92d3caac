"""The HTML report of `keepset tune`."""

from typing import Any

from keepset.bench.report.page import assemble


def render(result: dict[str, Any]) -> str:
    """The report as one self-contained HTML page.

    Args:
        result: what `keepset tune --json` prints.
    """
    return assemble("tune", "keepset tune", result)
