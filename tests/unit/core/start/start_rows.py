"""Rows of evidence for a run of two required mirrors, as short as a table of cases needs them."""

from __future__ import annotations

from collections.abc import Iterable

from ckptmirror.core.model import Attempt, SaveRef
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.evidence import DISK, Copy, Evidence, Heard, ListFound, Origin, Row, Voice
from ckptmirror.core.start.lineage import SaveFacts
from tests.unit.core.core_builders import required

HERE, ELSEWHERE = "this root", "another root"
BOTH = ("gs://a", "gs://b")


def save(name: str, step: int) -> SaveFacts:
    """``a2`` is the second save of attempt A."""
    return SaveFacts(name, name[0].upper(), int(name[1:]), step, ("dcp",))


def ref(facts: SaveFacts) -> SaveRef:
    return SaveRef(facts.attempt, facts.number, facts.step, facts.save_id)


def place(
    name: str,
    listed: Iterable[Attempt] = (),
    saves: Iterable[SaveFacts] = (),
    *,
    uploaded: str = "",
    completed: str = "",
) -> Row:
    """Return the row of this disk, whose saves were made here, or of a required mirror that answers.

    Args:
        uploaded: For this disk, the attempts (a letter each) of which it committed a save on a mirror.
        completed: For this disk, the attempts whose claims every required mirror recorded.
    """
    saves, saved = tuple(saves), {one.attempt for one in saves}
    voices = {
        one: [Voice.CLAIMED]
        + ([Voice.COUNTS] if one.id in saved else [])
        + ([Voice.UPLOADED] if one.id in uploaded else [])
        + ([Voice.COMPLETED] if one.id in completed else [])
        for one in listed
    }
    origin = Origin.SAVED_HERE if name == DISK else Origin.REMOTE
    return Row(
        name,
        "disk" if name == DISK else "mirror",
        required=name != DISK,
        listed=ListFound.SOUND if voices else ListFound.NONE,
        run_id="run" if voices else None,
        requirements=required(*BOTH) if voices else (),
        heard=tuple(Heard(one, frozenset(said)) for one, said in voices.items()),
        copies=tuple(Copy(one, origin) for one in saves),
    )


def silent(name: str) -> Row:
    return Row(name, "mirror", Reach.SILENT, required=True)


def evidence(*rows: Row) -> Evidence:
    return Evidence(rows, HERE)
