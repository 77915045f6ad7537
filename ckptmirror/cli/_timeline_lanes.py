"""Puts the bars of a timeline into lanes, and into rows within a lane.

Rules:
* A lane is one sort of work: the host copy of one rank, write and commit of the node, the uploads to one mirror, and so
  on. Attempts are not a lane: they are the background.
* Bars of one lane that would touch are in separate rows, one below the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from ckptmirror.observe.timeline_bars import Bar

__all__ = ["LEAST_WIDTH", "Lane", "Placed", "lanes_of"]

LEAST_WIDTH = 3.0
"""No bar is narrower than this, in the drawing's units."""
_GAP = 0.75
_ROW_HEIGHT = 14.0
_MOST_HEIGHT = 220.0
_LEAST_ROW_HEIGHT = 3.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A bar and its position."""

    bar: Bar
    left: float
    right: float
    row: int


@dataclass(frozen=True)
class Lane:
    """One lane.

    Attributes:
        name: The label beside the lane.
        title: The same in full.
        rows: The number of its rows.
    """

    name: str
    title: str
    placed: tuple[Placed, ...]
    rows: int
    row_height: float = field(default=_ROW_HEIGHT)

    @property
    def height(self) -> float:
        """The height of all its rows."""
        return self.rows * self.row_height


def lanes_of(bars: Sequence[Bar], x: Callable[[float], float]) -> list[Lane]:
    """Return the lanes that are not empty, from top to bottom; ``x`` maps a moment to its position."""
    of_ranks: dict[int, list[Bar]] = {}
    on_mirrors: dict[str, list[Bar]] = {}
    for bar in bars:
        if bar.kind == "host_copy" and bar.rank is not None:
            of_ranks.setdefault(bar.rank, []).append(bar)
        if bar.kind in _ON_A_MIRROR and bar.mirror:
            on_mirrors.setdefault(bar.mirror, []).append(bar)
    lanes = [
        _lane("resume, stage", bars, x, "resume", "stage"),
        *(_lane(f"host copy, rank {rank}", of_ranks[rank], x, "host_copy") for rank in sorted(of_ranks)),
        _lane("emergency snapshot", bars, x, "emergency"),
        _lane("write + commit", _of_the_node(bars), x, "commit"),
        *(_lane(f"upload, {url}", on_mirrors[url], x, *_ON_A_MIRROR) for url in on_mirrors),
        _lane("rotation", bars, x, "rotation"),
        _lane("stops and faults", bars, x, "stop", "fence", "broken_copy", "gone", "quarantine"),
    ]
    return [lane for lane in lanes if lane.placed]


_ON_A_MIRROR = ("upload", "mirror_commit", "unreachable")


def _of_the_node(bars: Iterable[Bar]) -> list[Bar]:
    """Join the bars of the ranks of one save: from the first that begins to the last that ends."""
    joined: dict[object, Bar] = {}
    for bar in bars:
        if bar.kind != "commit":
            continue
        key = bar.save_id or (bar.attempt, bar.step, bar.outcome)
        one = joined.get(key)
        if one is None:
            joined[key] = replace(bar, rank=None)
            continue
        end_s = None if one.end_s is None or bar.end_s is None else max(one.end_s, bar.end_s)
        joined[key] = replace(
            one, begin_s=min(one.begin_s, bar.begin_s), end_s=end_s, until_s=max(one.until_s, bar.until_s)
        )
    return list(joined.values())


def _lane(name: str, bars: Iterable[Bar], x: Callable[[float], float], *kinds: str) -> Lane:
    mine = sorted((bar for bar in bars if bar.kind in kinds), key=lambda bar: (bar.begin_s, bar.until_s))
    rows = 0
    busy: list[tuple[float, int]] = []  # heaps: where each row ends, and the rows that have ended
    free: list[int] = []
    placed: list[Placed] = []
    of_uploads: dict[str, int] = {}
    for bar in mine:
        left = x(bar.begin_s)
        right = max(x(bar.until_s), left + LEAST_WIDTH)
        row = of_uploads.get(bar.save_id) if bar.kind == "mirror_commit" else None
        if row is None:  # the commit on a mirror is a mark at the end of its upload's bar
            while busy and busy[0][0] + _GAP <= left:
                heappush(free, heappop(busy)[1])
            row = heappop(free) if free else rows
            rows = max(rows, row + 1)
            heappush(busy, (right, row))
        if bar.kind == "upload":
            of_uploads[bar.save_id] = row
        placed.append(Placed(bar, left, right, row))
    height = _ROW_HEIGHT
    if rows:
        height = max(_LEAST_ROW_HEIGHT, min(_ROW_HEIGHT, _MOST_HEIGHT / rows))
    return Lane(_short(name), name, tuple(placed), rows, height)


def _short(name: str, longest: int = 30) -> str:
    if len(name) <= longest:
        return name
    keep = longest - 1
    return name[: keep // 2] + "…" + name[len(name) - (keep - keep // 2) :]
