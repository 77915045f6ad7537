"""How long a resume takes, how long the first save after it blocks, and a checkpoint of very many tensors.

ckptmirror compares every byte with its checksum on its way into the page cache, and loads it from there; then it proves
what is in memory by fingerprints. The peers compare nothing. Files are cold, as on a machine that has just started, or
warm, as after a restart of the process alone (each contestant in a process of its own: ``python -m tests.bench.load WHO
DIRECTORY BYTES DEVICE``, started by the bench).
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ckptmirror import CheckpointManager, TrainState, load_checkpoint
from tests.bench.contest import Contestant, Measured, Role, measure
from tests.bench.places import arrive, cold, transformer_state
from tests.bench.raw_disk import read_raw

__all__ = ["measure_load"]

_TENSORS = 20_000
_VALUES = 64


def measure_load(directory: Path, size_bytes: int, rounds: int, device: str) -> list[Measured]:
    """Measure a resume of ``size_bytes``, the save after it, and ``load_checkpoint`` of 20,000 small tensors."""
    large = directory / "large"
    return [
        *_resume(large, size_bytes, rounds, device),
        *_first_save(large / "root", size_bytes, rounds, device),
        *_many(directory / "many", rounds),
    ]


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


def _resume(directory: Path, size_bytes: int, rounds: int, device: str) -> list[Measured]:
    state = transformer_state(size_bytes, device=device)
    _saved(directory / "root", state)
    dcp.save(_state_dict(state), checkpoint_id=str(directory / "plain"), no_dist=True)
    torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, directory / "plain.pt")
    return [*_cold(directory, state, rounds, device), *_restart(directory, size_bytes, rounds, device)]


def _state_dict(state: TrainState) -> dict[str, Any]:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer}


def _load(who: str, directory: Path, state: TrainState, device: str) -> None:
    """Load what ``who`` saved in ``directory``."""
    if who.startswith("ckptmirror"):
        with CheckpointManager(directory / "root") as manager:
            assert manager.resume(state, verify_loaded=who == "ckptmirror") is not None
    elif who == "dcp":
        found = _state_dict(state)
        dcp.load(found, checkpoint_id=str(directory / "plain"), no_dist=True)
        set_state_dict(
            state.model, state.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
    else:
        found = torch.load(directory / "plain.pt", weights_only=True, map_location=device)
        state.model.load_state_dict(found["model"])
        state.optimizer.load_state_dict(found["optimizer"])
    arrive(device)


_CONTESTANTS: tuple[tuple[str, Role, str, str], ...] = (
    ("ckptmirror, verified", "ours", "ckptmirror", "root"),
    ("the same without the proof of memory", "peer", "ckptmirror without proof", "root"),
    ("dcp.load", "peer", "dcp", "plain"),
    ("torch.load", "peer", "torch", "plain.pt"),
)


def _cold(directory: Path, state: TrainState, rounds: int, device: str) -> list[Measured]:
    what, pickled = "resume", directory / "plain.pt"
    raw = Contestant("raw O_DIRECT read", "limit", _timed(what, lambda: read_raw(pickled)), before=_forget(pickled))
    others = [
        Contestant(
            name,
            role,
            _timed(what, functools.partial(_load, who, directory, state, device)),
            before=_forget(directory / place),
        )
        for name, role, who, place in _CONTESTANTS
    ]
    return measure([raw, *others], rounds)


def _restart(directory: Path, size_bytes: int, rounds: int, device: str) -> list[Measured]:
    """A resume in a new process whose optimizer has no state yet, from files in the page cache."""

    def child(who: str) -> Callable[[], Mapping[str, float]]:
        def run() -> Mapping[str, float]:
            command = [sys.executable, "-m", "tests.bench.load", who, str(directory), str(size_bytes), device]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            return {"resume in a new process, files in the page cache": json.loads(done.stdout)["seconds"]}

        return run

    return measure(
        [
            Contestant(name, role, child(who), before=functools.partial(_touch, directory / place))
            for name, role, who, place in _CONTESTANTS
        ],
        rounds,
    )


def _touch(place: Path) -> None:
    buffer = memoryview(bytearray(8 << 20))
    for path in [place] if place.is_file() else place.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def _first_save(root: Path, size_bytes: int, rounds: int, device: str) -> list[Measured]:
    """How long the first save blocks that comes at once after a resume, and the one after it."""
    state = transformer_state(size_bytes, device=device)
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.zeros(size_bytes // 4, pin_memory=device == "cuda")
    what = "blocking of a save after a resume"

    def save(*, before: int) -> Mapping[str, float]:
        with CheckpointManager(root) as manager:
            found = manager.resume(state)
            assert found is not None
            for step in range(found.step + 1, found.step + 1 + before):
                manager.save(step, state).wait("committed")
            started = time.perf_counter()
            handle = manager.save(found.step + 1 + before, state)
            blocked = time.perf_counter() - started
            handle.wait("committed")
            return {what: blocked}

    return measure(
        [
            Contestant("one copy (memcpy)", "limit", _timed(what, lambda: target.copy_(source))),
            Contestant("the first, at once", "ours", lambda: save(before=0)),
            Contestant("the second", "peer", lambda: save(before=1)),
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


def _main(who: str, directory: Path, size_bytes: int, device: str) -> None:
    state = transformer_state(size_bytes, stepped=False, device=device)
    seconds = _timed("seconds", lambda: _load(who, directory, state, device))()
    print(json.dumps(seconds))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
