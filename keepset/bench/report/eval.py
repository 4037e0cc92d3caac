"""The HTML report of a sweep of benchmarks."""

from collections.abc import Mapping
from typing import Any

from keepset.bench.report.page import assemble


def render(model: str, configuration: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The report as one self-contained HTML page of what `keepset results --json` prints.

    The configuration is what all cells have in common, by names that a person understands.
    """
    common = {name: str(value) for name, value in configuration.items() if value is not None}
    return assemble("eval", "keepset results", {"model": model, "configuration": common, "summary": summary})
