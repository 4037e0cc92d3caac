"""`Grid`: a table that fits the terminal: it leaves columns out, and breaks texts between words only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

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
    """Rows under titles, printed as wide as they are or as the terminal is.

    Args:
        texts: titles of columns that may go on in a next line, at a space.
        numbers: titles of columns at the right of those, which stay on one line unless `fold`.
        optional: titles of columns that may be left out, the most dispensable first.
        fold: whether numbers may go on in a next line, at a space.
    """

    def __init__(
        self, texts: Sequence[str], numbers: Sequence[str], optional: Sequence[str] = (), fold: bool = False
    ) -> None:
        ranks = {title: len(optional) - at for at, title in enumerate(optional)}
        self.columns = [GridColumn(title, rank=ranks.get(title, 0)) for title in texts]
        self.columns += [GridColumn(title, True, not fold, ranks.get(title, 0)) for title in numbers]
        self._styles: list[str] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row; cells that are missing at its end are empty."""
        from rich.text import Text

        padded = [*cells, *[""] * (len(self.columns) - len(cells))]
        for column, cell in zip(self.columns, padded, strict=True):
            column.cells.append(Text(cell) if isinstance(cell, str) else cell)
        self._styles.append(style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        from rich.table import Table

        columns = self._fitting(options.max_width)
        widths = _widths(columns, options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
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
                more = min(room, max(getattr(column, goal) - widths[at], 0))
                widths[at], room = widths[at] + more, room - more
    return list(widths)


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
