"""The seam between ckptmirror and a place that keeps objects.

Rules (the contract suite in tests/contract/test_store_contract.py holds every store and every decorated store to them):
* An object is a name, bytes, a generation and custom metadata. Names are relative to the mirror's prefix, with ``/``.
* Every create, replace and delete carries a precondition; no method overwrites blindly.
* Every method may be called again after any error: it is idempotent or guarded by its precondition.
* Every method ends within a stated time. No method retries; the retrying decorator does.
* Errors are those of ``core.errors``: StoreTemporary, StorePermanent, ObjectNotFound, PreconditionFailed,
  IntegrityError, NotAuthorised.
* All methods may be called from any thread at once.
* A store whose URL may lead to another place tomorrow (a directory on a mount) has an ``identity``; the others return
  None.
* Reading creates nothing. If the bucket or directory does not exist, it raises BucketNotFound.
* An object that was created, or read to its end, is durable when the call returns: it survives a power loss there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from ckptmirror.core.model import Digest

__all__ = ["Capabilities", "ObjectInfo", "Source", "Store", "Upload"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do.

    Attributes:
        create_only: A create fails if the name exists, atomically.
        compare_and_swap: A replace or delete happens only at the given generation, atomically.
        server_crc32c: The store computes crc32c itself and rejects an upload whose declared crc32c differs.
        custom_metadata: Objects carry text key-value pairs.
        resumable: Another process can continue a half-sent upload with its session.
    """

    create_only: bool
    compare_and_swap: bool
    server_crc32c: bool
    custom_metadata: bool
    resumable: bool


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The store's current description of one object.

    Attributes:
        generation: Opaque; changes whenever the bytes under the name change. Never 0.
        crc32c: None if the store keeps no checksum: verify by reading back.
    """

    name: str
    size_bytes: int
    generation: int
    crc32c: int | None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Source(Protocol):
    """Bytes to upload, readable at any offset, any number of times."""

    @property
    def size_bytes(self) -> int:
        """Length in bytes, fixed."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` and return how many bytes were read (short only at the end)."""
        ...


@dataclass(frozen=True, slots=True)
class Upload:
    """One object to create.

    Attributes:
        digest: Computed when the save was committed; the store must reject other bytes.
        metadata: Custom metadata (run, attempt and save id).
        session: A session saved by an earlier process, or None.
        on_session: Called with the session's text as soon as one exists, before any byte is sent.
        on_progress: Called with the number of bytes that the store has acknowledged so far.
        on_sent: Called more often, if the store can do so, with the number of bytes that are on the wire.
    """

    name: str
    source: Source
    digest: Digest
    metadata: Mapping[str, str] = field(default_factory=dict)
    session: str | None = None
    on_session: Callable[[str], None] = lambda _session: None
    on_progress: Callable[[int], None] = lambda _size_bytes: None
    on_sent: Callable[[int], None] = lambda _size_bytes: None


@runtime_checkable
class Store(Protocol):
    """A mirror's objects below one prefix. By default a store has neither a local directory nor an identity."""

    @property
    def url(self) -> str:
        """The mirror's URL, normalised, without credentials."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""
        ...

    @property
    def local_directory(self) -> Path | None:
        """The local directory that holds the objects, which may not exist yet; None if the store is not a directory."""
        return None

    def identity(self, expected: str | None = None) -> str | None:
        """Return the identity of this place: a unique text that is kept with the objects.

        After the first answer, every call of this store reaches that same place, or fails.

        Args:
            expected: The identity that an earlier process saw. If it is given, nothing is created.

        Returns:
            None if the store has no identity, because its URL always names the same place. Also None for a read-only
            ``local_directory`` without an identity: it may get one later, and until then nothing can be changed there.

        Raises:
            StoreTemporary: The place does not answer, or is not the expected one: its file system is not mounted.
        """
        del expected
        return None

    def stat(self, name: str) -> ObjectInfo | None:
        """Ask the store about one object; None if there is none. Never answered from a cache."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object whose name starts with ``prefix``, in name order. Never answered from a cache."""
        ...

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """Return a small object whole.

        Raises:
            ObjectNotFound: No such object (or not at that generation).
            StorePermanent: It is larger than ``limit_bytes``.
        """
        ...

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """Create (``if_generation=0``) or replace (at that generation) a small object, atomically.

        If the store received other bytes, that is not an IntegrityError here: our copy is in memory, so the bytes
        changed on the way and can be sent again.

        Raises:
            PreconditionFailed: The object is not at ``if_generation``. After a lost answer this may be our own write:
                the caller reads the object and compares.
            StoreTemporary: The store is busy or unreachable, it rejected the bytes because of their checksum, or its
                answer describes other bytes. In the last case the object may exist.
        """
        ...

    def upload(self, upload: Upload) -> ObjectInfo:
        """Create one object of any size from a source (never replaces), continuing ``upload.session`` if given.

        The returned size and crc32c have been compared with ``upload.digest``.

        Raises:
            PreconditionFailed: The name exists. It may be our own object: the caller asks and compares.
            IntegrityError: The store computed a crc32c that differs from the digest; it created no object.
        """
        ...

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the object's bytes from ``offset``. The caller verifies them.

        Raises:
            ObjectNotFound: No such object at that generation.
            StoreTemporary: The answer was shorter than asked.
        """
        ...

    def delete(self, name: str, *, generation: int) -> None:
        """Delete the object at that generation; no error if the name is already free.

        Raises:
            PreconditionFailed: The object is at another generation.
        """
        ...

    def close(self) -> None:
        """Free connections. The store may not be used afterwards."""
        ...
