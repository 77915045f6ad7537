"""Locks on a root: one leader, the ranks that it leads, and short exclusive sections.

Rules:
* A lock is a flock(2). The kernel releases it when its holder dies and not before: a stopped process keeps its lock,
  and no code here breaks one. The text in the file is for people; only the kernel decides who holds the lock.
* Every rank that does not lead holds ``ranks.lock`` shared. A new leader takes it exclusively for a moment before it
  continues, so that no rank of an earlier attempt still writes. Ranks take it only after their leader has its own lock.
* A deleted lock file excludes no other process. Its holder can detect that (``lost``), and may take the lock again
  (``retake``) if no other process held it in the meantime.
* A forked child closes every inherited lock, so a DataLoader worker that outlives its trainer holds none.
* Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenMeta, IntegrityError, LocalStorageFull, RootLocked, WaitTimeout
from ckptmirror.core.printable import printable_strings
from ckptmirror.core.sealed_json import json_object
from ckptmirror.local import crashpoints
from ckptmirror.local.directories import make_dirs
from ckptmirror.local.files import read_limited
from ckptmirror.local.own_files import open_own_file
from ckptmirror.local.processes import lock_holders, named_processes
from ckptmirror.local.storage_errors import explained

__all__ = ["RANKS_LOCK_NAME", "SHORT_VERBS", "OnHeld", "RankLock", "RootLock", "exclusive", "is_held", "read_owner"]

SHORT_VERBS = ("drain", "stage", "rewind")
"""Verbs that hold the root's lock for a while only, so that waiting for them makes sense."""

OnHeld = Callable[[str], object]
"""Called once, with a description of the holder, when another process has held the lock for a moment."""

RANKS_LOCK_NAME = f"{names.CONTROL_DIR}/ranks.lock"

_POLL_S = 0.05
_NAMING_S = 0.5
_OWNER_LIMIT_BYTES = 64 * 1024
_REOPEN_TRIES = 5

_registry_lock = threading.RLock()
_open_locks: set[_LockFile] = set()


class _LockFile:
    """An open lock file. Closing it, here or by the kernel, releases the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained("open the lock file", path), _registry_lock, crashpoints.around("lock.create"):
            self.descriptor = open_own_file(path, os.O_RDWR, "open the lock file")
            _open_locks.add(self)

    def try_lock(self, operation: int) -> bool:
        """Lock shared or exclusive; False if another holds it."""
        with explained("lock", self.path):
            try:
                fcntl.flock(self.descriptor, operation | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                return False
            return True

    def is_at_path(self) -> bool:
        """Whether the path still names this file. If not, it was deleted, and this lock excludes no other process."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno != errno.ESTALE:  # a network file system reports a deleted file this way
                raise
            return False

    def is_gone(self) -> bool:
        """Whether it is known not to be at its path: a disk that does not answer says nothing about the lock."""
        with contextlib.suppress(OSError):
            return not self.is_at_path()
        return False

    def write(self, facts: Mapping[str, object]) -> None:
        """Replace the content, for people to read."""
        data = json.dumps(facts, default=str, sort_keys=True).encode()[:_OWNER_LIMIT_BYTES]
        with explained("write", self.path), crashpoints.around("lock.write"):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, data, 0)

    def close(self) -> None:
        with _registry_lock:
            _open_locks.discard(self)
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


def _close_inherited() -> None:
    for lock in list(_open_locks):
        lock.close()
    _registry_lock.release()


os.register_at_fork(
    before=_registry_lock.acquire, after_in_parent=_registry_lock.release, after_in_child=_close_inherited
)


def _locked(path: Path, operation: int, timeout_s: float, on_held: OnHeld | None = None) -> _LockFile | None:
    """Open and lock ``path``, trying for ``timeout_s`` seconds; None if another holds it all that time."""
    deadline = time.monotonic() + timeout_s
    tell_s = time.monotonic() + _NAMING_S
    reopened = 0
    lock = _LockFile(path)
    try:
        while True:
            if lock.try_lock(operation):
                if lock.is_at_path():
                    return lock
                reopened += 1
                lock.close()
                if reopened > _REOPEN_TRIES:
                    raise RootLocked(f"{path} keeps being deleted.", hint="Leave the lock file alone.")
                lock = _LockFile(path)
                continue
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                lock.close()
                return None
            if on_held is not None and time.monotonic() >= tell_s:
                on_held(named_processes(lock_holders(path)))
                on_held = None
            time.sleep(min(_POLL_S, remaining_s))
    except BaseException:
        lock.close()
        raise


