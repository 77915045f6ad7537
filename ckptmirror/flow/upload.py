"""Upload: one record of the table at a time, from claimed to verified.

Rules:
* The mirror is asked before anything is sent: our own object, already there, is success; another save's is left alone
  and the other name is used (``names.tagged``).
* A record becomes verified only when the mirror, asked after the upload, shows the size and crc32c taken at commit
  time; a store that computes none is read back.
* Of several nodes each publishes its part of the meta, and whoever sees all parts writes the whole: all write the same.
* The meta of a save is claimed only when all its artifacts are verified there (the table sees to that), and written
  only after the mirror confirmed that this attempt is not fenced.
* Nothing is sent to a mirror before this process has confirmed its claim of the run there.
* Temporary faults put the record back with a growing, jittered delay; permanent ones fail it, loudly. Nothing is
  dropped.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_from_bytes, meta_or_tombstone_from_bytes, meta_to_bytes
from ckptmirror.core.errors import (
    AttemptFenced,
    BrokenMeta,
    CkptMirrorError,
    ClaimLost,
    IntegrityError,
    NotAuthorised,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    Temporary,
)
from ckptmirror.core.merging import merge_parts
from ckptmirror.core.model import Digest, Meta, Tombstone
from ckptmirror.flow.mirrors import Mirror
from ckptmirror.local import files
from ckptmirror.local.checksums import crc32c, verify_file
from ckptmirror.local.uploads import Claim, UploadRecord, UploadsTable
from ckptmirror.stores.base import ObjectInfo, Store, Upload

__all__ = ["LEASE_S", "TRIES_LIMIT", "UploadContext", "Uploading", "read_back_crc32c", "upload_claimed"]

LEASE_S = 300.0
_SLOWEST_BYTES_PER_S = 20e6  # a lease outlasts a silent pass (fsync, reading back) over the whole file at this rate
TRIES_LIMIT = 10_000  # about a week at the longest delay
_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0
_META_LIMIT_BYTES = 64 * 1024 * 1024
_READ_BACK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class UploadContext:
    """What an upload needs beside its claim.

    Attributes:
        confirm: Asks the mirror whether this attempt may still commit there; raises AttemptFenced if not. A drain,
            which is no attempt, passes a function that lets the mirror's list hold the root's attempts.
        confirmed: Set once that went well, by the first record that is sent there.
    """

    root: Path
    table: UploadsTable
    mirror: Mirror
    bus: events.EventBus
    confirm: Callable[[Mirror], None]
    confirmed: threading.Event = field(default_factory=threading.Event)


def upload_claimed(context: UploadContext, claim: Claim) -> None:
    """Carry one claimed record as far as it goes now; its new state is durable on return.

    Raises:
        AttemptFenced: A newer attempt was met; the record is pending again.
    """
    record = claim.record
    try:
        if record.role == "meta":
            Uploading(context, claim).send_meta()
        else:
            Uploading(context, claim).send_artifact()
    except ClaimLost:
        return  # the lease ran out and another worker has the record: what we sent is found by it
    except AttemptFenced as error:
        context.table.put_back(claim, str(error), not_before_s=_LONGEST_DELAY_S)
        raise
    except CkptMirrorError as error:
        if error.temporary or isinstance(error, NotAuthorised):
            _put_back(context, claim, error)
        else:
            _fail(context, claim, str(error))
    except Exception as error:  # noqa: BLE001 - a fault that nobody foresaw must not take the worker down with it
        _put_back(context, claim, error)


def _put_back(context: UploadContext, claim: Claim, error: Exception) -> None:
    tries = claim.record.attempts_made
    if tries >= TRIES_LIMIT:
        _fail(context, claim, f"gave up after {tries} tries: {error}")
        return
    longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(tries, 10))
    delay_s = max(getattr(error, "retry_after_s", None) or 0.0, random.uniform(0.0, longest))  # full jitter
    if isinstance(error, NotAuthorised):
        delay_s = max(delay_s, min(longest, 5.0))
    reason = f"{type(error).__name__}: {error}"
    try:
        context.table.put_back(claim, reason, not_before_s=delay_s)
    except ClaimLost:
        return
    context.bus.emit(
        events.MirrorUnreachable(
            mirror=context.mirror.url,
            step=claim.record.step,
            path=claim.record.path,
            reason=reason,
            refused=isinstance(error, NotAuthorised),
        )
    )


def _fail(context: UploadContext, claim: Claim, reason: str) -> None:
    try:
        context.table.fail(claim, reason)
    except ClaimLost:
        return
    context.bus.emit(
        events.RecordFailed(mirror=context.mirror.url, step=claim.record.step, path=claim.record.path, reason=reason)
    )


class Uploading:
    """One record under one claim."""

    def __init__(self, context: UploadContext, claim: Claim) -> None:
        self._context = context
        self._claim = claim
        self._record: UploadRecord = claim.record
        self._store: Store = context.mirror.store
        self._lease_s = LEASE_S + (claim.record.size_bytes or 0) / _SLOWEST_BYTES_PER_S
        self._renewed = time.monotonic()

    # -- artifacts ------------------------------------------------------------------------------------------

    def send_artifact(self) -> None:
        """Send the record's file, or find it there, and verify it."""
        meta = self._local_meta()
        digest = next((a.digest for a in meta.artifacts if a.path == self._record.path), None)
        if digest is None:
            raise IntegrityError(f"The meta of save {meta.save_id[:8]} does not name {self._record.path}.")
        if not self._context.confirmed.is_set():
            self._context.confirm(self._context.mirror)
            self._context.confirmed.set()
        if self._lease_s > 2 * LEASE_S:
            self._context.table.renew(self._claim, self._lease_s)
        for name in self._candidate_names(meta):
            info = self._store.stat(name)
            if info is None and name in self._own_names(meta):
                info = self._create(name, digest, meta)
            if info is not None and self._is_ours(info, digest, meta):
                self._verify(info, digest)
                return
        raise StorePermanent(
            f"Every name for {self._record.path} on {self._context.mirror.url} holds other bytes.",
            hint="Another run writes to this prefix: give each run a prefix of its own.",
        )

    def _create(self, name: str, digest: Digest, meta: Meta) -> ObjectInfo | None:
        path = self._context.root / self._record.path
        try:
            source = files.FileSource(path)
        except FileNotFoundError as error:
            raise StorePermanent(
                f"{path} is gone, and {self._context.mirror.url} has no copy of it.",
                hint="Restore the file, then `ckptmirror drain`.",
            ) from error
        with source:
            if source.size_bytes != digest.size_bytes:
                raise IntegrityError(f"{path} has {source.size_bytes} bytes; {digest.size_bytes} were committed.")
            if name != self._record.object:
                self._context.table.set_object(self._claim, name)
            try:
                sent = self._store.upload(
                    Upload(
                        name=name,
                        source=source,
                        digest=digest,
                        metadata=self._metadata(meta),
                        session=self._record.session if name == self._record.object else None,
                        on_session=self._keep_session,
                        on_progress=self._progressed,
                    )
                )
            except PreconditionFailed as error:
                info = self._store.stat(name)  # an object stands there now, ours perhaps (a lost answer): compared next
                if info is None:
                    raise Temporary(f"{name} came and went on {self._context.mirror.url}.") from error
                return info
            except IntegrityError as error:
                self._context.table.set_session(self._claim, None)  # what it holds is not what was committed
                verify_file(path, digest)  # raises if it is our file that rotted since the commit
                raise Temporary(f"{self._context.mirror.url} received other bytes than were sent: {error}") from error
        info = self._store.stat(name)
        if info is not None and info.crc32c is None and info.generation == sent.generation:
            return replace(info, crc32c=digest.crc32c)  # such a store's upload() has just read the object back
        return info

    def _own_names(self, meta: Meta) -> list[str]:
        """The names that this save may create, best first."""
        plain = self._record.path
        tagged = plain if meta.tag else names.tagged(plain, meta.save_id)
        return list(dict.fromkeys([self._record.object or plain, plain, tagged]))

    def _candidate_names(self, meta: Meta) -> list[str]:
        """Where the object may lie: what is there already, under whichever name, comes first.

        A copy that was staged elsewhere may have come here before the original, or the original before the copy, and
        each has its tag from its own disk. With one mirror only a copy can be second.
        """
        own = self._own_names(meta)
        capable = self._store.capabilities.custom_metadata  # equal bytes alone may be another save's
        if meta.staged_from is None and not (capable and len(self._context.table.mirrors()) > 1):
            return own
        plain = names.untagged(self._record.path)
        came_from = [n for n in (plain, names.tagged(plain, meta.save_id)) if self._store.stat(n) is not None]
        return list(dict.fromkeys([*came_from, *own]))

    def _is_ours(self, info: ObjectInfo, digest: Digest, meta: Meta) -> bool:
        """Whether the object is this save's: by its metadata, or by equal bytes where a store keeps none."""
        if self._store.capabilities.custom_metadata:
            if info.metadata.get("ckptmirror-save") != meta.save_id:
                return False
        elif info.size_bytes != digest.size_bytes:
            return False
        return self._crc32c(info) == digest.crc32c and info.size_bytes == digest.size_bytes

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

    def _crc32c(self, info: ObjectInfo) -> int:
        return info.crc32c if info.crc32c is not None else read_back_crc32c(self._store, info)

    def _metadata(self, meta: Meta) -> dict[str, str]:
        return {
            "ckptmirror-run": meta.run_id,
            "ckptmirror-attempt": meta.attempt.id,
            "ckptmirror-save": meta.save_id,
        }

    def _keep_session(self, session: str) -> None:
        self._context.table.set_session(self._claim, session)

    def _progressed(self, _acknowledged_bytes: int) -> None:
        now = time.monotonic()
        if now - self._renewed > LEASE_S / 5:
            self._context.table.renew(self._claim, self._lease_s)
            self._renewed = now

    # -- the meta -------------------------------------------------------------------------------------------

    def send_meta(self) -> None:
        """Write the mirror's meta, last; find our own there; step aside for another save's; obey a tombstone."""
        context = self._context
        meta = self._local_meta()
        context.confirm(context.mirror)
        context.confirmed.set()
        data = meta_to_bytes(self._of_all_nodes(self._mirror_meta(meta)))
        own_names = self._own_names(meta)
        if not meta.is_whole:  # nodes tag their own names as they must: the merged meta's are the same for all
            plain = names.untagged(self._record.path)
            own_names = [plain, names.tagged(plain, meta.save_id)]
        for name in self._candidate_names(meta) if meta.is_whole else own_names:
            if name in own_names:
                with contextlib.suppress(PreconditionFailed):  # ours from before, or another save's: read next
                    self._store.write(name, data, if_generation=0, metadata=self._metadata(meta))
            elif self._store.stat(name) is None:
                continue
            try:
                there, info = self._store.read(name, limit_bytes=_META_LIMIT_BYTES)
            except ObjectNotFound as error:
                raise Temporary(f"{name} came and went on {context.mirror.url}.") from error
            if info.crc32c is not None and crc32c(there) != info.crc32c:
                raise Temporary(f"{name} arrived broken from {context.mirror.url}.")  # it may well be ours
            found = _meta_or_none(there)
            if found is None or found.save_id != meta.save_id:
                continue
            if isinstance(found, Tombstone):
                context.table.remove(meta.save_id, context.mirror.url, f"removed by retention: {found.reason}")
                return
            if there != data and not _covers(found, meta):
                raise IntegrityError(f"{name} on {context.mirror.url} names this save with other contents.")
            self._verify_meta(info, there)
            return
        raise StorePermanent(f"Both names for the meta of step {meta.step} are taken on {context.mirror.url}.")

    def _mirror_meta(self, meta: Meta) -> Meta:
        """The node's meta, with the object name of each artifact where it differs from its path."""
        objects = {
            r.path: r.object
            for r in self._context.table.records(save_id=meta.save_id, mirror=self._context.mirror.url)
            if r.role == "artifact"
        }
        artifacts = tuple(
            replace(a, object=objects[a.path] if objects[a.path] != a.path else None) for a in meta.artifacts
        )
        return replace(meta, artifacts=artifacts, staged_from=None)

    def _of_all_nodes(self, mine: Meta) -> Meta:
        """Publish this node's part, and merge the parts once every node's is there; no node leads.

        Raises:
            Temporary: A node's part is not there yet.
        """
        if mine.is_whole:
            return mine
        part_names = [names.part_name(mine.step, mine.save_id, number + 1, mine.nodes) for number in range(mine.nodes)]
        with contextlib.suppress(PreconditionFailed):  # published before
            own = part_names[mine.node]
            self._store.write(own, meta_to_bytes(mine), if_generation=0, metadata=self._metadata(mine))
        parts = []
        for name in part_names:
            try:
                data, _ = self._store.read(name, limit_bytes=_META_LIMIT_BYTES)
            except ObjectNotFound as error:
                raise Temporary(f"{name} is not on {self._context.mirror.url} yet: its node is on its way.") from error
            parts.append(meta_from_bytes(data))
        return merge_parts(parts)

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

    def _local_meta(self) -> Meta:
        """Read the committed local meta that the record belongs to."""
        for record in self._context.table.records(save_id=self._record.save_id, mirror=self._record.mirror):
            if record.role == "meta":
                path = self._context.root / record.path
                try:
                    meta = meta_from_bytes(files.read_limited(path, _META_LIMIT_BYTES))
                except FileNotFoundError as error:
                    raise StorePermanent(f"{path} is gone.", hint="Nothing was deleted by ckptmirror.") from error
                if meta.save_id != self._record.save_id:
                    raise IntegrityError(f"{path} names another save than its record.")
                return meta
        raise IntegrityError(f"The table has no meta record for save {self._record.save_id[:8]}.")


def _meta_or_none(data: bytes) -> Meta | Tombstone | None:
    """Read what stands under a meta's name; None for what somebody else put there."""
    try:
        return meta_or_tombstone_from_bytes(data)
    except BrokenMeta:
        return None


def _covers(there: Meta, mine: Meta) -> bool:
    """Whether a mirror's meta names every file of a local save (a staged copy holds some kinds, maybe tagged)."""
    named = {names.untagged(artifact.path): artifact.digest for artifact in there.artifacts}
    return all(named.get(names.untagged(artifact.path)) == artifact.digest for artifact in mine.artifacts)


def read_back_crc32c(store: Store, info: ObjectInfo) -> int:
    """Read a whole object and return its crc32c, in bounded memory."""
    buffer = memoryview(bytearray(min(_READ_BACK_BYTES, max(1, info.size_bytes))))
    crc = 0
    for offset in range(0, info.size_bytes, len(buffer)):
        piece = buffer[: min(len(buffer), info.size_bytes - offset)]
        store.download(info.name, generation=info.generation, offset=offset, buffer=piece)
        crc = crc32c(piece, crc)
    return crc
