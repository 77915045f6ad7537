"""The file:// store after a writer that died early: what it left is made durable before it counts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror.core.errors import PreconditionFailed, StoreTemporary
from ckptmirror.flow.places.object_match import read_back_crc32c
from ckptmirror.stores.file import FileStore
from tests.contract.stores_under_test import upload_of
from tests.kit.saves import digest_of


@pytest.fixture
def fsynced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were fsynced, in order."""
    real, seen = os.fsync, []

    def fsync(descriptor: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def _left_by_the_dead(root: Path, name: str, data: bytes) -> None:
    """What a writer leaves that is killed before it fsyncs any directory."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(data)


@pytest.mark.parametrize("data", [b"", b"12345"])
def test_what_was_found_is_durable_before_it_can_be_verified(
    store: FileStore, root: Path, fsynced: list[str], data: bytes
) -> None:
    store.identity()
    _left_by_the_dead(root, "a/b/x", data)
    durable = {str(root / path) for path in ("", "a", "a/b", "a/b/x")}
    fsynced.clear()
    info = store.stat("a/b/x")
    assert info is not None
    assert read_back_crc32c(store, info) == digest_of(data).crc32c
    assert set(fsynced) == durable
    fsynced.clear()
    assert store.read("a/b/x", limit_bytes=9)[0] == data
    assert set(fsynced) == durable
    for create in (
        lambda: store.upload(upload_of("a/b/x", data)),
        lambda: store.write("a/b/x", data, if_generation=0),
    ):
        fsynced.clear()
        with pytest.raises(PreconditionFailed):
            create()
        assert set(fsynced) == durable


def test_only_the_end_of_what_is_read_is_made_durable(store: FileStore, fsynced: list[str]) -> None:
    info = store.write("x", b"12345", if_generation=0)
    fsynced.clear()
    store.download("x", generation=info.generation, offset=0, buffer=memoryview(bytearray(4)))
    assert fsynced == []
    store.download("x", generation=info.generation, offset=4, buffer=memoryview(bytearray(1)))
    assert fsynced


def test_a_directory_that_another_process_made_is_durable_before_an_object_in_it(
    store: FileStore, root: Path, fsynced: list[str]
) -> None:
    store.identity()
    (root / "a").mkdir()
    (root / "a/b").mkdir()
    fsynced.clear()
    store.upload(upload_of("a/b/x", b"1"))
    assert fsynced[:2] == [str(root), str(root / "a")]
    assert fsynced[-1] == str(root / "a/b")


def test_a_lock_file_that_another_process_made_is_durable_before_its_id_counts(
    store: FileStore, root: Path, fsynced: list[str]
) -> None:
    root.mkdir()
    (root / ".ckptmirror.lock").write_text("ab" * 16)
    store.stat("x")
    assert fsynced == []
    assert store.identity() == "ab" * 16
    assert fsynced == [str(root), str(root.parent)]
    store.identity()
    assert len(fsynced) == 2


def test_what_cannot_be_made_durable_is_not_read_as_if_it_were(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(number: int) -> Callable[[int], None]:
        def fsync(_descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    store.write("x", b"1", if_generation=0)
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(StoreTemporary):
        store.read("x", limit_bytes=9)
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))  # a file system without fsync: read-only by its nature
    assert store.read("x", limit_bytes=9)[0] == b"1"
