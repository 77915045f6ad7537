"""What the ranks of test_data_ranks.py do: read some batches with worker processes, save, and tell what they read."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.data import SampleLoader, ShardLoader

WAIT_S = 60.0
SAMPLES = 48


def lines(name: str, start: int) -> Iterator[str]:
    with Path(name).open() as file:
        yield from (line.strip() for line in itertools.islice(file, start, None))


def loader_of(which: str, folder: Path) -> Any:
    if which == "samples":
        return SampleLoader(TensorDataset(torch.arange(SAMPLES)), 2, last="uneven", num_workers=2)
    files = {str(path): path.stat().st_size for path in folder.glob("*.txt")}
    return ShardLoader(files, lines, 2, num_workers=2, shuffle_block=3, open_shards=2, collate_fn=list)


def train(rank: int, root: str, folder: str, which: str, step: int, batches: int | None) -> dict[str, Any]:
    """Resume, read so many batches (or all that are left of the epoch), and save."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it will have workers
    loader = loader_of(which, Path(folder))
    extra = {"tokens": 0}
    state = TrainState(nn.Linear(2, 2), dataloader=loader, extra=extra, merge_extra={"tokens": share})
    manager = CheckpointManager(root, timeout_s=WAIT_S)
    start = manager.resume(state)
    got: list[Any] = []
    for batch in itertools.islice(loader, batches):
        got += batch[0].tolist() if which == "samples" else batch
        extra["tokens"] = state.extra["tokens"] + len(batch[0] if which == "samples" else batch)
    if batches is not None:
        manager.save(step, state).wait()
    manager.close()
    dist.barrier()
    missing = () if start is None else start.missing
    return {"got": got, "tokens": state.extra["tokens"], "missing": missing, "epoch": loader.epoch}


def share(values: Any, rank: int, _world_size: int) -> int:
    return sum(values) if rank == 0 else 0
