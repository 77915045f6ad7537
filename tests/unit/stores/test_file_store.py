"""The file:// store where it differs from a bucket: links, mounts that vanish, full disks, kills."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core.errors import (
    BucketNotFound,
    ConfigError,
    IntegrityError,
    NotAuthorised,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.stores import file as file_store
from ckptmirror.stores import file_place, normalise_url
from ckptmirror.stores.file import FileStore
from ckptmirror.stores.file_place import Place
from tests.contract.stores_under_test import pattern_bytes, upload_of
from tests.kit.saves import digest_of


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_url_is_an_absolute_path() -> None:
    assert normalise_url("file:///a%20b/c/") == normalise_url("FILE://localhost/a b//c") == normalise_url("/a b/c")
    assert file_store.open("file:///a%20b/100%25")._root == Path("/a b/100%")
    for wrong in ("file://", "file:///", "file://host/x", "file:///a/../b", "file:///a?b", "file:///a%00"):
        with pytest.raises(ConfigError):
            normalise_url(wrong)


def test_nothing_but_objects_and_the_lock_is_left(store: FileStore, root: Path) -> None:
    info = store.write("a/x", b"1", if_generation=0)
    store.write("a/x", b"2", if_generation=info.generation)
    store.upload(upload_of("a/y", b"3"))
    with pytest.raises(PreconditionFailed):
        store.upload(upload_of("a/y", b"4"))
    with pytest.raises(IntegrityError):
        store.upload(upload_of("b/z", b"5", digest=digest_of(b"6")))
    assert _files(root) == [".ckptmirror.lock", "a/x", "a/y"]


def test_directories_go_with_their_last_object(store: FileStore, root: Path) -> None:
    info = store.write("a/b/c/x", b"1", if_generation=0)
    keep = store.write("a/y", b"1", if_generation=0)
    store.delete("a/b/c/x", generation=info.generation)
    assert not (root / "a/b").exists()
    store.delete("a/y", generation=keep.generation)
    assert [path.name for path in root.iterdir()] == [".ckptmirror.lock"]


def test_temporaries_and_the_lock_are_no_objects(store: FileStore, root: Path) -> None:
    store.write("x", b"1", if_generation=0)
    (root / "y.tmp").write_bytes(b"")
    (root / "back\\slash").write_bytes(b"")
    Path(os.fsdecode(bytes(root) + b"/not\xff utf-8")).write_bytes(b"")
    assert [info.name for info in store.list()] == ["x"]
    for name in ("y.tmp", ".ckptmirror.lock"):
        with pytest.raises(StorePermanent):
            store.stat(name)
        with pytest.raises(StorePermanent):
            store.write(name, b"", if_generation=0)


def test_links_are_never_followed_nor_listed(store: FileStore, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.write("x", b"1", if_generation=0)
    (root / "file-link").symlink_to(outside / "secret")
    (root / "dir-link").symlink_to(outside)
    assert [info.name for info in store.list()] == ["x"]
    for name in ("file-link", "dir-link/secret"):
        with pytest.raises(StorePermanent):
            store.stat(name)
        with pytest.raises(StorePermanent):
            store.read(name, limit_bytes=100)
        with pytest.raises((StorePermanent, PreconditionFailed)):
            store.write(name, b"overwritten", if_generation=0)
    with pytest.raises(StorePermanent):
        store.upload(upload_of("dir-link/new", b"1"))
    assert _files(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_directories_within_directories_do_not_take_the_square_of_their_number(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("parts/a/b/x", b"1", if_generation=0)
    here = os.open(root, os.O_RDONLY)
    for _ in range(100):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    entered, parent = [], Place.parent

    def counted(place: Place, parts: tuple[str, ...], **more: Any) -> Any:
        entered.append(len(parts))
        return parent(place, parts, **more)

    monkeypatch.setattr(Place, "parent", counted)
    assert [info.name for info in store.list()] == ["parts/a/b/x"]
    assert max(entered) <= 32


def test_a_pipe_in_the_mirror_blocks_nobody(store: FileStore, root: Path) -> None:
    store.write("x", b"1", if_generation=0)
    os.mkfifo(root / "pipe")
    assert [info.name for info in store.list()] == ["x"]
    with pytest.raises(StorePermanent):
        store.read("pipe", limit_bytes=10)


def test_the_directory_is_made_only_below_an_existing_parent(tmp_path: Path) -> None:
    store = file_store.open(f"file://{tmp_path}/mount/run")
    with pytest.raises(BucketNotFound, match=f"no mirror at {tmp_path}/mount/run: {tmp_path}/mount does not") as raised:
        store.stat("x")
    assert "mkdir" not in raised.value.hint, "a reader creates nothing"
    for ask in (store.identity, lambda: store.write("x", b"1", if_generation=0)):
        with pytest.raises(BucketNotFound, match=f"there is no {tmp_path}/mount") as raised:  # no wait mends that
            ask()
        assert f"mkdir -p {tmp_path}/mount" in raised.value.hint
    assert not (tmp_path / "mount").exists()
    (tmp_path / "mount").mkdir()
    store.write("x", b"1", if_generation=0)
    assert _files(tmp_path / "mount") == ["run/.ckptmirror.lock", "run/x"]


def test_a_lock_file_that_was_removed_is_restored_by_the_command_that_the_error_names(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    identity = file_store.open(url).identity()
    (tmp_path / "run" / ".ckptmirror.lock").unlink()
    with pytest.raises(StoreTemporary) as raised:
        file_store.open(url).identity(identity)
    (command,) = re.findall(r"`(.*)`", raised.value.hint)
    subprocess.run(command, shell=True, check=True)
    assert file_store.open(url).identity(identity) == identity


def test_a_mirror_that_was_met_before_is_waited_for_though_its_parent_is_gone(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    identity = file_store.open(f"file://{tmp_path}/mount/run").identity()
    shutil.rmtree(tmp_path / "mount")
    store = file_store.open(f"file://{tmp_path}/mount/run")
    with pytest.raises(StoreTemporary, match="is it mounted"):
        store.identity(identity)
    with pytest.raises(StoreTemporary, match="is it mounted"):
        store.write("x", b"1", if_generation=0)


@pytest.mark.parametrize("stands_there", ["nothing", "empty", "other"])
def test_a_mount_that_vanished_is_not_written_to(store: FileStore, root: Path, stands_there: str) -> None:
    info = store.write("x", b"1", if_generation=0)
    away = root.with_name("away")
    root.rename(away)
    if stands_there != "nothing":
        root.mkdir()
    if stands_there == "other":
        file_store.open(f"file://{root}").write("x", b"1", if_generation=0)
    before = sorted(root.parent.rglob("*"))
    for ask in (
        lambda: store.stat("x"),
        lambda: list(store.list()),
        lambda: store.read("x", limit_bytes=9),
        lambda: store.write("y", b"1", if_generation=0),
        lambda: store.write("x", b"1", if_generation=info.generation),
        lambda: store.upload(upload_of("z/y", b"1")),
        lambda: store.delete("x", generation=info.generation),
    ):
        with pytest.raises(StoreTemporary, match="is not there"):
            ask()
    assert sorted(root.parent.rglob("*")) == before
    shutil.rmtree(root, ignore_errors=True)
    away.rename(root)
    assert store.stat("x") == info


def test_a_directory_that_came_back_with_other_inodes_is_the_same_mirror(store: FileStore, root: Path) -> None:
    store.write("x", b"1", if_generation=0)
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    shutil.rmtree(root)
    copy.rename(root)
    assert store.stat("x") is not None


def test_a_full_disk_is_temporary_and_leaves_nothing(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.write("x", b"1", if_generation=0)
    monkeypatch.setattr(file_store, "write_full", full)
    for create in (lambda: store.write("y", b"1", if_generation=0), lambda: store.upload(upload_of("z", b"1"))):
        with pytest.raises(StoreTemporary):
            create()
    monkeypatch.undo()
    assert _files(root) == [".ckptmirror.lock", "x"]


def test_a_disk_that_reads_back_other_bytes_publishes_nothing(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_store.read_full

    def rotten(descriptor: int, buffer: memoryview, offset: int) -> int:
        count = real(descriptor, buffer, offset)
        if count:
            buffer[0] ^= 1
        return count

    monkeypatch.setattr(file_store, "read_full", rotten)
    with pytest.raises(IntegrityError):
        store.upload(upload_of("x", pattern_bytes(100_000)))
    monkeypatch.undo()
    assert _files(root) == [".ckptmirror.lock"]


def test_without_hard_links_a_create_still_replaces_nothing(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    store.write("old", b"1", if_generation=0)
    monkeypatch.setattr(file_store, "link_new", refuse)
    assert store.upload(upload_of("new", b"22")) == store.stat("new")
    monkeypatch.setattr(file_store, "_exists", lambda _parent, _last: False)
    monkeypatch.setattr(file_store, "link_new", lambda *_: (_ for _ in ()).throw(FileExistsError()))
    with pytest.raises(PreconditionFailed):
        store.upload(upload_of("old", b"22"))
    assert store.read("old", limit_bytes=9)[0] == b"1"


def test_our_own_link_whose_answer_was_lost_counts_as_made(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        (tmp_path / "a.tmp").write_bytes(b"1")
        os.link(tmp_path / "a.tmp", tmp_path / "a")
        file_place.link_new(directory, "a.tmp", "a")
        (tmp_path / "b.tmp").write_bytes(b"1")
        with pytest.raises(FileExistsError):
            file_place.link_new(directory, "b.tmp", "a")
    finally:
        os.close(directory)


def test_a_lock_that_is_held_too_long_is_temporary(root: Path) -> None:
    store = FileStore(root, lock_timeout_s=0.05)
    info = store.write("x", b"1", if_generation=0)
    with (root / ".ckptmirror.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreTemporary, match=rf"locked by another process for .*process ids: {os.getpid()}\)"):
            store.write("x", b"2", if_generation=info.generation)
        store.write("y", b"2", if_generation=0)
    store.delete("x", generation=info.generation)


def test_a_mirror_that_may_only_be_read_is_readable(store: FileStore, root: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    store.write("x", b"1", if_generation=0)
    (root / ".ckptmirror.lock").unlink()
    root.chmod(0o555)
    try:
        reader = file_store.open(f"file://{root}")
        assert reader.read("x", limit_bytes=9)[0] == b"1"
        with pytest.raises(NotAuthorised):
            reader.write("y", b"1", if_generation=0)
    finally:
        root.chmod(0o755)


def test_old_temporaries_of_dead_writers_are_removed_and_those_of_living_ones_stay(
    store: FileStore, root: Path
) -> None:
    store.write("first", b"1", if_generation=0)
    dead, living, young = (root / f"x.{digit * 16}.tmp" for digit in "abc")
    for path in (dead, living, young):
        path.write_bytes(b"part")
    for path in (dead, living):
        os.utime(path, (1, 1))
    with living.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store.upload(upload_of("x", b"1"))
    assert _files(root) == [".ckptmirror.lock", "first", "x", living.name, young.name]


def test_order_of_write_fsync_link(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    info = store.write("d/writer.json", b"1", if_generation=0)
    steps: list[str] = []

    def recorded(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def record(*arguments: object, **named: object) -> object:
            steps.append(name)
            return call(*arguments, **named)

        return record

    def fsync(descriptor: int) -> None:
        steps.append("fsync directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync file")
        real(descriptor)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "pwrite", recorded("write", os.pwrite))
    for name in ("utime", "link", "rename", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    store.upload(upload_of("new/x", b"1"))
    created = ["mkdir", "fsync directory", "write", "fsync file", "utime", "fsync file", "link", "fsync directory"]
    assert steps == [*created, "unlink"]
    steps.clear()
    info = store.write("d/writer.json", b"2", if_generation=info.generation)
    assert steps == ["write", "utime", "fsync file", "rename", "fsync directory", "unlink"]
    steps.clear()
    store.delete("d/writer.json", generation=info.generation)
    assert steps == ["unlink", "fsync directory"]


_KILLED = """
import sys
from ckptmirror.local import crashpoints
from tests.contract.stores_under_test import upload_of
from ckptmirror.stores import file
store = file.open("file://" + sys.argv[1])
if len(sys.argv) > 2:
    crashpoints.arm(sys.argv[2])
