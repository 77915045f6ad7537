"""Mirrors for tests: their URLs and objects, one that notes and breaks downloads, one with the objects of a long run.

Rules:
* Of the saves on the crowded mirror, the newest has its bytes; the others have names, sizes and metas, which is all
  that is read of them.
* A listing counts one request for each 1,000 objects, as Cloud Storage pages it.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.model import Meta, new_id
from ckptmirror.local.checksums import crc32c
from ckptmirror.stores import memory
from ckptmirror.stores.base import ObjectInfo, Store
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts, put_on_mirror

_PAGE_OBJECTS = 1000
RANKS = 32
OBJECTS_PER_SAVE = 131


def crowd(name: str, folder: Path, objects: int) -> tuple[memory.MemoryStore, Meta]:
    """Fill ``memory://name/run``; return it, and the newest save, which is also in ``folder``."""
    store = memory.open(f"memory://{name}/run")
    saves = objects // OBJECTS_PER_SAVE
    newest = make_save(folder, saves, ranks=RANKS, number=saves, size_bytes=200)
    assert len(newest.artifacts) + 1 == OBJECTS_PER_SAVE
    put_attempts(store, [FIRST_ATTEMPT])
    held = store._bucket.objects
    for step in range(1, saves):
        meta = _as_step(newest, step)
        data = meta_to_bytes(meta)
        found = {artifact.path: (b"", artifact.digest.size_bytes) for artifact in meta.artifacts}
        found[names.SaveName(step).meta] = (data, len(data))
        for path, (content, size_bytes) in found.items():
            held[f"run/{path}"] = (content, ObjectInfo(path, size_bytes, step, crc32c(content), {}))
    put_on_mirror(store, folder, newest)
    return store, newest


def _as_step(meta: Meta, step: int) -> Meta:
    stem, other = names.SaveName(meta.step).stem, names.SaveName(step).stem
    artifacts = tuple(replace(one, path=one.path.replace(stem, other, 1)) for one in meta.artifacts)
    return replace(meta, step=step, save_id=new_id(), save_number=step, artifacts=artifacts)


_CALLS = ("stat", "list", "read", "write", "upload", "download", "delete")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the requests to every ``memory://`` mirror of this process."""
    requests: Counter[str] = Counter()
    honest: Mapping[str, Any] = {name: getattr(memory.MemoryStore, name) for name in _CALLS}

    def counting(name: str) -> Any:
        def call(self: memory.MemoryStore, *arguments: Any, **more: Any) -> Any:
            answer = honest[name](self, *arguments, **more)
            if name == "list":
                answer = list(answer)
                requests["list"] += max(1, -(-len(answer) // _PAGE_OBJECTS))
                return iter(answer)
            requests[name] += 1
            return answer

        return call

    for name in _CALLS:
        setattr(memory.MemoryStore, name, counting(name))
    try:
        yield requests
    finally:
        for name, method in honest.items():
            setattr(memory.MemoryStore, name, method)


def bucket_url(bucket: str) -> str:
    return f"gs://{bucket}/{uuid.uuid4().hex}"


def memory_url() -> str:
    return f"memory://m-{uuid.uuid4().hex}/run"


def object_names(store: Store) -> list[str]:
    return [info.name for info in store.list() if info.name != names.WRITER_NAME]


def nothing(*_: object) -> None:
    """A hook that lets everything pass."""


class SpyStore:
    """Passes everything on, and notes and breaks downloads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.downloads: list[tuple[str, int, int]] = []
        self.before: Callable[..., None] = nothing
        self.after: Callable[..., None] = nothing
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self.downloads.append((name, offset, len(buffer)))
        self.before(name, offset)
        self._store.download(name, generation=generation, offset=offset, buffer=buffer)
        self.after(name, offset, buffer)

    @property
    def downloaded_bytes(self) -> int:
        return sum(length for _, _, length in self.downloads)
