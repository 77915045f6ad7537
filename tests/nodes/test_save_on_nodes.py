"""Ranks on several nodes, each with a disk of its own, save together; the mirror has one save, whole."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptmirror import CheckpointManager, TrainState, list_checkpoints, load_checkpoint
from ckptmirror.core import events, names
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import ALL_NODES, Kind
from ckptmirror.flow.fetch.stage import stage_save
from ckptmirror.flow.places.catalog import local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.retention.mirror_audit import MirrorAudit
from ckptmirror.flow.save.save import LeaderSide, Saver, SaveRequest
from ckptmirror.ranks import open_ranks
from tests.kit.processes import run_ranks
from tests.kit.roots import MirroredRoot, leftovers
from tests.kit.saves import FIRST_ATTEMPT, RUN_ID
from tests.kit.training import same
from tests.nodes.jobs import built, train

pytestmark = pytest.mark.long

WAIT_S = 30.0


def url_of(base: Path) -> str:
    """The mirror of all nodes."""
    return f"file://{base}/mirror"


def trained(rank: int) -> TrainState:
    """A sharded model after one step, with something that each rank has for itself."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 5))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer, extra={"rank": rank})


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Let every file of more than 100 bytes that this process writes find the disk full."""
    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if offset + len(data) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    os.pwrite = pwrite
    try:
        yield
    finally:
        os.pwrite = real


def save_together(
    rank: int, base: str, nodes: str, kinds: tuple[Kind, ...], full: str = ""
) -> tuple[dict[str, torch.Tensor], str]:
    """One rank's part in the saves of steps 1 and 2; return the whole model of step 2, and why step 1 failed.

    Args:
        full: The node whose disk has no room for step 1.
    """
    root = Path(base) / nodes[rank]
    root.mkdir(exist_ok=True)
    ranks = open_ranks(node_key=nodes[rank], timeout_s=WAIT_S)
    place = MirroredRoot(root, [url_of(Path(base))]) if ranks.is_leader else None
    leader = None
    if place is not None:
        leader = LeaderSide(place.table, [MirrorSpec(url_of(Path(base)))], lambda: None, lambda _meta: None)
    saver = Saver(root, RUN_ID, FIRST_ATTEMPT, ranks.channel("save"), events.EventBus(), leader, [])
    state = trained(rank)
    why = ""
    for step in (1, 2):
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(1.0)
        with no_room() if (step, nodes[rank]) == (1, full) else contextlib.nullcontext():
            handle = saver.save(SaveRequest(step, kinds, {"loss": float(rank)}), state)
            try:
                handle.wait("committed", timeout_s=WAIT_S)
            except CkptMirrorError as error:
                why = str(error)
    whole = {
        name: value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
        for name, value in state.model.state_dict().items()
    }
    saver.settle(WAIT_S)
    ranks.exchange(None, what="all have saved")
    if place is not None:
        place.close()
    ranks.close()
    return whole, why


BOTH: tuple[Kind, ...] = ("dcp", "model")


@pytest.mark.parametrize(
    ("nodes", "taken", "kinds"),
    [("ab", "", ("dcp",)), ("ab", "", ("model",)), ("aba", "", BOTH), ("aba", "a", BOTH), ("aba", "b", BOTH)],
)
def test_nodes_save_together_and_the_last_to_upload_commits(
    nodes: str, taken: str, kinds: tuple[Kind, ...], tmp_path: Path
) -> None:
    """Also where ranks of another node are between a node's own, and where one node has the names already."""
    if taken:
        (tmp_path / taken).mkdir()
        (tmp_path / taken / "model_000002.pt").write_bytes(b"another's")
    ((whole, _), *_) = run_ranks(len(nodes), save_together, str(tmp_path), nodes, kinds)
    places = {name: MirroredRoot(tmp_path / name, [url_of(tmp_path)]) for name in sorted(set(nodes))}
    first, last = places.values()
    for place in places.values():  # what nodes keep by a metric must be the same saves
        parts = local_catalog(place.root).parts.values()
        assert [dict(meta.metrics) for meta in parts] == [{"loss": 0.0}] * 2
        latest = place.root / names.LATEST_NAME
        assert latest.exists() == (kinds != ("model",) or place is first)
        assert latest.is_symlink() == latest.exists()
    first.upload(limit=60)
    assert not any(isinstance(one, events.MirrorUnreachable) for one in first.events)  # it waits for the other node
    assert mirror_catalog(first.mirrors[0]).saves == {}
    listed = [(line.step, line.standing, line.why) for line in list_checkpoints(url_of(tmp_path))]
    waits = (
        "2 nodes saved it, and it waits for node 1: `ckptmirror drain` there finishes it, or says why not, if that "
        "node still has its part; or `ckptmirror push` there if it does not use this mirror"
    )
    assert listed == [(step, "incomplete", waits) for step in (1, 2)]
    last.upload()
    saves = sorted(mirror_catalog(last.mirrors[0]).saves.values(), key=lambda meta: meta.step)
    assert [(meta.step, meta.node, meta.kinds) for meta in saves] == [(step, ALL_NODES, kinds) for step in (1, 2)]
    first.upload()
    there = {info.name: info.generation for info in first.store.list("")}
    for place in places.values():
        assert place.states() == {"verified"}
        MirrorAudit(place.table, place.mirrors).ask()
        assert place.states() == {"verified"}  # no node has rewritten what another had verified
        assert place.upload() == 0
    assert {info.name: info.generation for info in first.store.list("")} == there
    for place in places.values():
        place.close()
    for kind in kinds:
        dest = tmp_path / f"staged-{kind}"
        dest.mkdir()
        stage_save(first.mirrors[0], saves[1], dest, kinds=(kind,), full=True)
        loaded = load_checkpoint(dest)
        assert same(loaded.model, whole)
        assert loaded.optimizer is not None


