"""What two ranks do in one job for test_save_ranks.py: each part notes what happened on its rank."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError, LocalStorageFull
from ckptmirror.formats import model as model_format
from ckptmirror.formats.base import Snapshot, WriteContext
from tests.kit.faults import dead, faulty, flip_bit
from tests.kit.processes import outcome
from tests.kit.roots import leftovers, whole
from tests.kit.training import everything, new_state, train

WAIT_S = 60.0


class FullTable:
    """The uploads table of a disk that is full."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def add_save(self, *_: object, **__: object) -> None:
        raise LocalStorageFull("The disk is full (the test's table).")


@contextmanager
def no_large_files(limit_bytes: int) -> Iterator[None]:
    """Every write of this process past so many bytes fails, and those of no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def collectives_so_far() -> int:
    """How many collectives the training's group has seen."""
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


def train_alike(rank: int, state: TrainState, seed: int) -> None:
    """One step that leaves both replicas equal, but for their generators."""
    torch.manual_seed(seed)
    train(state)
    torch.manual_seed(100 * seed + rank)


def everything_that_happens(rank: int, base: str) -> dict[str, Any]:
    """All parts, in the order of the tests."""
    place = Path(base)
    found: dict[str, Any] = {}
    failing_saves(rank, place / "root", found)
    resumes(rank, place, found)
    sharded(rank, place / "sharded", found)
    for kind in ("dcp", "model", "emergency"):
        found[f"sharded ema {kind}"] = sharded_ema(rank, place / f"sharded-ema-{kind}", kind)
    unseen(rank, place / "unseen", found)
    return found


# -- saves that fail on one rank --------------------------------------------------------------------------------------


def failing_saves(rank: int, root: Path, found: dict[str, Any]) -> None:
    manager = CheckpointManager(root, timeout_s=WAIT_S)
    state = new_state()
    found["fresh"] = manager.resume(state)
    dist.barrier()
    before = collectives_so_far()
    manager.save(1, state).wait()
    found["collectives"] = collectives_so_far() - before

    def left() -> tuple[list[int], list[str]]:
        dist.barrier()
        seen = sorted(whole(root)), leftovers(root)
        dist.barrier()
        return seen

    if rank == 1:
        state.extra["bad"] = object()
        found["capture"] = outcome(lambda: manager.save(2, state))
        del state.extra["bad"]
    else:
        found["capture"] = outcome(lambda: manager.save(2, state).wait())
    found["after capture"] = left()
    train_alike(rank, state, 2)
    manager.save(2, state).wait()
    found["state of 2"] = everything(state)

    for victim in (0, 1):
        with no_large_files(600 if rank == victim else resource.RLIM_INFINITY):
            found[f"write {victim}"] = outcome(lambda: manager.save(3, state).wait())
        found[f"after write {victim}"] = left()
    manager.save(3, state).wait()

    leader = manager._saver._leader  # type: ignore[union-attr]
    table = leader.table if leader is not None else None
    if leader is not None:
        leader.table = FullTable(table)  # type: ignore[assignment]
    found["commit"] = outcome(lambda: manager.save(4, state).wait())
    found["after commit"] = left()
    if leader is not None:
        leader.table = table  # type: ignore[assignment]
    manager.save(4, state).wait()

    found["different steps"] = outcome(lambda: manager.save(5 + rank, state).wait())
    found["after different steps"] = left()
    manager.save(6, state).wait()

    different_knowledge(rank, manager, state, found)
    found["slow rank"] = slow_rank(rank, root, manager, state)
    found["after slow rank"] = left()
    train_alike(rank, state, 9)
    manager.save(9, state).wait("mirrored", timeout_s=WAIT_S)
    found["state of 9"] = everything(state)
    found["numbers"] = [meta.save_number for meta in whole(root).values()]
    train_alike(rank, state, 10)
    found["emergency"] = manager.save_emergency_checkpoint(10, state).name
    found["state of 10"] = everything(state)
    manager.close()
    found["locks"] = outcome(lambda: CheckpointManager(root, timeout_s=WAIT_S).close())


