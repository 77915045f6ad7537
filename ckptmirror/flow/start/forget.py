"""Removes a mirror from a run: no start, commit or drain waits for it any more. Only a person decides this.

Rules:
* The lists of the root and of every answering mirror record the removal, with the number of the newest attempt that any
  of them names. So an older list on a mirror that is away now does not bring it back, and a later start that has the
  mirror in its configuration does.
* The root's table no longer lists it, so that no verb waits for it either. Uploads that wait for it stay in the table
  until it is configured again. The last mirror stays listed, as an optional one: without any, rotation would ask none.
* A mirror that a person pushed to is taken from the table alone, for no list names it: drains send nothing more there.
  If the table knows no other, it stays: where the table is new, the trainer's mirrors are not in it yet.
* Nothing on the mirror and no file of a save changes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_to_bytes
from ckptmirror.core.errors import CheckpointNotFound, CkptMirrorError, ConfigError, PreconditionFailed, Temporary
from ckptmirror.core.model import AttemptList, Requirement, new_id
from ckptmirror.core.start.attempts import count
from ckptmirror.core.start.evidence import ANYWHERE
from ckptmirror.core.start.lineage import SaveFacts, merge_attempts, removal
from ckptmirror.flow.places.attempt_lists import check_can_sign, listed_attempts, read_mirror_attempts
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec, close_mirrors, open_mirrors, set_mirrors
from ckptmirror.flow.start.disk_facts import look_at_disk
from ckptmirror.flow.start.survey import survey
from ckptmirror.local import files
from ckptmirror.local.lock import RootLock
from ckptmirror.local.root_id import read_root_id
from ckptmirror.local.table_place import open_known_table
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import normalise_url

__all__ = ["Forgotten", "forget_mirror"]

_log = logging.getLogger("ckptmirror.forget")


@dataclass(frozen=True)
class Forgotten:
    """A mirror that was removed from the run.

    Attributes:
        url: Its URL.
        left: The required mirrors that the run still has.
        recorded_on: The mirrors whose lists record the removal.
        unreachable: The mirrors that do not answer, with the reason; the next start records it there.
        is_configured: Whether the root's last start used it, so that the configuration must change too.
        was_required: Whether the run required it.
        before: The newest save of the lineage that is whole on this disk or another mirror, while the run requires this
            one. None if there is none, or if a mirror does not answer.
        after: The same without the mirror. It is another one if somebody went back, and no other mirror is known not to
            have recorded that.
    """

    url: str
    left: tuple[str, ...]
    recorded_on: tuple[str, ...]
    unreachable: dict[str, str]
    is_configured: bool
    was_required: bool
    before: SaveFacts | None = None
    after: SaveFacts | None = None


def forget_mirror(root: Path, url: str, *, dry_run: bool = False) -> Forgotten:
    """Remove a mirror from the run of a root.

    Args:
        root: The local root.
        url: The mirror's URL; also one that a person pushed to.
        dry_run: Change nothing, and return what would change.

    Raises:
        CheckpointNotFound: The run does not name such a mirror.
        ConfigError: It was pushed to, and the table knows no other.
        NoTable: ckptmirror has not saved here.
        RootLocked: A trainer, or another verb, holds the root.
    """
    check_can_sign(root)
    url = normalise_url(url)
    lock = RootLock(root)
    with open_known_table(root) as table:
        lock.acquire({"verb": "forget-mirror"})
        try:
            rows = table.mirrors()
            pushed = {row.url for row in rows if row.pushed}
            if url in pushed and len(rows) == 1:
                raise ConfigError(
                    f"{url} is the only mirror that the table of {root} knows: without it, rotation would ask none.",
                    hint="Start the trainer with its mirrors, or `ckptmirror push` to another one, first.",
                )
            specs = [MirrorSpec(row.url, row.required) for row in rows if row.url != url and not row.pushed]
            mirrors = open_mirrors(specs, root, table, is_verb=True)
            try:
                is_configured = url in {row.url for row in rows} - pushed
                forgotten = _forget(root, table, url, mirrors, is_configured, dry_run, was_pushed=url in pushed)
            finally:
                close_mirrors(mirrors)
            if url in pushed and not dry_run:
                table.set_mirrors([(row.url, row.required) for row in rows if row.url != url], pushed - {url})
            elif is_configured and not dry_run:
                set_mirrors(table, specs or [MirrorSpec(url, required=False)])
            return forgotten
        finally:
            lock.release()


def _forget(
    root: Path,
    table: UploadsTable,
    url: str,
    mirrors: Sequence[Mirror],
    is_configured: bool,
    dry_run: bool,
    *,
    was_pushed: bool,
) -> Forgotten:
    here = listed_attempts(root)
    lists: dict[str, tuple[AttemptList, int]] = {}
    unreachable: dict[str, str] = {}
    by_url = {mirror.url: mirror for mirror in mirrors}
    for mirror in by_url.values():
        try:
            listed, generation = read_mirror_attempts(mirror)
        except CkptMirrorError as error:
            unreachable[mirror.url] = str(error)
            continue
        if listed is not None:
            lists[mirror.url] = (listed, generation)
    every = [listed for listed, _ in lists.values()] + ([here] if here is not None else [])
    named = {one for attempts in every for one in attempts.required}
    if url not in named and was_pushed:
        return Forgotten(url, tuple(sorted(named)), (), {}, is_configured, was_required=False)
    if url not in named and not is_configured:
        known = ", ".join(sorted(named)) or "none"
        raise CheckpointNotFound(
            f"The run of {root} does not name {url} as a required mirror. It names {known}.",
            hint=f"`ckptmirror status --root {quote(str(root))}` lists the mirrors that are configured.",
        )
    left = tuple(sorted(named - {url}))
    if not every:  # no start has succeeded yet: no list can require it
        return Forgotten(url, left, (), unreachable, is_configured, url in named)
    removed = removal(url, every)
    out = AttemptList(every[0].run_id, requirements=(removed,))
    before: SaveFacts | None = None
    after: SaveFacts | None = None
    if not unreachable:  # else that is not known
        try:
            before, after = _newest_saves(root, table, mirrors, removed)
        except CkptMirrorError as error:  # it only tells what the next start will find out
            _log.debug("where the next start continues is not known: %s", error)
    if here is not None and not dry_run:
        data = attempts_to_bytes(merge_attempts(here, out))
        files.write_bytes(root / names.ATTEMPTS_NAME, data, save_id=new_id(), replace=True)
    for one, (listed, generation) in lists.items():
        if not dry_run:
            _record(by_url[one], merge_attempts(listed, out), generation)
    return Forgotten(url, left, tuple(lists), unreachable, is_configured, url in named, before, after)


def _newest_saves(
    root: Path, table: UploadsTable, mirrors: Sequence[Mirror], out: Requirement
) -> tuple[SaveFacts | None, SaveFacts | None]:
    """Return the newest save of the lineage as it is, and as it will be without the mirror."""
    evidence = survey([look_at_disk(root, table, read_root_id(root))], mirrors).without({ANYWHERE}).evidence
    disk = replace(evidence.disk, requirements=(*evidence.disk.requirements, out))
    orders = [count(one).order.in_order() for one in (evidence, replace(evidence, rows=(disk, *evidence.rows[1:])))]
    before, after = (order[-1] if order else None for order in orders)
    return before, after


def _record(mirror: Mirror, wanted: AttemptList, generation: int) -> None:
    try:
        mirror.store.write(names.WRITER_NAME, attempts_to_bytes(wanted), if_generation=generation)
    except PreconditionFailed as error:
        raise Temporary(f"{mirror.url}/{names.WRITER_NAME} has been changed since.", hint="Try again.") from error
