"""How long a save blocks the training, and how long it takes until the save is durable.

Blocking is over when the training may change its tensors again; durable when nothing that was saved is lost in a power
cut. All contestants take the state dict themselves, as a training loop would.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core import signing
from tests.bench.contest import Contestant, Measured, measure
from tests.bench.places import arrive, empty, transformer_state
from tests.bench.raw_disk import write_raw

__all__ = ["measure_save"]

_COPIES = 5  # memory is faster at one moment than at the next, and others are measured against this
_TIMES = 3  # for what blocks for a tenth of a second
_STAGERS_LAST = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # before, one ends with its save
_BLOCKING, _DURABLE = "save: blocking", "save: until durable"


def measure_save(directory: Path, size_bytes: int, rounds: int, device: str) -> list[Measured]:
    """Measure saves of one state of ``size_bytes``."""
    state = transformer_state(size_bytes, device=device)
    with CheckpointManager(directory / "root") as manager:
        manager.resume(state)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # async_save needs one
        try:
            return measure(_contestants(manager, state, directory, size_bytes, device), rounds)
        finally:
            dist.destroy_process_group()


def _contestants(
    manager: CheckpointManager, state: TrainState, directory: Path, size_bytes: int, device: str
) -> list[Contestant]:
    pinned = device == "cuda"
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.zeros(size_bytes // 4, pin_memory=pinned)
    place = directory / "peer"
    steps = iter(range(1, 1_000_000))
    options = StagingOptions(
        use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
    )
    kept = DefaultStager(options)

    def train() -> None:
        with torch.no_grad():
            next(state.model.parameters()).add_(1e-3)
        arrive(device)

    def ours(*kinds: Any) -> Callable[[], Mapping[str, float]]:
        def run() -> Mapping[str, float]:
            started = time.perf_counter()
            handle = manager.save(next(steps), state, kinds=kinds)
            blocked = time.perf_counter()
            handle.wait("committed")
            return {_BLOCKING: blocked - started, _DURABLE: time.perf_counter() - started}

        return run

    def signed(run: Callable[[], Mapping[str, float]]) -> Callable[[], Mapping[str, float]]:
        def run_signed() -> Mapping[str, float]:
            before = signing.set_current(signing.Keys(sign=Ed25519PrivateKey.generate().sign))
            try:
                return run()
            finally:
                signing.set_current(before)

        return run_signed

    def blocking(work: Callable[[Path], None]) -> Callable[[], Mapping[str, float]]:
        def run() -> Mapping[str, float]:
            started = time.perf_counter()
            work(place)
            took = time.perf_counter() - started
            return {_BLOCKING: took, _DURABLE: took}

        return run

    def warm() -> None:
        target.copy_(source)

    def copy() -> Mapping[str, float]:
        return {_BLOCKING: statistics.median(timeit.repeat(lambda: target.copy_(source), number=1, repeat=_COPIES))}

    def raw() -> Mapping[str, float]:
        started = time.perf_counter()
        write_raw(place, size_bytes)
        return {_DURABLE: time.perf_counter() - started}

    def state_dict() -> dict[str, Any]:
        model, optimizer = get_state_dict(state.model, state.optimizer)
        return {"model": model, "optimizer": optimizer}

    def torch_save(path: Path) -> None:
        with path.open("wb") as file:
            torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def dcp_save(path: Path) -> None:
        dcp.save(state_dict(), checkpoint_id=str(path))

    def async_save() -> Mapping[str, float]:
        started = time.perf_counter()
        stager = kept if _STAGERS_LAST else DefaultStager(options)
        future: Any = dcp.async_save(state_dict(), checkpoint_id=str(place), async_stager=stager)
        blocked = time.perf_counter()
        future.result()
        return {_BLOCKING: blocked - started, _DURABLE: time.perf_counter() - started}

    def remove() -> None:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)

    def empty_root() -> None:
        empty(manager.root)

    return [
        Contestant("one copy_ into a warm buffer", "limit", copy, before=warm),
        Contestant("raw O_DIRECT write and fsync", "limit", raw, after=remove),
        Contestant("ckptmirror dcp", "ours", ours("dcp"), before=train, after=empty_root, times=_TIMES),
        Contestant(
            "ckptmirror dcp and model", "ours", ours("dcp", "model"), before=train, after=empty_root, times=_TIMES
        ),
        Contestant("ckptmirror dcp, signed", "ours", signed(ours("dcp")), before=train, after=empty_root, times=_TIMES),
        Contestant("torch.save and fsync", "peer", blocking(torch_save), before=train, after=remove),
        Contestant("dcp.save", "peer", blocking(dcp_save), before=train, after=remove),
        Contestant(
            f"dcp.async_save, {'kept' if _STAGERS_LAST else 'new'} stager",
            "peer",
            async_save,
            before=train,
            after=remove,
            times=_TIMES,
        ),
    ]
