"""Sending: the common part of the uploads of an artifact and of a meta.

Rules:
* A record belongs to a save whose meta is committed on this disk; that meta says what the bytes must be.
* A save creates only its own names: the plain one if it is free, otherwise the one with its tag (``names.tagged``).
* Where another save of the step may have lost a file, a free plain name may be that file's: then it is not taken. The
  start of an attempt has read the names on each mirror that answered; on another one, the first file of a save asks.
* Of a save that is signed, nothing is sent by a process that could not sign its meta on the mirror.
* Before the first file of each save, the mirror is asked whether this attempt may still send there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Protocol

from ckptmirror.core import events, names, signing
from ckptmirror.core.codec import is_signed, meta_from_bytes
from ckptmirror.core.errors import BrokenMeta, IntegrityError, NotSigned, StorePermanent
from ckptmirror.core.model import Artifact, Meta
from ckptmirror.core.verification import delete_command
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES, read_mirror_meta
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.object_match import is_of_save
from ckptmirror.flow.upload.transfer_progress import UnderWay
from ckptmirror.local import files
from ckptmirror.local.uploads import Claim, UploadRecord, UploadsTable
from ckptmirror.stores.base import ObjectInfo, Store

__all__ = ["LEASE_S", "Confirm", "Sending", "UploadContext"]

LEASE_S = 300.0


class Confirm(Protocol):
    """The question whether a writer may go on at a mirror."""

    def __call__(self, mirror: Mirror, meta: Meta | None = None, *, is_part: bool = False) -> None:
        """Ask before files are sent (no ``meta``), or before the meta of a save is written.

        Args:
            mirror: The mirror.
            meta: The save.
            is_part: Only a node's part of it is written now. The node that writes the whole meta asks once more.

        Raises:
            AttemptFenced: This attempt may do neither any more.
        """
        ...


@dataclass(frozen=True)
class UploadContext:
    """What an upload needs beside its claim.

    Attributes:
        confirm: Asks whether that may be sent which a save needs, or a meta be written: see :class:`Confirm`.
        confirmed: Ids of the saves whose files may be sent to the mirror. The first file of a save asks for all its
            files; the meta, sent last, asks again.
        awaited: The part of another node that a save waits for, once this node's is there, by save id; "" if all parts
            have been seen.
        published: The object names in this node's part of each save that this process published or saw, by save id.
        left: How often this node left the meta of a save to another, since it saw all parts, by save id.
        left_to_others: How often a file that this node cannot send was left to other nodes that have it too, by path.
        under_way: Keeps what is being sent, for progress displays.
        read_by: The id of the attempt whose start read which names the mirror has; "" if none has.
        contested: Whether another save of the step has plain names there, by the id of each save that asked.
    """

    root: Path
    table: UploadsTable
    mirror: Mirror
    bus: events.EventBus
    confirm: Confirm
    confirmed: set[str] = field(default_factory=set)
    awaited: dict[str, str] = field(default_factory=dict)
    published: dict[str, dict[str, str | None]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    left_to_others: dict[str, int] = field(default_factory=dict)
    under_way: UnderWay = field(default_factory=UnderWay)
    read_by: str = ""
    contested: dict[str, bool] = field(default_factory=dict)


class Sending:
    """One record under one claim."""

    def __init__(self, context: UploadContext, claim: Claim) -> None:
        self._context = context
        self._claim = claim
        self._record: UploadRecord = claim.record
        self._store: Store = context.mirror.store
        self._is_signed = False  # whether the local meta is

    def _own_names(self, meta: Meta) -> list[str]:
        """Return the names that this save may create, best first."""
        plain = self._record.path
        tagged = plain if meta.tag else names.tagged(plain, meta.save_id)
        return list(dict.fromkeys([self._record.object or plain, plain, tagged]))

    def _candidate_names(self, meta: Meta) -> list[str]:
        """Return the names that the object may have on the mirror; those that exist already come first.

        The original and a copy staged elsewhere may reach the mirror in either order, and each has the tag of its own
        disk. With one mirror, only a copy can be second.
        """
        own = self._own_names(meta)
        capable = self._store.capabilities.custom_metadata  # equal bytes alone may be another save's
        if meta.staged_from is None and not (capable and len(self._context.table.mirrors()) > 1):
            return own
        plain = names.untagged(self._record.path)
        came_from = [n for n in (plain, names.tagged(plain, meta.save_id)) if self._store.stat(n) is not None]
        return list(dict.fromkeys([*came_from, *own]))

    def _may_create(self, name: str, meta: Meta) -> bool:
        """Whether a name of this save that is free is not that of a file which another save of the step has lost."""
        if name != self._record.path or meta.tag or self._record.session:
            return True
        if meta.attempt.id == self._context.read_by:  # the save would have a tag
            return True
        contested = self._context.contested
        if meta.save_id not in contested:
            contested[meta.save_id] = self._is_contested(meta)
        return not contested[meta.save_id]

    def _is_contested(self, meta: Meta) -> bool:
        """Whether the mirror has the meta of another save of the step under a plain name, or a part of another save."""
        name, own = names.SaveName(meta.step).meta, names.parts_prefix(meta.step, meta.save_id)
        if any(not one.name.startswith(own) for one in self._store.list(names.parts_of_step(meta.step))):
            return True
        with contextlib.suppress(StorePermanent, IntegrityError):  # there is none, or it cannot be read
            return read_mirror_meta(self._store, name)[0].save_id != meta.save_id
        return self._store.stat(name) is not None

    def _is_right(self, info: ObjectInfo, artifact: Artifact, meta: Meta) -> bool:
        return is_of_save(artifact, meta.save_id, info, self._store)

    def _is_damaged_own(self, info: ObjectInfo, meta: Meta) -> bool:
        """Whether an object with wrong bytes still belongs to this save, so that a person may delete it.

        An object whose metadata names another save is never ours. Without metadata, it is ours only by this save's tag.
        """
        owner = info.metadata.get("ckptmirror-save")
        return owner == meta.save_id if owner else info.name == names.tagged(names.untagged(info.name), meta.save_id)

    def _say_what_to_delete(self, damaged: Sequence[str], what: str = "") -> StorePermanent:
        """Return the error for what is damaged under every name: a person must delete it before it is resent.

        Args:
            damaged: The names.
            what: What is damaged; "" for the file.
        """
        mirror, folder = self._context.mirror, self._store.local_directory
        urls = [f"{mirror.url}/{name}" for name in damaged]
        at = urls if folder is None else [str(folder / name) for name in damaged]
        commands = "`, `".join(delete_command(one) or one for one in at)
        return StorePermanent(
            f"{what or self._record.path} is damaged on {mirror.url} under every name that it may have: "
            f"{', '.join(urls)}. ckptmirror never replaces an object. Delete it: `{commands}`; "
            f"then `ckptmirror retry --root {quote(str(self._context.root))}` sends it again."
        )

    def _own_not_believed(self, path: Path, data: bytes, why: NotSigned) -> StorePermanent:
        """Return the error of a local meta without the signature that this process demands, with the way out."""
        with_key = (
            "with the key that signed it in verify_keys" if is_signed(data) else "with signing_key and no verify_keys"
        )
        return StorePermanent(
            f"{path} is not believed here: {why} If the save is yours, one "
            f"`ckptmirror drain --root {quote(str(self._context.root))}` {with_key} sends it."
        )

    def _metadata(self, meta: Meta) -> dict[str, str]:
        return {
            "ckptmirror-run": meta.run_id,
            "ckptmirror-attempt": meta.attempt.id,
            "ckptmirror-save": meta.save_id,
        }

    def _local_meta(self) -> Meta:
        """Read the committed local meta that the record belongs to."""
        for record in self._context.table.records(save_id=self._record.save_id, mirror=self._record.mirror):
            if record.role == "meta":
                path = self._context.root / record.path
                try:
                    data = files.read_limited(path, META_LIMIT_BYTES)
                    meta = meta_from_bytes(data)
                except FileNotFoundError as error:
                    raise StorePermanent(f"{path} is gone.", hint="Nothing was deleted by ckptmirror.") from error
                except NotSigned as error:
                    raise self._own_not_believed(path, data, error) from error
                except BrokenMeta as error:
                    raise BrokenMeta(
                        f"{path} cannot be used, and nothing else says what belongs to the save: {error}"
                    ) from error
                if meta.save_id != self._record.save_id:
                    raise IntegrityError(f"{path} is the meta of another save, not of this one.")
                self._is_signed = is_signed(data)
                if signing.current().sign is None and self._is_signed:
                    raise signing.cannot_sign(str(path))
                return meta
        raise IntegrityError(f"The table does not know the meta of save {self._record.save_id[:8]}.")
