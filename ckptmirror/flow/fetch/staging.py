"""Staging: how one save of a mirror becomes a whole save of a directory.

Order (DESIGN.md §3, "Stage"):

1. what the directory holds of this save already, and still verifies, is kept;
2. the rest is received into temporaries, every block verified, and fsynced;
3. the files get their final names, never replacing anything;
4. metas of other saves that are replaced go to trash (``refresh``); then a broken file of this very save makes room for
   its whole one under the same name;
5. the meta is written, last, with the same save id and ``staged_from``: from here the save is staged. This very save's
   earlier meta is replaced in that one step, by one that names more; one that names as much stays, a trainer's always;
6. the files of metas in the trash go there too, and the trash is emptied.

Rules:
* There are never two metas of one save id. A crash after 3 leaves files that the next call recognises by their
  checksums; a crash after 4 is finished by the next call, from the trash; while a broken file makes room, its save is
  incomplete and not listed, and still named, so that nothing takes it for one that was deleted.
* A copy is verified when it is staged; a later call compares sizes, and ``refresh`` verifies the checksums again.
* Replacing loses nothing: another save goes only if this mirror holds it, checksum by checksum, or if it was a mere
  copy of this mirror's. In a training root no other save goes at all, and of the very save only what its verified copy
  replaces.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

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
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.flow.fetch.blocks import Incoming, ObjectToRead, receive
from ckptmirror.flow.fetch.destination import (
    Destination,
    by_top,
    in_tree,
    is_training_root,
    make_durable,
    make_real_dirs,
    with_tag,
)
from ckptmirror.flow.fetch.stage_progress import OnProgress, StageProgress
from ckptmirror.flow.places.catalog import first_missing, mirror_catalog, objects_of
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.read_back import read_back_crc32c
from ckptmirror.flow.places.select import MAIN_ROLE, lineage_of
from ckptmirror.local import files
from ckptmirror.local.inventory import LocalSave

__all__ = ["Staging", "wanted_artifacts"]


_log = logging.getLogger("ckptmirror.stage")


def wanted_artifacts(meta: Meta, kinds: Sequence[Kind], full: bool) -> list[Artifact]:
    """The artifacts to have, under untagged paths; ``object`` always says where each lies on the mirror."""
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


class Staging:
    """What one call of :func:`stage_save` does, under the step's lock."""

    def __init__(
        self, mirror: Mirror, dest: Path, refresh: bool, on_progress: OnProgress | None, bus: events.EventBus
    ) -> None:
        self._mirror = mirror
        self._dest = dest
        self._in_training = is_training_root(dest)
        self._refresh = refresh
        self._on_progress = on_progress
        self._bus = bus

    def destination(self, meta: Meta) -> Destination:
        """Look at the directory, for bringing in this save."""
        return Destination(self._dest, meta.step, replaces=meta.save_id if self._in_training else None)

    def judge(self, place: Destination, meta: Meta) -> tuple[list[LocalSave], list[Meta]]:
        """Say which other saves of the step are to go, and which are the mirror's own and to be verified.

        Raises:
            RefusedOnlyCopy: A stale save is not whole on this mirror, and not a mere copy of this mirror's.
        """
        catalog = mirror_catalog(self._mirror, step=meta.step)
        current = {save.save_id for save in lineage_of(catalog).current.values()} | {meta.save_id}
        stale = [save for save in place.saves if save.meta.save_id not in current]
        for save in stale:
            there = catalog.saves.get(save.meta.save_id)
            came_from_here = (save.meta.staged_from, save.meta.run_id) == (self._mirror.url, meta.run_id)
            if came_from_here and not self._in_training and not catalog.problems:
                continue  # what is broken on the mirror may be this very save
            if there is None or not self._holds(there, save.meta):
                raise RefusedOnlyCopy(
                    f"{save.meta_path} is save {save.meta.save_id[:8]}, which {self._mirror.url} does not hold whole: "
                    "it stays."
                )
        others = {save.meta.save_id for save in place.saves} & current - {meta.save_id}
        if self._in_training and stale:
            listed = ", ".join(save.meta_path.name for save in stale)
            _log.info("%s: stale, but a trainer saves here: it stays until rotation may delete it", listed)
            stale = []
        return stale, [catalog.saves[save_id] for save_id in sorted(others)]

    def _holds(self, there: Meta, here: Meta) -> bool:
        """Whether the mirror, asked now, has every file that a local save names, with its checksum."""
        store = self._mirror.store
        named = {names.untagged(artifact.path): artifact for artifact in there.artifacts}
        objects = objects_of(store, there)
        for artifact in here.artifacts:
            copy = named.get(names.untagged(artifact.path))
            info = objects.get(copy.object_name) if copy is not None else None
            if copy is None or info is None or copy.digest != artifact.digest:
                return False
            crc32c = info.crc32c if info.crc32c is not None else read_back_crc32c(store, info)
            if (info.size_bytes, crc32c) != (artifact.digest.size_bytes, artifact.digest.crc32c):
                return False
        return True

    def bring(
        self, place: Destination, meta: Meta, wanted: Sequence[Artifact], kinds: Sequence[Kind], stale: list[LocalSave]
    ) -> Meta:
        """Have ``wanted``, and whatever the directory holds of this save already, whole, under one meta."""
        same = place.find(meta.save_id)
        if meta.partial and same is not None and not self._refresh and self._has(place, same.meta, wanted):
            return same.meta  # it may name kinds that the mirror has lost since
        twins = [save for save in place.saves if save.meta.save_id == meta.save_id and save is not same]
        if self._refresh or not self._in_training:  # on refresh the one that stays is verified
            stale = [*stale, *twins]  # of two metas of one save, one goes
        held = same.meta if same is not None else place.interrupted(meta.save_id)
        arriving = by_top(self._with_held(meta, wanted, held))
        tag = place.choose_tag(meta.save_id, arriving, same)
        missing = {
            top: artifacts
            for top, artifacts in arriving.items()
            if not self._is_here(place, with_tag(top, meta.save_id, tag), artifacts, same, tag)
        }
        for top, artifacts in missing.items():
            self._check_no_stranger(place, with_tag(top, meta.save_id, tag), artifacts)
        new = self._new_meta(meta, [a for some in arriving.values() for a in some], kinds, held, tag)
        if same is not None and _says_the_same(same.meta, new):
            new = same.meta  # a trainer's own always does
            if not missing:
                self._put_aside(stale)
                return new
        started = time.monotonic()
        size_bytes = sum(a.digest.size_bytes for some in missing.values() for a in some)
        self._bus.emit(
            events.StageStarted(mirror=self._mirror.url, step=meta.step, kinds=new.kinds, size_bytes=size_bytes)
        )
        self._receive(meta, [a for some in missing.values() for a in some])
        self._publish(place, meta, list(missing), same, stale, new)
        self._bus.emit(
            events.StageFinished(
                mirror=self._mirror.url,
                step=meta.step,
                kinds=new.kinds,
                size_bytes=size_bytes,
                duration_s=time.monotonic() - started,
            )
        )
        return new

    def _has(self, place: Destination, held: Meta, wanted: Sequence[Artifact]) -> bool:
        """Whether the directory's own meta names all that is wanted, and it lies there."""
        named = {names.untagged(artifact.path): artifact.digest for artifact in held.artifacts}
        tops = {with_tag(top, held.save_id, held.tag): artifacts for top, artifacts in by_top(wanted).items()}
        is_named = all(named.get(artifact.path) == artifact.digest for artifact in wanted)
        return is_named and all(place.has_sizes(top, artifacts) for top, artifacts in tops.items())

    def _with_held(self, meta: Meta, wanted: Sequence[Artifact], held: Meta | None) -> list[Artifact]:
        """``wanted``, and what the directory's own meta of this save names."""
        on_mirror = _untagged(meta)
        paths = {names.untagged(a.path) for a in held.artifacts} if held is not None else set()
        beyond = paths - {a.path for a in on_mirror}
        if beyond:
            raise RefusedOnlyCopy(
                f"{self._dest} holds {sorted(beyond)[0]} of save {meta.save_id[:8]}, "
                f"which {self._mirror.url} does not have."
            )
        both = paths | {a.path for a in wanted}
        return [a for a in on_mirror if a.path in both]

    def _is_here(
        self, place: Destination, name: str, artifacts: Sequence[Artifact], same: LocalSave | None, tag: str
    ) -> bool:
        """Whether what lies under a top name may stay: our own by size (on refresh by checksum), or by checksum."""
        if same is not None and same.meta.tag == tag:
            here = {names.untagged(a.path): a.digest for a in same.meta.artifacts}
            if all(here.get(a.path) == a.digest for a in artifacts):
                whole = self._verified(place, name, artifacts) if self._refresh else place.has_sizes(name, artifacts)
                if not whole and place.has_sizes(name, artifacts):
                    reason = f"{name} does not have the checksums of its meta"
                    self._bus.emit(
                        events.CopyBroken(
                            step=place.step, save_id=same.meta.save_id, place=str(self._dest), reason=reason
                        )
                    )
                return whole
        if not os.path.lexists(self._dest / name) or not self._verified(place, name, artifacts):
            return False
        make_durable(self._dest / name)
        return True

    def _verified(self, place: Destination, name: str, artifacts: Sequence[Artifact]) -> bool:
        """Whether what lies there has the checksums: all of it is read, which takes its time."""
        if self._on_progress is not None:
            total = sum(artifact.digest.size_bytes for artifact in artifacts)
            self._on_progress(StageProgress(place.step, 0, 0, total, checking=name))
        return place.holds(name, artifacts)

    def _check_no_stranger(self, place: Destination, name: str, artifacts: Sequence[Artifact]) -> None:
        """A directory that is to make room for its whole copy must hold nothing of anyone else's."""
        strangers = place.strangers(name, {a.path.partition("/")[2] for a in artifacts})
        if strangers:
            raise DestinationOccupied(f"{self._dest / name} holds {strangers[0]}, which is not part of the checkpoint.")

    def _new_meta(
        self, meta: Meta, artifacts: Sequence[Artifact], kinds: Sequence[Kind], held: Meta | None, tag: str
    ) -> Meta:
        before = held.kinds if held is not None else ()
        together = tuple(kind for kind in meta.kinds if kind in (*before, *kinds))
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
            partial=meta.partial or len(named) < len(meta.artifacts),
        )

    # -- the bytes ------------------------------------------------------------------------------------------

    def _tmp_of(self, path: str, save_id: str) -> Path:
        """The temporary of an untagged path: the same whatever tag is chosen, so that a later call finds it."""
        top, _, below = path.partition("/")
        tmp = self._dest / names.tmp_name(top, save_id)
        return tmp / below if below else tmp

    def _receive(self, meta: Meta, artifacts: Sequence[Artifact]) -> None:
        if not artifacts:
            return
        asked = replace(meta, artifacts=tuple(artifacts))
        objects = objects_of(self._mirror.store, asked)
        missing = first_missing(asked, objects)
        if missing is not None:
            raise self._went(meta, missing)
        incoming = []
        for artifact in artifacts:
            info = objects[artifact.object_name]
            if info.crc32c is not None and info.crc32c != artifact.digest.crc32c:
                raise IntegrityError(
                    f"{self._mirror.url}/{info.name} has crc32c {info.crc32c:08x}, "
                    f"but {artifact.digest.crc32c:08x} was saved.",
                    hint="Stage the step from another mirror, or another step: see `ckptmirror ls`.",
                )
            source = ObjectToRead(self._mirror.store, info.name, info.generation, artifact.digest)
            incoming.append(Incoming(source, self._tmp_of(artifact.path, meta.save_id)))
        self._check_space(incoming)
        for directory in dict.fromkeys(one.path.parent for one in incoming):
            make_real_dirs(self._dest, directory)
        try:
            receive(incoming, on_bytes=self._counter(meta.step, incoming))
        except ObjectNotFound as error:
            raise self._went(meta, str(error)) from error

    def _went(self, meta: Meta, reason: str) -> CheckpointNotFound:
        return CheckpointNotFound(
            f"Step {meta.step} was whole on {self._mirror.url} when it was chosen, but is no more: {reason}.",
            hint="It was removed meanwhile, perhaps by retention. List what there is with `ckptmirror ls`.",
        )

    def _check_space(self, incoming: Sequence[Incoming]) -> None:
        needed = sum(max(0, one.source.digest.size_bytes - _allocated_bytes(one.path)) for one in incoming)
        found = os.statvfs(self._dest)
        free = found.f_bavail * found.f_frsize
        if needed > free:
            raise LocalStorageFull(
                f"{self._dest} has {free} bytes free, and {needed} more are needed.",
                hint="Free space there, or choose another --dest.",
            )

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
        meta: Meta,
        tops: Sequence[str],
        same: LocalSave | None,
        stale: Sequence[LocalSave],
        new: Meta,
    ) -> None:
        """Steps 3 to 5 of the module's order."""
        earlier = [same] if same is not None else []
        keeps_its_name = same is not None and same.meta.tag == new.tag
        ours = {*place.condemned} | {name for save in (*earlier, *stale) for name in place.names_of(save)}
        waiting = []
        for top in tops:
            final = self._dest / with_tag(top, meta.save_id, new.tag)
            if final.name in ours and os.path.lexists(final):
                waiting.append((top, final))
            else:
                self._publish_one(top, final, meta.save_id, new)
        self._put_aside(stale if keeps_its_name else [*earlier, *stale])
        for top, final in waiting:
            files.move_to_trash(self._dest, final)
            self._publish_one(top, final, meta.save_id, new)
        files.fsync_dir(self._dest)
        if same is None or new is not same.meta:
            meta_path = self._dest / names.SaveName(new.step, new.tag).meta
            files.write_bytes(meta_path, meta_to_bytes(new), save_id=new.save_id, replace=keeps_its_name)

    def _put_aside(self, replaced: Sequence[LocalSave]) -> None:
        """From here these saves are no more; their files go to trash when the new meta stands."""
        for save in replaced:
            files.move_to_trash(self._dest, save.meta_path)
        if replaced:
            files.fsync_dir(self._dest)

    def _publish_one(self, top: str, final: Path, save_id: str, new: Meta) -> None:
        tmp = self._tmp_of(top, save_id)
        if tmp.is_dir():
            ours = {a.path.partition("/")[2] for a in new.artifacts if a.path.partition("/")[0] == final.name}
            for stray in sorted(set(in_tree(tmp)) - ours):
                files.move_to_trash(self._dest, tmp / stray)
            files.publish_dir(tmp, final)
        else:
            files.rename_noreplace(tmp, final)


def _says_the_same(standing: Meta, new: Meta) -> bool:
    """Whether the meta that stands names the same files for the same kinds."""
    return set(standing.kinds) == set(new.kinds) and {(a.path, a.digest) for a in standing.artifacts} == {
        (a.path, a.digest) for a in new.artifacts
    }


def _allocated_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except (FileNotFoundError, NotADirectoryError):
        return 0
