"""Each rank's wait for the mirrors ends as that of the leader of its node does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import AttemptFenced, DeadlinePassed, NotAuthorised
from ckptmirror.flow.mirror_wait import MirrorWait
from ckptmirror.flow.places.mirrors import mirror_specs
from ckptmirror.local.status_file import is_writer_alive, read_status_file
from ckptmirror.local.table_place import open_known_table
from tests.kit.faults import faulty, refusing
from tests.kit.faulty_store import StoreFault
from tests.kit.processes import outcome, run_ranks
from tests.nodes.jobs import WAIT_S, built, train

pytestmark = pytest.mark.long

RIVAL = """
import sys
from pathlib import Path
from tests.nodes.test_waits_on_nodes import rival
rival(Path(sys.argv[1]))
"""


def rival(base: Path) -> None:
    """Claim the run from another disk."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 5))
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), extra={})
    with CheckpointManager(base / "rival", [f"file://{base}/mirror"]) as manager:
        assert manager.resume(state) is not None


def wait_in_vain(rank: int, base: str, what: str) -> list[tuple[str, str, int]]:
    """Wait for what cannot be mirrored any more, with no limit that would be reached; return how each wait ends."""
    manager = CheckpointManager(Path(base) / "aab"[rank], [f"file://{base}/mirror"], timeout_s=WAIT_S)
    state = built("fsdp")
    if what != "fenced" and manager.ranks.is_leader:
        faulty(manager, refusing() if what == "refused" else StoreFault("upload", when="before", times=0))
    manager.resume(state)
    train(state, rank, 1)
    first = manager.save(1, state)
    if what == "fenced":
        first.wait("mirrored", timeout_s=WAIT_S)
        manager.ranks.exchange(None, what="all are mirrored")
        if rank == 0:
            subprocess.run([sys.executable, "-c", RIVAL, base], check=True, timeout=WAIT_S)
        manager.ranks.exchange(None, what="the rival has claimed the run")
        first = manager.save(2, state)
    first.wait("committed", timeout_s=WAIT_S)
    if what in ("closed", "killed"):
        manager.ranks.exchange(None, what="all are committed")
        if what == "killed" and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if manager.ranks.is_leader:
            outcome(lambda: manager.close(timeout_s=0.0))
            return []
    ended = [
        outcome(lambda: manager.wait("mirrored", timeout_s=10 * WAIT_S)),
        outcome(lambda: first.wait("mirrored", timeout_s=10 * WAIT_S)),
    ]
    outcome(lambda: manager.close(timeout_s=0.0))
    return ended


def test_a_wait_for_uploads_that_failed_for_good_ends_on_every_rank(tmp_path: Path) -> None:
    for ended in run_ranks(3, wait_in_vain, str(tmp_path), "refused", limit_s=WAIT_S):
        for kind, message, code in ended:
            assert (kind, code) == (DeadlinePassed.__name__, 8)
            assert "failed for good" in message


def test_a_wait_ends_once_the_leader_of_the_node_has_closed(tmp_path: Path) -> None:
    _, ended, _ = run_ranks(3, wait_in_vain, str(tmp_path), "closed", limit_s=WAIT_S)
    for kind, message, code in ended:
        assert (kind, code) == (DeadlinePassed.__name__, 8)
        assert "the leader of this node has closed its manager" in message


def wait_beside_a_drain(rank: int, base: str, leader_stays: bool) -> str:
    """Wait after the leader has ended well, while a drain of the root has begun to ask the mirror once more."""
    url = f"file://{base}/mirror"
    manager = CheckpointManager(Path(base) / "root", [url], timeout_s=WAIT_S)
    state = built("fsdp")
    manager.resume(state)
    train(state, rank, 1)
    manager.save(1, state).wait("committed", timeout_s=WAIT_S)
    manager.ranks.exchange(None, what="all are committed")
    ticks = threading.Event()
    if manager.ranks.is_leader:
        manager.close(timeout_s=WAIT_S)
        with open_known_table(Path(base) / "root") as table:
            table.set_unasked([url])
        (Path(base) / "asked").touch()
        if not leader_stays:
            os.kill(os.getpid(), signal.SIGKILL)
        while not (Path(base) / "over").exists():
            ticks.wait(0.05)
        return ""
    root = Path(base) / "root"
    while not (Path(base) / "asked").exists() or is_writer_alive(read_status_file(root)) is not leader_stays:
        ticks.wait(0.05)
    ended = outcome(lambda: manager.wait("mirrored", timeout_s=10 * WAIT_S))[0]
    (Path(base) / "over").touch()
    outcome(lambda: manager.close(timeout_s=0.0))
    return ended


@pytest.mark.parametrize("leader_stays", [True, False])
def test_a_wait_ends_well_after_the_leader_has_although_a_drain_asks_the_mirror_again(
    leader_stays: bool, tmp_path: Path
) -> None:
    dead = () if leader_stays else (0,)
    *_, ended = run_ranks(2, wait_beside_a_drain, str(tmp_path), leader_stays, dead=dead, limit_s=WAIT_S)
    assert ended == "value"


def test_a_wait_ends_once_the_leader_of_the_node_is_dead(tmp_path: Path) -> None:
    _, ended, _ = run_ranks(3, wait_in_vain, str(tmp_path), "killed", dead=(0,), limit_s=WAIT_S)
    for kind, message, code in ended:
        assert (kind, code) == (DeadlinePassed.__name__, 8)
        assert "the leader of this node is dead" in message


def test_a_look_never_waits_for_a_mirror_that_hangs_and_a_wait_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host that mounts the root and has not its table."""
    hold, asked = threading.Event(), []

    def hanging(*_: object, **__: object) -> bool:
        asked.append(1)
        hold.wait()
        return True

    monkeypatch.setattr("ckptmirror.flow.mirror_wait.is_on_mirrors", hanging)
    waits = MirrorWait(tmp_path, mirror_specs([f"file://{tmp_path}/mirror"]), None)
    try:
        assert not waits.wait(None, "0" * 32, 0.0)
        assert not waits.wait(None, "0" * 32, 0.2)
        assert not waits.wait(None, "0" * 32, 0.0)
        assert len(asked) == 2
    finally:
        hold.set()
    assert waits.wait(None, "0" * 32, WAIT_S)
    assert waits.wait(None, "0" * 32, 0.0)


def test_a_look_has_an_answer_where_a_mirror_refuses_and_a_wait_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> bool:
        raise NotAuthorised("the mirror does not accept the credentials")

    monkeypatch.setattr("ckptmirror.flow.mirror_wait.is_on_mirrors", refused)
    waits = MirrorWait(tmp_path, mirror_specs([f"file://{tmp_path}/mirror"]), None)
    assert not waits.wait(None, "0" * 32, 0.0)
    for thread in threading.enumerate():
        if thread.name == "ckptmirror-ask":
            thread.join()
    assert not waits.wait(None, "0" * 32, 0.0)
    with pytest.raises(NotAuthorised):
        waits.wait(None, "0" * 32, WAIT_S)


def test_a_wait_of_a_fenced_attempt_ends_on_every_rank(tmp_path: Path) -> None:
    for ended in run_ranks(3, wait_in_vain, str(tmp_path), "fenced", limit_s=WAIT_S):
        assert [kind for kind, _, _ in ended] == [AttemptFenced.__name__] * 2, ended
