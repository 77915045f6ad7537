"""How many files a rank has open for its connections to other ranks: counted in jobs of 4 and 8 processes over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.ranks import open_ranks
from tests.kit.processes import run_ranks

_FEW, _MANY = 4, 8
_LAZY = "TORCH_GLOO_LAZY_INIT"


@dataclass(frozen=True)
class OpenFiles:
    """The open files of a rank, as a line over the number of ranks.

    Attributes:
        of_itself: However many ranks there are.
        per_rank: For each other rank.
    """

    of_itself: float
    per_rank: float

    def at(self, ranks: int) -> float:
        """For a job of so many ranks."""
        return self.of_itself + self.per_rank * (ranks - 1)


def count_open_files(*, lazy: bool) -> tuple[OpenFiles, OpenFiles]:
    """Return the open files of rank 0 and of another rank, after a manager's two channels were opened and used."""
    with _lazy(lazy):
        few, many = run_ranks(_FEW, _count), run_ranks(_MANY, _count)
    return _line(few[0], many[0]), _line(few[1], many[1])


def _line(few: int, many: int) -> OpenFiles:
    per_rank = (many - few) / (_MANY - _FEW)
    return OpenFiles(few - per_rank * (_FEW - 1), per_rank)


def _count(_rank: int) -> int:
    first = open_ranks(node_key="a", timeout_s=60.0)
    save = first.channel("save")
    found = len(list(Path("/proc/self/fd").iterdir()))
    save.close()
    first.close()
    return found


@contextmanager
def _lazy(lazy: bool) -> Iterator[None]:
    before = os.environ.pop(_LAZY, None)
    if lazy:
        os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_LAZY, None)
        if before is not None:
            os.environ[_LAZY] = before
