"""`Grid`: a table that fits the terminal: it leaves columns out, and breaks texts between words only."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable
    from rich.text import Text

    from keepset.lab.report.table import Table

_GAP = 2
_NAME = 44
"""A text may be this wide before a column is left out for it."""


@dataclass
class GridColumn:
    """A title and the cells below it.

    Attributes:
        is_number: whether cells stand at the right.
        is_whole: whether every cell stays on one line.
        rank: where the terminal is too narrow, columns of the highest rank are left out first; 0 always stays.
    """

    title: str
    is_number: bool = False
    is_whole: bool = False
    rank: int = 0
    cells: list[Text] = field(default_factory=list)

    @property
    def widest(self) -> int:
        """Cells of the terminal that the longest line takes."""
        return max(map(_width, [self.title, *(line for cell in self.cells for line in cell.plain.splitlines())]))

    @property
    def least(self) -> int:
        """Cells of the terminal that the longest word takes, or the longest line if lines stay whole."""
        words = [word for text in (self.title, *(cell.plain for cell in self.cells)) for word in text.split()]
        return self.widest if self.is_whole else max(map(_width, words), default=0)

    @property
    def wanted(self) -> int:
        """Width that the column must have for others to stay beside it."""
        return self.least if self.is_number else max(self.least, min(self.widest, _NAME))


class Grid:
    """A table's lines under their headings, as wide as they are or as the terminal is; those with errors alone not."""

    def __init__(self, table: Table) -> None:
        from rich.text import Text

        shown = [(at, column) for at, column in enumerate(table.columns) if not column.page_only]
        self.columns = [GridColumn(table.head)]
        for _, column in shown:
            is_whole = not (column.is_text or table.fold)
            self.columns.append(GridColumn(column.title, not column.is_text, is_whole, column.rank))
        self._styles: list[str] = []
        heading = ""
        for line in (line for line in table.lines if line.cells):
            if line.heading != heading:
                heading = line.heading
                self._add([Text(sanitize(heading), "bold")])
            inside = "  " if heading else ""
            name = Text(sanitize(inside + (line.short or line.name)))
            if line.error:
                name.append("".join(f"\n  {inside}{part}" for part in sanitize(line.error).split("\n")), "red")
            self._add([name, *(Text(sanitize(line.cells[at][0])) for at, _ in shown)], line.style)

    def _add(self, cells: Sequence[Text], style: str = "") -> None:
        from rich.text import Text

        for column, cell in zip_longest(self.columns, cells):
            column.cells.append(cell or Text())
        self._styles.append(style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
        from rich.table import Table as RichTable

        columns = self._fitting(options.max_width)
        widths = _widths(columns, options.max_width)
        table = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for column, width in zip(columns, widths, strict=True):
            justify = "right" if column.is_number else "left"
            table.add_column(
                column.title,
                justify=justify,  # type: ignore[arg-type]
                width=width,
                no_wrap=column.is_whole,
                overflow="fold",
            )
        for number, style in enumerate(self._styles):
            table.add_row(*(column.cells[number] for column in columns), style=style)
        yield table

    def _fitting(self, width: int) -> list[GridColumn]:
        """Return the columns for which there is room, in their order, without optional ones that are empty."""
        columns = [column for column in self.columns if not column.rank or any(cell.plain for cell in column.cells)]
        while sum(column.wanted + _GAP for column in columns) - _GAP > width:
            last = max(columns, key=lambda column: column.rank)
            if not last.rank:
                break
            columns.remove(last)
        return columns


def _widths(columns: Sequence[GridColumn], width: int) -> list[int | None]:
    """Return every column's width; None for texts that rich has to shrink, because not all words fit.

    Columns have their longest word first; then texts grow, then numbers.
    """
    room = width - sum(column.least + _GAP for column in columns) + _GAP
    if room < 0:
        return [column.least if column.is_whole else None for column in columns]
    widths = [column.least for column in columns]
    for goal, kind in (("wanted", False), ("widest", True), ("widest", False)):
        for at, column in enumerate(columns):
            if column.is_number is kind:
                growth = min(room, max(getattr(column, goal) - widths[at], 0))
                widths[at], room = widths[at] + growth, room - growth
    return list(widths)


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def sanitize(text: str) -> str:
    """Return a text of a model or a user without characters that control a terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in text)
