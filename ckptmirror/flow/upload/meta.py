"""Upload of a meta. It makes a save exist on a mirror, after every file that it names.

Rules:
* A meta can be claimed only when the table has all artifacts of the save as verified there. It is written only after
  the mirror confirmed that this attempt is not fenced.
* With several nodes, each publishes its part. The node that comes last sees all parts and writes the whole meta; any
  node may, and all write the same. No node believes that a part is its own, or that a meta is the whole one, because
  of its name.
* The requests of a node do not grow with the number of nodes: one that waits asks for one missing part at a time, and
  one that finds all parts lets the node that came last write the meta. If that takes too long, a few stand in for it,
  drawn by lot, and twice as many at each further look: if all did, each of them would read the parts of all.
* If an object has the name already, it is read. If it is our own meta, the upload has succeeded. If it is another
  save's, the upload uses its other name. If it is a tombstone, the save is not uploaded.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from dataclasses import replace

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_from_bytes, meta_or_tombstone_from_bytes, meta_to_bytes, part_from_bytes
from ckptmirror.core.errors import (
    BrokenMeta,
    IntegrityError,
    NewerFormat,
    NodeBehind,
    NotSigned,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    Temporary,
)
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.meta_merging import check_same_save, merge_parts
from ckptmirror.core.model import Artifact, Meta, Tombstone
from ckptmirror.core.uncommitted import damaged_part_text, node_behind_text
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES, objects_of
from ckptmirror.flow.places.object_match import why_differs
from ckptmirror.flow.upload.sending import Sending
from ckptmirror.local.checksums import crc32c
from ckptmirror.local.daemon_pool import run_jobs
from ckptmirror.stores.base import ObjectInfo

__all__ = ["MetaUpload"]

_READERS = 8
_WRITING_S = 5.0  # the least time that a node gets for writing the meta of all
_WRITING_PART_S = 0.03  # and for each part that it reads: two requests, eight at a time, each well below 0.1 s
_STAND_INS = 4  # so many nodes, if all look, stand in for one that took too long, at the first look
_DOUBLINGS_LIMIT = 30
_random = random.Random()  # does not disturb the random numbers of the training


class MetaUpload(Sending):
    """The upload of a save's meta."""

    def send(self) -> None:
        """Write the mirror's meta, unless the mirror has it already or has a tombstone of the save.

        Raises:
            NodeBehind: Another node has not published its part yet, or is about to write the meta.
        """
        context = self._context
        meta = self._local_meta()
        objects = self._objects(meta)
        is_published = self._ask_for_awaited(meta, objects)
        context.confirm(context.mirror, meta, is_part=not meta.is_whole)
        context.confirmed.discard(meta.save_id)
        mine = self._mirror_meta(meta, objects)
        self._check_artifacts(mine)
        if meta.is_whole:
            self._write(meta, mine, meta_to_bytes(mine))
            return
        came_last = not is_published and self._publish_part(meta, mine)
        context.published[meta.save_id] = objects
        if not self._is_settled(meta, mine, None, []):
            merged = self._merged(mine, came_last)
            context.confirm(context.mirror, meta)
            self._write(meta, mine, meta_to_bytes(merged))
        context.awaited.pop(meta.save_id, None)
        context.published.pop(meta.save_id, None)
        context.left.pop(meta.save_id, None)

    def _write(self, meta: Meta, mine: Meta, data: bytes) -> None:
        damaged: list[str] = []
        if self._is_settled(meta, mine, data, damaged):
            return
        if meta.partial:
            raise StorePermanent(
                f"{self._context.mirror.url} has no meta of step {meta.step}, and this disk has only a part of the "
                "save.",
                hint="Upload it from a machine that has all of it.",
            )
        if damaged:
            raise self._say_what_to_delete(damaged)
        raise StorePermanent(f"Both names for the meta of step {meta.step} are taken on {self._context.mirror.url}.")

    def _is_settled(self, meta: Meta, mine: Meta, data: bytes | None, damaged: list[str]) -> bool:
        """Return whether the mirror has the save's meta now, or its tombstone; record which.

        Args:
            meta: The local meta.
            mine: The same with the names of the objects.
            data: The bytes to write under the first free name; None: only look.
            damaged: Receives the names of objects that may be the save's and cannot be read.
        """
        context = self._context
        own_names = self._own_names(meta) if meta.is_whole else self._whole_names(meta)
        for name in self._candidate_names(meta) if meta.is_whole else own_names:
            # A copy with only some of the save's files does not name them all.
            if data is not None and name in own_names and not meta.partial:
                with contextlib.suppress(PreconditionFailed):  # ours from before, or another save's: read next
                    self._store.write(name, data, if_generation=0, metadata=self._metadata(meta))
            elif self._store.stat(name) is None:
                continue
            try:
                there, info = self._store.read(name, limit_bytes=META_LIMIT_BYTES)
            except ObjectNotFound as error:
                raise Temporary(f"{name} appeared and disappeared on {context.mirror.url}.") from error
            except IntegrityError:  # the mirror has other bytes than it was sent
                stored = self._store.stat(name)
                if stored is not None and self._is_damaged_own(stored, meta):
                    damaged.append(name)
                continue
            if info.crc32c is not None and crc32c(there) != info.crc32c:
                raise Temporary(f"{name} arrived broken from {context.mirror.url}.")  # it may be ours
            try:
                found = meta_or_tombstone_from_bytes(there)
            except NewerFormat as error:
                if self._is_damaged_own(info, meta):
                    raise self._of_later_version(name) from error
                continue
            except BrokenMeta:
                found = None
            if found is None and self._is_damaged_own(info, meta):
                damaged.append(name)
            if found is None or found.save_id != meta.save_id:
                continue
            if isinstance(found, Tombstone):
                context.table.remove(meta.save_id, context.mirror.url, f"removed by retention: {found.reason}")
                return True
            if there != data and not (found.is_whole and _covers(found, meta)):
                raise IntegrityError(f"{name} on {context.mirror.url} names this save with other contents.")
            self._verify_meta(*self._naming_what_was_verified(found, mine, info, there))
            return True
        return False

    def _naming_what_was_verified(
        self, there: Meta, mine: Meta, info: ObjectInfo, data: bytes
    ) -> tuple[ObjectInfo, bytes]:
        """Make the mirror's meta of this save name the verified objects, and return the resulting meta.

        A damaged object keeps its name, and the object sent in place of it has another. Only object names change, and
        only if the meta still has the generation that was read. An object that is right keeps its place in the meta,
        though this node sent the same file under another name: all nodes have ``.metadata``.

        Raises:
            StorePermanent: It is not signed as what this process signs has to be.
            Temporary: Another process changed it meanwhile.
        """
        verified = {names.untagged(artifact.path): artifact.object_name for artifact in mine.artifacts}
        artifacts = zip(_untagged_paths(there), there.artifacts, strict=True)
        wanted = [self._better_name(one, verified.get(path, one.object_name), mine) for path, one in artifacts]
        if wanted == [artifact.object_name for artifact in there.artifacts]:
            return info, data
        named = tuple(
            replace(a, object=name if name != a.path else None) for a, name in zip(there.artifacts, wanted, strict=True)
        )
        if self._is_signed:
            try:
                part_from_bytes(data)
            except NotSigned as error:
                raise self._not_believed(info.name, error) from error
        data = meta_to_bytes(replace(there, artifacts=named))
        try:
            info = self._store.write(info.name, data, if_generation=info.generation, metadata=info.metadata)
        except PreconditionFailed as error:
            raise Temporary(f"{info.name} on {self._context.mirror.url} has been changed since.") from error
        return info, data

    def _better_name(self, artifact: Artifact, verified: str, meta: Meta) -> str:
        """Return the name of the artifact's object in the mirror's meta, unless that is gone or wrong: then another."""
        if artifact.object_name == verified:
            return verified
        info = self._store.stat(artifact.object_name)
        is_right = info is not None and self._is_right(info, artifact, meta)
        return artifact.object_name if is_right else verified

    def _check_artifacts(self, meta: Meta) -> None:
        """Ask for every artifact once more: some were verified long ago, and the bucket may have been replaced since.

        Raises:
            Temporary: Some are no longer the objects that were verified; they are pending again.
        """
        table, mirror = self._context.table, self._context.mirror
        objects = objects_of(self._store, meta)
        changed = []
        for record in table.records(save_id=meta.save_id, mirror=mirror.url):
            name = record.object or record.path
            why = why_differs(record, objects.get(name)) if record.role == "artifact" else None
            if why is not None:
                changed.append(f"{name} {why}")
                if record.state is RecordState.VERIFIED:
                    table.unverify(record.save_id, record.path, record.mirror, changed[-1])
        if changed:
            raise Temporary(f"{mirror.url}: {changed[0]} ({len(changed)} in all): they are sent again before the meta.")

    def _objects(self, meta: Meta) -> dict[str, str | None]:
        """Return the object name of each file of the save that is queued, by path; None if it has none yet."""
        records = self._context.table.records(save_id=meta.save_id, mirror=self._context.mirror.url)
        return {record.path: record.object for record in records if record.role == "artifact"}

    def _mirror_meta(self, meta: Meta, objects: Mapping[str, str | None]) -> Meta:
        """Return the node's meta, with the object name of each artifact whose object name differs from its path.

        Args:
            meta: The local meta.
            objects: The object names.

        Raises:
            StorePermanent: The whole save was staged in the place of this node's part, and its files are not queued.
        """
        if any(artifact.path not in objects for artifact in meta.artifacts):
            raise StorePermanent(
                f"More of step {meta.step} was staged into {self._context.root} since its files were queued: another "
                "`ckptmirror drain`, or the next start, queues the rest."
            )
        artifacts = tuple(
            replace(a, object=objects[a.path] if objects[a.path] != a.path else None) for a in meta.artifacts
        )
        return replace(meta, artifacts=artifacts, staged_from=None, partial=False)

    # -- parts ------------------------------------------------------------------------------------------------

    def _whole_names(self, meta: Meta) -> list[str]:
        """Return the names that the meta of all nodes may have: each node may tag its own names, but not this one."""
        plain = names.untagged(self._record.path)
        return [plain, names.tagged(plain, meta.save_id)]

    def _ask_for_awaited(self, meta: Meta, objects: Mapping[str, str | None]) -> bool:
        """Ask for the part that this node waits for, and whether this attempt may still wait.

        If the mirror has lost this node's own part meanwhile, or a file was sent again under another name, it waits
        for nothing: its part comes first.

        Returns:
            Whether its own part is there, and names these objects.

        Raises:
            NodeBehind: It is not there yet, and neither is the whole meta, which may outlive it.
            AttemptFenced: A newer attempt has started: the other node sends nothing more.
        """
        awaited = self._context.awaited.get(meta.save_id)
        if meta.is_whole or awaited is None or self._context.published.get(meta.save_id) != objects:
            return False
        if awaited and all(self._store.stat(name) is None for name in (awaited, *self._whole_names(meta))):
            if self._store.stat(names.part_name(meta.step, meta.save_id, meta.node + 1, meta.nodes)) is None:
                self._context.awaited.pop(meta.save_id, None)
                return False
            self._context.confirm(self._context.mirror, None)
            raise self._behind(awaited)
        return True

    def _behind(self, part: str) -> NodeBehind:
        return NodeBehind(node_behind_text(part, self._context.mirror.url))

    def _publish_part(self, meta: Meta, mine: Meta) -> bool:
        """Publish this node's part; return whether it was not there yet. If it was, it names what was sent since."""
        if meta.partial:  # no stage brings a part: somebody else made this meta that of a copy
            raise StorePermanent(
                f"The meta of step {meta.step} in {self._context.root} names only a part of the files of its node.",
                hint="Put back the meta that the save wrote, then `ckptmirror retry`.",
            )
        own = names.part_name(mine.step, mine.save_id, mine.node + 1, mine.nodes)
        try:
            self._store.write(own, meta_to_bytes(mine), if_generation=0, metadata=self._metadata(mine))
        except PreconditionFailed:
            self._renew_part(own, mine)
            return False
        return True

    def _renew_part(self, own: str, mine: Meta) -> None:
        """Make a part that is there name the verified objects, so that no meta is made that names a damaged one."""
        with contextlib.suppress(IntegrityError, ObjectNotFound, NewerFormat):  # whoever merges says what is wrong
            data, info = self._store.read(own, limit_bytes=META_LIMIT_BYTES)
            there = meta_from_bytes(data)
            check_same_save([mine, there])
            if _covers(there, mine):
                self._naming_what_was_verified(there, mine, info, data)

    def _merged(self, mine: Meta, came_last: bool) -> Meta:
        """Merge the parts of all nodes.

        Args:
            mine: This node's part.
            came_last: Whether this node has just published it: if all parts are there, it came last.

        Raises:
            NodeBehind: A part is not there yet; or all are, and the node that came last is about to merge them.
            IntegrityError: A part is not of this save, or the one with this node's name lacks files of this node:
                somebody else wrote it.
        """
        awaited, left = self._context.awaited, self._context.left
        if mine.save_id in left and not self._stands_in(mine):
            raise self._left_to_the_last(mine)
        part_names = [names.part_name(mine.step, mine.save_id, number + 1, mine.nodes) for number in range(mine.nodes)]
        there = {info.name for info in self._store.list(names.parts_prefix(mine.step, mine.save_id))}
        if missing := [name for name in part_names if name not in there]:
            if part_names[mine.node] in missing:  # somebody deleted it: it is published again
                awaited.pop(mine.save_id, None)
                raise self._behind(part_names[mine.node])
            awaited[mine.save_id] = missing[mine.node % len(missing)]  # not all nodes wait for the same
            raise self._behind(missing[0])
        has_waited = bool(awaited.get(mine.save_id))
        if has_waited or not (came_last or mine.save_id in left or self._stands_in(mine)):
            raise self._left_to_the_last(mine)
        found: dict[str, Meta] = {}
        own = part_names[mine.node]
        from_bytes = part_from_bytes if self._is_signed else meta_from_bytes  # before the run was signed, no part was

        def read(name: str) -> None:
            try:
                found[name] = from_bytes(self._store.read(name, limit_bytes=META_LIMIT_BYTES)[0])
            except ObjectNotFound as error:
                raise self._behind(name) from error
            except NotSigned as error:
                raise self._not_believed(name, error) from error
            except NewerFormat as error:
                raise self._of_later_version(name) from error
            except IntegrityError as error:
                if name == own:
                    raise self._say_what_to_delete([name], f"This node's part of step {mine.step}") from error
                raise NodeBehind(damaged_part_text(name, self._context.mirror.url)) from error
            try:
                check_same_save([mine, found[name]])
            except BrokenMeta as error:
                raise self._not_ours(name, str(error)) from error

        run_jobs(part_names, read, name="ckptmirror-parts", workers=_READERS)
        if not _covers(found[own], mine):
            raise self._not_ours(own, "It does not name what this node saved.")
        return merge_parts([found[name] for name in part_names])

    def _of_later_version(self, name: str) -> StorePermanent:
        return StorePermanent(
            f"{name} on {self._context.mirror.url} was written by a later version of ckptmirror: `ckptmirror drain` of "
            "that version finishes the save."
        )

    def _not_believed(self, name: str, why: NotSigned) -> StorePermanent:
        return StorePermanent(f"{name} on {self._context.mirror.url} is not believed: {why}", hint=why.hint)

    def _not_ours(self, name: str, why: str) -> IntegrityError:
        url = self._context.mirror.url
        return IntegrityError(
            f"{name} on {url} is not what a node of this job wrote: {why}",
            hint="Delete it, then `ckptmirror retry` on each node.",
        )

    def _stands_in(self, mine: Meta) -> bool:
        """Draw whether this node writes the meta now in place of the one that came last."""
        looks = self._context.left.get(mine.save_id, 0)
        return _random.random() * mine.nodes < _STAND_INS << min(looks, _DOUBLINGS_LIMIT)

    def _left_to_the_last(self, mine: Meta) -> NodeBehind:
        self._context.awaited[mine.save_id] = ""
        self._context.left[mine.save_id] = self._context.left.get(mine.save_id, -1) + 1
        last = NodeBehind(
            f"All parts of step {mine.step} are on {self._context.mirror.url}, and the node that came last is about to "
            "write its meta."
        )
        last.writes_for_s = max(_WRITING_S, _WRITING_PART_S * mine.nodes)
        return last

    # -- the table --------------------------------------------------------------------------------------------

    def _verify_meta(self, info: ObjectInfo, data: bytes) -> None:
        context = self._context
        context.table.verify(
            self._claim,
            object_name=info.name,
            generation=info.generation,
            size_bytes=len(data),
            crc32c=crc32c(data),
        )
        context.bus.emit(
            events.MirrorCommitted(mirror=context.mirror.url, step=self._record.step, save_id=self._record.save_id)
        )


def _covers(there: Meta, mine: Meta) -> bool:
    """Whether a mirror's meta names every file of a local save. A staged copy may hold only some kinds."""
    named = {path: artifact.digest for path, artifact in zip(_untagged_paths(there), there.artifacts, strict=True)}
    found = ((named.get(names.untagged(artifact.path)), artifact.digest) for artifact in mine.artifacts)
    return all(there is not None and there.agrees_with(digest) for there, digest in found)


def _untagged_paths(meta: Meta) -> list[str]:
    """Return the artifacts' paths without the meta's tag. Thousands of names need no look if it has none."""
    return [names.untagged(artifact.path) if meta.tag else artifact.path for artifact in meta.artifacts]
