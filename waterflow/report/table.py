"""Tables that lose nothing on a narrow terminal: what does not fit in rows becomes records.

A terminal table that is too wide is cut by whoever draws it, and the column that is gone may be the
one that mattered. So a table is drawn as one where all of it fits, and else a row at a time: the
first cell on a line of its own, and below it each heading with its cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from waterflow.common.text import printable

_LEAST_WRAPPED = 12  # of a column that wraps, before records are the better reading
_INDENT = 2  # of what is said below a record's name
_GAP = 2  # blanks between two columns


class Column(NamedTuple):
    """A column: its heading; whether its cells are words, to the left; whether they may wrap."""

    heading: str
    words: bool = False
    wraps: bool = False


class FittedTable:
    """A table of texts; rich prints it in whatever width there is.

    Attributes:
        title: above it.
        columns: its columns; the first names the row.
        rows: a text for each column.
        below: lines below it.
    """

    def __init__(self, title: str, *columns: Column) -> None:
        self.title = printable(title)
        self.columns = tuple(
            column._replace(heading=printable(column.heading)) for column in columns
        )
        self.rows: list[tuple[str, ...]] = []
        self.below: list[str] = []

    def add_row(self, *cells: str) -> None:
        """Adds a row.

        Raises:
            ValueError: it has more or fewer cells than there are columns.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(self.columns)} columns, but {len(cells)} cells: {cells}")
        self.rows.append(tuple(map(printable, cells)))

    def add_below(self, lines: Iterable[str]) -> FittedTable:
        """Adds lines below the table, or several where one has line feeds; returns the table."""
        self.below += [printable(part) for line in lines for part in line.split("\n")]
        return self

    @property
    def caption(self) -> str:
        """What is below the table."""
        return "\n".join(self.below)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield _folded(self.title, "italic")
        if self._least_width <= options.max_width:
            yield self._table()
        else:
            yield from self._records(options.max_width)
        yield from (_folded(line, "dim") for line in self.below)

    @property
    def _least_width(self) -> int:
        widths = [self._width(number) for number in range(len(self.columns))]
        return sum(widths) + _GAP * (len(widths) - 1)

    def _width(self, number: int) -> int:
        """Of a column, at least."""
        column = self.columns[number]
        cells = max((cell_len(row[number]) for row in self.rows), default=0)
        return max(cell_len(column.heading), min(cells, _LEAST_WRAPPED) if column.wraps else cells)

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1), collapse_padding=True)
        table.pad_edge = False
        for number, column in enumerate(self.columns):
            table.add_column(
                Text(column.heading),
                justify="left" if number == 0 or column.words else "right",
                no_wrap=not column.wraps,
                min_width=self._width(number),
                overflow="fold",
            )
        for row in self.rows:
            # Text, not str: a job may be called "[bold]", which rich would take for markup.
            table.add_row(*map(Text, row))
        return table

    def _records(self, width: int) -> Iterator[RenderableType]:
        yield Text()
        for name, *others in self.rows:
            yield _folded(name, "bold")
            pairs = zip(self.columns[1:], others, strict=True)
            texts = [f"{column.heading} {cell}" for column, cell in pairs if cell]
            for line in _packed(texts, max(1, width - _INDENT)):
                yield Padding(_folded(line), (0, 0, 0, _INDENT), expand=False)
        yield Text()


def _packed(texts: Sequence[str], width: int) -> Iterator[str]:
    """The texts in lines of at most this width, where each by itself is not wider."""
    line = ""
    for text in texts:
        longer = f"{line}, {text}" if line else text
        if line and cell_len(longer) >= width:
            yield f"{line},"
            longer = text
        line = longer
    if line:
        yield line


def _folded(text: str, style: str = "") -> Text:
    return Text(text, style=style, overflow="fold")
