"""Tables on stdout: on a terminal with headers, colours and ages; elsewhere plain columns, for scripts.

Rules:
* Elsewhere there are no headers, colours or ages, so that scripts that read the output keep working.
* ``NO_COLOR`` is respected. rich is imported only for a terminal, because the import is slow.
* Control characters from a mirror or a file never reach a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmirror.cli._streams import raw_stdout
from ckptmirror.core.printable import printable_line

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["SAVE_COLUMNS", "Cell", "Column", "is_for_people", "print_line", "print_table", "standing_style"]

Cell = str | tuple[str, str]
"""A text, or a text with its style in rich's syntax."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        head: Its header on a terminal.
        width: Its width elsewhere; 0: the width of each cell.
        right: Whether it is aligned right.
        only_for_people: Whether it is shown only on a terminal.
    """

    head: str
    width: int = 0
    right: bool = False
    only_for_people: bool = False


SAVE_COLUMNS = (
    Column("STEP", 9, right=True),
    Column("KIND", 10),
    Column("SIZE", 10, right=True),
    Column("STANDING", 11),
    Column("SAVE", 8),
)
"""The first columns of every table of saves."""


def is_for_people() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def standing_style(standing: str) -> str:
    """Return the style of a save's standing: bright for saves that count, dim for those off the lineage."""
    return {"current": "green", "replaced": "dim", "superseded": "dim", "incomplete": "red"}.get(standing, "yellow")


def print_line(text: str, style: str) -> None:
    """Print a line, in colour if stdout supports it."""
    if is_for_people():
        from rich.text import Text

        _console().print(Text(printable_line(text), style), soft_wrap=True)  # one line, so that a command can be pasted
    else:
        print(printable_line(text))


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """Print rows of cells, one for each column. On a terminal a column that is empty in every row is left out."""
    if not is_for_people():
        for row in rows:
            cells = [_padded(*one) for one in zip(columns, row, strict=True) if not one[0].only_for_people]
            print("  ".join(cells).rstrip())
    elif rows:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        used = [number for number in range(len(columns)) if any(_text(row[number]) for row in rows)]
        for column in (columns[number] for number in used):
            table.add_column(
                column.head, justify="right" if column.right else "left", no_wrap=column.width > 0, overflow="fold"
            )
        for row in rows:
            table.add_row(*(Text(_text(row[number]), _style(row[number])) for number in used))
        _console().print(table)


def _padded(column: Column, cell: Cell) -> str:
    return f"{_text(cell):>{column.width}}" if column.right else f"{_text(cell):<{column.width}}"


def _text(cell: Cell) -> str:
    return printable_line(cell if isinstance(cell, str) else cell[0])


def _style(cell: Cell) -> str:
    return "" if isinstance(cell, str) else cell[1]


def _console() -> Console:
    from rich.console import Console

    return Console(file=raw_stdout(), highlight=False)
