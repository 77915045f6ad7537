"""Staging: turns one save of a mirror into a whole save of a directory.

Order (DESIGN.md §3, "Stage"):

1. Files of this save that the directory already has, and that still verify, are kept.
2. The rest is received into temporaries, with every block verified, and fsynced.
3. The files get their final names, never replacing anything.
4. With ``refresh``, the metas of other saves that are replaced are moved to trash. Then each broken file of this save
   is moved away, and the whole file gets its name. A directory takes that of the broken one, or of a node's part, in
   one step, if the file system can exchange names.
5. The meta is written, last, with the same save id and ``staged_from``. From here the save is staged. An earlier meta
   of this save is replaced in that one step if the new one names more; otherwise it stays, and a trainer's always does.
6. The files of metas in the trash are moved there too, and the trash is emptied.

Rules:
* There are never two metas of one save id. After a crash after step 3, the next call recognises the files by their
  checksums. After a crash after step 4, the next call finishes from the trash. While a broken file is being replaced,
  its save is incomplete and not listed, but its meta still names it, so that it does not look deleted.
* A copy is verified when it is staged; a later call compares sizes, and ``refresh`` verifies the checksums again.
* Replacing loses nothing: another save is removed only if this mirror holds it, checksum by checksum, or if it was only
  a copy from this mirror. In a training root no other save is removed at all, and of this save only the files that a
  verified copy replaces.
* What another user owns is fetched again and replaced (``destination``). If this user may not move it away, or in a
  training root, the call is refused before anything is fetched.
* A kind of this save that the mirror has lost since stays beside what is brought, under the meta that names it. If that
  meta cannot stay, the call is refused.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    DestinationOccupied,
    IntegrityError,
    KindMismatch,
    LocalStorageFull,
    ObjectNotFound,
    RefusedOnlyCopy,
)
from ckptmirror.core.model import Artifact, Digest, Kind, Meta
from ckptmirror.flow.fetch.blocks import Incoming, ObjectToRead, receive
from ckptmirror.flow.fetch.destination import (
    Destination,
    below_top,
    by_top,
    is_training_root,
    make_real_dirs,
    moved,
    with_tag,
)
from ckptmirror.flow.fetch.stage_progress import OnProgress, StageProgress
from ckptmirror.flow.places.catalog import first_missing, mirror_catalog, objects_of
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.object_match import why_differs
from ckptmirror.flow.places.select import MAIN_ROLE, lineage_of
from ckptmirror.local import directories, files, trash
from ckptmirror.local.free_space import allocated_bytes, free_bytes
from ckptmirror.local.inventory import LocalSave
from ckptmirror.local.own_files import OWN_DIRECTORY_HINT, may_move
from ckptmirror.stores.base import ObjectInfo

__all__ = ["Staging", "check_space", "incoming_of", "wanted_artifacts"]

_log = logging.getLogger("ckptmirror.stage")


def wanted_artifacts(meta: Meta, kinds: Sequence[Kind], full: bool) -> list[Artifact]:
    """Return the artifacts to bring, under untagged paths; ``object`` is always the name of each on the mirror."""
    missing = [kind for kind in kinds if kind not in meta.kinds]
    if missing:
        raise KindMismatch(
            f"Save {meta.save_id[:8]} of step {meta.step} has no kind {', '.join(missing)}; "
            f"it has {', '.join(meta.kinds)}."
        )
    return [a for a in _untagged(meta) if set(a.kinds) & set(kinds) and (full or _is_main(a, kinds))]


def _untagged(meta: Meta) -> list[Artifact]:
    found = []
    for artifact in meta.artifacts:
        names.check_relative_path(artifact.path)
        parsed = names.parse_artifact_path(artifact.path)
        if parsed is None or parsed.top.step != meta.step:
            raise BrokenMeta(f"{artifact.path[:80]!a} is not the name of an artifact of step {meta.step}.")
        found.append(replace(artifact, path=names.untagged(artifact.path), object=artifact.object_name))
    return found


def _is_main(artifact: Artifact, kinds: Sequence[Kind]) -> bool:
    parsed = names.parse_artifact_path(artifact.path)
    return parsed is not None and parsed.top.role in {MAIN_ROLE[kind] for kind in kinds}


def incoming_of(
    mirror: Mirror,
    meta: Meta,
    artifacts: Sequence[Artifact],
    path_of: Callable[[str], Path],
    *,
    objects: Mapping[str, ObjectInfo] | None = None,
) -> list[Incoming]:
    """Return what to receive for these artifacts of a save.

    Args:
        mirror: The mirror.
        meta: The save.
        artifacts: The files.
        path_of: Says where each is received.
        objects: What the mirror has just said of their objects, by name; None: it is asked now.

    Raises:
        ObjectNotFound: One is gone.
        IntegrityError: One is not what was saved.
    """
    asked = replace(meta, artifacts=tuple(artifacts))
    objects = objects if objects is not None else objects_of(mirror.store, asked)
    missing = first_missing(asked, objects)
    if missing is not None:
        raise ObjectNotFound(missing)
    incoming = []
    for artifact in artifacts:
        info = objects[artifact.object_name]
        why = why_differs(artifact, info)
        if why is not None:
            raise IntegrityError(
                f"{mirror.url}/{info.name} is not what was saved: it {why}.",
                hint="Stage the step from another mirror, or another step: see `ckptmirror ls`.",
            )
        source = ObjectToRead(mirror.store, info.name, info.generation, artifact.digest)
        incoming.append(Incoming(source, path_of(artifact.path)))
    return incoming


def check_space(dest: Path, incoming: Sequence[Incoming], *, hint: str | None = None) -> None:
    """Check that the disk has room for what comes.

    Args:
        dest: A directory on that disk.
        incoming: What comes.
        hint: What to do, if not what the error says by default.

    Raises:
        LocalStorageFull: It has not.
    """
    needed = sum(max(0, one.source.digest.size_bytes - allocated_bytes(one.path)) for one in incoming)
    free = free_bytes(dest)
    if needed > free:
        raise LocalStorageFull(f"{dest} has {free} bytes free, and {needed} more are needed.", hint=hint)


class Staging:
    """Brings saves of a mirror into a directory; the caller holds the lock of their step.

    Args:
        mirror: The mirror that has them.
        dest: The directory.
        refresh: Whether files of a save in the directory are verified by checksum, not by size.
        on_progress: Called now and then, from other threads, one at a time.
        bus: Receives events when a download starts and ends, and for each broken copy in the directory.
        own_root: Whether the directory is a trainer's root and the caller acts for that trainer.
    """

    def __init__(
        self,
        mirror: Mirror,
        dest: Path,
        refresh: bool,
        on_progress: OnProgress | None,
        bus: events.EventBus,
        *,
        own_root: bool = False,
    ) -> None:
        self._mirror = mirror
        self._dest = dest
        self._in_training = is_training_root(dest)
        self._refresh = refresh
        self._on_progress = on_progress
        self._bus = bus
        self._own_root = own_root

    def bring(self, meta: Meta, wanted: Sequence[Artifact], kinds: Sequence[Kind], *, replaces: bool = False) -> Meta:
        """Bring ``wanted`` into the directory, whole, under one meta with the save's files that are there already.

        Args:
            meta: The mirror's meta.
            wanted: The result of :func:`wanted_artifacts` for these kinds.
            kinds: The kinds to bring.
            replaces: Whether stale saves of the step are removed, and its other saves are verified and repaired too.

        Returns:
            The save's meta in the directory.
        """
        only = meta.save_id if self._in_training else None
        place = Destination(self._dest, meta.step, replaces=only, own_root=self._own_root)
        stale, others = self._judged(place, meta) if replaces else ([], [])
        staged = self._bring(place, meta, wanted, kinds, stale)
        for name in by_top(staged.artifacts):  # a crash may have left what an exchange put there
            tmp = self._tmp_of(names.untagged(name), staged.save_id)
            if os.path.lexists(tmp):
                trash.move_to_trash(self._dest, tmp)
        place.finish_replacing()
        for other in others:
            self.bring(other, [], ())
        return staged

    def _judged(self, place: Destination, meta: Meta) -> tuple[list[LocalSave], list[Meta]]:
        """Return the other saves of the step to remove, and the metas of those that the mirror has, to verify.

        Raises:
            RefusedOnlyCopy: A stale save is not whole on this mirror, and not a copy from it.
        """
        catalog = mirror_catalog(self._mirror, step=meta.step)
        current = {save.save_id for save in lineage_of(catalog).current.values()} | {meta.save_id}
        stale = [save for save in place.saves if save.meta.save_id not in current]
        for save in stale:
            there = catalog.saves.get(save.meta.save_id)
            came_from_here = (save.meta.staged_from, save.meta.run_id) == (self._mirror.url, meta.run_id)
            if came_from_here and not self._in_training and not catalog.problems:
                continue  # the broken save on the mirror may be this one
            if there is None or not self._holds(there, save.meta):
                raise RefusedOnlyCopy(
                    f"{save.meta_path} is save {save.meta.save_id[:8]}, which {self._mirror.url} does not hold whole: "
                    "it stays."
                )
        if self._in_training and stale:
            listed = ", ".join(save.meta_path.name for save in stale)
            _log.info("%s: stale, but a trainer saves here: it stays until rotation may delete it", listed)
            stale = []
        others = {save.meta.save_id for save in place.saves} & current - {meta.save_id}
        return stale, [catalog.saves[save_id] for save_id in sorted(others)]

    def _holds(self, there: Meta, here: Meta) -> bool:
        """Ask the mirror whether it has every file that a local save names, with its checksum."""
        store = self._mirror.store
        named = {names.untagged(artifact.path): artifact for artifact in there.artifacts}
        objects = objects_of(store, there)
        for path, digest in _digests(here).items():
            copy = named.get(path)
            info = objects.get(copy.object_name) if copy is not None else None
            if copy is None or copy.digest != digest or why_differs(copy, info, store=store) is not None:
                return False
        return True

    def _bring(
        self, place: Destination, meta: Meta, wanted: Sequence[Artifact], kinds: Sequence[Kind], stale: list[LocalSave]
    ) -> Meta:
        same = place.find(meta.save_id)
        if meta.partial and same is not None and not self._refresh and _has(place, same.meta, wanted):
            return same.meta  # it may name kinds that the mirror has lost since
        if self._refresh or not self._in_training:  # on refresh the remaining one is verified
            twins = [save for save in place.saves if save.meta.save_id == meta.save_id and save is not same]
            stale = [*stale, *twins]  # of two metas of one save, remove one
        planted = [save for save in place.planted if save.meta.save_id == meta.save_id]
        stale = [*stale, *planted]
        on_mirror = _untagged(meta)
        held = same.meta if same is not None else place.interrupted(meta.save_id)
        lost = _only_in(held, on_mirror)
        if held is not None and not held.is_whole:  # a node's part: only the whole save may take its place
            self._check_replaces_part(meta, held)
            wanted, kinds = on_mirror, meta.kinds
        if same is None and held is not None:
            held = held.narrowed(held.kinds_without(lost))
            lost = []
        artifacts = _with_held(wanted, on_mirror, held)
        tag = place.choose_tag(meta.save_id, by_top([*artifacts, *lost]), same, planted)
        standing = same if same is not None and same.meta.tag == tag else None
        self._check_only_copies(place, meta, on_mirror, standing)
        missing = {}
        for top, below in by_top(artifacts).items():
            name = with_tag(top, meta.save_id, tag)
            if not self._is_here(place, name, below, standing):
                missing[name] = below
                if strangers := place.strangers(name, below_top(below)):
                    what = f"{self._dest / name} holds {strangers[0]}"
                    raise DestinationOccupied(f"{what}, which is not part of the checkpoint.")
        files_here = [self._dest / moved(a, name) for name, below in missing.items() for a in below]
        self._check_planted(place, [*files_here, *(save.meta_path for save in planted)])
        for top, below in by_top(lost).items():
            self._is_here(place, with_tag(top, meta.save_id, tag), below, standing)  # reports a broken one, which stays
        new = self._new_meta(meta, [*artifacts, *lost], kinds, held, tag)
        if same is not None and _says_the_same(same.meta, new):
            new = same.meta  # a trainer's own always does
            if not missing:
                self._put_aside(stale)
                return new
        arriving = [artifact for below in missing.values() for artifact in below]
        url, size_bytes = self._mirror.url, sum(artifact.digest.size_bytes for artifact in arriving)
        started = time.monotonic()
        self._bus.emit(events.StageStarted(mirror=url, step=meta.step, kinds=new.kinds, size_bytes=size_bytes))
        if arriving:
            self._receive(meta, arriving)
        self._publish(place, list(missing), same, stale, new)
        duration_s = time.monotonic() - started
        self._bus.emit(
            events.StageFinished(
                mirror=url, step=meta.step, kinds=new.kinds, size_bytes=size_bytes, duration_s=duration_s
            )
        )
        return new

    def _check_replaces_part(self, meta: Meta, held: Meta) -> None:
        """Check that the mirror has the whole save of which this directory holds a node's part.

        Raises:
            RefusedOnlyCopy: It has lost some of it.
        """
        if meta.partial:
            raise RefusedOnlyCopy(
                f"{self._dest} holds node {held.node}'s part of save {meta.save_id[:8]}, of which "
                f"{self._mirror.url} has only {', '.join(meta.kinds)}.",
                hint="Stage it into another directory, and train on from there; or start all nodes that saved it.",
            )

    def _check_only_copies(
        self, place: Destination, meta: Meta, on_mirror: Sequence[Artifact], standing: LocalSave | None
    ) -> None:
        """Check that each file of this save that the mirror has lost is named by the meta that stays.

        Raises:
            RefusedOnlyCopy: Another meta of this save, or one in the trash, names such a file, and it is here.
        """
        stays = {artifact.path for artifact in standing.meta.artifacts} if standing is not None else set()
        here = [*(save.meta for save in place.saves), *place.trashed_metas()]
        for held in (one for one in here if one.save_id == meta.save_id):
            lost = {artifact.path for artifact in _only_in(held, on_mirror)}
            for artifact in held.artifacts:
                path = artifact.path
                if names.untagged(path) in lost and path not in stays and os.path.lexists(self._dest / path):
                    raise RefusedOnlyCopy(
                        f"{self._dest} holds {path} of save {meta.save_id[:8]}, which {self._mirror.url} has lost.",
                        hint="Stage into another directory, or move the file away.",
                    )

    def _check_planted(self, place: Destination, paths: Sequence[Path]) -> None:
        """Check that what another user has under the save's names can be replaced, and say so.

        Raises:
            DestinationOccupied: This user may not move it away, or a trainer saves here.
        """
        theirs = [(path, owner) for path in paths if (owner := place.other_owner(path)) is not None]
        for path, owner in theirs:
            what = f"{path} belongs to user id {owner}"
            if self._in_training:
                raise DestinationOccupied(f"{what}, and a trainer saves there.", hint=OWN_DIRECTORY_HINT)
            top = self._dest / path.relative_to(self._dest).parts[0]
            if place.other_owner(top) is not None and os.path.lexists(top) and not may_move(top):
                raise DestinationOccupied(f"{what}, who alone may move it away.", hint=OWN_DIRECTORY_HINT)
        if theirs:
            _log.warning("%s belongs to user id %d: it is not believed, and is fetched again", *theirs[0])

    def _is_here(self, place: Destination, name: str, artifacts: Sequence[Artifact], same: LocalSave | None) -> bool:
        """Whether the files under a top name may stay: those of ``same`` by size, others or on refresh by checksum."""
        if same is not None:
            named = _digests(same.meta)
            if all(named.get(a.path) == a.digest for a in artifacts):
                if not place.has_sizes(name, artifacts):
                    return False
                if not self._refresh or self._verified(place, name, artifacts):
                    return True
                reason = f"{name} does not have the checksums of its meta"
                save_id, where = same.meta.save_id, str(self._dest)
                self._bus.emit(events.CopyBroken(step=place.step, save_id=save_id, place=where, reason=reason))
                return False
        path = self._dest / name
        if not os.path.lexists(path) or not self._verified(place, name, artifacts):
            return False
        if path.is_dir():  # another call, or program, wrote it
            directories.fsync_tree(path)
        else:
            directories.fsync_file(path)
        return True

    def _verified(self, place: Destination, name: str, artifacts: Sequence[Artifact]) -> bool:
        """Whether the files have the checksums. Reads all of them, which takes a while."""
        if self._on_progress is not None:
            total = sum(artifact.digest.size_bytes for artifact in artifacts)
            self._on_progress(StageProgress(place.step, 0, 0, total, checking=name))
        return place.holds(name, artifacts)

    def _new_meta(
        self, meta: Meta, artifacts: Sequence[Artifact], kinds: Sequence[Kind], held: Meta | None, tag: str
    ) -> Meta:
        before = held.kinds if held is not None else ()
        together = tuple(kind for kind in dict.fromkeys((*meta.kinds, *before)) if kind in (*before, *kinds))
        named = [
            replace(
                artifact,
                path=with_tag(artifact.path, meta.save_id, tag),
                object=None,
                kinds=tuple(kind for kind in artifact.kinds if kind in together),
            )
            for artifact in artifacts
        ]
        return replace(
            meta,
            kinds=together,
            artifacts=tuple(sorted(named, key=lambda artifact: artifact.path)),
            tag=tag,
            staged_from=self._mirror.url,
            partial=(meta.partial or len(named) < len(meta.artifacts))
            and (held is None or held.partial or not held.is_whole),
        )

    # -- the bytes ------------------------------------------------------------------------------------------

    def _tmp_of(self, path: str, save_id: str) -> Path:
        """Return the temporary of an untagged path. It does not depend on the tag, so that a later call finds it."""
        top, _, below = path.partition("/")
        tmp = self._dest / names.tmp_name(top, save_id)
        return tmp / below if below else tmp

    def _receive(self, meta: Meta, artifacts: Sequence[Artifact]) -> None:
        try:
            incoming = incoming_of(self._mirror, meta, artifacts, lambda path: self._tmp_of(path, meta.save_id))
            elsewhere = None if self._in_training else "Free space there, or choose another --dest."
            check_space(self._dest, incoming, hint=elsewhere)
            for directory in dict.fromkeys(one.path.parent for one in incoming):
                make_real_dirs(self._dest, directory)
            receive(incoming, on_bytes=self._counter(meta.step, incoming))
        except ObjectNotFound as error:
            raise CheckpointNotFound(
                f"Step {meta.step} was whole on {self._mirror.url} when it was chosen, but no longer is: {error}.",
                hint="It has since been removed, perhaps by retention. List the saves with "
                f"`ckptmirror ls {quote(self._mirror.url)}`.",
            ) from error

    def _counter(self, step: int, incoming: Sequence[Incoming]) -> Callable[[int, int], None]:
        total = sum(one.source.digest.size_bytes for one in incoming)
        counted = [0, 0]

        def count(received: int, kept: int) -> None:
            counted[0] += received
            counted[1] += kept
            if self._on_progress is not None:
                self._on_progress(StageProgress(step, counted[0], counted[1], total))

        count(0, 0)
        return count

    # -- the names ------------------------------------------------------------------------------------------

    def _publish(
        self,
        place: Destination,
        arriving: Sequence[str],
        same: LocalSave | None,
        stale: Sequence[LocalSave],
        new: Meta,
    ) -> None:
        """Steps 3 to 5 of the module's order."""
        earlier = [same] if same is not None else []
        keeps_its_name = same is not None and same.meta.tag == new.tag
        ours = {*place.condemned} | {name for save in (*earlier, *stale) for name in place.names_of(save)}
        waiting = [name for name in arriving if name in ours and os.path.lexists(self._dest / name)]
        for name in arriving:
            if name not in waiting:
                self._publish_one(place, name, new)
        self._put_aside(stale if keeps_its_name else [*earlier, *stale])
        for name in waiting:
            self._replace_one(place, name, new)
        directories.fsync_dir(self._dest)
        if same is None or new is not same.meta:
            meta_path = self._dest / names.SaveName(new.step, new.tag).meta
            files.write_bytes(meta_path, meta_to_bytes(new), save_id=new.save_id, replace=keeps_its_name)

    def _put_aside(self, replaced: Sequence[LocalSave]) -> None:
        """Move the metas of these saves to trash, which ends them; their files follow after the new meta."""
        for save in replaced:
            trash.move_to_trash(self._dest, save.meta_path)
        if replaced:
            directories.fsync_dir(self._dest)

    def _replace_one(self, place: Destination, name: str, new: Meta) -> None:
        """Publish in the place of what has the name; a directory in one step, since it may be a node's healthy part."""
        tmp, old = self._tmp_of(names.untagged(name), new.save_id), self._dest / name
        if tmp.is_dir() and old.is_dir() and not old.is_symlink():
            self._drop_strangers(place, tmp, name, new)
            if directories.exchange_dirs(tmp, old):
                trash.move_to_trash(self._dest, tmp)
                return
        trash.move_to_trash(self._dest, old)
        self._publish_one(place, name, new)

    def _publish_one(self, place: Destination, name: str, new: Meta) -> None:
        tmp = self._tmp_of(names.untagged(name), new.save_id)
        if not tmp.is_dir():
            directories.rename_noreplace(tmp, self._dest / name)
            return
        self._drop_strangers(place, tmp, name, new)
        directories.publish_dir(tmp, self._dest / name)

    def _drop_strangers(self, place: Destination, tmp: Path, name: str, new: Meta) -> None:
        for stray in place.strangers(tmp.name, below_top(by_top(new.artifacts)[name])):
            trash.move_to_trash(self._dest, tmp / stray)


