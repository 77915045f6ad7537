"""How long fingerprints of tensors take, beside one copy of the same bytes, and the proof of a whole state.

One tensor is summed in one thread, as a rank does; its copy takes one thread too. With CUDA, a tensor there is also
summed, beside a copy on the device. ``GiB/s`` counts each byte once: a copy reads and writes it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ckptmirror import TrainState
from ckptmirror.core.regions import Region
from ckptmirror.core.tensor_proof import compare
from ckptmirror.flow.fetch.unchanged_check import UnchangedCheck
from ckptmirror.formats.live_sums import live_sums
from ckptmirror.ranks import SingleRank
from ckptmirror.sums.digests import byte_view
from ckptmirror.sums.fingerprints import fingerprint
from tests.bench.contest import Contestant, Measured, measure
from tests.bench.places import transformer_state

__all__ = ["measure_fingerprint"]

_SHAPES = {
    "a matrix": (torch.float32, (-1, 4096)),
    "a matrix of short rows": (torch.float32, (-1, 96)),
    "one long dimension": (torch.float32, (-1,)),
    "bfloat16": (torch.bfloat16, (-1, 4096)),
}
_LOADED = ("model", "optimizer")


def measure_fingerprint(_: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure both sums of tensors of ``size_bytes``, and of a model and its optimizer of as many bytes."""
    found = _of_tensors(size_bytes, rounds, "cpu")
    if torch.cuda.is_available():
        found += _of_tensors(size_bytes, rounds, "cuda")
    return found + _of_a_state(size_bytes, rounds)


def _of_tensors(size_bytes: int, rounds: int, device: str) -> list[Measured]:
    source, target = torch.ones(size_bytes // 4, device=device), torch.zeros(size_bytes // 4, device=device)
    what = "fingerprint" if device == "cpu" else f"fingerprint on {torch.cuda.get_device_name()}"
    timed = _timed(what, size_bytes)
    contestants = [Contestant("one copy (memcpy)", "limit", timed(lambda: _copy(target, source)), times=3)]
    for name, (dtype, shape) in _SHAPES.items():
        row = math.prod(shape[1:])
        flat = source.view(dtype)
        values = flat[: len(flat) // row * row].view(shape)
        whole = Region(tuple(values.shape), (0,) * values.dim(), tuple(values.shape))
        contestants.append(Contestant(name, "ours", timed(lambda v=values, r=whole: fingerprint(v, r)), times=3))
    return _with_rates(measure(contestants, rounds))


def _of_a_state(size_bytes: int, rounds: int) -> list[Measured]:
    """What a start adds for its proof, and what the first step adds for the check before it; in about 550 tensors."""
    state = transformer_state(size_bytes)
    tensors = [*state.model.state_dict().values()]
    tensors += [one for of_one in state.optimizer.state.values() for one in of_one.values() if torch.is_tensor(one)]
    memory = [torch.zeros_like(one) for one in tensors]
    loaded = live_sums(state, _LOADED)
    timed = _timed("proof of a state", sum(one.nbytes for one in tensors))

    def copy() -> None:
        for there, one in zip(memory, tensors, strict=True):
            _copy(there, one)

    def proof() -> None:
        assert compare(live_sums(state, _LOADED), [loaded]).differ == ()

    contestants = [
        Contestant("one copy (memcpy)", "limit", timed(copy), times=3),
        Contestant("after the load", "ours", timed(proof), times=3),
        Contestant("before the first step", "ours", lambda: _first_step(state, loaded, timed), times=3),
    ]
    return _with_rates(measure(contestants, rounds))


def _first_step(state: TrainState, loaded: list, timed: Callable) -> Mapping[str, float]:
    """Time the step that the check waits for: it has no gradient, so it does nothing else."""
    state.optimizer.zero_grad(set_to_none=True)
    check = UnchangedCheck(state, loaded, 1, SingleRank())
    try:
        found: Mapping[str, float] = timed(state.optimizer.step)()
        return found
    finally:
        check.end()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.device.type == "cpu":
        byte_view(target)[:] = byte_view(source)  # torch would use more threads
    else:
        target.copy_(source)
        torch.cuda.synchronize()


def _timed(what: str, size_bytes: int) -> Callable[[Callable[[], object]], Callable[[], Mapping[str, float]]]:
    def timed(work: Callable[[], object]) -> Callable[[], Mapping[str, float]]:
        def run() -> Mapping[str, float]:
            started = time.perf_counter()
            work()
            took_s = time.perf_counter() - started
            return {what: took_s, f"{what}: GiB/s": size_bytes / 2**30 / took_s}

        return run

    return timed


def _with_rates(found: list[Measured]) -> list[Measured]:
    for one in found:
        one.unit = "GiB/s" if one.what.endswith(": GiB/s") else one.unit
    return found
