"""A drain on the nodes of a job that has ended: what it may send, and what it says that it waits for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, stage_checkpoint_step
from ckptmirror.cli._transfer_speed import Pace
from ckptmirror.cli._uploading import showing
from ckptmirror.core.errors import StoreTemporary
from ckptmirror.core.names import part_name
from ckptmirror.core.uncommitted import node_behind_text
from ckptmirror.flow.drain import Drained, DrainReport, drain
from ckptmirror.flow.places.catalog import catalogs_on, local_catalog
from ckptmirror.flow.places.mirrors import close_mirrors, mirror_specs, open_mirrors
from ckptmirror.flow.start.claim import DrainConfirmation
from ckptmirror.flow.upload.transfer_progress import Transfers, Wait
from ckptmirror.local.table_place import open_known_table
from tests.kit.cli import run
from tests.kit.processes import outcome, run_ranks
from tests.nodes.jobs import WAIT_S, built, train

BOTH = ("one", "two")


def leave_unsent(rank: int, base: str, mirrors: Sequence[str], stopped: str, steps: Sequence[int] = (2,)) -> None:
    """Save step 1 and mirror it; save the ``steps``, which the nodes ``stopped`` do not upload."""
    node = "ab"[rank]
    state = built("ddp")
    manager = CheckpointManager(Path(base) / node, [f"file://{base}/{one}" for one in mirrors], timeout_s=WAIT_S)
    manager.resume(state)
    train(state, rank, 1)
    manager.save(1, state)
    manager.wait("mirrored", timeout_s=WAIT_S)
    if node in stopped:
        assert manager._node is not None
        assert manager._node._workers.stop(WAIT_S)
    for step in steps:
        train(state, rank, step)
        manager.save(step, state).wait("committed", WAIT_S)
    manager.ranks.exchange(None, what="both have saved")
    outcome(lambda: manager.close(timeout_s=0.0))


def steps_on(mirror: Path) -> set[int]:
    return {meta.step for meta in local_catalog(mirror).saves.values()}


def drain_until_its_part_names(text: str, root: Path, mirror: Path) -> None:
    """Drain node 1 of 2, which waits for the other, until its part of step 2 has a text."""

    class Named(Exception):
        pass

    def stop_then(_at: Drained) -> None:
        if any(text in part.read_text() for part in mirror.glob("parts/meta_000002-*.part00002-of-00002.json")):
            raise Named

    with pytest.raises(Named):
        drain(root, timeout_s=WAIT_S, on_progress=stop_then)


def test_i6_the_meta_of_all_names_what_a_node_sent_in_place_of_a_damaged_object(tmp_path: Path) -> None:
    run_ranks(2, leave_unsent, str(tmp_path), ("mirror",), "ab", limit_s=WAIT_S)
    mirror = tmp_path / "mirror"
    for names_in_part in ("extra_000002_rank1.pt", "extra_000002-"):
        drain_until_its_part_names(names_in_part, tmp_path / "b", mirror)
        (sent,) = mirror.glob("extra_000002_rank1.pt")
        sent.write_bytes(sent.read_bytes()[:100])
    shutil.move(tmp_path / "b", tmp_path / "lost")
    assert drain(tmp_path / "a", timeout_s=WAIT_S).is_verified
    (there,) = catalogs_on([f"file://{mirror}"])
    assert {meta.step for meta in there.whole.values()} == {1, 2}


def drain_both(base: Path, only: str) -> list[DrainReport]:
    with ThreadPoolExecutor(2) as pool:
        roots = [base / node for node in "ab"]
        return list(pool.map(lambda root: drain(root, only=[f"file://{base}/{only}"], timeout_s=WAIT_S), roots))


def ask_to_commit(root: Path, base: Path) -> None:
    """Ask, as a drain does, whether this root's part of step 2 may be published."""
    (problem,) = (one for one in local_catalog(root).problems.values() if one.step == 2)
    assert problem.meta is not None
    with open_known_table(root) as table:
        mirrors = open_mirrors(mirror_specs([f"file://{base}/{one}" for one in BOTH]), root, table)
        try:
            DrainConfirmation(root, table, mirrors)(mirrors[0], problem.meta, is_part=True)
        finally:
            close_mirrors(mirrors)


def test_a_drain_on_each_node_commits_the_save_of_their_job_while_a_mirror_is_silent(tmp_path: Path) -> None:
    run_ranks(2, leave_unsent, str(tmp_path), BOTH, "ab")
    (tmp_path / "two").rename(tmp_path / "away")
    reports = drain_both(tmp_path, "one")
    assert [one.is_verified for one in reports] == [True, True], reports
    assert steps_on(tmp_path / "one") == {1, 2}


