"""What the nodes that are left have of saves that nobody can complete goes in the end, and keeps nothing waiting."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ckptmirror import CheckpointManager, MirrorSpec, Retention, TrainState
from ckptmirror.core import names
from ckptmirror.core.errors import DeadlinePassed, RefusedOnlyCopy
from ckptmirror.core.model import Meta
from ckptmirror.flow.drain import drain
from ckptmirror.flow.places.catalog import local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention.rotation import rotate_root
from ckptmirror.flow.status import read_status
from ckptmirror.stores import open_store
from tests.kit.processes import outcome, run_ranks
from tests.nodes.jobs import ALONE_S, WAIT_S, built, train

pytestmark = pytest.mark.long


def steps_on(root: Path) -> list[int]:
    return sorted(meta.step for meta in local_catalog(root).parts.values())


def mirror_saves(url: str) -> list[Meta]:
    store = open_store(url)
    try:
        return [*mirror_catalog(Mirror(url, True, store)).saves.values()]
    finally:
        store.close()


def save_steps(rank: int, base: Path, steps: tuple[int, ...], mirrors: tuple[str, ...], keep: int, upload: bool) -> int:
    """Save, each node uploads, and each rotates; without ``upload``, node 1 sends nothing of the last step."""
    state = built("fsdp")
    urls = [f"file://{base}/{name}" for name in mirrors]
    manager = CheckpointManager(
        base / "ab"[rank], urls, kinds=("dcp",), retention=Retention(keep_last=keep), timeout_s=WAIT_S
    )
    try:
        start = manager.resume(state)
        for step in steps:
            if not upload and step == steps[-1] and manager._node is not None and rank == 1:
                assert manager._node._workers is not None
                manager._node._workers.stop(WAIT_S)
            train(state, rank, step)
            lasts = step != steps[-1] or upload
            manager.save(step, state).wait("mirrored" if lasts else "committed", timeout_s=WAIT_S)
        if upload:
            manager.rotate()
    finally:
        with suppress(DeadlinePassed):
            manager.close(timeout_s=WAIT_S if upload else 0)
    return start.step if start is not None else 0


@pytest.mark.parametrize("is_damaged_there", [False, True])
def test_a_part_whose_rest_was_lost_with_a_disk_is_given_up_once_the_run_went_on(
    is_damaged_there: bool, tmp_path: Path
) -> None:
    run_ranks(2, save_steps, tmp_path, (1, 2), ("mirror",), 1, False)
    shutil.rmtree(tmp_path / "b")
    assert steps_on(tmp_path / "a")[-1] == 2
    if is_damaged_there:
        (save_id,) = (meta.save_id for meta in local_catalog(tmp_path / "a").parts.values() if meta.step == 2)
        (tmp_path / "mirror" / names.part_name(2, save_id, 2, 2)).write_bytes(b'{"step": 2')
    assert run_ranks(2, save_steps, tmp_path, (3,), ("mirror",), 1, True) == [1, 1]
    assert steps_on(tmp_path / "a") == [3]
    assert drain(tmp_path / "a", timeout_s=WAIT_S).pending == 0
    assert read_status(tmp_path / "a").unsettled == {}


def save_once(rank: int, base: Path, step: int) -> None:
    state = built("fsdp")
    with CheckpointManager(base / "ab"[rank], [f"file://{base}/mirror"], kinds=("dcp",), timeout_s=WAIT_S) as manager:
        manager.resume(state)
        train(state, rank, step)
        manager.save(step, state).wait("mirrored", timeout_s=WAIT_S)


def test_one_save_and_close_are_enough_to_give_it_up(tmp_path: Path) -> None:
    run_ranks(2, save_steps, tmp_path, (1, 2), ("mirror",), 9, False)
    shutil.rmtree(tmp_path / "b")
    assert drain(tmp_path / "a", timeout_s=ALONE_S).pending > 0
    run_ranks(2, save_once, tmp_path, 2)
    assert drain(tmp_path / "a", timeout_s=WAIT_S).pending == 0
    assert read_status(tmp_path / "a").unsettled == {}


def test_a_mirror_that_is_added_does_not_wait_for_saves_that_one_node_has_deleted(tmp_path: Path) -> None:
    run_ranks(2, save_steps_of_two, tmp_path)
    assert (steps_on(tmp_path / "a"), steps_on(tmp_path / "b")) == ([3], [1, 2, 3])
    run_ranks(2, save_steps, tmp_path, (4, 5), ("mirror", "added"), 1, True)
    for node in "ab":
        assert steps_on(tmp_path / node) == [5]
        assert drain(tmp_path / node, timeout_s=WAIT_S).pending == 0


def save_steps_of_two(rank: int, base: Path) -> int:
    return save_steps(rank, base, (1, 2, 3), ("mirror",), (1, 3)[rank], True)


def go_on(
    rank: int,
    base: Path,
    nodes: str,
    steps: tuple[int, ...],
    mirrors: tuple[str, ...],
    keep: int,
    required: bool = True,
) -> str:
    """Continue on some nodes, save, and rotate; return what the end said."""
    manager = CheckpointManager(
        base / nodes[rank],
        [MirrorSpec(f"file://{base}/{name}", required=required) for name in mirrors],
        kinds=("dcp",),
        retention=Retention(keep_last=keep),
        timeout_s=WAIT_S,
    )
    state = built("ddp")
    manager.resume(state)
    for step in steps:
        train(state, rank, step)
        manager.save(step, state).wait("mirrored", timeout_s=WAIT_S)
    manager.rotate(WAIT_S)
    kind, message, _ = outcome(lambda: manager.close(timeout_s=WAIT_S))
    return message if kind != "value" else ""


@pytest.mark.parametrize(("keep", "loses_parts"), [(1, False), (9, False), (9, True)])
def test_i1_a_part_goes_only_once_it_is_on_a_mirror_that_waits_for_a_node_which_is_away(
    keep: int, loses_parts: bool, tmp_path: Path
) -> None:
    """The node comes back, and completes the save there, if the mirror or the other still has that one's part."""
    assert run_ranks(2, go_on, tmp_path, "ab", (1,), ("mirror",), 9) == ["", ""]
    assert run_ranks(2, go_on, tmp_path, "bc", (2, 3), ("mirror", "added"), keep) == ["", ""]
    assert steps_on(tmp_path / "b") == ([3] if keep == 1 else [1, 2, 3])
    if loses_parts:
        shutil.rmtree(tmp_path / "added" / "parts")
        report = rotate_root(tmp_path / "b", Retention(keep_last=1))
        (why,) = [why for save_id, why in report.refused.items() if report.steps[save_id] == 1]
        assert "part00002-of-00002.json is missing" in why
        drain(tmp_path / "b", timeout_s=ALONE_S)
        assert len(list((tmp_path / "added" / "parts").iterdir())) == 1
    assert run_ranks(2, go_on, tmp_path, "ab", (4,), ("mirror", "added"), 9) == ["", ""]
    assert 1 in {meta.step for meta in mirror_saves(f"file://{tmp_path}/added")}


