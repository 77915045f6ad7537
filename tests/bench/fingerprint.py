"""How long fingerprints of tensors take, beside one copy of the same bytes; both in one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ckptmirror.core.regions import Region
from ckptmirror.sums.digests import byte_view
from ckptmirror.sums.fingerprints import fingerprint
from tests.bench.contest import Contestant, Measured, measure

__all__ = ["measure_fingerprint"]

_SHAPES = {
    "a matrix": (torch.float32, (-1, 4096)),
    "a matrix of short rows": (torch.float32, (-1, 96)),
    "one long dimension": (torch.float32, (-1,)),
    "bfloat16": (torch.bfloat16, (-1, 4096)),
}


def measure_fingerprint(_: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure both sums of tensors of ``size_bytes``."""
    source, target = torch.ones(size_bytes // 4), torch.zeros(size_bytes // 4)
    contestants = [Contestant("one copy (memcpy)", "limit", _timed(lambda: _copy(target, source)))]
    for name, (dtype, shape) in _SHAPES.items():
        row = math.prod(shape[1:])
        flat = source.view(dtype)
        values = flat[: len(flat) // row * row].view(shape)
        whole = Region(tuple(values.shape), (0,) * values.dim(), tuple(values.shape))
        contestants.append(Contestant(name, "ours", _timed(lambda v=values, r=whole: fingerprint(v, r))))
    return measure(contestants, rounds)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    byte_view(target)[:] = byte_view(source)  # torch would use more threads


def _timed(work: Callable[[], object]) -> Callable[[], Mapping[str, float]]:
    def run() -> Mapping[str, float]:
        started = time.perf_counter()
        work()
        return {"fingerprint": time.perf_counter() - started}

    return run
