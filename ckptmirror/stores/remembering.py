"""A store that is met only as the place that an earlier process met: the decorator that every mirror of a root gets.

Rules:
* Before the first call goes through, the store says which place it is (``Store.identity``). Where one is remembered,
  any other, or none, is a temporary fault; where none is, this one is remembered first, durably.
* After that the store itself watches that it stays the same place.
* A store that has no identity is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.stores.base import Capabilities, ObjectInfo, Store, Upload

__all__ = ["RememberingStore"]


class RememberingStore:
    """``store``, as long as it is the place that is remembered.

    Args:
        store: The store behind.
        recall: Returns the identity that is remembered; None if none is.
        remember: Keeps an identity, durably, unless one is kept already, and returns the one that is kept.
    """

    def __init__(self, store: Store, recall: Callable[[], str | None], remember: Callable[[str], str]) -> None:
        self._store = store
        self._recall = recall
        self._remember = remember
        self._is_met = False

    @property
    def url(self) -> str:
        """The mirror's URL."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """Those of the store behind."""
        return self._store.capabilities

    @property
    def local_directory(self) -> Path | None:
        """That of the store behind."""
        return self._store.local_directory

    def identity(self, expected: str | None = None) -> str | None:
        """See :meth:`Store.identity`."""
        return self._store.identity(expected if expected is not None else self._recall())

    def stat(self, name: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`."""
        return self._met().stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :meth:`Store.list`."""
        return self._met().list(prefix)

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """See :meth:`Store.read`."""
        return self._met().read(name, generation=generation, limit_bytes=limit_bytes)

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See :meth:`Store.write`."""
        return self._met().write(name, data, if_generation=if_generation, metadata=metadata)

    def upload(self, upload: Upload) -> ObjectInfo:
        """See :meth:`Store.upload`."""
        return self._met().upload(upload)

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        """See :meth:`Store.download`."""
        self._met().download(name, generation=generation, offset=offset, buffer=buffer)

    def delete(self, name: str, *, generation: int) -> None:
        """See :meth:`Store.delete`."""
        self._met().delete(name, generation=generation)

    def close(self) -> None:
        """Close the store behind."""
        self._store.close()

    def _met(self) -> Store:
        """The store behind, once it is known to be the right place."""
        if not self._is_met:  # two threads may come here at once: what is remembered first stands for both
            expected = self._recall()
            found = self._store.identity(expected)
            if expected is None and found is not None:
                expected = self._remember(found)
            if found != expected:
                raise StoreTemporary(
                    f"{self.url} is not the mirror that was used before: is it mounted?",
                    hint="Mount it. A mirror that was made anew on purpose needs a URL of its own.",
                )
            self._is_met = True
        return self._store