def test_drain_and_status_on_a_node_that_has_sent_its_part_name_the_node_that_they_wait_for(tmp_path: Path) -> None:
    run_ranks(2, leave_unsent, str(tmp_path), ("one",), "ab")
    root = tmp_path / "a"
    waits = "node 1 of 2 (from 0) has still to upload what it saved"
    command = "`ckptmirror drain` there sends it"

    class Waits(Exception):
        pass

    def stop_then(at: Drained) -> None:
        if any(waits in wait.reason for wait in at.seen.waits):
            raise Waits

    with pytest.raises(Waits):
        drain(root, on_progress=stop_then)
    ended = run("drain", "--root", root, "--timeout", "0")
    assert ended.returncode == 8
    assert "Still pending: 1 file" in ended.stderr
    assert f"Waiting for another node: step 2: {waits}" in ended.stderr
    assert command in ended.stderr
    status = run("status", root).stdout.splitlines()[0]
    assert status.startswith(
        "NOT SAFE: this node has sent all that it has, and when it last asked, other nodes had not: step 2: node 1 of"
    )
    assert command in status
    assert status.endswith(f"and one here then records it: `ckptmirror drain --root {root}`")
    assert [reason[:14] for reason in json.loads(run("status", root, "--json").stdout)["awaited"]] == ["step 2: node 1"]
    there = run("status", tmp_path / "b").stdout.splitlines()[0]
    assert f"`ckptmirror drain --root {tmp_path}/b` sends them" in there
    assert all(one.is_verified for one in drain_both(tmp_path, "one"))
    assert run("status", root, "--exit-code").returncode == 0


def test_a_drain_that_runs_while_the_whole_save_is_staged_in_the_place_of_a_part_says_that_another_sends_the_rest(
    tmp_path: Path,
) -> None:
    run_ranks(2, leave_unsent, str(tmp_path), BOTH, "ab")
    drain_both(tmp_path, "one")
    root, staged = tmp_path / "a", []

    def stage_once(at: Drained) -> None:
        if any("node 1 of 2" in wait.reason for wait in at.seen.waits) and not staged:
            staged.append(stage_checkpoint_step(f"file://{tmp_path}/one", dest=root, step=2, full=True))

    (why,) = drain(root, only=[f"file://{tmp_path}/two"], timeout_s=WAIT_S, on_progress=stage_once).failed
    assert "More of step 2 was staged" in why
    assert drain(root, timeout_s=WAIT_S).is_verified
    assert steps_on(tmp_path / "two") == {1, 2}


def test_a_rotation_names_the_node_that_a_save_waits_for_and_no_command_that_does_nothing(tmp_path: Path) -> None:
    run_ranks(2, leave_unsent, str(tmp_path), ("one",), "b", (2, 3))
    root = tmp_path / "a"
    run("drain", "--root", root, "--timeout", "0")
    ended = run("rotate", "--root", root, "--keep-last", "1")
    assert ended.returncode == 7
    assert "node 1 of 2 (from 0) has still to upload" in ended.stderr
    assert ended.stderr.endswith("`ckptmirror drain` on that node uploads.\n")


def test_a_drain_says_without_a_terminal_that_it_waits_for_a_node_once(capsys: pytest.CaptureFixture[str]) -> None:
    reason = node_behind_text(part_name(2, "0" * 32, 2, 2), "gs://bucket/run")
    show = showing(Pace("drain"))
    for left_s in (2.0, 1.0):
        show(Drained(1, 2, 0, 0, Transfers(waits=(Wait("gs://bucket/run", reason, left_s),))))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("waiting for another node: node 1 of 2 (from 0) has still to upload")


def test_i11_a_drain_in_the_copy_of_a_node_takes_the_attempts_of_its_job_for_those_of_another_root(
    tmp_path: Path,
) -> None:
    run_ranks(2, leave_unsent, str(tmp_path), BOTH, "ab")
    (tmp_path / "two").rename(tmp_path / "away")
    ask_to_commit(tmp_path / "b", tmp_path)
    shutil.copytree(tmp_path / "b", tmp_path / "copy")
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "copy").rename(tmp_path / "b")
    with pytest.raises(StoreTemporary, match="another root may have saved on a mirror that is silent"):
        ask_to_commit(tmp_path / "b", tmp_path)
