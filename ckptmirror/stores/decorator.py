"""A store around a store: what hang-guarded, observed, throttled, retrying and remembering stores are made from.

Rules:
* It passes everything on. A decorator overrides what it changes, and nothing else.
* Each call that meets objects goes through ``_call``, so that a decorator states in one place what it does around all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ckptmirror.stores.base import Capabilities, ObjectInfo, Store, Upload

__all__ = ["StoreDecorator"]

_Result = TypeVar("_Result")


class StoreDecorator:
    """``store``, as it is."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _call(self, operation: str, name: str, run: Callable[[], _Result], size_bytes: int = 0) -> _Result:
        """Make one call of the store behind.

        Args:
            operation: The method's name.
            name: The object; of a listing, its prefix.
            run: Makes the call; may be called again after an error.
            size_bytes: How many bytes of the caller's are moved.
        """
        del operation, name, size_bytes
        return run()

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
        return self._store.identity(expected)

    def stat(self, name: str) -> ObjectInfo | None:
        return self._call("stat", name, lambda: self._store.stat(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._call("list", prefix, lambda: self._store.list(prefix))

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        return self._call("read", name, lambda: self._store.read(name, generation=generation, limit_bytes=limit_bytes))

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:

        def run() -> ObjectInfo:
            return self._store.write(name, data, if_generation=if_generation, metadata=metadata)

        return self._call("write", name, run, len(data))

    def upload(self, upload: Upload) -> ObjectInfo:
        return self._call("upload", upload.name, lambda: self._store.upload(upload), upload.digest.size_bytes)

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:

        def run() -> None:
            self._store.download(name, generation=generation, offset=offset, buffer=buffer)

        self._call("download", name, run, len(buffer))

    def delete(self, name: str, *, generation: int) -> None:
        self._call("delete", name, lambda: self._store.delete(name, generation=generation))

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
