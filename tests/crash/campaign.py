"""The engine of the crash campaigns: the same story, killed at every point, once each.

Rules:
* A case starts from a copy of a prepared place, at the very path where that was prepared (the table knows its root).
  Artifacts are hard links, so that the generations on a ``file://`` mirror stay; what is written in place is copied.
* A point is named ``label:side@n``, the n-th of its name: threads change the order of points, hardly their count.
* Several lanes, each with a story server and a place of its own, share the points of a campaign.
* A slice takes every point that matters by its label, and every n-th of the others, from an offset that the seed
  gives. The seed stands in every failure; ``CKPTMIRROR_CAMPAIGN_SEED`` repeats it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core import names
from tests.crash.invariants import Place

__all__ = ["FULL", "SEED", "Campaign", "StoryServer", "check", "quick", "run_campaign"]

FULL = os.environ.get("CKPTMIRROR_CAMPAIGN") == "full"
SEED = int(os.environ.get("CKPTMIRROR_CAMPAIGN_SEED") or random.SystemRandom().randrange(1_000_000))
SLICE = 5  # about as many cases of each campaign in `make test`, beside those that matter by their label
LANES = 2
UNREACHED_SHARE = 0.1  # threads beside one another: a rare point may come one time less often

REPOSITORY = Path(__file__).parents[2]


class StoryServer:
    """A process that tells stories, each in a forked child. See ``story_server``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.story_server"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )

    def await_ready(self) -> None:
        """Wait until everything is imported."""
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the story server died"
        return line.strip()

    def tell(self, story: str, place: Path, crash_at: str | None = None, *, count: bool = False, **more: Any) -> int:
        """Tell a story; return the signal that ended it, 0 for none. A story that fails is an error.

        When one of several ranks is killed, the others may fail, but must end.
        """
        request = {"story": story, "place": str(place), "crash_at": crash_at, "count": count, **more}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        codes = [os.waitstatus_to_exitcode(status) for status in json.loads(self._answer())["statuses"]]
        killed = -signal.SIGKILL in codes
        said = place / "said.log"
        expected = {0, 1, -signal.SIGKILL} if killed else {0}
        assert set(codes) <= expected, f"{story} failed ({codes}):\n{said.read_text()[-6000:] if said.exists() else ''}"
        return int(signal.SIGKILL) if killed else 0

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@dataclass
class Campaign:
    """One story and what surrounds it.

    Attributes:
        prepare: Told once, never killed.
        story: Told once per point, killed there.
        recover: Told after each kill, in the same place.
        after_kill: Gives sentences that say what is wrong after a kill.
        after_recovery: The same after ``recover``.
        disturb: Changes the prepared place before each case, such as losing the disk.
        always: Labels of which every point is tried, in a slice too.
        cut_short: A story and the point where it dies, before all cases: what they meet is its wreck.
    """

    prepare: str
    story: str
    recover: str
    after_kill: Callable[[Place], list[str]]
    after_recovery: Callable[[Place], list[str]]
    disturb: Callable[[Place], None] = lambda _place: None
    always: Sequence[str] = ()
    cut_short: tuple[str, str] | None = None


@dataclass
class Result:
    """What a campaign found."""

    points: int = 0
    kills: int = 0
    unreached: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Take in what a lane found."""
        self.kills += other.kills
        self.unreached += other.unreached
        self.wrong += other.wrong

    def __str__(self) -> str:
        return f"{self.points} points, {self.kills} kills, {len(self.unreached)} not reached, {len(self.wrong)} wrong"


def named_points(passed: Sequence[str]) -> list[str]:
    """``label:side@n`` for each point passed, in order."""
    seen: Counter[str] = Counter()
    points = []
    for name in passed:
        seen[name] += 1
        points.append(f"{name}@{seen[name]}")
    return points


def chosen(points: Sequence[str], always: Sequence[str]) -> list[str]:
    """All points in a full campaign; else those that matter, and a slice of the rest that the seed turns."""
    if FULL:
        return list(points)
    matters = [point for point in points if point.partition(":")[0] in always]
    rest = [point for point in points if point.partition(":")[0] not in always]
    stride = max(1, len(rest) // SLICE)
    return matters + rest[SEED % stride :: stride]


def run_campaign(servers: Sequence[StoryServer], campaign: Campaign, directory: Path) -> Result:
    """Count the points of a story, then kill it at each of those chosen; check after each kill and each recovery."""
    started = time.monotonic()
    lanes = [_Lane(server, campaign, directory / f"lane{n}") for n, server in enumerate(servers)]
    points = lanes[0].count_points()
    result = Result(len(points))
    shares = [chosen(points, campaign.always)[n :: len(lanes)] for n in range(len(lanes))]
    with ThreadPoolExecutor(len(lanes)) as pool:
        for found in pool.map(lambda lane, share: lane.kill_at(share), lanes, shares):
            result.add(found)
    print(f"{campaign.story}: {result}, {time.monotonic() - started:.0f} s, seed {SEED}")
    return result


def quick(campaigns: Iterable[str], *names: str) -> list[Any]:
    """The campaigns as parameters of a test; only those of these names are what `make test` runs."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.long) for name in campaigns]


