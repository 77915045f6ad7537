"""Where the bench works: a directory on one disk, a state of a given size, a saved root, a server."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.testing import GcsServerProcess

__all__ = [
    "BUCKET",
    "arrive",
    "cold",
    "describe_disk",
    "empty",
    "one_file_root",
    "random_file",
    "server",
    "transformer_state",
]

BUCKET = "bench"
_BLOCK_BYTES = 4096


def describe_disk(directory: Path) -> str:
    """Return file system and kind of the disk under ``directory``."""
    device = directory.stat().st_dev
    found = "an unknown file system"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            found = rest.split()[0]
    if found == "tmpfs":
        return "tmpfs (memory: nothing here is durable)"
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if disk.name.startswith(("vd", "xvd")):
        return f"{found} on a virtual disk"
    queues = [place / "queue/rotational" for place in (disk, disk.parent)]  # a partition has none of its own
    kinds = [queue.read_text().strip() for queue in queues if queue.exists()]
    return found + {"1": " on a spinning disk", "0": " on a solid-state disk"}.get(kinds[0] if kinds else "", "")


def transformer_state(size_bytes: int, *, stepped: bool = True, device: str = "cpu") -> TrainState:
    """Return a model and its AdamW, of ``size_bytes`` with moments, shaped like a small language model.

    Unless it has ``stepped``, the optimizer has no moments yet, as in a process that has just started.
    """
    width = 768 if size_bytes >= 256 * 2**20 else 128
    block_bytes = 12 * (12 * width * width + 13 * width)  # float32, times parameter and two moments
    blocks = max((size_bytes - size_bytes // 16) // block_bytes, 1)
    rows = max((size_bytes - blocks * block_bytes) // (12 * width), 1)
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(rows, width),
            "blocks": torch.nn.ModuleList(_block(width) for _ in range(blocks)),
        }
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return TrainState(model=model, optimizer=optimizer)


def arrive(device: str) -> None:
    """Wait until everything that was begun on ``device`` is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def _block(width: int) -> torch.nn.Module:
    return torch.nn.ModuleDict(
        {
            "norm1": torch.nn.LayerNorm(width),
            "qkv": torch.nn.Linear(width, 3 * width),
            "out": torch.nn.Linear(width, width),
            "norm2": torch.nn.LayerNorm(width),
            "up": torch.nn.Linear(width, 4 * width),
            "down": torch.nn.Linear(4 * width, width),
        }
    )


def one_file_root(directory: Path, size_bytes: int) -> Path:
    """Make a root with one committed save whose model file has ``size_bytes``; return the file's path."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size_bytes // 4, dtype=torch.float32))])
    state = TrainState(model=model)
    with CheckpointManager(directory, kinds=("model",), mode="blocking") as manager:
        manager.resume(state)
        manager.save(1, state)
    return next(directory.glob("model_*.pt"))


def random_file(path: Path, size_bytes: int) -> Path:
    """Write a file of random bytes."""
    piece = 16 * 2**20
    with path.open("wb") as file:
        for offset in range(0, size_bytes, piece):
            file.write(os.urandom(min(piece, size_bytes - offset)))
        os.fsync(file.fileno())
    return path


def cold(path: Path) -> None:
    """Let the page cache forget a file, as it is after a save that went past the cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def empty(directory: Path) -> None:
    """Remove everything in a directory but ckptmirror's own control directory; make it if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    for entry in directory.iterdir():
        if entry.name == ".ckptmirror":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def server(directory: Path) -> Iterator[GcsServerProcess]:
    """Run the strict test server, without MD5, and point the Google libraries of this process at it."""
    with GcsServerProcess(directory, buckets=[BUCKET], options=["--no-md5"]) as process:
        before = {name: os.environ.get(name) for name in process.environment}
        os.environ.update(process.environment)
        try:
            yield process
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


_numbers = itertools.count()


def fresh_name(stem: str) -> str:
    """Return a name that was not used in this process."""
    return f"{stem}-{next(_numbers)}"