def different_knowledge(rank: int, manager: CheckpointManager, state: TrainState, found: dict[str, Any]) -> None:
    """A save fails; rank 0 waits for it and knows, rank 1 does not: the next call of rank 1 alone raises."""
    with no_large_files(600 if rank == 1 else resource.RLIM_INFINITY):
        handle = manager.save(7, state)
        if rank == 0:
            outcome(handle.wait)
        else:
            handle.wait_over()
        dist.barrier()
    found["different knowledge"] = outcome(lambda: manager.save(7, state).wait())
    found["next after that"] = outcome(lambda: manager.save(7, state).wait())


def slow_rank(rank: int, root: Path, manager: CheckpointManager, state: TrainState) -> Any:
    """Rank 0, the leader, fails at once; rank 1 has files on disk and is still writing."""
    pipe = root.parent / "slow.fifo"
    if rank == 0:
        os.mkfifo(pipe)
    dist.barrier()
    real = model_format.FORMAT.write
    seen: list[bool] = []

    def write(snapshot: Snapshot, context: WriteContext) -> Any:
        if rank == 0:
            with pipe.open("w"):
                raise LocalStorageFull("The disk is full (the test's format).")
        mine = root / f"extra_000008_rank1.pt.{context.save_id[:8]}.tmp"
        mine.write_bytes(b"being written")
        with pipe.open():  # rank 0 has failed by now
            pass
        seen.append(mine.exists())
        mine.unlink()
        return real(snapshot, context)

    model_format.FORMAT.write = write  # type: ignore[method-assign]
    try:
        ended = outcome(lambda: manager.save(8, state, kinds=("model",)).wait())
    finally:
        model_format.FORMAT.write = real  # type: ignore[method-assign]
    return ended, seen


# -- resumes of two ranks ---------------------------------------------------------------------------------------------


def resumes(rank: int, place: Path, found: dict[str, Any]) -> None:
    root = place / "root"

    def resume(where: Path, *dead_mirrors: str, seed: int = 50, **more: Any) -> tuple[Any, Any]:
        manager = CheckpointManager(where, dead_mirrors, timeout_s=WAIT_S)
        if manager._node is not None:
            faulty(manager, dead())
        state = new_state(seed)
        try:
            start = manager.resume(state, **more)
            return (start and (start.step, start.kind, start.place, start.passed_over), everything(state))
        except CkptMirrorError as error:
            return ((type(error).__name__, str(error), error.exit_code), None)
        finally:
            outcome(lambda: manager.close(timeout_s=0.0))
            dist.barrier()

    found["resume emergency"] = resume(root)
    (emergency,) = root.glob("emergency_step_*")
    if rank == 0:
        (emergency / "meta_rank1.json").rename(root.parent / "taken-away")
    dist.barrier()
    found["resume wreck"] = resume(root)
    if rank == 0:  # the second file of the list is in the share of rank 1
        flip_bit(root / whole(root)[9].artifacts_of("dcp")[1].path)
        flip_bit(root / whole(root)[9].artifacts_of("model")[1].path)
    dist.barrier()
    found["resume broken"] = resume(root)
    found["resume missing step"] = resume(root, policy=77)
    found["resume step"] = resume(root, policy=3)
    found["resume silent mirror"] = resume(place / "empty", "memory://silent/run")
    for kind in ("dcp", "model"):
        found[f"one to two {kind}"] = resume(place / f"single-{kind}")


# -- sharded ----------------------------------------------------------------------------------------------------------


def sharded(rank: int, root: Path, found: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer, extra={})

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()

    manager = CheckpointManager(root, timeout_s=WAIT_S)
    manager.resume(state)
    step()
    manager.save(1, state).wait()
    if rank == 1:
        state.extra["bad"] = object()
    found["sharded capture"] = outcome(lambda: manager.save(2, state).wait())
    state.extra.clear()
    sharded_failures(rank, manager, state, found)
    step()
    manager.save(2, state).wait()
    found["sharded saved"] = _full(model)
    step()
    manager.save_emergency_checkpoint(3, state)
    found["sharded emergency state"] = _full(model)
    manager.close()
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    manager = CheckpointManager(root, timeout_s=WAIT_S)
    start = manager.resume(state)
    found["sharded resume"] = (start and (start.step, start.kind), _full(model))
    manager.close()


