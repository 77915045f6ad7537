"""How long a resume takes, and a checkpoint of very many tensors.

ckptmirror compares every byte with its checksum on its way into the page cache, and loads it from there; then it proves
what is in memory by fingerprints. The peers compare nothing. All files are cold, as on a machine that has just started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ckptmirror import CheckpointManager, TrainState, load_checkpoint
from tests.bench.contest import Contestant, Measured, measure
from tests.bench.places import cold, transformer_state
from tests.bench.raw_disk import read_raw

__all__ = ["measure_load"]

_TENSORS = 20_000
_VALUES = 64


def measure_load(directory: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure a resume of ``size_bytes``, and ``load_checkpoint`` of 20,000 small tensors."""
    return [*_resume(directory / "large", size_bytes, rounds), *_many(directory / "many", rounds)]


def _timed(what: str, work: Callable[[], object]) -> Callable[[], Mapping[str, float]]:
    def run() -> Mapping[str, float]:
        started = time.perf_counter()
        work()
        return {what: time.perf_counter() - started}

    return run


def _forget(*places: Path) -> Callable[[], None]:
    def forget() -> None:
        for place in places:
            for path in [place] if place.is_file() else place.rglob("*"):
                if path.is_file():
                    cold(path)

    return forget


def _saved(root: Path, state: TrainState) -> None:
    with CheckpointManager(root, mode="blocking") as manager:
        manager.resume(state)
        manager.save(1, state)


def _resume(directory: Path, size_bytes: int, rounds: int) -> list[Measured]:
    state = transformer_state(size_bytes)
    root, plain, pickled = directory / "root", directory / "plain", directory / "plain.pt"
    _saved(root, state)

    def state_dict() -> dict[str, Any]:
        model, optimizer = get_state_dict(state.model, state.optimizer)
        return {"model": model, "optimizer": optimizer}

    dcp.save(state_dict(), checkpoint_id=str(plain), no_dist=True)
    torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, pickled)

    def ours(*, verify_loaded: bool = True) -> None:
        with CheckpointManager(root) as manager:
            assert manager.resume(state, verify_loaded=verify_loaded) is not None

    def of_dcp() -> None:
        found = state_dict()
        dcp.load(found, checkpoint_id=str(plain), no_dist=True)
        set_state_dict(
            state.model, state.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )

    def of_torch() -> None:
        found = torch.load(pickled, weights_only=True)
        state.model.load_state_dict(found["model"])
        state.optimizer.load_state_dict(found["optimizer"])

    what = "resume"
    return measure(
        [
            Contestant("raw O_DIRECT read", "limit", _timed(what, lambda: read_raw(pickled)), before=_forget(pickled)),
            Contestant("ckptmirror, verified", "ours", _timed(what, ours), before=_forget(root)),
            Contestant(
                "the same without the proof of memory",
                "peer",
                _timed(what, lambda: ours(verify_loaded=False)),
                before=_forget(root),
            ),
            Contestant("dcp.load", "peer", _timed(what, of_dcp), before=_forget(plain)),
            Contestant("torch.load", "peer", _timed(what, of_torch), before=_forget(pickled)),
        ],
        rounds,
    )


def _many(root: Path, rounds: int) -> list[Measured]:
    values = [torch.nn.Parameter(torch.full((_VALUES,), float(number))) for number in range(_TENSORS)]
    _saved(root, TrainState(model=torch.nn.ParameterList(values)))
    (path,) = root.glob("model_*.pt")
    what = f"load_checkpoint of {_TENSORS:,} tensors"
    return measure(
        [
            Contestant(
                "ckptmirror, verified", "ours", _timed(what, lambda: load_checkpoint(path)), before=_forget(path)
            ),
            Contestant(
                "torch.load", "peer", _timed(what, lambda: torch.load(path, weights_only=True)), before=_forget(path)
            ),
        ],
        rounds,
    )
