"""A store around a store: the base of the hang-guarded, observed, throttled, retrying and remembering stores.

Rules:
* It passes every call on. A decorator overrides only what it changes.
* Each call that reads or changes objects goes through ``_call``, so that a decorator wraps all of them in one place.
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
            size_bytes: How many of the caller's bytes it transfers.
        """
        del operation, name, size_bytes
        return run()

    @property
    def url(self) -> str:
        """The mirror's URL."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the store behind."""
        return self._store.capabilities

    @property
    def local_directory(self) -> Path | None:
        """The local directory of the store behind."""
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
        """Stop retrying, here and in every store behind, until ``ask_patiently``: a caller is waiting to end."""
        if isinstance(self._store, StoreDecorator):
            self._store.stop_retrying()

    def ask_patiently(self) -> None:
        """Give the mirror the full retry time again before it counts as silent, because a start is asking."""
        if isinstance(self._store, StoreDecorator):
            self._store.ask_patiently()

    def close(self) -> None:
        """Close the store behind."""
        self._store.close()
