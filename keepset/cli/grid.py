"""`Grid`: a table that fits the terminal by leaving columns out, and breaks texts between words only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

_GAP = 2
_NAME = 44
"""A text may be this wide before a column is left out for it."""


@dataclass
class Column:
    """A title and its cells; numbers stand at the right, and keep to one line unless they may `fold`.

    Attributes:
        rank: where the terminal is too narrow, columns of the highest rank are left out first; 0 for those that stay.
    """

    title: str
    number: bool
    fold: bool
    rank: int
    cells: list[Text] = field(default_factory=list)

    @property
    def widest(self) -> int:
        """Of its lines, none broken."""
        return max(cell.cell_len if "\n" not in cell.plain else _lines(cell) for cell in self._all())

    @property
    def least(self) -> int:
        """Of its words."""
        return max((_cells(word) for cell in self._all() for word in cell.plain.split()), default=0)

    @property
    def wanted(self) -> int:
        """What it must have for others to stay beside it."""
        if self.number:
            return self.least if self.fold else self.widest
        return max(self.least, min(self.widest, _NAME))

    def _all(self) -> Iterator[Text]:
        from rich.text import Text

        return chain([Text(self.title)], self.cells)


class Grid:
    """Rows under titles, printed as wide as they are or as the terminal is.

    Args:
        texts: titles of columns that may go on in a next line, at a space.
        numbers: titles of columns at the right of those, which stay on one line unless `fold`.
        optional: titles of columns that may be left out, the most dispensable first.
    """

    def __init__(
        self, texts: Sequence[str], numbers: Sequence[str], optional: Sequence[str] = (), fold: bool = False
    ) -> None:
        ranks = {title: len(optional) - at for at, title in enumerate(optional)}
        titles = [*((title, False) for title in texts), *((title, True) for title in numbers)]
        self._columns = [Column(title, number, fold, ranks.get(title, 0)) for title, number in titles]
        self._styles: list[str] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """A row; what is missing at its end is empty."""
        from rich.text import Text

        padded = [*cells, *[""] * (len(self._columns) - len(cells))]
        for column, cell in zip(self._columns, padded, strict=True):
            column.cells.append(Text(cell) if isinstance(cell, str) else cell)
        self._styles.append(style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        from rich.table import Table

        columns = self._fitting(options.max_width)
        widths = _widths(columns, options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for column, width in zip(columns, widths, strict=True):
            justify, one_line = ("right", not column.fold) if column.number else ("left", False)
            table.add_column(column.title, justify=justify, width=width, no_wrap=one_line, overflow="fold")  # type: ignore[arg-type]
        for number, style in enumerate(self._styles):
            table.add_row(*(column.cells[number] for column in columns), style=style)
        yield table

    def _fitting(self, width: int) -> list[Column]:
        """The columns for which there is room, in their order; empty ones are left out in any case."""
        columns = [column for column in self._columns if not column.rank or any(cell.plain for cell in column.cells)]
        while sum(column.wanted + _GAP for column in columns) - _GAP > width:
            last = max(columns, key=lambda column: column.rank)
            if not last.rank:
                break
            columns.remove(last)
        return columns


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Of each column: what it wants; more where there is room, less for the widest texts where there is too little."""
    widths = [column.wanted for column in columns]
    room = width - sum(widths) - _GAP * (len(widths) - 1)
    for column, at in sorted(((column, at) for at, column in enumerate(columns)), key=lambda each: not each[0].number):
        more = min(max(room, 0), column.widest - widths[at])
        widths[at], room = widths[at] + more, room - more
    while room < 0:
        texts = [at for at, column in enumerate(columns) if not column.number and widths[at] > 1]
        wider = [at for at in texts if widths[at] > columns[at].least] or texts
        if not wider:
            break
        widths[max(wider, key=widths.__getitem__)] -= 1
        room += 1
    return widths


def _lines(cell: Text) -> int:
    return max(_cells(line) for line in cell.plain.splitlines())


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