def _digests(meta: Meta) -> dict[str, Digest]:
    """Return the files that a meta names, by untagged path."""
    return {names.untagged(artifact.path): artifact.digest for artifact in meta.artifacts}


def _with_held(wanted: Sequence[Artifact], on_mirror: Sequence[Artifact], held: Meta | None) -> list[Artifact]:
    """Return the mirror's artifacts that are wanted or that the directory's own meta names, for the kinds of both."""
    here = {names.untagged(artifact.path): artifact.kinds for artifact in held.artifacts} if held is not None else {}
    paths = {*here, *(artifact.path for artifact in wanted)}
    return [
        replace(a, kinds=tuple(dict.fromkeys((*a.kinds, *here.get(a.path, ()))))) for a in on_mirror if a.path in paths
    ]


def _only_in(held: Meta | None, on_mirror: Sequence[Artifact]) -> list[Artifact]:
    """Return the artifacts, under untagged paths, that the directory has and the mirror has lost."""
    there = {artifact.path for artifact in on_mirror}
    return [a for a in _untagged(held) if a.path not in there] if held is not None else []


def _has(place: Destination, held: Meta, wanted: Sequence[Artifact]) -> bool:
    """Whether the directory's own meta names all wanted files, and they are there."""
    named = _digests(held)
    return all(named.get(artifact.path) == artifact.digest for artifact in wanted) and all(
        place.has_sizes(with_tag(top, held.save_id, held.tag), artifacts) for top, artifacts in by_top(wanted).items()
    )


def _says_the_same(standing: Meta, new: Meta) -> bool:
    """Whether the existing meta names the same files for the same kinds."""

    def said(meta: Meta) -> tuple[object, ...]:
        needed = {(artifact.path, frozenset(artifact.kinds)) for artifact in meta.artifacts}
        return set(meta.kinds), meta.tag, meta.partial, needed, _digests(meta)

    return said(standing) == said(new)