def save_and_die(rank: int, base: Path, required: bool) -> None:
    """Step 1 is on both mirrors; nothing of step 2, which is committed, as both are away."""
    mirrors = [MirrorSpec(f"file://{base}/{name}/run", required=required) for name in ("mirror", "other")]
    manager = CheckpointManager(base / "ab"[rank], mirrors, kinds=("dcp",), timeout_s=WAIT_S)
    state = built("ddp")
    manager.resume(state)
    train(state, rank, 1)
    manager.save(1, state).wait("mirrored", timeout_s=WAIT_S)
    manager.ranks.exchange(None, what="are both done")
    if rank == 0:
        for name in ("mirror", "other"):
            (base / name).rename(base / f"{name} is away")
    manager.ranks.exchange(None, what="are they away")
    train(state, rank, 2)
    manager.save(2, state).wait("committed")
    manager.ranks.exchange(None, what="are both done")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("required", [True, False])
def test_a_mirror_without_the_part_of_a_lost_node_is_not_waited_for_once_the_other_has_the_save_whole(
    required: bool, tmp_path: Path
) -> None:
    for name in ("mirror", "other"):
        (tmp_path / name).mkdir()
    run_ranks(2, save_and_die, tmp_path, required, dead=(0, 1), limit_s=3 * WAIT_S)
    (tmp_path / "mirror is away").rename(tmp_path / "mirror")
    assert drain(tmp_path / "b", only=[f"file://{tmp_path}/mirror/run"], timeout_s=ALONE_S).awaited
    (tmp_path / "other is away").rename(tmp_path / "other")
    shutil.rmtree(tmp_path / "b")
    last = "ac", (3, 4), ("mirror/run", "other/run"), 1, required
    assert run_ranks(2, go_on, tmp_path, *last, limit_s=3 * WAIT_S) == ["", ""]
    assert not required or steps_on(tmp_path / "a") == [4]
    for name, steps in (("mirror", [1, 2, 3, 4]), ("other", [1, 3, 4])):
        assert sorted(meta.step for meta in mirror_saves(f"file://{tmp_path}/{name}/run")) == steps


@pytest.mark.parametrize("steps", [(1, 2), (2,)])
def test_a_start_on_other_nodes_says_which_save_waits_for_a_node(steps: tuple[int, ...], tmp_path: Path) -> None:
    run_ranks(2, save_steps, tmp_path, steps, ("mirror",), 9, False)
    assert drain(tmp_path / "a", timeout_s=6.0).awaited
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 5))
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), extra={})
    says = "2 nodes saved it, and it waits for node 1: `ckptmirror drain` there finishes it"
    with CheckpointManager(tmp_path / "c", [f"file://{tmp_path}/mirror"], kinds=("dcp",)) as manager:
        if len(steps) == 1:
            with pytest.raises(RefusedOnlyCopy) as refused:
                manager.resume(state)
            assert refused.value.hint.startswith(f"Step 2: {says}")
            return
        start = manager.resume(state)
    assert start is not None
    assert start.step == 1
    (line,) = start.passed_over
    assert line.startswith(f"step 2 (file://{tmp_path}/mirror/parts/meta_000002-")
    assert says in line
    drain(tmp_path / "b", timeout_s=WAIT_S)
    with CheckpointManager(tmp_path / "d", [f"file://{tmp_path}/mirror"], kinds=("dcp",)) as manager:
        start = manager.resume(state)
    assert start is not None
    assert (start.step, start.passed_over) == (2, ())