else:
    crashpoints.arm()
old = store.stat("writer.json")
store.upload(upload_of("new/dir/x", b"new" * 5000))
store.write("writer.json", b"two", if_generation=old.generation)
gone = store.stat("gone/x")
store.delete("gone/x", generation=gone.generation)
print(len(crashpoints.passed()))
"""


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _KILLED, str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3])


def test_a_kill_at_any_point_leaves_every_object_whole_or_absent(tmp_path: Path) -> None:
    def fresh(number: int) -> Path:
        root = tmp_path / f"mirror{number}"
        store = file_store.open(f"file://{root}")
        store.write("writer.json", b"one", if_generation=0)
        store.write("gone/x", b"gone", if_generation=0)
        return root

    done = _run(fresh(0))
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points >= 16
    for number in range(1, points + 1, 1 if os.environ.get("CKPTMIRROR_CAMPAIGN") == "full" else 3):
        root = fresh(number)
        assert _run(root, str(number)).returncode == -signal.SIGKILL
        store = file_store.open(f"file://{root}")
        there = {info.name: store.read(info.name, limit_bytes=10**6)[0] for info in store.list()}
        assert there.pop("writer.json") in (b"one", b"two")
        assert there.pop("gone/x", b"gone") == b"gone"
        assert there.pop("new/dir/x", b"new" * 5000) == b"new" * 5000
        assert there == {}
        if store.stat("new/dir/x") is None:
            store.upload(upload_of("new/dir/x", b"new" * 5000))
        left = [name for name in _files(root) if name.endswith(".tmp")]
        assert all(re.fullmatch(r".*\.[0-9a-f]{16}\.tmp", name) for name in left)


def test_a_thread_that_looks_while_another_makes_the_directory_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, opens, looks = Place(tmp_path / "mirror", 5.0), os.open, [1]

    def open_as_another_makes_it(*given: Any, **more: Any) -> int:
        try:
            return opens(*given, **more)
        except FileNotFoundError:
            if looks:
                looks.pop()
                place.identity()
            raise

    monkeypatch.setattr(os, "open", open_as_another_makes_it)
    assert place.identity()
    assert not looks
