"""Lists of attempts: reads them, and rebuilds, completes and merges them.

A root's list is ``.ckptmirror/attempts.json``, a mirror's is ``writer.json``.

Rules:
* A lost list is rebuilt from the metas, each of which records its attempt. A root's list that is out of date is
  completed from the metas of saves made there. A list of a later version is never taken for lost.
* Only a new start replaces a list that cannot be trusted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptmirror.core import names, signing
from ckptmirror.core.codec import (
    attempts_from_bytes,
    attempts_to_bytes,
    health_from_bytes,
    health_to_bytes,
    is_signed,
)
from ckptmirror.core.errors import (
    BrokenMeta,
    CkptMirrorError,
    ConfigError,
    IntegrityError,
    LineageError,
    NewerFormat,
    NotSigned,
    ObjectNotFound,
    PreconditionFailed,
    Temporary,
)
from ckptmirror.core.model import Attempt, AttemptHealth, AttemptList, Sign, new_id
from ckptmirror.core.start.explain import NOT_BELIEVED
from ckptmirror.core.start.lineage import attempts_of_metas, merge_attempts
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local import files
from ckptmirror.local.checksums import crc32c
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.storage_errors import permitted

__all__ = [
    "attempts_here",
    "check_can_sign",
    "check_run",
    "diverged_there",
    "health_here",
    "listed_attempts",
    "met_here",
    "not_one_run",
    "note_diverged",
    "note_met",
    "note_sign",
    "read_list_of_a_root",
    "read_local_attempts",
    "read_mirror_attempts",
    "trusted_attempts",
]

_LIST_LIMIT_BYTES = 16 * 1024 * 1024
_HEALTH_LIMIT_BYTES = 1024 * 1024
_log = logging.getLogger("ckptmirror.claim")


def check_can_sign(root: Path) -> None:
    """Refuse to change a run in a process whose documents the run's other processes would not believe.

    Raises:
        ConfigError: It has no key to sign with, and it demands signatures, or the root's list is signed.
    """
    signing.check_can_sign()
    if signing.current().sign is not None:
        return
    with contextlib.suppress(FileNotFoundError, IntegrityError):  # broken, or unreadable: who needs the list says so
        if is_signed(files.read_limited(root / names.ATTEMPTS_NAME, _LIST_LIMIT_BYTES)):
            raise signing.cannot_sign(f"The run of {root}")


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


def listed_attempts(root: Path) -> AttemptList | None:
    """Return the root's list of attempts, as :func:`read_local_attempts`, for a reader that cannot do without it.

    Raises:
        BrokenMeta: The list cannot be trusted; the message names its file and what repairs it.
        LocalStorageUnwritable: This user may not read it.
    """
    path = root / names.ATTEMPTS_NAME
    with _list_at(path), permitted(path):
        return read_local_attempts(root)


@contextmanager
def _list_at(place: object) -> Iterator[None]:
    """Name the list that cannot be trusted, and what repairs it."""
    try:
        yield
    except NewerFormat as error:
        raise NewerFormat(f"{place}: {error.message}") from error
    except NotSigned as error:
        raise NotSigned(f"{place} {NOT_BELIEVED}: {error.message}") from error
    except BrokenMeta as error:
        raise BrokenMeta(
            f"{place} is broken: {error.message}", hint="The next start of the trainer rebuilds it."
        ) from error


def met_here(root: Path, run_id: str) -> AttemptList:
    """Return the attempts that fenced an attempt of this root. The root's own list does not have them."""
    try:
        met = attempts_from_bytes(files.read_limited(root / names.MET_NAME, _LIST_LIMIT_BYTES))
    except FileNotFoundError:
        return AttemptList(run_id)
    except IntegrityError as error:  # broken, or it cannot be read
        _log.warning("skipped %s: %s", root / names.MET_NAME, error)
        return AttemptList(run_id)
    return met if met.run_id == run_id else AttemptList(run_id)


def note_met(root: Path, run_id: str, attempts: Sequence[Attempt]) -> None:
    """Record that the run continued elsewhere, for a next start during which the mirror may be silent.

    A failure is only logged.
    """
    try:
        met = merge_attempts(met_here(root, run_id), AttemptList(run_id, tuple(attempts)))
        files.write_bytes(root / names.MET_NAME, attempts_to_bytes(met), save_id=new_id(), replace=True)
    except CkptMirrorError as error:
        _log.error("the next start will not know that the run continued elsewhere: %s", error)


def health_here(root: Path, run_id: str) -> AttemptHealth:
    """Return how far the attempts of this root got. Without the file, or if it cannot be trusted, nothing is known."""
    try:
        health = health_from_bytes(files.read_limited(root / names.HEALTH_NAME, _HEALTH_LIMIT_BYTES))
    except FileNotFoundError:
        return AttemptHealth(run_id)
    except (IntegrityError, OSError) as error:  # broken, or it cannot be read
        _log.warning("skipped %s: %s", root / names.HEALTH_NAME, error)
        return AttemptHealth(run_id)
    return health if health.run_id == run_id else AttemptHealth(run_id)


