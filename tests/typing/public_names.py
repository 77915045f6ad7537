"""Uses every public name as a user would; ``mypy --strict`` must accept it (test_house.py runs it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch

from ckptmirror import (
    CheckpointManager,
    CheckpointReference,
    LoadedCheckpoint,
    MirrorSpec,
    ResumeInfo,
    Retention,
    SaveHandle,
    StagedCheckpoint,
    StopRequest,
    TrainState,
    errors,
    find_local_checkpoint_steps,
    list_checkpoints,
    load_checkpoint,
    load_settings,
    resolve_checkpoint_reference,
    resolve_resume_path,
    stage_checkpoint_step,
    use_keys,
)
from ckptmirror.data import SampleLoader, ShardLoader
from ckptmirror.integrations.ddp import rebuild_buckets
from ckptmirror.testing import assert_exact_resume


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = TrainState(model=model, optimizer=optimizer, extra={"tokens": 0})
    stop = StopRequest().install()
    with CheckpointManager(
        "/local-ssd/run",
        mirrors=["gs://bucket/run", MirrorSpec("file:///nfs/run", required=False)],
        kinds=("dcp",),
        retention=Retention(keep_last=2, keep_best=1, metric="loss"),
    ) as manager:
        start = manager.resume(state, command_wins=("lr",))
        assert_type(start, ResumeInfo | None)
        assert_type(manager.load(state, "/elsewhere/dist_ckpt_000200", exclude=("rng",)), ResumeInfo)
        manager.load(state, rename=lambda name: name.removeprefix("old."), strict=False)
        handle = manager.save(1, state, metrics={"loss": 1.0}, fields={"tracker": "x"})
        assert_type(handle, SaveHandle)
        handle.wait("committed", timeout_s=10.0)
        if stop.check(manager.ranks):
            assert_type(manager.save_emergency_checkpoint(2, state), Path)
        manager.report(10, 0.5)
        manager.wait(until="mirrored", timeout_s=10.0)
        print(manager.status().newest_safe_step)


def read(data: torch.utils.data.Dataset[int], files: dict[str, int]) -> None:
    samples = SampleLoader(data, batch_size=8, seed=17, last="drop", num_workers=2)
    shards = ShardLoader(files, lambda name, start: [name][start:], 8, shuffle_block=1000, open_shards=4)
    state = TrainState(
        model=torch.nn.Linear(1, 1),
        dataloader=[samples, shards],
        extra={"tokens": 0},
        merge_extra={"tokens": lambda values, rank, world_size: sum(values) // world_size + rank},
        per_rank=("experts.*",),
    )
    state.per_rank = {"experts.*": lambda values, rank, world_size: sum(values) / world_size + rank, "*.bias": None}
    print(len(samples), samples.epoch, [batch for batch in shards], state.merge_extra, state.per_rank)


def step(state: TrainState) -> float:
    return float(state.model(torch.zeros(1, 1)).sum())


def prove(wrapped: torch.nn.parallel.DistributedDataParallel) -> None:
    rebuild_buckets(wrapped, lambda model: model(torch.zeros(1, 1)).sum())
    assert_exact_resume(lambda: TrainState(wrapped), step, steps=4, world_size=2, kinds=("dcp",), ignore=("extra.*",))


def evaluate() -> None:
    use_keys(verify_keys=["/keys/run.pub"])
    try:
        staged = stage_checkpoint_step("gs://bucket/run", step="latest", dest="/scratch", require_kind="dcp")
    except errors.CheckpointNotFound as error:
        raise SystemExit(error.exit_code) from error
    assert_type(staged, StagedCheckpoint)
    found = resolve_checkpoint_reference(staged.path)
    assert_type(found, CheckpointReference)
    loaded = load_checkpoint(found, map_location="cpu", new_config_keys={"gate": False})
    assert_type(loaded, LoadedCheckpoint)
    assert_type(load_settings({"root": "/local-ssd/run"}).manager_arguments(), dict[str, Any])
    assert_type(resolve_resume_path("/local-ssd/run"), Path | None)
    assert_type(find_local_checkpoint_steps("/local-ssd/run", kind="model"), list[int])
    print([line.step for line in list_checkpoints("gs://bucket/run")], errors.CkptMirrorError.exit_code)
