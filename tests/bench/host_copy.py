"""How long a host copy blocks, against one ``copy_`` of as many bytes into a warm buffer.

python tests/bench/host_copy.py --size-mib 1024 --tensors 600
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from ckptmirror.ranks.host_copy import HostCopier


def state_of(size_bytes: int, tensors: int, device: str) -> dict[str, torch.Tensor]:
    """Return as many matrices of equal size, and a 0-dim counter for every third of them, as optimizers hold."""
    items = max(size_bytes // tensors // 4, 1)
    state = {f"matrix{i}": torch.ones(items, device=device) for i in range(tensors)}
    return state | {f"step{i}": torch.tensor(float(i)) for i in range(tensors // 3)}


def seconds(work: Callable[[], object], device: str) -> float:
    """Return how long ``work`` takes until its bytes are there."""
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Print the median of each and their ratio."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--size-mib", type=int, default=512)
    arguments.add_argument("--tensors", type=int, default=300)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    given = arguments.parse_args()
    state = state_of(given.size_mib * 2**20, given.tensors, given.device)
    flat = torch.ones(sum(t.nbytes for t in state.values()) // 4, device=given.device)
    warm = torch.zeros(flat.shape, pin_memory=given.device == "cuda")
    copier = HostCopier()

    def ours() -> None:
        copier.copy(state).release()

    first_s = seconds(ours, given.device)
    pairs = [
        (seconds(lambda: warm.copy_(flat), given.device), seconds(ours, given.device)) for _ in range(given.rounds)
    ]
    one_s, ours_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{flat.nbytes / 2**20:.0f} MiB in {len(state)} tensors on {given.device}, {copier.nbytes / 2**20:.0f} MiB held"
    )
    print(
        f"first copy {first_s:.4f} s; one warm copy_ {one_s:.4f} s; host copy {ours_s:.4f} s; "
        f"ratio {ours_s / one_s:.3f}"
    )


if __name__ == "__main__":
    main()