def sharded_failures(rank: int, manager: CheckpointManager, state: TrainState, found: dict[str, Any]) -> None:
    """What fails on one rank before its part of the capture's collectives; each time the next save must work."""
    with no_large_files(600 if rank == 1 else resource.RLIM_INFINITY):
        handle = manager.save(2, state)
        if rank == 0:
            outcome(handle.wait)
        else:
            handle.wait_over()
        dist.barrier()
    found["sharded knowledge"] = outcome(lambda: manager.save(2, state).wait())
    found["sharded after knowledge"] = outcome(lambda: manager.save(1, state).wait())

    leader = manager._saver._leader  # type: ignore[union-attr]
    honest = leader.fenced if leader is not None else None
    if leader is not None:
        leader.fenced = lambda: "a newer attempt (the test's)"
    found["sharded fence"] = outcome(lambda: manager.save(1, state).wait())
    if leader is not None and honest is not None:
        leader.fenced = honest
    found["sharded after fence"] = outcome(lambda: manager.save(1, state).wait())

    found["sharded behind"] = outcome(lambda: manager.save(rank, state).wait())
    found["sharded after behind"] = outcome(lambda: manager.save(1, state).wait())
    found["sharded different steps"] = outcome(lambda: manager.save(2 + rank, state).wait())
    found["sharded after different steps"] = outcome(lambda: manager.save(1, state).wait())


def sharded_ema(rank: int, root: Path, kind: str) -> tuple[tuple[str, ...], list[dict[str, torch.Tensor]]]:
    """A replicated model whose average alone is sharded: what was loaded, and both before and after."""

    def build() -> TrainState:
        torch.manual_seed(1)
        model, average = nn.Linear(6, 4), nn.Linear(6, 4)
        fully_shard(average)
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1), ema=average, extra={})

    state, fresh = build(), build()
    manager = CheckpointManager(root, kinds=("dcp", "model") if kind == "emergency" else (kind,), timeout_s=WAIT_S)
    manager.resume(state)
    state.model(torch.ones(2, 6)).square().mean().backward()
    state.optimizer.step()
    with torch.no_grad():
        for at, parameter in enumerate(state.ema.parameters()):
            parameter.to_local().add_(at + 1 + rank)  # no two ranks' parts are alike
    if kind == "emergency":
        manager.save_emergency_checkpoint(1, state)
    else:
        manager.save(1, state).wait()
    manager.close()
    dist.barrier()
    manager = CheckpointManager(root, timeout_s=WAIT_S)
    start = manager.resume(fresh)
    manager.close()
    return start.loaded if start else (), [
        {**_full(each.model), **{f"ema.{n}": v for n, v in _full(each.ema).items()}} for each in (state, fresh)
    ]


def unseen(rank: int, root: Path, found: dict[str, Any]) -> None:
    """A save fails, rank 0 alone is told, and both resume: what rank 1 did not see is everyone's, once."""
    manager = CheckpointManager(root, kinds=("model",), timeout_s=WAIT_S)
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait()
    with no_large_files(600 if rank == 1 else resource.RLIM_INFINITY):
        handle = manager.save(2, state)
        if rank == 0:
            outcome(handle.wait)
        else:
            handle.wait_over()
        dist.barrier()
    start = manager.resume(state)
    found["unseen resume"] = start and start.step
    found["unseen next"] = outcome(lambda: manager.save(3, state).wait())
    found["unseen after"] = outcome(lambda: manager.save(3, state).wait())
    manager.close()


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().clone() if isinstance(p, DTensor) else p.clone() for n, p in model.state_dict().items()}
