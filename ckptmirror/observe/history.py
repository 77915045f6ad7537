"""The history of a run, read from this disk: the journal of events, the table's transitions, the local metas.

Rules:
* Nothing is locked and nothing is changed; a trainer may be running.
* A source that cannot be read is reported in ``problems``, and the others are used; without any, that is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenTable, CheckpointNotFound, NoTable
from ckptmirror.core.journal import FILE_LIMIT_BYTES, JournalEntry, entries_from_lines
from ckptmirror.core.model import Meta
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.line_file import read_lines
from ckptmirror.local.table_place import open_known_table
from ckptmirror.local.uploads import Transition

__all__ = ["History", "read_history"]


@dataclass(frozen=True)
class History:
    """Everything that is known about what happened when.

    Attributes:
        told: The journal's events, in the order in which they were written.
        transitions: The table's transitions, oldest first.
        saves: The metas of the whole saves under the root.
        broken_lines: The number of journal lines that are cut short, or whose events this version does not know.
        problems: One sentence for each thing that could not be read.
    """

    told: tuple[JournalEntry, ...] = ()
    transitions: tuple[Transition, ...] = ()
    saves: tuple[Meta, ...] = ()
    broken_lines: int = 0
    problems: tuple[str, ...] = ()


def read_history(root: Path) -> History:
    """Read the history of a root.

    Raises:
        NoTable: ckptmirror has not saved here.
        ForeignTable: The table is another root's.
        CheckpointNotFound: There is a table, but nothing has happened yet.
    """
    lines, problems = read_lines(
        root / names.EVENTS_NAME, older=root / names.OLDER_EVENTS_NAME, limit_bytes=FILE_LIMIT_BYTES
    )
    told, broken = entries_from_lines(lines)
    transitions: list[Transition] = []
    try:
        transitions = _transitions(root)
    except (NoTable, BrokenTable) as error:
        if not told:
            raise
        problems.append(f"The history of uploads is not in it: {error}")
    saves = tuple(save.meta for save in read_inventory(root).saves)
    if not (told or transitions or saves):
        raise CheckpointNotFound(
            f"Nothing has happened under {root} yet: no event, no upload and no save.",
            hint="Save a step, or pass the root of another run.",
        )
    return History(tuple(told), tuple(transitions), saves, broken, tuple(problems))


def _transitions(root: Path) -> list[Transition]:
    with open_known_table(root, read_only=True) as table:
        return table.history()
