"""A directory whose file system hangs on demand: a bindfs mount whose daemon is stopped, like a dead NFS server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["HangingDirectory", "hanging_directory"]

IMPATIENT = (
    "from ckptmirror.local import hang_guard; hang_guard.HANG_S = hang_guard._LOOK_S = 1.0; "
    "from ckptmirror.flow.save import persistent_dir; persistent_dir._EMERGENCY_S = 1.0"
)
"""Code that makes this process give up at once what hangs."""


class HangingDirectory:
    """``path``, on a mount of its own, that answers until it hangs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._daemon = _daemon_of(path)

    def hang(self) -> None:
        """From now on nothing is answered."""
        os.kill(self._daemon, signal.SIGSTOP)

    def answer(self) -> None:
        """Answer, also what was asked meanwhile."""
        os.kill(self._daemon, signal.SIGCONT)


@contextmanager
def hanging_directory(place: Path) -> Iterator[HangingDirectory]:
    """Mount one at ``place``; skip the test where that cannot be done."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("a file system that hangs needs bindfs and /dev/fuse")
    behind = place.with_name(f"{place.name}-behind")
    behind.mkdir()
    place.mkdir()
    done = subprocess.run(["bindfs", str(behind), str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not allow FUSE: {done.stderr.strip()}")
    directory = HangingDirectory(place)
    try:
        yield directory
    finally:
        directory.answer()
        subprocess.run(["umount", "-l", str(place)], check=True)


def _daemon_of(place: Path) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[0].endswith(b"bindfs") and os.fsencode(place) in command:
            return int(process.name)
    raise LookupError(f"no bindfs serves {place}")
