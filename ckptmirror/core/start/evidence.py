"""Evidence: what each place reports of the run, as values. A survey fills it in and knows no rule.

A *place* is this disk, a mirror, or the persistent directory. What they have together has a row of its own. Rules:

* A place that did not answer has a row too: its silence is a fact.
* Every meta is evidence, even if its save is not whole: it names an attempt and shows that the attempt committed.
* Values only, which convert to JSON and back without loss, so that anyone can replay a start that surprised them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Literal, TypeVar

from ckptmirror.core.model import Attempt, Kind, Requirement
from ckptmirror.core.problems import Hindrance
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.lineage import SaveFacts, merge_requirements

__all__ = [
    "ANYWHERE",
    "DISK",
    "Copy",
    "Evidence",
    "Heard",
    "ListFound",
    "Origin",
    "Part",
    "Problem",
    "Row",
    "Sort",
    "Voice",
    "evidence_from_json",
    "evidence_to_json",
]

DISK = "disk"
ANYWHERE = "anywhere"
Sort = Literal["disk", "mirror", "persistent", "anywhere"]


class ListFound(StrEnum):
    """What a survey found in place of a list of attempts, or the list itself."""

    SOUND = "sound"
    NONE = "none"  # no list, and no save that names an attempt
    LOST = "lost"  # no list, but saves that name attempts
    BROKEN = "broken"
    NEWER = "newer"  # of a later version of ckptmirror


class Voice(StrEnum):
    """How a place knows of an attempt."""

    CLAIMED = "claimed"  # its list has it
    COUNTS = "counts"  # it has a committed save of it; a staged one on this disk only if a claim here continued from it
    COMPLETED = "completed"  # this root claimed it, and every required mirror recorded the claim
    NAMED = "named"  # only a meta names it
    UPLOADED = "uploaded"  # this root's table records that a save of it is committed on a mirror
    FENCED_US = "fenced_us"  # it fenced an attempt of this root
    REPORTED = "reported"  # on this root, its training reported a step
    DIVERGED = "diverged"  # its training reported a loss that is not finite
    ENDED = "ended"  # on this root, it ended in order
    SAVED = "saved"  # on this root, it committed a save after it had reported a step
    UNDECIDED = "undecided"  # a list of ckptmirror 0.1.0 has it, written before its parent was known


class Origin(StrEnum):
    """How a copy got to its place."""

    SAVED_HERE = "saved_here"
    STAGED = "staged"  # brought from a mirror
    COPIED = "copied"  # copied with the root: this is not the directory that its table knew
    REMOTE = "remote"  # it is on a mirror, or in the persistent directory


@dataclass(frozen=True)
class Heard:
    """An attempt, and how one place knows of it."""

    attempt: Attempt
    voices: frozenset[Voice]


@dataclass(frozen=True)
class Copy:
    """A save that can be resumed from in one place.

    Attributes:
        save: The save, with only the kinds in which this copy has everything that a resume needs.
        origin: How the copy got there.
        unfinished: Whether an earlier start was killed while it repaired this copy.
        world_size: How many ranks saved it.
        no_proof: Whether it lost lists of tensors, so that a load of it cannot be proved.
    """

    save: SaveFacts
    origin: Origin
    unfinished: bool = False
    world_size: int = 1
    no_proof: bool = False


@dataclass(frozen=True)
class Part:
    """What one of several nodes wrote of a save, on the disk of a node. ``disks`` joins the parts of a save.

    Attributes:
        save: The whole save.
        kinds: The kinds in which this part is whole.
        shares: Which shares of the save it has, from 0: that of one node; of an emergency snapshot, those of ranks.
        of: How many shares the save has.
        origin: How the part got to its disk.
        name: The path of its meta.
        why: What is wrong with it; "" if it is whole in all kinds.
        hindrance: As of a :class:`Problem`.
        world_size: How many ranks saved the whole save.
        is_given_up: Whether this disk sends nothing more of it: a start found that nothing can make the save whole, or
            the run went on without it. Rotation deletes it.
    """

    save: SaveFacts
    kinds: tuple[Kind, ...]
    shares: tuple[int, ...]
    of: int
    origin: Origin
    name: str
    why: str = ""
    hindrance: Hindrance = ""
    world_size: int = 1
    is_given_up: bool = False


@dataclass(frozen=True)
class Problem:
    """Something that looks like a save but cannot be resumed from in its place.

    Attributes:
        name: A path, or a URL and an object's name.
        why: What is wrong.
        step: None if unknown.
        save_id: "" if unknown.
        kinds: The kinds in which it could be resumed from, if it were whole.
        save: The save that its meta describes, if the meta can be read.
        hindrance: Set if it merely cannot be read now (an I/O error, a permission, a later format; ``refused``: the
            mirror does not accept these credentials for it), so that it may be whole.
        is_save: Whether it is or was a save of this run. Other things only show that the place is not empty.
    """

    name: str
    why: str
    step: int | None = None
    save_id: str = ""
    kinds: tuple[Kind, ...] = ("dcp", "model")
    save: SaveFacts | None = None
    hindrance: Hindrance = ""
    is_save: bool = True


@dataclass(frozen=True)
class Row:
    """What one place reports.

    Attributes:
        place: ``DISK``, a mirror's URL, the path of the persistent directory, or ``ANYWHERE``: all of these together,
            each with the files that are whole there.
        sort: Which of these four it is.
        reach: Whether it answered.
        why: Why it did not answer.
        required: Whether a start needs its answer: it is a required mirror, or no mirror is required.
        was_required: Whether it was required at this root's last start, and holds something verified.
        listed: The condition of its list.
        run_id: The run that its list names, or else its saves; None if neither does.
        run_on: Of the disks of several nodes: the nodes whose disks hold the run.
        requirements: What its list says of each mirror that is required, or was.
        heard: Every attempt that it names. A place may have shown its list before it fell silent.
        copies: The saves that this place can resume from.
        problems: What looks like a save here but cannot be resumed from.
        removed: The ids of the saves that retention removed here.
        parts: On the disk of one node, its parts of saves of several nodes; on all disks together, those of saves of
            which some part is missing; in the persistent directory, those of snapshots.
        parts_here: On a mirror, the parts of saves that are there: eight digits of the save's id, and which node's. In
            the persistent directory, those of snapshots that are not whole there, and which rank's.
    """

    place: str
    sort: Sort
    reach: Reach = Reach.ANSWERED
    why: str = ""
    required: bool = False
    was_required: bool = False
    listed: ListFound = ListFound.NONE
    run_id: str | None = None
    run_on: tuple[int, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    heard: tuple[Heard, ...] = ()
    copies: tuple[Copy, ...] = ()
    problems: tuple[Problem, ...] = ()
    removed: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    parts_here: tuple[tuple[str, int], ...] = ()

    @property
    def answers(self) -> bool:
        """Whether the place answered."""
        return self.reach is Reach.ANSWERED

    def heard_as(self, voice: Voice) -> frozenset[str]:
        """Return the ids of the attempts that this place knows in one of these ways."""
        return frozenset(heard.attempt.id for heard in self.heard if voice in heard.voices)


@dataclass(frozen=True)
class Evidence:
    """All rows: the disk first, then the mirrors in configured order, then the others.

    Attributes:
        rows: One for each place; the persistent directory has one for each run that it holds. ``ANYWHERE`` comes last.
        root: The identity of this root, as lists name it; of a job of several nodes, one that all its roots have.
        roots: The identity of each node's root. A person may have changed something on one of them, for all.
    """

    rows: tuple[Row, ...]
    root: str = ""
    roots: frozenset[str] = frozenset()

    @property
    def disk(self) -> Row:
        """The row of this disk."""
        return self.rows[0]

    def row(self, place: str) -> Row | None:
        """Return a place's row; None if there is none."""
        return next((row for row in self.rows if row.place == place), None)

    def mirrors(self) -> tuple[Row, ...]:
        """Return the rows of all mirrors, silent ones included."""
        return tuple(row for row in self.rows if row.sort == "mirror")

    def answering(self) -> tuple[Row, ...]:
        """Return the rows of the places that answered."""
        return tuple(row for row in self.rows if row.answers)

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """The newest word of any list on each mirror that is required, or was."""
        return merge_requirements(one for row in self.rows for one in row.requirements)

    def heard_as(self, voice: Voice) -> frozenset[str]:
        """Return the ids of the attempts that any answering place knows in one of these ways."""
        return frozenset(one for row in self.answering() for one in row.heard_as(voice))


# -- JSON ----------------------------------------------------------------------------------------------------

_T = TypeVar("_T")


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """Return plain JSON that :func:`evidence_from_json` turns back into the same evidence."""
    return {"root": evidence.root, "roots": _plain(evidence.roots), "rows": [_plain(row) for row in evidence.rows]}


def evidence_from_json(document: Mapping[str, Any]) -> Evidence:
    """Rebuild evidence from the output of :func:`evidence_to_json`. For replays: types are not checked."""
    rows = tuple(_made(Row, row) for row in document["rows"])
    return Evidence(rows, document["root"], frozenset(document["roots"]))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, frozenset):
        return sorted(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _made(wanted: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if value is not None and origin is UnionType:
        return _made(next(one for one in arguments if one is not type(None)), value)
    if origin in (tuple, frozenset):
        return origin(_made(arguments[0], item) for item in value)
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        hints = typing.get_type_hints(wanted)
        return wanted(**{one.name: _made(hints[one.name], value[one.name]) for one in dataclasses.fields(wanted)})
    return wanted(value) if isinstance(wanted, type) and issubclass(wanted, StrEnum) else value
