"""One live writer per root: seen with real processes that are stopped, killed and forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckptmirror
from ckptmirror.core.errors import LocalStorageUnwritable, RootLocked, WaitTimeout
from ckptmirror.core.model import new_id
from ckptmirror.local.files import write_bytes
from ckptmirror.local.lock import RankLock, RootLock, exclusive, read_owner
from ckptmirror.local.status_file import write_status_file

PACKAGE_PARENT = str(Path(ckptmirror.__file__).parent.parent)

HOLDER = """
import sys
from pathlib import Path
from ckptmirror.local import lock
root = Path(sys.argv[1])
held = getattr(lock, sys.argv[2])(root)
held.acquire({"verb": "test"}) if sys.argv[2] == "RootLock" else held.acquire()
print("held", flush=True)
sys.stdin.read()
"""

FORKER = """
import os, sys
from pathlib import Path
from ckptmirror.local.lock import RankLock, RootLock
root = Path(sys.argv[1])
leader, rank = RootLock(root), RankLock(root)
leader.acquire({})
rank.acquire()
gate_read, gate_write = os.pipe()
child = os.fork()
if child == 0:
    os.close(gate_write)
    os.write(1, b"%d %d %d\\n" % (os.getpid(), leader.held, rank.held))
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as started:
        try:
            yield started
        finally:
            started.kill()


@contextmanager
def holder(root: Path, lock: str = "RootLock") -> Iterator[subprocess.Popen[str]]:
    with process(HOLDER, root, lock) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "held\n"
        yield started


READER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_who_locks_the_file_without_writing_into_it_is_named_and_not_who_wrote_it(tmp_path: Path):
    """Whoever may read the file can lock it. A person who is told another process id would stop that one."""
    lock = RootLock(tmp_path)
    lock.acquire({"pid": 4194304})
    lock.release()
    with process(READER, tmp_path / ".ckptmirror" / "lock") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RootLocked, match=rf"process ids: {other.pid}\.") as caught:
            lock.acquire({})
        assert "4194304" not in str(caught.value)


def test_a_second_process_is_told_who_holds_the_root(tmp_path: Path):
    with holder(tmp_path) as other, pytest.raises(RootLocked) as caught:
        RootLock(tmp_path).acquire({})
    assert f"pid {other.pid}" in str(caught.value)
    assert "host " in str(caught.value)
    assert "since " in str(caught.value)
    assert "verb test" in str(caught.value)
    assert caught.value.exit_code == 11