def note_sign(root: Path, run_id: str, attempt: str, sign: Sign) -> None:
    """Record how far an attempt got, for the starts after it. A failure is only logged: that attempt will not count."""
    try:
        health = health_here(root, run_id).with_sign(attempt, sign)
        files.write_bytes(root / names.HEALTH_NAME, health_to_bytes(health), save_id=new_id(), replace=True)
    except (CkptMirrorError, OSError) as error:
        _log.warning("the next starts will not know that attempt %s %s: %s", attempt[:8], sign, error)


def note_diverged(mirror: Mirror, attempt: str) -> None:
    """Record on a mirror that an attempt diverged, for starts on other disks. A failure is only logged."""
    try:
        mirror.store.write(names.diverged_name(attempt), b"{}\n", if_generation=0)
    except PreconditionFailed:
        pass  # another node has done so
    except CkptMirrorError as error:
        _log.debug("%s does not record that attempt %s diverged: %s", mirror.url, attempt[:8], error)


def diverged_there(listed: Iterable[str]) -> frozenset[str]:
    """Return the ids of the attempts that diverged, according to the names of a mirror's objects.

    Where signatures are demanded, these objects, which have none, are not believed.
    """
    if signing.current().is_signed is not None:
        return frozenset()
    return frozenset(one for name in listed if (one := names.diverged_attempt(name)) is not None)


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
    if info.crc32c is not None and crc32c(data) != info.crc32c:  # broken in transit: the mirror's object is fine
        raise Temporary(f"{mirror.url}/{names.WRITER_NAME} arrived broken.")
    try:
        with _list_at(f"{mirror.url}/{names.WRITER_NAME}"):
            return attempts_from_bytes(data), info.generation
    except BrokenMeta as error:
        if isinstance(error, NewerFormat) or not mend:
            raise
        save_logger(_log, mirror=mirror.url).error("%s; a start that claims the run rebuilds it", error)
        return None, info.generation


def read_list_of_a_root(mirror: Mirror) -> AttemptList | None:
    """Read the list of a place that is a trainer's root, or a copy of one, though it is given as a mirror.

    Raises:
        BrokenMeta: The list cannot be trusted.
        StoreTemporary: The place does not answer.
    """
    try:
        data, _ = mirror.store.read(names.ATTEMPTS_NAME, limit_bytes=_LIST_LIMIT_BYTES)
    except ObjectNotFound:
        return None
    with _list_at(f"{mirror.url}/{names.ATTEMPTS_NAME}"):
        return attempts_from_bytes(data)


def attempts_here(root: Path) -> tuple[AttemptList | None, BrokenMeta | None]:
    """Return the root's attempts, and the error if its list is broken.

    A list that lacks the attempt of a save made here is out of date, and is completed. A lost list is rebuilt from all
    metas.

    Raises:
        LineageError: The saves here belong to different runs.
    """
    listed, broken = _read_local_or_reason(root)
    inventory = read_inventory(root)
    metas = [save.meta for save in (*inventory.saves, *inventory.incomplete)]
    if listed is None:
        return attempts_of_metas(metas), broken
    mine = attempts_of_metas([m for m in metas if m.staged_from is None and m.run_id == listed.run_id])
    return (merge_attempts(listed, mine) if mine is not None else listed), broken


def trusted_attempts(root: Path) -> AttemptList | None:
    """Return the root's list as it is; None if there is none, or if it cannot be trusted."""
    try:
        return read_local_attempts(root)
    except (IntegrityError, OSError):
        return None


def _read_local_or_reason(root: Path) -> tuple[AttemptList | None, BrokenMeta | None]:
    try:
        return read_local_attempts(root), None
    except NewerFormat:
        raise
    except NotSigned as error:
        return None, NotSigned(f"{root / names.ATTEMPTS_NAME} {NOT_BELIEVED}: {error.message}")
    except (IntegrityError, OSError) as error:  # broken, or it cannot be read
        path = root / names.ATTEMPTS_NAME
        _log.error("%s is broken (%s): the lists of the mirrors are used instead", path, error)
        return None, BrokenMeta(
            f"{path} is broken, and no mirror has a list: {error}",
            hint="Move it away: the next start rebuilds it from the saves. A rewind with no save after it is lost.",
        )


def not_one_run(root: Path, error: LineageError) -> ConfigError:
    """Return the error for a root and mirrors that name several runs."""
    return ConfigError(
        f"{root} and its mirrors do not belong to one run: {error}",
        hint="Give each run a root and a mirror prefix of its own.",
    )


def check_run(mirror: Mirror, there: AttemptList, others: Sequence[AttemptList], root: Path) -> None:
    """Refuse a mirror's list that names another run than the other lists."""
    for other in others:
        if other.run_id != there.run_id:
            raise ConfigError(
                f"{mirror.url} holds run {there.run_id[:8]}, but {root} or an earlier mirror holds run "
                f"{other.run_id[:8]}.",
                hint="Give each run a root and a mirror prefix of its own.",
            )
