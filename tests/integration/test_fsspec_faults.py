"""What file systems of fsspec get wrong, and what a mirror on one must not make of it."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import CkptMirrorError, StoreTemporary
from ckptmirror.core.model import Digest
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.local.checksums import crc32c
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Upload
from ckptmirror.testing import Fault, GcsServerProcess
from tests.small_training import new_state, train


class SilentDirectory(MemoryFileSystem):
    """Lists by fsspec's own ``find``, and one directory cannot be listed."""

    protocol = "silentdir"
    find = AbstractFileSystem.find
    walk = AbstractFileSystem.walk
    silent: str | None = None

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if self.silent is not None and path.rstrip("/").endswith(self.silent):
            raise TimeoutError("no answer")
        return super().ls(path, detail=detail, **options)


class LateFile(AbstractBufferedFile):
    """A file of ``LateName``: sent to another name, moved to its own by ``commit``."""

    def __init__(self, fs: Any, path: str, **options: Any) -> None:
        super().__init__(fs, path, **options)
        self.target, self.path = self.path, f"/parts/{uuid.uuid4()}"
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts += self.buffer.getvalue()
        if final:
            MemoryFile(self.fs, self.path, self.parts).commit()
        return True

    def commit(self) -> None:
        self.fs.mv(self.path, self.target)

    def discard(self) -> None:
        self.fs.rm(self.path)


class LateName(MemoryFileSystem):
    """Takes ``xb`` and is not exclusive; a file has its name only once it is published, as over FTP."""

    protocol = "latename"
    asked: dict[str, Any]

    def __init__(self, host: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        LateName.asked = {"host": host}

    @classmethod
    def _get_kwargs_from_urls(cls, path: str) -> dict[str, Any]:
        return {"host": path.partition("://")[2].partition("/")[0]}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "r" in mode:
            return super()._open(path, mode)
        return LateFile(self, path, mode=mode, **{k: options[k] for k in ("block_size", "autocommit") if k in options})


for kind in (SilentDirectory, LateName):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


@pytest.fixture
def silent() -> Iterator[type[SilentDirectory]]:
    yield SilentDirectory
    SilentDirectory.silent = None


class _Bytes:
    """Bytes to upload; ``meanwhile`` happens before they are read."""

    def __init__(self, data: bytes, meanwhile: Any = None) -> None:
        self._data = data
        self._meanwhile = meanwhile

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        if self._meanwhile is not None:
            self._meanwhile()
        piece = self._data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)


def upload_of(name: str, data: bytes, meanwhile: Any = None) -> Upload:
    return Upload(name, _Bytes(data, meanwhile), Digest(len(data), crc32c(data), 1 << 20, (crc32c(data),)))


@pytest.mark.parametrize("directory", ["run", "dcp_000002"])
def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, silent: type[SilentDirectory], directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = MirrorSpec(f"fsspec+silentdir://{uuid.uuid4().hex}/run", required=False)
    with CheckpointManager(tmp_path / "lost", [mirror]) as manager:
        state = new_state()
        manager.resume(state)
        for step in (1, 2):
            train(state)
            manager.save(step, state).wait("mirrored", timeout_s=60)
    silent.silent = directory
    monkeypatch.setenv("CKPTMIRROR_RETRY_S", "0.5")
    with pytest.raises(StoreTemporary), CheckpointManager(tmp_path / "new", [mirror]) as manager:
        manager.resume(new_state())
    silent.silent = None
    with CheckpointManager(tmp_path / "new", [mirror]) as manager:
        start = manager.resume(new_state())
    assert start is not None
    assert start.step == 2


def test_an_upload_that_fails_takes_away_nothing_that_another_put_there() -> None:
    store = open_store("fsspec+latename://host/run", retry=False)

    def another_is_faster() -> None:
        if store.stat("x") is None:
            open_store("fsspec+latename://host/run", retry=False).upload(upload_of("x", b"theirs"))
        raise ConnectionResetError("gone")

    with pytest.raises(CkptMirrorError):
        store.upload(upload_of("x", b"ours", another_is_faster))
    assert store.read("x", limit_bytes=10)[0] == b"theirs"


def test_a_file_system_of_a_host_is_told_which_host() -> None:
    open_store("fsspec+latename://host/run").stat("x")
    assert LateName.asked == {"host": "host"}


def test_an_upload_that_failed_holds_none_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What a cycle holds is freed by the garbage collector alone, under which Python 3.12.0 and 3.12.1 crash."""

    def in_flight() -> int:
        held = [found for found in gc.get_objects() if type(found) is memoryview]
        return sum(type(view.obj).__name__ == "_BytesIOBuffer" for view in held)

    with GcsServerProcess(tmp_path / "server", buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        store = open_store("gcsfs+gs://bucket/run", retry=False)
        server.faults([Fault(operation="upload.put", status=400)])
        gc.collect()
        gc.disable()
        request.addfinalizer(gc.enable)
        with pytest.raises(StoreTemporary) as failed:
            store.upload(upload_of("x", os.urandom(600_000)))
        assert in_flight() == 0, failed.value
        server.clear_faults()
        store.upload(upload_of("x", b"again"))
        assert store.read("x", limit_bytes=10)[0] == b"again"
