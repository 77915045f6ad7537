"""Disk facts: what a node knows of its own disk, from its files, its list of attempts and its table.

They are values that travel to the leader of the job, which makes the evidence of a start from those of all nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import IntegrityError, NewerFormat, NotSigned
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import AttemptList, Sign
from ckptmirror.core.start.evidence import ListFound
from ckptmirror.core.start.explain import NOT_BELIEVED
from ckptmirror.core.start.lineage import attempts_of_metas
from ckptmirror.flow.places.attempt_lists import health_here, met_here, read_local_attempts
from ckptmirror.flow.places.catalog import Catalog, local_catalog
from ckptmirror.flow.retention.reconcile import being_brought
from ckptmirror.local.root_id import RootId
from ckptmirror.local.uploads import MirrorRow, SaveRow, Transition, UploadRecord, UploadsTable

__all__ = ["DiskFacts", "TakenNames", "look_at_disk"]


@dataclass(frozen=True)
class TakenNames:
    """Which names of saves the mirrors have.

    Attributes:
        steps: The steps of which a mirror has a name without a tag: saves of these have a tag.
        read_from: The URLs of the mirrors that this is known of.
    """

    steps: frozenset[int] = frozenset()
    read_from: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DiskFacts:
    """What a node knows of its disk.

    Attributes:
        attempts: Its list; None if it has none, or one that cannot be trusted.
        listed: The condition of the list.
        why: Why the list cannot be trusted.
        run_id: The run that the list names, or else its saves; None if neither does.
        catalog: The saves and parts on it.
        identity: The root's.
        bringing: The save that an earlier start was bringing, in the place of a copy here, when it was killed.
        met: The attempts that fenced one of this root.
        saves: Every save that its table knows.
        metas_moved: What the table has of the past of metas, oldest first.
        metas_sent: The table's records of metas.
        verified_on: The mirrors that have something verified.
        mirrors: The mirrors that the table knows.
        places: Which place each mirror is, by URL, as far as the root remembers.
        sees: Which place it finds there now for each mirror that no node remembers; see ``Node.sees``.
        persistent_is_new: Whether its start created the persistent directory.
        signs: How far its attempts got, by id.
    """

    attempts: AttemptList | None
    listed: ListFound
    why: str
    run_id: str | None
    catalog: Catalog
    identity: RootId
    bringing: str | None
    met: AttemptList
    saves: tuple[SaveRow, ...] = ()
    metas_moved: tuple[Transition, ...] = ()
    metas_sent: tuple[UploadRecord, ...] = ()
    verified_on: frozenset[str] = frozenset()
    mirrors: tuple[MirrorRow, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    sees: Mapping[str, str | None] = field(default_factory=dict)
    persistent_is_new: bool = False
    signs: Mapping[str, frozenset[Sign]] = field(default_factory=dict)


def look_at_disk(root: Path, table: UploadsTable | None, identity: RootId) -> DiskFacts:
    """Look at a node's disk. Writes nothing.

    Args:
        root: The local root, under its lock.
        table: The root's table; None if it has none.
        identity: The root's identity.

    Raises:
        LineageError: There is no list, and there are saves of several runs.
    """
    attempts, listed, why = None, ListFound.SOUND, ""
    try:
        attempts = read_local_attempts(root)
    except NewerFormat as failure:
        listed, why = ListFound.NEWER, str(failure)
    except NotSigned as failure:
        listed, why = ListFound.BROKEN, f"{root / names.ATTEMPTS_NAME} {NOT_BELIEVED}: {failure.message}"
    except (IntegrityError, OSError) as failure:
        listed, why = ListFound.BROKEN, f"{root / names.ATTEMPTS_NAME} is broken: {failure}"
    catalog = local_catalog(root, with_attempts=False)
    if attempts is None and listed is ListFound.SOUND:
        listed = ListFound.LOST if catalog.metas() else ListFound.NONE
    rebuilt = attempts if attempts is not None else attempts_of_metas(catalog.metas())
    run_id = rebuilt.run_id if rebuilt is not None else None
    met = met_here(root, run_id) if run_id is not None else AttemptList("")
    signs = health_here(root, run_id).signs if run_id is not None else {}
    bringing = being_brought(root, in_place=True)
    if table is None:
        return DiskFacts(attempts, listed, why, run_id, catalog, identity, bringing, met, signs=signs)
    records = table.records()
    return DiskFacts(
        attempts,
        listed,
        why,
        run_id,
        catalog,
        identity,
        bringing,
        met,
        saves=tuple(table.saves()),
        metas_moved=tuple(moved for moved in table.history() if moved.path.startswith("meta_")),
        metas_sent=tuple(record for record in records if record.role == "meta"),
        verified_on=frozenset(record.mirror for record in records if record.state is RecordState.VERIFIED),
        mirrors=tuple(table.mirrors()),
        signs=signs,
    )