@pytest.mark.parametrize(("full", "kinds"), [("a", BOTH), ("b", BOTH), ("b", ("dcp",)), ("b", ("model",))])
def test_a_disk_that_is_full_on_one_node_fails_the_save_on_all_and_no_other(
    full: str, kinds: tuple[Kind, ...], tmp_path: Path
) -> None:
    found = run_ranks(3, save_together, str(tmp_path), "aba", kinds, full)
    for rank, (_, why) in enumerate(found):
        assert "no space is left" in why
        assert str(tmp_path / full) in why
        if "aba"[rank] != full:  # there the paths may be the same
            assert f"on node {'ab'.index(full)}" in why
    places = [MirroredRoot(tmp_path / name, [url_of(tmp_path)]) for name in "ab"]
    for place in places:
        assert leftovers(place.root) == []
        assert list(place.root.glob("*_000001*")) == []
        place.upload()
    assert [meta.step for meta in mirror_catalog(places[0].mirrors[0]).saves.values()] == [2]
    for place in places:
        place.close()


def save_copies_of_one_model(rank: int, base: str) -> list[str]:
    """Train and save steps 1 and 2, and save step 3 without training; return what this rank warned of."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("ckptmirror.save").addHandler(Handler(logging.WARNING))
    with CheckpointManager(Path(base) / "ab"[rank], [], kinds=("model",), timeout_s=WAIT_S) as manager:
        state = built("ddp")
        manager.resume(state)
        for step in (1, 2, 3):
            if step < 3:
                train(state, rank, step)
            manager.save(step, state).wait("committed", timeout_s=WAIT_S)
    return said


def test_only_a_node_that_saves_tensors_says_that_they_have_not_changed(tmp_path: Path) -> None:
    """Rank 0 saves a model that all ranks have alike; the other node's lists of tensors are empty, and equal."""
    zero, one = run_ranks(2, save_copies_of_one_model, str(tmp_path))
    assert zero == ["step 3 has exactly the same tensors as the previous save: is the optimizer stepping?"]
    assert one == []


def leaves_out(rank: int, base: Path, calls: str, at: int) -> tuple[int, str] | None:
    """One save of all; then one that the last rank does not call, or that is called wrongly; then a snapshot of all."""
    state, last = built("ddp"), 1
    manager = CheckpointManager(base / "ab"[rank], kinds=("dcp",), timeout_s=4.0)
    if (start := manager.resume(state)) is not None:
        manager.close()
        return start.step, start.kind
    manager.save(1, state).wait()
    for step in (2, 3):
        train(state, rank, step)
        given: Any = str(step) if rank == last else step
        if rank != last or calls != "not":
            with pytest.raises(CkptMirrorError):
                manager.save(given, state).wait(timeout_s=60.0)
    manager.save_emergency_checkpoint(at, state)
    with contextlib.suppress(CkptMirrorError):
        manager.close(timeout_s=1.0)
    return None


@pytest.mark.parametrize(("calls", "at"), [("not", 3), ("wrongly", 4)])
def test_a_snapshot_after_a_save_that_one_rank_left_out_is_one(calls: str, at: int, tmp_path: Path) -> None:
    """The ranks gave it two numbers, and the next start found two halves."""
    assert run_ranks(2, leaves_out, tmp_path, calls, at) == [None, None]
    assert run_ranks(2, leaves_out, tmp_path, calls, at) == [(at, "emergency")] * 2
