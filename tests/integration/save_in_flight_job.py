"""A training that ends with a save in flight: whose background goes on only when the interpreter has begun to end.

Arguments: root, how it ends, the rank that ends ("all", or the others wait for it), whether threads can be started
then ("threads"; Python 3.12 and later refuse: "no-threads").
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from ckptmirror import CheckpointManager, TrainState, manager
from ckptmirror.flow.save.save import Saver

WIDTH = 1024
HEIGHT = 6 * 1024  # 24 MiB: several buffers of the writer


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def hold_back(*, threads: bool) -> None:
    """Let nothing happen in the background before the main thread is over."""
    honest = Saver._agree

    def late(self: Saver, *arguments: Any) -> Any:
        threading.main_thread().join()
        if not threads:
            threading._start_new_thread = refuse  # type: ignore[attr-defined]
        return honest(self, *arguments)

    Saver._agree = late  # type: ignore[method-assign]


def new_state(fill: float) -> TrainState:
    model = torch.nn.Linear(WIDTH, HEIGHT)
    torch.nn.init.constant_(model.weight, fill)
    return TrainState(model)


def main(root: str, how: str, who_ends: str, threads: str) -> None:
    rank = os.environ.get("RANK")
    if rank is not None:
        dist.init_process_group("gloo")
    ends = who_ends in ("all", rank)
    if ends:
        hold_back(threads=threads == "threads")
    manager._LEAVING_SAVE_S = 0.1
    state = new_state(7.0)
    if how == "with":
        with CheckpointManager(root) as mine:
            mine.resume(state)
            mine.save(1, state)
            raise ZeroDivisionError
    mine = CheckpointManager(root)
    mine.resume(state)
    mine.save(1, state)
    if not ends:
        dist.barrier()
    if how == "raise":
        raise ZeroDivisionError
    if how == "exit":
        sys.exit(3)
    if how == "close":
        mine.close(timeout_s=0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
