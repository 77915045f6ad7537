"""Upload of an artifact: the upload succeeds only if the mirror has exactly its bytes.

Rules:
* The mirror is asked before anything is sent. If our own object is there already, the upload has succeeded. Another
  save's object is left alone, and the upload uses its other name.
* A record becomes verified only when the mirror, asked after the upload, reports the size and crc32c taken at commit
  time. If a store computes no crc32c, the object is read back.
* What is damaged or gone here fails. Where every node has the same file, this one first looks for a while whether
  another sends it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ckptmirror.core import events
from ckptmirror.core.errors import (
    CkptMirrorError,
    IntegrityError,
    NodeBehind,
    PreconditionFailed,
    StorePermanent,
    Temporary,
)
from ckptmirror.core.meta_merging import is_on_all_nodes
from ckptmirror.core.model import Digest, Meta
from ckptmirror.flow.upload.sending import LEASE_S, Sending, UploadContext
from ckptmirror.flow.upload.transfer_progress import WatchedUpload
from ckptmirror.local import files
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.uploads import Claim
from ckptmirror.stores.base import ObjectInfo, Upload

__all__ = ["ArtifactUpload"]

_TRIES_OF_OTHERS, _OTHERS_SEND_FOR_S = 6, 2.0  # within half a minute
_SLOWEST_BYTES_PER_S = 20e6  # a lease outlasts a silent pass (fsync, reading back) over the whole file at this rate


class ArtifactUpload(Sending):
    """The upload of one file of a save."""

    def __init__(self, context: UploadContext, claim: Claim) -> None:
        super().__init__(context, claim)
        self._lease_s = LEASE_S + (claim.record.size_bytes or 0) / _SLOWEST_BYTES_PER_S
        self._renewed = time.monotonic()

    def send(self) -> None:
        """Send the record's file, unless the mirror has it already, and verify it."""
        meta = self._local_meta()
        artifact = next((a for a in meta.artifacts if a.path == self._record.path), None)
        if artifact is None:
            raise IntegrityError(f"The meta of save {meta.save_id[:8]} does not name {self._record.path}.")
        if meta.save_id not in self._context.confirmed:
            self._context.confirm(self._context.mirror, None)
            self._context.confirmed.add(meta.save_id)
        if self._lease_s > 2 * LEASE_S:
            self._context.table.renew(self._claim, self._lease_s)
        damaged = []
        for name in self._candidate_names(meta):
            info = self._store.stat(name)
            if info is None and name in self._own_names(meta) and self._may_create(name, meta):
                try:
                    info = self._create(name, artifact.digest, meta)
                except IntegrityError as error:
                    self._leave_to_other_nodes(meta, error)
                    raise
            if info is not None and self._is_right(info, artifact, meta):
                self._verify(info, artifact.digest)
                return
            if info is not None and self._is_damaged_own(info, meta):
                damaged.append(name)
        if damaged:
            raise self._say_what_to_delete(damaged)
        raise StorePermanent(
            f"Every name for {self._record.path} on {self._context.mirror.url} holds other bytes.",
            hint="Another run seems to write to this prefix: give each run a prefix of its own.",
        )

    def _leave_to_other_nodes(self, meta: Meta, error: CkptMirrorError) -> None:
        """Raise NodeBehind if another node has what this one cannot send, and may just be about to send it."""
        path, left = self._record.path, self._context.left_to_others
        if is_on_all_nodes(meta, path) and left.get(path, 0) < _TRIES_OF_OTHERS:
            left[path] = left.get(path, 0) + 1
            behind = NodeBehind(f"{error} Another node has this file too, and may send it.")
            behind.writes_for_s = _OTHERS_SEND_FOR_S
            raise behind from error

    def _create(self, name: str, digest: Digest, meta: Meta) -> ObjectInfo:
        path = self._context.root / self._record.path
        try:
            source = files.FileSource(self._context.root, self._record.path)
        except FileNotFoundError as error:
            gone = StorePermanent(
                f"{path} is gone, and {self._context.mirror.url} has no copy of it.",
                hint="Restore the file, then `ckptmirror drain`.",
            )
            self._leave_to_other_nodes(meta, gone)
            raise gone from error
        with source:
            if source.size_bytes != digest.size_bytes:
                raise IntegrityError(f"{path} has {source.size_bytes} bytes; {digest.size_bytes} were committed.")
            if name != self._record.object:
                self._context.table.set_object(self._claim, name)
            record = self._record
            watched = WatchedUpload(source, self._context.under_way, (record.save_id, record.path), record.mirror)
            try:
                sent = self._store.upload(
                    Upload(
                        name=name,
                        source=watched,
                        digest=digest,
                        metadata=self._metadata(meta),
                        session=self._record.session if name == self._record.object else None,
                        on_session=self._keep_session,
                        on_progress=lambda acknowledged: self._progressed(watched, acknowledged),
                        on_sent=watched.sent,
                    )
                )
            except PreconditionFailed as error:
                info = self._store.stat(name)  # an object exists there now, perhaps ours (a lost answer): compared next
                if info is None:
                    raise Temporary(f"{name} appeared and disappeared on {self._context.mirror.url}.") from error
                return info
            except IntegrityError as error:
                self._context.table.set_session(self._claim, None)  # the session holds other bytes than were committed
                verify_file(path, digest)  # raises if our file has rotted since the commit
                raise Temporary(f"{self._context.mirror.url} received bytes other than those sent: {error}") from error
        info = self._store.stat(name)
        if info is None:
            self._context.table.set_session(self._claim, None)  # it would report again that everything was received
            raise Temporary(f"{self._context.mirror.url} received {name}, but no longer has it.")
        if info.crc32c is None and info.generation == sent.generation:
            return replace(info, crc32c=digest.crc32c)  # the upload() of such a store has just read the object back
        return info

    def _verify(self, info: ObjectInfo, digest: Digest) -> None:
        self._context.table.verify(
            self._claim,
            object_name=info.name,
            generation=info.generation,
            size_bytes=digest.size_bytes,
            crc32c=digest.crc32c,
        )
        self._context.bus.emit(
            events.RecordVerified(
                mirror=self._context.mirror.url,
                step=self._record.step,
                path=self._record.path,
                size_bytes=digest.size_bytes,
            )
        )

    def _keep_session(self, session: str) -> None:
        self._context.table.set_session(self._claim, session)

    def _progressed(self, watched: WatchedUpload, acknowledged_bytes: int) -> None:
        watched.acknowledged(acknowledged_bytes)
        now = time.monotonic()
        if now - self._renewed > LEASE_S / 5:
            self._context.table.renew(self._claim, self._lease_s)
            self._renewed = now
