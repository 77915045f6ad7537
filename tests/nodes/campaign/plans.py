"""What a job of the campaign is asked to do, as values that travel to its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core.model import Kind
from ckptmirror.flow.start.resume_policy import Policy

__all__ = ["Ambush", "Plan"]


@dataclass(frozen=True)
class Ambush:
    """A signal that strikes at a crash point.

    Attributes:
        rank: The rank whose points are counted.
        point: The number of the point, from 1, or its name, as ``crashpoints.arm`` takes it.
        in_training: Whether counting begins after the resume, not before the manager is made.
        struck: The ranks that get the signal, all at that moment.
        signal: SIGKILL or SIGSTOP.
    """

    rank: int
    point: str
    in_training: bool
    struck: tuple[int, ...]
    signal: int


@dataclass(frozen=True)
class Plan:
    """One job.

    Attributes:
        number: The job's number in its history. It is in every value that the job saves.
        base: The directory that has a root for each node.
        nodes: The node of each rank, a letter each.
        wrapped: ``"fsdp"`` or ``"ddp"``.
        urls: The mirrors.
        kinds: What each save writes.
        steps: How many steps it trains; each is saved.
        policy: As of ``resume``, with ``force`` where it is ``"scratch"``.
        ends_mirrored: Whether it waits at the end until everything is on all mirrors; else it just leaves.
        asks_at: Before this step (from 1) rank 0 asks the campaign to let something happen; 0: never.
        asked_to_stop: The ranks that get a SIGTERM, and in which step (from 1); 0: never.
        timeout_s: How long a rank waits for another.
    """

    number: int
    base: Path
    nodes: str
    wrapped: str
    urls: tuple[str, ...]
    kinds: tuple[Kind, ...] = ("dcp",)
    steps: int = 2
    policy: Policy = "auto"
    ends_mirrored: bool = True
    ambush: Ambush | None = None
    asks_at: int = 0
    asked_to_stop: tuple[tuple[int, ...], int] = ((), 0)
    timeout_s: float = 60.0

    @property
    def share_downloads(self) -> bool:
        """What every third job asks for; it changes nothing but the way of the bytes."""
        return self.number % 3 == 0

    def ranks_of(self, node: str) -> tuple[int, ...]:
        return tuple(rank for rank, letter in enumerate(self.nodes) if letter == node)

    def root_of(self, rank: int) -> Path:
        return self.base / self.nodes[rank]

    def log_of(self, rank: int) -> Path:
        return self.base / "logs" / f"job{self.number}-rank{rank}.log"

    @property
    def persistent_dir(self) -> Path | None:
        """One for all nodes, in the histories that have one."""
        directory = self.base / "kept"
        return directory if directory.exists() else None

    @property
    def size(self) -> int:
        return len(self.nodes)
