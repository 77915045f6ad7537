"""Several hosts that mount one root are one node. The pending-uploads table is on the disk of one of them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import CkptMirrorError, NoTable, WaitTimeout
from ckptmirror.flow.places.uncommitted import uncommitted_on
from ckptmirror.flow.status import read_status
from tests.kit.processes import run_ranks
from tests.nodes.jobs import WAIT_S, built, train

pytestmark = pytest.mark.long

CLONE_NEWNS = 0x20000  # <sched.h>: mounts of its own


@pytest.fixture
def disks(tmp_path: Path, mounted: Callable[..., Path]) -> list[Path]:
    """A disk for each of two hosts, made alike, so that their files have the same inodes."""
    (tmp_path / "local").mkdir()
    return [mounted("size=4m"), mounted("size=4m")]


def on_host(base: Path, disk: Path) -> None:
    """Give this process a disk of the host's own, under the same name on every host."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    for arguments in (["--make-rprivate", "/"], ["--bind", str(disk), str(base / "local")]):
        subprocess.run(["mount", *arguments], check=True)


def save_once(rank: int, base: Path, disks: list[Path], step: int) -> tuple[int | None, str]:
    """Resume, save, wait until it is mirrored; return the newest safe step and why there is no status."""
    on_host(base, disks[rank])
    newest, why = None, ""
    url = f"file://{base}/mirror"
    with CheckpointManager(base / "root", [url], state_dir=base / "local/state", timeout_s=WAIT_S) as manager:
        state = built("fsdp")
        manager.resume(state)
        train(state, rank, step)
        handle = manager.save(step, state)
        handle.wait("mirrored", timeout_s=WAIT_S)
        manager.wait("mirrored", timeout_s=WAIT_S)
        assert uncommitted_on(url) == []
        try:
            newest = manager.status().newest_safe_step
        except NoTable as error:
            why = str(error)
    return newest, why


def test_ranks_on_a_host_without_the_table_ask_the_mirror_and_never_read_an_older_table(
    tmp_path: Path, disks: list[Path]
) -> None:
    orders = [(disks, "there is none here"), (disks[::-1], "is another one"), (disks, "is another one")]
    for step, (of_ranks, said) in enumerate(orders, start=1):
        (newest, nothing), (unknown, why) = run_ranks(2, save_once, tmp_path, of_ranks, step, limit_s=WAIT_S)
        assert (newest, nothing, unknown) == (step, "", None)
        assert said in why
        assert str(tmp_path / "local/state") in why
    with pytest.raises(NoTable):
        read_status(tmp_path / "root", tmp_path / "local/state")


def wait_for_what_cannot_be_sent(rank: int, base: Path, disks: list[Path]) -> str:
    """Save once while the leader cannot write to the mirror; return how the wait of the other host ends."""
    on_host(base, disks[rank])
    url = f"file://{base}/mirror"
    manager = CheckpointManager(base / "root", [url], state_dir=base / "local/state", timeout_s=WAIT_S)
    state = built("fsdp")
    manager.resume(state)
    if manager.ranks.is_leader:
        subprocess.run(["mount", "--bind", "-o", "ro", f"{base}/mirror", f"{base}/mirror"], check=True)
    manager.save(1, state).wait("committed", timeout_s=WAIT_S)
    ended = ""
    if not manager.ranks.is_leader:
        with pytest.raises(WaitTimeout) as caught:
            manager.wait("mirrored", timeout_s=1.0)
        ended = str(caught.value)
    manager.ranks.exchange(None, what="the other host has waited")
    with suppress(CkptMirrorError):
        manager.close(timeout_s=0.0)
    return ended


def test_a_rank_on_a_host_without_the_table_does_not_call_mirrored_what_the_mirror_lacks(
    tmp_path: Path, disks: list[Path]
) -> None:
    _, ended = run_ranks(2, wait_for_what_cannot_be_sent, tmp_path, disks, limit_s=WAIT_S)
    assert "Not everything is mirrored after 1 s" in ended
