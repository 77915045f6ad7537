"""Tables on stdout: on a terminal with heads, colours and ages; elsewhere plain columns, for a script to cut.

Rules:
* Elsewhere there is no head, no colour and no age: what a script has learnt to read stays as it is.
* ``NO_COLOR`` is heeded. rich is imported only for a terminal: the other way is quick.
* What a mirror or a file says reaches no terminal raw.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmirror.cli._streams import raw_stdout
from ckptmirror.core.printable import printable_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["SAVE_COLUMNS", "Cell", "Column", "is_for_people", "print_line", "print_table", "standing_style"]

Cell = str | tuple[str, str]
"""Its text; or that and its style, in rich's words."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        head: What stands over it on a terminal.
        width: How wide it is elsewhere; 0: as wide as each cell is.
        right: Whether it ends flush.
        only_for_people: Whether it is left out where nobody looks.
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
"""What the tables of saves begin with."""


def is_for_people() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def standing_style(standing: str) -> str:
    """Return the style of a save's standing: what counts stands out, what is off the lineage steps back."""
    return {"current": "green", "replaced": "dim", "superseded": "dim", "incomplete": "red"}.get(standing, "yellow")


def print_line(text: str, style: str) -> None:
    """Print a line, in colour where that can be."""
    if is_for_people():
        from rich.text import Text

        _console().print(Text(printable_text(text), style), soft_wrap=True)  # a command in it is pasted as one line
    else:
        print(text)


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
            table.add_row(*(Text(printable_text(_text(row[number])), _style(row[number])) for number in used))
        _console().print(table)


def _padded(column: Column, cell: Cell) -> str:
    return f"{_text(cell):>{column.width}}" if column.right else f"{_text(cell):<{column.width}}"


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _style(cell: Cell) -> str:
    return "" if isinstance(cell, str) else cell[1]


def _console() -> Console:
    from rich.console import Console

    return Console(file=raw_stdout(), highlight=False)
