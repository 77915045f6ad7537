"""The disk of one of two nodes is too small or full: it is named, the save fails on all, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckptmirror import CheckpointManager, Retention, errors
from ckptmirror.core import events
from ckptmirror.core.model import Kind
from ckptmirror.flow.places.catalog import local_catalog
from ckptmirror.flow.status import read_status
from tests.kit.processes import run_ranks
from tests.kit.roots import leftovers
from tests.kit.training import same
from tests.nodes.jobs import WAIT_S, built, train, whole

pytestmark = pytest.mark.long

MORE_THAN_THE_SMALL_DISK_HOLDS = 50_000


@dataclass
class Heard:
    """What one rank heard: why saves were skipped, what was deleted, and what was said of its disk."""

    skipped: dict[int, str] = field(default_factory=dict)
    rotated: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    snapshot: str = ""
    began: int | None = None
    passed_over: str = ""
    alike: bool = True
    listed: tuple[int, ...] = ()


@pytest.fixture
def base(mounted: Callable[..., Path], tmp_path: Path) -> Path:
    """A place for two nodes, of which the second has a small disk."""
    (tmp_path / "b").symlink_to(mounted("size=24m"))
    return tmp_path


def open_manager(rank: int, base: Path, heard: Heard, **more: object) -> CheckpointManager:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.said.append(record.getMessage())

    logging.getLogger("ckptmirror.resume").addHandler(Handler(logging.WARNING))
    logging.getLogger("ckptmirror.rotate").addHandler(Handler(logging.WARNING))
    manager = CheckpointManager(base / "ab"[rank], [f"file://{base}/mirror"], timeout_s=WAIT_S, **more)  # type: ignore[arg-type]

    def hear(event: events.Event) -> None:
        if isinstance(event, events.SaveSkipped):
            heard.skipped[event.step] = event.reason
        elif isinstance(event, events.SaveRotated):
            heard.rotated.append(event.step)

    manager.events.subscribe(hear)
    return manager


def begin(rank: int, base: str, keep_last: int) -> Heard:
    """Start and end."""
    heard = Heard()
    with open_manager(rank, Path(base), heard, retention=Retention(keep_last=keep_last)) as manager:
        manager.resume(built("fsdp"))
    return heard


def test_a_start_says_whose_disk_cannot_hold_what_the_retention_keeps(base: Path) -> None:
    large, small = run_ranks(2, begin, str(base), MORE_THAN_THE_SMALL_DISK_HOLDS)
    assert large.said == []
    (line,) = small.said
    assert line.startswith("node 1 of 2 (from 0): ")
    assert f"cannot hold keep_last + 1 = {MORE_THAN_THE_SMALL_DISK_HOLDS + 1} saves" in line
    assert [one.said for one in run_ranks(2, begin, str(base), 2)] == [[], []]


def fill(disk: Path) -> None:
    """Leave no free byte."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass


def skip_one(rank: int, base: str, kinds: tuple[Kind, ...]) -> Heard:
    """Save four steps; the second node's disk is full at the second one, and when a snapshot is taken at the end."""
    heard, disk = Heard(), Path(base) / "b"
    state = built("fsdp")
    with open_manager(rank, Path(base), heard, kinds=kinds) as manager:
        manager.resume(state)
        for step in (1, 2, 3, 4):
            train(state, rank, step)
            if step == 2:  # what the table has yet to write would free room again
                manager.wait("mirrored", timeout_s=WAIT_S)
            dist.barrier()
            if step == 2 and rank == 1:
                fill(disk)
            dist.barrier()
            manager.save(step, state)
            manager._started()._wait_for_earlier()
            dist.barrier()
            if step == 2 and rank == 1:
                (disk / "filler").unlink()
        saved = whole(state)
        train(state, rank, 5)
        dist.barrier()
        if rank == 1:
            fill(disk)
        dist.barrier()
        try:
            manager.save_emergency_checkpoint(5, state)
        except errors.LocalStorageFull as error:
            heard.snapshot = str(error)
        with pytest.raises(errors.BackgroundSaveFailed, match="step 2 was skipped"):
            manager.close(timeout_s=WAIT_S)
    dist.barrier()
    if rank == 1:
        (disk / "filler").unlink()
    dist.barrier()
    heard.listed = read_status(Path(base) / "ab"[rank]).skipped
    with open_manager(rank, Path(base), heard, kinds=kinds) as manager:
        found = built("fsdp")
        start = manager.resume(found)
        assert start is not None
        heard.began, heard.passed_over = start.step, "; ".join(start.passed_over)
        heard.alike = same(whole(found), saved)
    return heard


@pytest.mark.parametrize("kinds", [("dcp",), ("model",)])
def test_a_disk_that_is_full_on_one_node_costs_that_save_on_all_and_no_training(
    kinds: tuple[Kind, ...], base: Path
) -> None:
    large, small = run_ranks(2, skip_one, str(base), kinds)
    for one in (large, small):
        assert list(one.skipped) == [2]
        assert "no space is left" in one.skipped[2]
        assert one.skipped[2].count("rank 1 on node 1") == 1
        assert one.skipped[2].count("rank") == 1 + one.skipped[2].count("_rank1.pt")
        assert (one.listed, one.began, one.alike) == ((2,), 4, True)
        assert "step 5" in one.passed_over
    assert (large.snapshot, "no space is left" in small.snapshot) == ("", True)
    for node in "ab":
        root = base / node
        assert sorted(meta.step for meta in local_catalog(root).parts.values() if "emergency" not in meta.kinds) == [
            1,
            3,
            4,
        ]
        assert leftovers(root) == []


def fill_up(rank: int, base: str) -> tuple[Heard, dict[str, torch.Tensor]]:
    """Save more often than the second disk has room for; return also what the first save has."""
    heard, first = Heard(), {}
    state = built("fsdp")
    with open_manager(rank, Path(base), heard, retention=Retention(keep_last=50)) as manager:
        manager.resume(state)
        for step in range(1, 10):
            train(state, rank, step)
            state.extra = {"large": "x" * 3_000_000}
            first = first or whole(state)
            manager.save(step, state).wait("mirrored", timeout_s=WAIT_S)
            manager.rotate()
            dist.barrier()
    return heard, first


def go_back(rank: int, base: str, step: int) -> tuple[Heard, dict[str, torch.Tensor]]:
    """Continue from an older save, on purpose."""
    heard, state = Heard(), built("fsdp")
    with open_manager(rank, Path(base), heard) as manager:
        start = manager.resume(state, policy=step)
        assert start is not None
        heard.began = start.step
        manager.close(timeout_s=0)
    return heard, whole(state)


def test_each_node_makes_room_on_its_own_disk_and_a_start_brings_to_it_what_went(base: Path) -> None:
    (large, first), (small, _) = run_ranks(2, fill_up, str(base))
    assert (large.skipped, small.skipped, large.rotated) == ({}, {}, [])
    assert small.rotated == list(range(1, len(small.rotated) + 1))
    assert len(small.rotated) > 2
    parts = {node: sorted(meta.step for meta in local_catalog(base / node).parts.values()) for node in "ab"}
    assert parts == {"a": list(range(1, 10)), "b": list(range(len(small.rotated) + 1, 10))}
    for one, found in run_ranks(2, go_back, str(base), 1):
        assert one.began == 1
        assert same(found, first)
