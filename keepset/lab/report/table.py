"""Tables as data, which the command line prints and a page draws; and formats of figures for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Show = Callable[[Any], str]
"""Returns the text of a value that is not None."""


def integer(value: float) -> str:
    """Return a number without decimals, in groups of three digits."""
    return f"{value:,.0f}"


def decimals(digits: int, suffix: str = "") -> Show:
    """Return a format of numbers.

    Args:
        digits: how many decimals.
        suffix: what follows the number.
    """
    return lambda value: f"{value:.{digits}f}{suffix}"


def percent(value: float) -> str:
    """Return a fraction as a percentage with one decimal."""
    # A value that rounds to zero is shown without a sign.
    return f"{round(100 * value, 1) + 0.0:.1f}%"


def whole_percent(value: float) -> str:
    """Return a fraction as a percentage without decimals."""
    return f"{value:.0%}"


def megabytes(value: float) -> str:
    """Return bytes in units of 10^6; fewer than 50 kB keep two digits."""
    return f"{value / 1e6:.1f}" if value >= 50_000 or not value else f"{value / 1e6:.2g}"


def seconds(value: float) -> str:
    """Return seconds, with three decimals below 10."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def times(value: float) -> str:
    """Return a ratio, such as `x1.25`."""
    return f"x{value:.2f}"


def yes(value: bool) -> str:
    """Return yes or no."""
    return "yes" if value else "no"


def with_interval(value: float, low: float | None, high: float | None, show: Show) -> str:
    """Return a figure with its interval in brackets.

    Args:
        value: the figure.
        low, high: the interval's ends; None if unknown.
        show: returns the text of a number.
    """
    return show(value) if low is None or high is None else f"{show(value)} ({show(low)}..{show(high)})"


Cell = tuple[str, float | str | None]
"""The text of a cell, and the value by which a page sorts it."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: the heading; `unit` stands below it on a page.
        value: returns a row's value, or None if it has none.
        show: returns the text of a value.
        rank: if a terminal is too narrow, columns of the highest rank are left out first; 0 always stays.
        page_only: whether the terminal leaves the column out.
        is_text: whether values are words, which are aligned left.
        is_pinned: whether a narrow page shows the value below the line's name, which stays in view.
    """

    title: str
    value: Callable[[Any], Any]
    show: Show = str
    unit: str = ""
    rank: int = 0
    page_only: bool = False
    is_text: bool = False
    is_pinned: bool = False

    def cell(self, row: Any) -> Cell:
        """Return a row's text and sort value; empty text and None if it has no value."""
        value = self.value(row)
        if value is None:
            return "", None
        number = getattr(value, "value", value)  # a `Figure` sorts by its value
        return self.show(value), number if isinstance(number, int | float | str) else None


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes:
        name: the subject of the line, such as a recipe; `short` replaces it under a heading.
        cells: one cell for each column; empty if there are no figures, and then `error` says why.
        heading: the group of the line; a terminal prints it above the group's first line.
        style: a style of rich for the terminal.
        mark: a symbol of plotly and its colour, which a page shows before the name.
        choice: what the line selects on a page when its name is clicked.
        is_reference: whether a page keeps the line at the top.
    """

    name: str
    cells: Sequence[Cell] = ()
    heading: str = ""
    short: str = ""
    error: str = ""
    style: str = ""
    mark: tuple[str, int | str] | None = None
    choice: int | None = None
    is_reference: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the line as the page's script reads it."""
        line: dict[str, Any] = {"name": self.name, "cells": self.cells, "error": self.error, "mark": self.mark}
        if self.is_reference:
            line["reference"] = True
        return line if self.choice is None else {**line, "go": self.choice}


@dataclass
class Table:
    """Lines under columns. With `fold` numbers may continue in a next line of the terminal."""

    head: str
    columns: list[Column]
    lines: list[Line] = field(default_factory=list)
    fold: bool = False

    def add(self, name: str, row: Any, **line: Any) -> None:
        """Add the line of a row with figures.

        Args:
            name: the subject of the line.
            row: the row, from which columns take their values.
            line: what else a `Line` may have.
        """
        self.lines.append(Line(name, [column.cell(row) for column in self.columns], **line))

    def section(self, title: str, name: str = "rows", note: str = "") -> dict[str, Any]:
        """Return the table as a section of a page.

        Args:
            title: the heading.
            name: the section's id.
            note: the words below the heading.
        """
        columns = [
            {"title": column.title, "unit": column.unit, "text": column.is_text, "pinned": column.is_pinned}
            for column in self.columns
        ]
        lines = [line.to_json() for line in self.lines]
        section = {"kind": "table", "id": name, "title": title, "note": note}
        return {**section, "head": self.head, "columns": columns, "lines": lines}


def filled(columns: Iterable[Column], rows: Sequence[Any]) -> list[Column]:
    """Return the columns in which at least one row has a value.

    Args:
        columns: the columns.
        rows: the rows.
    """
    return [column for column in columns if any(column.value(row) is not None for row in rows)]
