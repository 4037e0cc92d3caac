"""The table of an entry: the paper's figures beside those that were measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from keepset.bench.papers.figures import FRACTIONS
from keepset.bench.report.table import Column, Table


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table, with a heading for every task and metric.

    Args:
        rows: places (`task`, `method`, `keep`, `metric`), each with the measured `figure` and that of the `paper`,
            which may be None, with the number of `examples`, and with how many of them `failed`.
    """
    columns = [
        Column("keep", lambda row: row["keep"]),
        Column("paper", lambda row: _number(row["paper"], row["metric"])),
        Column("measured (95 %)", lambda row: _with_interval(row["figure"], row["metric"])),
        Column("examples", lambda row: row["examples"], rank=1),
    ]
    table = Table("", columns, fold=True)
    for row in rows:
        error = f"failed on {row['failed']} of {row['examples']}: {row['error']}" if row["failed"] else ""
        table.add(row["method"], row, heading=f"{row['task']}, {row['metric']}", error=error)
    return table


def _with_interval(figure: Mapping[str, float | None] | None, metric: str) -> str:
    """Return a figure with its interval, which a narrow terminal puts on a line of its own."""
    if figure is None:
        return ""
    value, low, high = (_number(figure[name], metric) for name in ("value", "low", "high"))
    return f"{value} ({low}..{high})" if low else value


def _number(value: float | None, metric: str) -> str:
    """Return a number as text: a fraction in percent, bytes in units of 10^6."""
    if value is None:
        return ""
    if metric.endswith("_bytes"):
        return f"{value / 1e6:.1f} MB"
    # A value that rounds to zero has no sign.
    return f"{round(100 * value, 1) + 0.0:.1f}" if metric in FRACTIONS else f"{value:,.4g}"
