"""The seam between ckptmirror and a place that keeps objects.

Rules (the contract suite in tests/contract/test_store_contract.py holds every store and every decorated store to them):
* An object is a name, bytes, a generation and custom metadata. Names are relative to the mirror's prefix, with ``/``.
* Every create, replace and delete carries a precondition; no method overwrites blindly.
* Every method may be called again after any error: it is idempotent or guarded by its precondition.
* Every method ends within a stated time; no method retries (the retrying decorator does).
* Errors are those of ``core.errors``: StoreTemporary, StorePermanent, ObjectNotFound, PreconditionFailed,
  IntegrityError, NotAuthorised.
* All methods may be called from any thread at once.
* A store whose URL may lead to another place tomorrow (a directory on a mount) has an ``identity``; the others have
  none, and answer None.
* Reading makes nothing: where there is no such bucket or directory, it raises BucketNotFound.
* What is created, and what is read to its end, is durable when the call returns: it survives a power loss there.
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
        resumable: A half-sent upload is continued by another process with its session.
    """

    create_only: bool
    compare_and_swap: bool
    server_crc32c: bool
    custom_metadata: bool
    resumable: bool


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store says of one object, asked now.

    Attributes:
        generation: Opaque; changes whenever the bytes under the name change. Never 0.
        crc32c: None where the store keeps none: verify by reading back.
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
        digest: Taken when the save was committed; the store must reject other bytes.
        metadata: Custom metadata (run, attempt and save id).
        session: A session saved by an earlier process, or None.
        on_session: Called with the session's text as soon as one exists, before any byte is sent.
        on_progress: Called with the number of bytes that the store has acknowledged so far.
        on_sent: Called more often, where a store can tell, with the number of bytes that are on the wire.
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
    """A mirror's objects below one prefix. What is derived from it has neither a local directory nor an identity."""

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
        """The directory of this machine that holds the objects, which need not exist yet; None where there is none."""
        return None

    def identity(self, expected: str | None = None) -> str | None:
        """Say which place this is: a text that stays with the objects and is met nowhere else.

        Once it has answered, every call of this store meets that very place, or fails.

        Args:
            expected: What an earlier process was told. Then nothing is made that is not there.

        Returns:
            None where a store has none: where its URL names one place for ever. None also from a store with a
            ``local_directory`` that may only be read and has none yet: that is not final, and nothing can be changed
            there meanwhile.

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

        Other bytes at the store are no IntegrityError here: ours lie in memory, so they changed on their way, and are
        sent again.

        Raises:
            PreconditionFailed: The object is not at ``if_generation``. After a lost answer this may be our own write:
                the caller reads the object and compares.
            StoreTemporary: The store is busy or out of reach, it refused the bytes for their checksum, or its answer
                describes other bytes: then the object may stand there.
        """
        ...

    def upload(self, upload: Upload) -> ObjectInfo:
        """Create one object of any size from a source (never replaces), continuing ``upload.session`` if given.

        The answer's crc32c and size were compared with ``upload.digest``.

        Raises:
            PreconditionFailed: The name exists. It may be our own object: the caller asks and compares.
            IntegrityError: The store computed another crc32c than the digest says; nothing of ours stands under the
                name.
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
            PreconditionFailed: Another generation stands there.
        """
        ...

    def close(self) -> None:
        """Free connections. The store may not be used afterwards."""
        ...
