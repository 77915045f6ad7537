"""Evidence: what each place says of the run, as values. A survey fills it in and knows no rule.

A *place* is this disk, a mirror, or the persistent directory. Rules:

* A place that did not answer is a row too: that it is silent is a fact.
* Every meta testifies: also that of a save which is not whole names its attempt, and that the attempt committed.
* Values only. They turn into JSON and back without loss, so a start that surprised somebody can be replayed.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Literal, TypeVar

from ckptmirror.core.model import Attempt, Kind
from ckptmirror.core.start.lineage import SaveFacts

__all__ = [
    "DISK",
    "Copy",
    "Evidence",
    "Heard",
    "Hindrance",
    "ListFound",
    "Origin",
    "Problem",
    "Reach",
    "Row",
    "Sort",
    "Voice",
    "evidence_from_json",
    "evidence_to_json",
]

DISK = "disk"
Sort = Literal["disk", "mirror", "persistent"]
Hindrance = Literal["", "unreadable", "refused"]


class Reach(StrEnum):
    """Whether a place answered."""

    ANSWERED = "answered"
    SILENT = "silent"  # it may hold anything
    REFUSED = "refused"  # it does not accept these credentials, and may hold anything
    DROPPED = "dropped"  # it was a mirror of this root, or a list names it, and it is not configured


class ListFound(StrEnum):
    """What became of a place's list of attempts."""

    TOLD = "told"
    NONE = "none"  # and no save there names an attempt
    LOST = "lost"  # but saves there name attempts
    BROKEN = "broken"
    NEWER = "newer"  # of a later version of ckptmirror


class Voice(StrEnum):
    """How a place knows of an attempt."""

    CLAIMED = "claimed"  # its list has it
    COUNTS = "counts"  # a committed save of it is there; on this disk none that was staged, but the parent of a claim
    COMPLETED = "completed"  # this root claimed it, and every required mirror took it down
    NAMED = "named"  # only a meta names it
    UPLOADED = "uploaded"  # this root's table records that a save of it is committed on a mirror
    FENCED_US = "fenced_us"  # an attempt of this root met it
    UNDECIDED = "undecided"  # a list of ckptmirror 0.1.0 has it, from before it knew where it starts


class Origin(StrEnum):
    """How a copy came to its place."""

    SAVED_HERE = "saved_here"
    STAGED = "staged"  # brought from a mirror
    COPIED = "copied"  # with the root: this directory is not the one that its table knew
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
        save: Which; its kinds are those in which this copy holds all that a resume needs.
        origin: How it came there.
        unfinished: Whether an earlier start was repairing it when it was killed.
        world_size: How many ranks saved it.
    """

    save: SaveFacts
    origin: Origin
    unfinished: bool = False
    world_size: int = 1


@dataclass(frozen=True)
class Problem:
    """Something that looks like a save, and cannot be resumed from in its place.

    Attributes:
        name: Of what there is: a path, or a URL and an object's name.
        why: What is wrong.
        step: None where nothing tells it.
        save_id: "" where nothing tells it.
        kinds: In which kinds it might be resumed from, if it were whole.
        save: What its meta says of it, where that can be read.
        hindrance: Set if it only cannot be read now (an I/O error, a permission, a later format; ``refused``: the
            mirror does not accept these credentials for it), so that it may be whole.
        is_save: Whether it is, or was, a save of this run. Other things only show that the place is not empty.
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
    """What one place says.

    Attributes:
        place: ``DISK``, a mirror's URL, or the path of the persistent directory.
        sort: Which of these it is.
        reach: Whether it answered.
        why: Why not.
        required: Whether a start needs its word: it is a required mirror, or one of all where none is required.
        was_required: Whether that was so at the last start of this root, and something was verified there.
        listed: What became of its list.
        run_id: The run that its list, or else its saves, are of; None if nothing there names one.
        names_required: The mirrors that its list names as required.
        forgets: The mirrors that a person took out of the run, by its list.
        heard: Every attempt that it knows of; one that did not answer may have shown its list before that.
        copies: The saves that can be resumed from here.
        problems: What cannot.
        removed: The ids of the saves that retention removed here.
    """

    place: str
    sort: Sort
    reach: Reach = Reach.ANSWERED
    why: str = ""
    required: bool = False
    was_required: bool = False
    listed: ListFound = ListFound.NONE
    run_id: str | None = None
    names_required: tuple[str, ...] = ()
    forgets: tuple[str, ...] = ()
    heard: tuple[Heard, ...] = ()
    copies: tuple[Copy, ...] = ()
    problems: tuple[Problem, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def answers(self) -> bool:
        """Whether what it says is known."""
        return self.reach is Reach.ANSWERED

    def heard_as(self, voice: Voice) -> frozenset[str]:
        """Return the ids of the attempts of which it knows in this way."""
        return frozenset(heard.attempt.id for heard in self.heard if voice in heard.voices)


@dataclass(frozen=True)
class Evidence:
    """All rows: the disk first, then the mirrors in configured order, then the others.

    Attributes:
        rows: One for each place; the persistent directory has one for each run that it holds.
        root: The identity of this root, by which lists name it.
    """

    rows: tuple[Row, ...]
    root: str = ""

    @property
    def disk(self) -> Row:
        """What this disk says."""
        return self.rows[0]

    def row(self, place: str) -> Row | None:
        """Return a place's row; None if there is none."""
        return next((row for row in self.rows if row.place == place), None)

    def mirrors(self) -> tuple[Row, ...]:
        """Return the rows of the mirrors, those that did not answer too."""
        return tuple(row for row in self.rows if row.sort == "mirror")

    def answering(self) -> tuple[Row, ...]:
        """Return the rows of the places that answered."""
        return tuple(row for row in self.rows if row.answers)

    def heard_as(self, voice: Voice) -> frozenset[str]:
        """Return the ids of the attempts of which any place that answered knows in this way."""
        return frozenset(one for row in self.answering() for one in row.heard_as(voice))


# -- JSON ----------------------------------------------------------------------------------------------------

_T = TypeVar("_T")


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """Return plain JSON from which :func:`evidence_from_json` makes the same evidence."""
    return {"root": evidence.root, "rows": [_plain(row) for row in evidence.rows]}


def evidence_from_json(document: Mapping[str, Any]) -> Evidence:
    """Make evidence from what :func:`evidence_to_json` returned. For replays: it does not check types."""
    return Evidence(tuple(_made(Row, row) for row in document["rows"]), document["root"])


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
