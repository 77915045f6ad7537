"""Lists of attempts: read where they lie, rebuilt or completed from the metas there, joined.

A root's list lies in ``.ckptmirror/attempts.json``, a mirror's in ``writer.json``.

Rules:
* A list that is lost is rebuilt from metas, which carry their attempt; an old one of the root is completed from the
  metas of what was saved there. One of a later version is never taken for lost.
* Only a new start replaces a list that cannot be trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes, attempts_to_bytes
from ckptmirror.core.errors import (
    BrokenMeta,
    CkptMirrorError,
    ConfigError,
    IntegrityError,
    LineageError,
    NewerFormat,
    ObjectNotFound,
    Temporary,
)
from ckptmirror.core.model import Attempt, AttemptList, new_id
from ckptmirror.core.start.lineage import attempts_of_metas, merge_attempts
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local import files
from ckptmirror.local.checksums import crc32c
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.save_logger import save_logger

__all__ = [
    "attempts_here",
    "check_run",
    "met_here",
    "not_one_run",
    "note_met",
    "read_local_attempts",
    "read_mirror_attempts",
    "told_here",
]

_LIST_LIMIT_BYTES = 16 * 1024 * 1024
_log = logging.getLogger("ckptmirror.claim")


def read_local_attempts(root: Path) -> AttemptList | None:
    """Read the root's list of attempts; None if there is none.

    Raises:
        BrokenMeta: The list cannot be trusted.
    """
    try:
        data = files.read_limited(root / names.ATTEMPTS_NAME, _LIST_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    return attempts_from_bytes(data)


def met_here(root: Path, run_id: str) -> AttemptList:
    """Return the attempts that fenced one of this root: of them the root's own list does not tell."""
    try:
        met = attempts_from_bytes(files.read_limited(root / names.MET_NAME, _LIST_LIMIT_BYTES))
    except FileNotFoundError:
        return AttemptList(run_id)
    except IntegrityError as error:  # broken, or it cannot be read
        _log.warning("%s is left out: %s", root / names.MET_NAME, error)
        return AttemptList(run_id)
    return met if met.run_id == run_id else AttemptList(run_id)


def note_met(root: Path, run_id: str, attempts: Sequence[Attempt]) -> None:
    """Keep for the next start, when the mirror may be silent, that the run went on elsewhere. A failure is logged."""
    try:
        met = merge_attempts(met_here(root, run_id), AttemptList(run_id, tuple(attempts)))
        files.write_bytes(root / names.MET_NAME, attempts_to_bytes(met), save_id=new_id(), replace=True)
    except CkptMirrorError as error:
        _log.error("the next start will not know that the run continued elsewhere: %s", error)


def read_mirror_attempts(mirror: Mirror, *, mend: bool = False) -> tuple[AttemptList | None, int]:
    """Read a mirror's list of attempts and its generation; ``(None, 0)`` if there is none.

    Args:
        mirror: Whose list.
        mend: A list that cannot be trusted counts as lost, to be rebuilt and replaced at its generation. Only a new
            start may do that: a running attempt would drop a newer one from the list, and so escape being fenced.

    Raises:
        BrokenMeta: The list cannot be trusted.
        StoreTemporary: The mirror does not answer.
    """
    try:
        data, info = mirror.store.read(names.WRITER_NAME, limit_bytes=_LIST_LIMIT_BYTES)
    except ObjectNotFound:
        return None, 0
    if info.crc32c is not None and crc32c(data) != info.crc32c:  # broken on its way here: nothing to mend there
        raise Temporary(f"{mirror.url}/{names.WRITER_NAME} arrived broken.")
    try:
        return attempts_from_bytes(data), info.generation
    except NewerFormat as error:
        raise NewerFormat(f"{mirror.url}/{names.WRITER_NAME}: {error.message}") from error
    except BrokenMeta as error:
        if not mend:
            raise BrokenMeta(
                f"{mirror.url}/{names.WRITER_NAME} is broken: {error}",
                hint="The next start of the trainer rebuilds it.",
            ) from error
        save_logger(_log, mirror=mirror.url).error(
            "%s/%s is broken and is rebuilt: %s", mirror.url, names.WRITER_NAME, error
        )
        return None, info.generation


def attempts_here(root: Path) -> tuple[AttemptList | None, BrokenMeta | None]:
    """Return the root's attempts, and why its list cannot be read, if it is broken.

    A list that lacks an attempt of which a save was made here is an old one, and is completed. One that is lost is
    rebuilt from all metas.

    Raises:
        LineageError: What lies here is of different runs.
    """
    listed, broken = _read_local_or_reason(root)
    inventory = read_inventory(root)
    metas = [save.meta for save in (*inventory.saves, *inventory.incomplete)]
    if listed is None:
        return attempts_of_metas(metas), broken
    mine = attempts_of_metas([m for m in metas if m.staged_from is None and m.run_id == listed.run_id])
    return (merge_attempts(listed, mine) if mine is not None else listed), broken


def told_here(root: Path) -> AttemptList | None:
    """Return the root's list as it is there; None if there is none, or none that can be trusted."""
    try:
        return read_local_attempts(root)
    except (IntegrityError, OSError):
        return None


def _read_local_or_reason(root: Path) -> tuple[AttemptList | None, BrokenMeta | None]:
    try:
        return read_local_attempts(root), None
    except NewerFormat:
        raise
    except (IntegrityError, OSError) as error:  # broken, or it cannot be read
        path = root / names.ATTEMPTS_NAME
        _log.error("%s is broken (%s): what the mirrors list is used instead", path, error)
        return None, BrokenMeta(
            f"{path} is broken, and no mirror has a list: {error}",
            hint="Move it away, and the list is rebuilt from the saves; a rewind with no save after it is lost.",
        )


def not_one_run(root: Path, error: LineageError) -> ConfigError:
    """Return the error of a root and mirrors that tell of several runs."""
    return ConfigError(
        f"{root} and its mirrors do not belong to one run: {error}",
        hint="Give each run a root and a mirror prefix of its own.",
    )


def check_run(mirror: Mirror, there: AttemptList, others: Sequence[AttemptList], root: Path) -> None:
    """Refuse a mirror's list that is not of the run of the others."""
    for other in others:
        if other.run_id != there.run_id:
            raise ConfigError(
                f"{mirror.url} holds run {there.run_id[:8]}, but {root} or an earlier mirror holds run "
                f"{other.run_id[:8]}.",
                hint="Give each run a root and a mirror prefix of its own.",
            )
