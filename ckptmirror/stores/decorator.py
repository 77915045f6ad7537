"""A store around a store: what retrying, remembering and faulty stores are made from.

Rules:
* It passes everything on. A decorator overrides the methods that it changes, and nothing else.
* Calls that meet objects go through ``_behind``, so that a decorator can look first at what it is about to ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptmirror.stores.base import Capabilities, ObjectInfo, Store, Upload

__all__ = ["StoreDecorator"]


class StoreDecorator:
    """``store``, as it is."""

    def __init__(self, store: Store) -> None:
        self._store = store

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
        return self._store.identity(expected)

    def stat(self, name: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`."""
        return self._behind().stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :meth:`Store.list`."""
        return self._behind().list(prefix)

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """See :meth:`Store.read`."""
        return self._behind().read(name, generation=generation, limit_bytes=limit_bytes)

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See :meth:`Store.write`."""
        return self._behind().write(name, data, if_generation=if_generation, metadata=metadata)

    def upload(self, upload: Upload) -> ObjectInfo:
        """See :meth:`Store.upload`."""
        return self._behind().upload(upload)

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        """See :meth:`Store.download`."""
        self._behind().download(name, generation=generation, offset=offset, buffer=buffer)

    def delete(self, name: str, *, generation: int) -> None:
        """See :meth:`Store.delete`."""
        self._behind().delete(name, generation=generation)

    def stop_retrying(self) -> None:
        """Until a start asks patiently nothing that fails is tried again, by no store behind: an end is waited for."""
        if isinstance(self._store, StoreDecorator):
            self._store.stop_retrying()

    def ask_patiently(self) -> None:
        """Let each store behind take its whole time again before it calls the mirror silent: a start asks."""
        if isinstance(self._store, StoreDecorator):
            self._store.ask_patiently()

    def close(self) -> None:
        """Close the store behind."""
        self._store.close()

    def _behind(self) -> Store:
        return self._store