class RootLock:
    """The lock of the one process that leads the writing to a root.

    Args:
        root: The local root.
        ranks_wait_s: How many seconds to wait for ranks of an earlier attempt to end.
    """

    def __init__(self, root: Path, *, ranks_wait_s: float = 30.0) -> None:
        self.root = root
        self._ranks_wait_s = ranks_wait_s
        self._lock: _LockFile | None = None
        self._lost = False
        self._owner: Mapping[str, object] = {}
        self._directory: os.stat_result | None = None

    @property
    def held(self) -> bool:
        """Whether this process holds the lock (never so in a forked child)."""
        return self._lock is not None and self._lock.descriptor >= 0

    @property
    def lost(self) -> bool:
        """Whether the held lock file was deleted, so that another process may write here. It stays so."""
        if self._lock is not None and self.held and not self._lost:
            self._lost = self._lock.is_gone()
        return self._lost

    def acquire(
        self,
        owner: Mapping[str, object],
        *,
        wait_s: float = 0.0,
        wait_for_verbs: Collection[str] = (),
        on_held: OnHeld | None = None,
    ) -> None:
        """Take the lock, or raise an error that names its holder.

        Args:
            owner: Facts for people; ``pid``, ``host`` and ``since`` are added if missing. A process that takes the lock
                for one short verb names it as ``verb``.
            wait_s: How many seconds to wait for a holder that runs one of ``wait_for_verbs``.
            wait_for_verbs: The verbs to wait for.
            on_held: Called with a description of the holder.

        Raises:
            RootLocked: Another live process holds it, or ranks of an earlier attempt are alive after the wait.
            LocalStorageUnwritable: The lock file cannot be written.
        """
        if self.held:
            raise RootLocked(f"This process holds {self.root} already.")
        make_dirs(self.root / names.CONTROL_DIR)
        path = self.root / names.LOCK_NAME
        lock = self._lock_or_wait(path, wait_s, wait_for_verbs, on_held)
        if lock is None:
            if os.getpid() in lock_holders(path) and "verb" not in read_owner(self.root):
                raise RootLocked(
                    f"This process already writes to {self.root}.", hint="Close the other CheckpointManager first."
                )
            raise RootLocked(f"{self.root} is being written by another process: {_description(path)}.")
        try:
            with contextlib.suppress(LocalStorageFull):  # the kernel knows who holds it; the text is for people
                lock.write(_with_defaults(owner))
            self._await_ranks()
        except BaseException:
            lock.close()
            raise
        self._lock, self._lost = lock, False
        self._owner, self._directory = owner, self.root.stat()

    def retake(self, may_keep: Callable[[], bool], *, wait_s: float, wait_for_verbs: Collection[str]) -> bool:
        """Take the lock again after it was lost, unless another process holds it or the root is another directory.

        Args:
            may_keep: Called when the new file is locked; returns whether no other process wrote to the root meanwhile.
            wait_s: As for :meth:`acquire`.
            wait_for_verbs: As for :meth:`acquire`.

        Raises:
            LocalStorageUnwritable: The lock file cannot be written.
        """
        try:
            is_the_root = self._directory is not None and os.path.samestat(self._directory, self.root.stat())
        except (FileNotFoundError, NotADirectoryError):
            is_the_root = False
        if not self.held or not is_the_root:
            return False
        make_dirs(self.root / names.CONTROL_DIR)
        lock = self._lock_or_wait(self.root / names.LOCK_NAME, wait_s, wait_for_verbs)
        if lock is None:
            return False
        is_kept = False
        try:
            is_kept = may_keep()
        finally:
            if not is_kept:
                lock.close()
        if not is_kept:
            return False
        with contextlib.suppress(LocalStorageFull):
            lock.write(_with_defaults(self._owner))
        self.release()
        self._lock, self._lost = lock, False
        return True

    def release(self) -> None:
        """Let go. May be called again, and without having acquired."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _lock_or_wait(
        self, path: Path, wait_s: float, verbs: Collection[str], on_held: OnHeld | None = None
    ) -> _LockFile | None:
        deadline = time.monotonic() + wait_s
        unnamed = time.monotonic() + min(wait_s, _NAMING_S)  # a new holder may not have written its name yet
        while True:
            lock = _locked(path, fcntl.LOCK_EX, min(wait_s, _POLL_S))
            now = time.monotonic()
            if lock is not None or now >= deadline:
                return lock
            if now < unnamed:
                continue
            if read_owner(self.root).get("verb") not in verbs:
                return None
            if on_held is not None:
                on_held(_description(path))
                on_held = None

    def _await_ranks(self) -> None:
        path = self.root / RANKS_LOCK_NAME
        ranks = _locked(path, fcntl.LOCK_EX, self._ranks_wait_s)
        if ranks is None:
            raise RootLocked(
                f"Ranks of an earlier attempt still write to {self.root} ({named_processes(lock_holders(path))}); "
                f"waited {self._ranks_wait_s:g} s.",
                hint="Stop those processes; their leader is gone.",
            )
        ranks.close()


class RankLock:
    """The shared lock of a rank that does not lead. Take it after the leader has the root's lock.

    Args:
        root: The local root.
        wait_s: How many seconds to wait for a leader that is checking that earlier ranks are gone.
    """

    def __init__(self, root: Path, *, wait_s: float = 30.0) -> None:
        self.root = root
        self._wait_s = wait_s
        self._lock: _LockFile | None = None

    @property
    def held(self) -> bool:
        """Whether this process holds the lock (never so in a forked child)."""
        return self._lock is not None and self._lock.descriptor >= 0

    def acquire(self) -> None:
        """Take the shared lock.

        Raises:
            RootLocked: A leader held it exclusively for longer than the wait.
        """
        if self.held:
            return
        make_dirs(self.root / names.CONTROL_DIR)
        self._lock = _locked(self.root / RANKS_LOCK_NAME, fcntl.LOCK_SH, self._wait_s)
        if self._lock is None:
            raise RootLocked(f"Another leader of {self.root} kept its ranks out for {self._wait_s:g} s.")

    def retake(self) -> None:
        """Take the lock again if its file was deleted and no process holds it exclusively now.

        Raises:
            LocalStorageUnwritable: The lock file cannot be written.
        """
        if self._lock is not None and self.held and self._lock.is_gone():
            make_dirs(self.root / names.CONTROL_DIR)
            lock = _locked(self.root / RANKS_LOCK_NAME, fcntl.LOCK_SH, 0.0)
            if lock is not None:
                self.release()
                self._lock = lock

    def release(self) -> None:
        """Let go. May be called again, and without having acquired."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextlib.contextmanager
