"""Finds the saves of a mirror that wait for nodes, and asks the mirror what of them is there.

Rules:
* The names of parts come from a listing that the caller has. Only where some save waits is the mirror asked for more:
  for the parts, and for the names of that step.
* A part that cannot be read is left out: its node has to send it again, and its files count as files that no part
  names.
"""

from __future__ import annotations

from dataclasses import replace

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes, meta_or_tombstone_from_bytes
from ckptmirror.core.errors import CkptMirrorError, IntegrityError, NotSigned, ObjectNotFound, StorePermanent
from ckptmirror.core.model import Meta
from ckptmirror.core.uncommitted import ROLES, PartsThere, Uncommitted, parts_there, uncommitted_save
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES, Catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, opened_mirror
from ckptmirror.local.daemon_pool import run_jobs
from ckptmirror.stores.retrying import OnWait

__all__ = ["read_parts", "uncommitted_on", "uncommitted_saves"]

_READERS = 8


def uncommitted_on(url: str, on_wait: OnWait | None = None) -> list[Uncommitted]:
    """Return the saves of a mirror that wait for nodes, with what their parts say.

    Raises:
        StoreTemporary: It does not answer.
        NotAuthorised: It does not accept the credentials.
        ConfigError: The URL is wrong.
    """
    with opened_mirror(url, on_wait=on_wait) as mirror:
        return uncommitted_saves(mirror, mirror_catalog(mirror), with_parts=True)


def uncommitted_saves(
    mirror: Mirror, catalog: Catalog, *, step: int | None = None, with_parts: bool
) -> list[Uncommitted]:
    """Return the saves of a mirror that wait for nodes.

    Args:
        mirror: The mirror.
        catalog: Its catalog.
        step: The step that the catalog is limited to.
        with_parts: Whether to read the parts, of each node that has published one.

    Raises:
        StoreTemporary: The mirror does not answer.
    """
    listed = catalog.others
    if step is not None:
        prefix = f"{names.PARTS_DIR}/meta_{names.SaveName(step).stem}-"
        listed = tuple(info.name for info in mirror.store.list(prefix))
    waiting = [one for one in parts_there(listed, catalog.known) if not _has_unbelieved_meta(mirror, catalog, one)]
    objects = {at: _objects_of_step(mirror, at) for at in dict.fromkeys(one.step for one in waiting)}
    claimed = {artifact.object_name for meta in catalog.metas() for artifact in meta.artifacts}
    found = []
    for one in waiting:
        parts = read_parts(mirror, one) if with_parts else ()
        read = {part.node: one.names[part.node] for part in parts}
        is_alone = sum(other.step == one.step for other in waiting) == 1
        there = replace(one, names=read) if with_parts else one
        found.append(uncommitted_save(there, parts, objects[one.step], claimed, is_alone=is_alone))
    return found


def _has_unbelieved_meta(mirror: Mirror, catalog: Catalog, there: PartsThere) -> bool:
    """Whether the save is committed, by a meta that is not signed by a key which this process believes."""
    for name in (names.SaveName(there.step, tag).meta for tag in ("", there.digits)):
        if name not in catalog.problems:
            continue
        try:
            data = mirror.store.read(name, limit_bytes=META_LIMIT_BYTES)[0]
        except (ObjectNotFound, StorePermanent):  # the problem says so
            continue
        try:
            meta_or_tombstone_from_bytes(data)
        except NotSigned:
            if there.digits.encode() in data:  # nobody vouches for it, and this only tells whom a person has to ask
                return True
        except IntegrityError:
            continue
    return False


def read_parts(mirror: Mirror, there: PartsThere, unread: dict[str, CkptMirrorError] | None = None) -> list[Meta]:
    """Read the parts of a save that are on a mirror. One that is damaged, or another's, is left out.

    Args:
        mirror: The mirror.
        there: Which of them.
        unread: Takes why a part could not be read, by name.

    Raises:
        StoreTemporary: The mirror does not answer.
    """
    found: list[Meta] = []

    def read(name: str) -> None:
        try:
            part = meta_from_bytes(mirror.store.read(name, limit_bytes=META_LIMIT_BYTES)[0])
        except (IntegrityError, ObjectNotFound, StorePermanent) as error:
            if unread is not None:
                unread[name] = error
            return
        says = (part.step, part.save_id[:8], part.nodes, there.names.get(part.node))
        if says == (there.step, there.digits, there.nodes, name):
            found.append(part)

    run_jobs(list(there.names.values()), read, name="ckptmirror-parts", workers=_READERS)
    return found


def _objects_of_step(mirror: Mirror, step: int) -> dict[str, tuple[int, str]]:
    stem = names.SaveName(step).stem
    return {
        info.name: (info.size_bytes, info.metadata.get("ckptmirror-save", ""))
        for role in ROLES
        for info in mirror.store.list(f"{role}_{stem}")
    }
