"""The file:// store where nobody has changed anything yet: what reading leaves alone, and what a change demands."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror.core.errors import BucketNotFound, NotAuthorised, StorePermanent, StoreTemporary
from ckptmirror.stores import file as file_store
from ckptmirror.stores.file import FileStore
from ckptmirror.stores.same_place import SamePlaceStore
from tests.contract.stores_under_test import upload_of


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


READS: list[Callable[[FileStore], object]] = [
    lambda store: store.stat("x"),
    lambda store: list(store.list()),
    lambda store: list(store.list("a/b")),
    lambda store: store.read("x", limit_bytes=9),
    lambda store: store.download("x", generation=1, offset=0, buffer=memoryview(bytearray(1))),
]
CHANGES: list[Callable[[FileStore], object]] = [
    lambda store: store.write("new", b"1", if_generation=0),
    lambda store: store.write("x", b"2", if_generation=7),
    lambda store: store.upload(upload_of("a/new", b"1")),
    lambda store: store.delete("x", generation=7),
]


@pytest.mark.parametrize("read", READS)
def test_reading_a_mistyped_url_makes_nothing_and_says_so(store: FileStore, root: Path, read) -> None:
    with pytest.raises(BucketNotFound, match=r"mirror directory .* does not exist") as raised:
        read(store)
    assert "URL" in raised.value.hint
    assert raised.value.exit_code == 10
    assert not root.exists()
    assert store.identity()  # who will save there makes it
    assert _files(root) == [".ckptmirror.lock"]


def test_reading_a_directory_without_a_lock_file_makes_none(store: FileStore, root: Path) -> None:
    root.mkdir()
    (root / "x").write_bytes(b"1")
    assert store.read("x", limit_bytes=9)[0] == b"1"
    assert [info.name for info in store.list()] == ["x"]
    assert store.stat("y") is None
    assert _files(root) == ["x"]


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes the file system of every mirror refuse new files, and take them again."""
    real, refusing = os.open, [False]

    def refuse(path: object, flags: int, *arguments: int, **named: int) -> int:
        if refusing[0] and flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    return lambda is_read_only: refusing.__setitem__(0, is_read_only)


@pytest.mark.parametrize("change", CHANGES)
def test_a_mirror_that_was_read_only_at_first_is_recognised_once_it_can_be(
    store: FileStore, root: Path, read_only: Callable[[bool], None], change
) -> None:
    root.mkdir()
    (root / "x").write_bytes(b"1")
    read_only(True)
    assert store.identity() is None
    assert store.read("x", limit_bytes=9)[0] == b"1"
    with pytest.raises(NotAuthorised, match="nothing was changed"):
        change(store)
    read_only(False)
    info = store.stat("x")
    assert info is not None
    store.delete("x", generation=info.generation)
    assert _files(root) == [".ckptmirror.lock"]
    root.rename(root.with_name("away"))
    root.mkdir()  # the mount point without the mount
    for ask in (*READS, *CHANGES):
        with pytest.raises(StoreTemporary, match="is it mounted"):
            ask(store)
    assert _files(root) == []


def test_no_identity_is_not_final_for_who_remembers(
    store: FileStore, root: Path, read_only: Callable[[bool], None]
) -> None:
    root.mkdir()
    known: dict[str, str] = {}
    remembering = SamePlaceStore(store, lambda: known.get("it"), lambda found: known.setdefault("it", found))
    read_only(True)
    assert remembering.stat("x") is None
    assert known == {}
    read_only(False)
    remembering.write("x", b"1", if_generation=0)
    assert known == {"it": store.identity()}
    root.rename(root.with_name("away"))
    root.mkdir()
    next_process = SamePlaceStore(file_store.open(store.url), lambda: known.get("it"), lambda found: found)
    for one in (remembering, next_process):
        with pytest.raises(StoreTemporary, match="is it mounted"):
            one.stat("x")


def test_another_mirror_with_the_same_device_and_inode_is_another_mirror(store: FileStore, root: Path) -> None:
    store.write("x", b"1", if_generation=0)
    (root / ".ckptmirror.lock").write_text("0" * 32)  # in place, as a mount gets the numbers of one that went
    for ask in (*READS, *CHANGES):
        with pytest.raises(StoreTemporary, match="another mirror"):
            ask(store)


@pytest.mark.parametrize("content", ["", "no id", "0" * 31, "0" * 33])
def test_a_lock_file_that_holds_no_id_lets_nothing_be_changed(store: FileStore, root: Path, content: str) -> None:
    root.mkdir()
    (root / ".ckptmirror.lock").write_text(content)
    for ask in (*CHANGES, lambda store: store.identity()):
        with pytest.raises(StorePermanent, match="holds no id"):
            ask(store)
    assert store.stat("x") is None