def exclusive(path: Path, *, timeout_s: float, on_held: OnHeld | None = None, keep_file: bool = True) -> Iterator[None]:
    """Run the body while no other process or thread holds the same lock file.

    Args:
        path: The lock file.
        timeout_s: How many seconds to wait for others.
        on_held: Called with a description of the holder.
        keep_file: Whether the file stays; else it is removed before the lock is released: who waits makes a new one.

    Raises:
        WaitTimeout: Another holder kept it for longer than ``timeout_s`` seconds.
    """
    lock = _locked(path, fcntl.LOCK_EX, timeout_s, on_held)
    if lock is None:
        pids = lock_holders(path)
        who = (
            "another thread of this process" if pids == [os.getpid()] else f"another process ({named_processes(pids)})"
        )
        raise WaitTimeout(
            f"{path} is held by {who}; waited {timeout_s:g} s.",
            hint="Try again in a moment; if it is held for longer, stop that process.",
        )
    try:
        yield
    finally:
        if not keep_file:
            with contextlib.suppress(OSError), crashpoints.around("lock.unlink"):
                path.unlink()
        lock.close()


def read_owner(root: Path) -> dict[str, Any]:
    """Return what the last holder wrote about itself, not whether it still holds the lock; {} if it cannot be read."""
    try:
        facts: dict[str, Any] = printable_strings(json_object(read_limited(root / names.LOCK_NAME, _OWNER_LIMIT_BYTES)))
    except (OSError, BrokenMeta, IntegrityError):
        return {}
    return facts


def is_held(path: Path) -> bool:
    """Whether a process holds a lock on ``path`` now, by the kernel's list. For messages: it may change at once."""
    return bool(lock_holders(path))


def _with_defaults(owner: Mapping[str, object]) -> dict[str, object]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since, **owner}


def _description(path: Path) -> str:
    facts = read_owner(path.parent.parent)
    pids = lock_holders(path)
    if pids and facts.get("pid") not in pids:  # whoever may read the file can lock it, and leave an earlier text there
        return named_processes(pids)
    known = [f"{key} {facts[key]}" for key in ("pid", "host", "since") if key in facts]
    others = [f"{key} {value}" for key, value in facts.items() if key not in ("pid", "host", "since")]
    return ", ".join(known + others) or "its owner is not known yet"