def test_a_stopped_holder_keeps_its_lock(tmp_path: Path):
    with holder(tmp_path) as other:
        os.kill(other.pid, signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        with pytest.raises(RootLocked):
            RootLock(tmp_path).acquire({})
        os.kill(other.pid, signal.SIGCONT)


def test_a_killed_holder_keeps_nothing(tmp_path: Path):
    with holder(tmp_path) as other:
        other.kill()
        other.wait()
        lock = RootLock(tmp_path)
        lock.acquire({})
        lock.release()


def test_a_released_root_can_be_taken_again(tmp_path: Path):
    for _ in range(3):
        lock = RootLock(tmp_path)
        lock.acquire({"verb": "train"})
        assert lock.held
        assert read_owner(tmp_path)["pid"] == os.getpid()
        with pytest.raises(RootLocked):
            RootLock(tmp_path).acquire({})
        lock.release()
        lock.release()
        assert not lock.held


def test_a_forked_child_that_outlives_its_parent_holds_no_lock(tmp_path: Path):
    with process(FORKER, tmp_path) as parent:
        assert parent.stdout is not None
        child, leader_held, rank_held = map(int, parent.stdout.readline().split())
        assert (leader_held, rank_held) == (0, 0)
        try:
            parent.kill()
            parent.wait()
            os.kill(child, 0)
            lock = RootLock(tmp_path, ranks_wait_s=5)
            lock.acquire({})
            lock.release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_release_its_parents_lock(tmp_path: Path):
    lock = RootLock(tmp_path)
    lock.acquire({})
    pid = os.fork()
    if pid == 0:
        lock.release()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(RootLocked):
        RootLock(tmp_path).acquire({})
    lock.release()


def test_a_new_leader_waits_for_the_ranks_of_the_last_one(tmp_path: Path):
    with holder(tmp_path, "RankLock") as rank:
        with pytest.raises(RootLocked, match=rf"Ranks of an earlier attempt.*{rank.pid}"):
            RootLock(tmp_path, ranks_wait_s=0.1).acquire({})
        leader = RootLock(tmp_path, ranks_wait_s=60)
        waiting = threading.Thread(target=leader.acquire, args=({},))
        waiting.start()
        rank.kill()
        waiting.join(60)
        assert leader.held
        leader.release()


def test_a_leader_that_gave_up_waiting_holds_nothing(tmp_path: Path):
    with holder(tmp_path, "RankLock"), pytest.raises(RootLocked):
        RootLock(tmp_path, ranks_wait_s=0).acquire({})
    lock = RootLock(tmp_path)
    lock.acquire({})
    lock.release()


def test_ranks_share_their_lock_under_a_leader(tmp_path: Path):
    leader, ranks = RootLock(tmp_path), [RankLock(tmp_path) for _ in range(3)]
    leader.acquire({})
    for rank in ranks:
        rank.acquire()
    assert all(rank.held for rank in ranks)
    for lock in (leader, *ranks):
        lock.release()


def test_a_deleted_lock_file_is_made_anew(tmp_path: Path):
    first = RootLock(tmp_path)
    first.acquire({})
    first.release()
    os.unlink(tmp_path / ".ckptmirror" / "lock")
    second = RootLock(tmp_path)
    second.acquire({})
    with pytest.raises(RootLocked):
        RootLock(tmp_path).acquire({})
    second.release()


@pytest.mark.parametrize("how", ["deleted", "replaced", "directory gone", "not a directory"])
def test_a_holder_sees_that_its_lock_file_was_taken_away(tmp_path: Path, how: str):
    control = tmp_path / ".ckptmirror"
    lock = RootLock(tmp_path)
    assert not lock.lost
    lock.acquire({})
    assert not lock.lost
    moved = (control / "lock").rename(tmp_path / "aside")
    if how == "replaced":
        (control / "lock").write_bytes(b"{}")
    elif how != "deleted":
        control.rename(tmp_path / "control aside")
        if how == "not a directory":
            control.write_bytes(b"")
    assert lock.held
    assert lock.lost
    if how == "deleted":
        moved.rename(control / "lock")
        assert lock.lost  # another may have started meanwhile
        lock.release()
        lock.acquire({})
        assert not lock.lost
    lock.release()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]", b'{"pid": ', b"[" * 10_000])
def test_an_unreadable_owner_still_locks(tmp_path: Path, content: bytes):
    with holder(tmp_path) as other:
        (tmp_path / ".ckptmirror" / "lock").write_bytes(content)
        with pytest.raises(RootLocked, match=rf"process ids: {other.pid}\."):
            RootLock(tmp_path).acquire({})


def test_a_link_in_place_of_the_lock_file_is_not_written_through(tmp_path: Path):
    (tmp_path / ".ckptmirror").mkdir()
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / ".ckptmirror" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(LocalStorageUnwritable, match="symbolic link"):
        RootLock(tmp_path).acquire({})
    assert (tmp_path / "victim").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", [RootLock, RankLock])
def test_a_lock_file_with_a_second_name_is_not_written(tmp_path: Path, kind: type[RootLock | RankLock]):
    (tmp_path / ".ckptmirror").mkdir()
    (tmp_path / "victim").write_bytes(b"precious")
    for name in ("lock", "ranks.lock"):
        (tmp_path / ".ckptmirror" / name).hardlink_to(tmp_path / "victim")
    lock = kind(tmp_path)
    with pytest.raises(LocalStorageUnwritable, match="hard link"):
        lock.acquire({}) if isinstance(lock, RootLock) else lock.acquire()
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_control_directory_that_is_a_link_is_not_locked(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".ckptmirror").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LocalStorageUnwritable, match="symbolic link"):
        RootLock(tmp_path).acquire({})
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_control_directory_that_becomes_a_link_is_written_through_no_more(tmp_path: Path):
    """The lock is held: only later a link is put into the directory's place."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "status.json").write_bytes(b"precious")
    lock = RootLock(tmp_path)
    lock.acquire({})
    (tmp_path / ".ckptmirror").rename(tmp_path / "gone")
    (tmp_path / ".ckptmirror").symlink_to(elsewhere)
    with pytest.raises(LocalStorageUnwritable, match="symbolic link"):
        write_bytes(tmp_path / ".ckptmirror" / "status.json", b"{}", save_id=new_id(), replace=True)
    write_status_file(tmp_path, {"step": 3})  # which only logs it
    with pytest.raises(LocalStorageUnwritable, match="symbolic link"):
        lock.retake(lambda: True, wait_s=0.0, wait_for_verbs=())
    assert [(path.name, path.read_bytes()) for path in elsewhere.iterdir()] == [("status.json", b"precious")]
    lock.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
@pytest.mark.parametrize("planted", [".ckptmirror", ".ckptmirror/lock"])
def test_where_everyone_may_write_another_users_lock_is_not_taken(tmp_path: Path, planted: str):
    (tmp_path / ".ckptmirror").mkdir()
    (tmp_path / ".ckptmirror" / "lock").write_bytes(b"his")
    os.chown(tmp_path / planted, 65534, 65534)
    lock = RootLock(tmp_path)
    lock.acquire({})  # only some may write here, and the owner has chosen them
    lock.release()
    (tmp_path / ".ckptmirror" / "lock").write_bytes(b"his")
    (tmp_path / planted).parent.chmod(0o1777)
    with pytest.raises(LocalStorageUnwritable, match=r"belongs to user id 65534.*everyone may write"):
        RootLock(tmp_path).acquire({})
    assert (tmp_path / ".ckptmirror" / "lock").read_bytes() == b"his"


def test_an_exclusive_body_is_entered_by_one_at_a_time(tmp_path: Path):
    inside, most, guard = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(3):
            with exclusive(tmp_path / "rotate.lock", timeout_s=60):
                with guard:
                    inside += 1
                    most = max(most, inside)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_waiting_for_an_exclusive_body_has_a_limit(tmp_path: Path):
    path = tmp_path / "rotate.lock"
    held, refused = exclusive(path, timeout_s=0), pytest.raises(WaitTimeout, match="by another thread of this process")
    with held, refused, exclusive(path, timeout_s=0.05):
        pass
    with exclusive(path, timeout_s=0):
        pass


def test_an_error_in_an_exclusive_body_frees_it(tmp_path: Path):
    with pytest.raises(KeyError), exclusive(tmp_path / "rotate.lock", timeout_s=0):
        raise KeyError
    with exclusive(tmp_path / "rotate.lock", timeout_s=0):
        pass
