"""A summary as CSV."""

import csv
import io
import unicodedata
from typing import Any

from keepset.bench.analysis.rows import Row
from keepset.bench.analysis.summary import Summary

_INTERVALS = ("score", "difference")
# Spreadsheets take a text that begins with one of these for a formula.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def to_csv(summary: Summary) -> str:
    """Return rows and averages as CSV; a text that a spreadsheet would take for a formula begins with `'`."""
    out = io.StringIO()
    rows = [_flat(row) for row in (*summary.rows, *summary.averages)]
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    """Return a row by names of columns; an interval has a column for each of its ends."""
    flat: dict[str, Any] = {}
    for name, value in row.to_json().items():
        if name in _INTERVALS:
            ends = value or {"value": "", "low": "", "high": ""}
            flat |= {name: ends["value"], f"{name}_low": ends["low"], f"{name}_high": ends["high"]}
        else:
            # Spreadsheets also take some full-width forms for formulas.
            is_risky = isinstance(value, str) and unicodedata.normalize("NFKC", value[:1]).startswith(_FORMULAS)
            flat[name] = f"'{value}" if is_risky else value
    return flat