class _Lane:
    """One story server and the place it works in."""

    def __init__(self, server: StoryServer, campaign: Campaign, directory: Path) -> None:
        self._server, self._campaign = server, campaign
        self._case, self._prepared = directory / "case", directory / "prepared"
        self._case.mkdir(parents=True)
        server.tell(campaign.prepare, self._case)
        campaign.disturb(Place(self._case))
        if campaign.cut_short is not None:
            assert server.tell(campaign.cut_short[0], self._case, campaign.cut_short[1]) == signal.SIGKILL
        self._case.rename(self._prepared)

    def count_points(self) -> list[str]:
        """Tell the story to its end; it and the recovery from nothing must be in order, too."""
        server, campaign = self._server, self._campaign
        with restored(self._prepared, self._case):
            server.tell(campaign.story, self._case, count=True)
            points = named_points(json.loads((self._case / "points0.json").read_text()))
            wrong = campaign.after_kill(Place(self._case))
            server.tell(campaign.recover, self._case)
            wrong += campaign.after_recovery(Place(self._case))
            assert not wrong, f"{campaign.story}, not killed: {wrong}"
        return points

    def kill_at(self, points: Sequence[str]) -> Result:
        result = Result()
        for point in points:
            with restored(self._prepared, self._case):
                if self._server.tell(self._campaign.story, self._case, point) != signal.SIGKILL:
                    result.unreached.append(point)
                    continue
                result.kills += 1
                result.wrong += _case(self._server, self._campaign, Place(self._case), point)
        return result


def _case(server: StoryServer, campaign: Campaign, place: Place, point: str) -> list[str]:
    where = f"{campaign.story} killed at {point}"
    wrong = [f"{where}: {what}" for what in campaign.after_kill(place)]
    try:
        server.tell(campaign.recover, place.path)
        wrong += [f"{where}, then {campaign.recover}: {what}" for what in campaign.after_recovery(place)]
    except AssertionError as error:
        wrong.append(f"{where}: {error}")
    keep = os.environ.get("CKPTMIRROR_CAMPAIGN_KEEP")
    if wrong and keep:
        shutil.copytree(place.path, Path(keep) / point, symlinks=True, dirs_exist_ok=True)
    return wrong


def check(result: Result) -> None:
    """Fail with what was wrong, with the seed that repeats it."""
    lines = "\n".join(result.wrong[:40])
    assert not result.wrong, f"CKPTMIRROR_CAMPAIGN_SEED={SEED}: {len(result.wrong)} things are wrong:\n{lines}"
    tried = result.kills + len(result.unreached)
    assert result.kills > 0
    assert len(result.unreached) <= max(3, UNREACHED_SHARE * tried), f"not reached: {result.unreached}"


@contextmanager
def restored(prepared: Path, case: Path) -> Iterator[None]:
    """Lay the prepared place out at ``case`` for the body, and remove it afterwards."""
    _lay_out(prepared, case)
    try:
        yield
    finally:
        shutil.rmtree(case)


def _lay_out(source: Path, target: Path) -> None:
    """Copy a tree: hard links, but for what is written in place (control files, the table, notes)."""
    target.mkdir()
    for entry in os.scandir(source):
        here = target / entry.name
        if entry.is_dir(follow_symlinks=False):
            _lay_out(Path(entry.path), here)
        elif entry.is_symlink() or source.name in (names.CONTROL_DIR, "prepared"):
            shutil.copy2(entry.path, here, follow_symlinks=False)
        else:
            os.link(entry.path, here)
