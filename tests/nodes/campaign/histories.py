"""Histories: drawn from a seed, played on real processes, and shortened when one fails.

Rules:
* A history is a list of steps; a step draws its choices from its own number, so any step can be left out and the rest
  still means something.
* Processes run as the machine lets them: a history that failed once may need to be repeated to fail again.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ckptmirror.testing import GcsServerProcess
from tests.nodes.campaign.checks import Watch
from tests.nodes.campaign.expected import on_the_lineage
from tests.nodes.campaign.happenings import RULES, drain_all, run_job, wake_all
from tests.nodes.campaign.jobs import Hung
from tests.nodes.campaign.plans import Plan
from tests.nodes.campaign.sight import look_at_mirror
from tests.nodes.campaign.world import FileMirror, GcsMirror, Lost, MirrorPlace, Mixed, World, gcs_server

__all__ = ["Played", "Step", "environment", "history", "in_words", "play", "shortened"]

LENGTH = 7
WITH_PERSISTENT_DIR = 0.5  # of the histories
SHRINKING_RUNS = 12
DRAINS_S = (2.0, 10.0, 90.0)  # those of the end; most need only the first


@dataclass(frozen=True)
class Step:
    """One thing that happens; the rule draws its choices from ``draw``."""

    rule: str
    draw: int


@dataclass
class Played:
    """How a history went. ``verdict``: ok, lost, mixed, hung or broken."""

    verdict: str = "ok"
    failure: str = ""
    told: list[str] = field(default_factory=list)
    rules: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    saves: int = 0
    staged: int = 0
    took_s: float = 0.0


def history(seed: int, length: int = LENGTH) -> list[Step]:
    """The history of a seed: it begins and ends with a job."""
    draw = random.Random(f"history {seed}")
    rules, weights = list(RULES), [weight for _, weight in RULES.values()]
    between = draw.choices(rules, weights, k=length - 2)
    return [Step(rule, draw.randrange(10_000)) for rule in ("job", *between, "job")]


@contextmanager
def environment() -> Iterator[GcsServerProcess]:
    """What all histories of a campaign share: a server, and an environment in which ``gs://`` means it."""
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="ckptmirror-nodes-", dir=memory if memory.is_dir() else None))
    kept = dict(os.environ)
    try:
        with gcs_server(base / "gcs") as server:
            os.environ.update(server.environment)
            os.environ["CKPTMIRROR_RETRY_S"] = "3"
            yield server
    finally:
        os.environ.clear()
        os.environ.update(kept)
        shutil.rmtree(base, ignore_errors=True)


_played = 0


def play(seed: int, steps: Sequence[Step], server: GcsServerProcess) -> Played:
    """Play a history; the seed gives the mirrors too."""
    global _played
    _played += 1
    played, began = Played(), time.monotonic()
    base = server.directory.parent / f"history-{seed}-{_played}"
    base.mkdir()
    world = World(base, _mirrors(base, server, random.Random(f"mirrors {seed}")))
    if random.Random(f"persistent_dir {seed}").random() < WITH_PERSISTENT_DIR:
        world.kept.mkdir()
    watch = Watch(world)
    also = ", and a persistent_dir" if world.kept.exists() else ""
    world.told.append(f"  mirrors: {', '.join(world.urls)}{also}")
    try:
        for step in steps:
            RULES[step.rule][0](world, watch, random.Random(f"step {step.draw}"))
            played.rules[step.rule] += 1
            watch.look()
        played.staged = _put_in_order(world, watch)
    except Exception as error:  # noqa: BLE001 - every kind of failure is a finding
        kinds = ((Lost, "lost"), (Mixed, "mixed"), (Hung, "hung"))
        played.verdict = next((word for kind, word in kinds if isinstance(error, kind)), "broken")
        played.failure = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    finally:
        world.close()
        for mirror in world.mirrors:
            mirror.come_back()
    played.told, played.jobs, played.saves = world.told, len(world.plans), len(world.truths)
    played.took_s = time.monotonic() - began
    if played.verdict == "ok":
        shutil.rmtree(base)
    return played


def _mirrors(base: Path, server: GcsServerProcess, draw: random.Random) -> list[MirrorPlace]:
    gcs, file = GcsMirror(server, base.name), FileMirror(base / "nfs")
    return draw.choice([[gcs], [file], [gcs, file], [file, gcs]])


def _put_in_order(world: World, watch: Watch) -> int:
    """Everything answers again and is finished; return how many copies were staged.

    Raises:
        Broken: Something did not come right.
    """
    for mirror in world.mirrors:
        mirror.come_back()
    wake_all(world)
    watch.look()
    for timeout_s in DRAINS_S:
        drain_all(world, timeout_s)
        if (lacking := _unfinished(world)) is None:
            break
    else:
        raise Lost(lacking)
    watch.look()
    plan = Plan(len(world.plans) + 1, world.base, "yz", "fsdp", world.urls, steps=1)
    if world.refused:
        plan = Plan(plan.number, world.base, "yz", "fsdp", world.urls, steps=1, policy="scratch")
    world.disk |= {"y": 0, "z": 0}
    world.told.append("  at the end, a job on new nodes")
    run_job(world, plan)
    watch.look()
    return watch.check_stage()


def _unfinished(world: World) -> str | None:
    """Say what is on the lineage, and on disks that were not lost, and not on every mirror."""
    lineage = on_the_lineage(world)
    for truth in world.truths.values():
        kept = all(world.disk[node] == number for node, number in truth.disks.items())
        if not (truth.acknowledged and kept and truth.save_id in lineage):
            continue
        for mirror in world.mirrors:
            if (mirror.url, truth.save_id) in world.hurt:
                continue
            if truth.save_id not in look_at_mirror(world, mirror.url, mirror.objects()).whole():
                return f"step {truth.step} of job {truth.job} is on the lineage, and never came to {mirror.url}"
    return None


def shortened(seed: int, steps: list[Step], server: GcsServerProcess, verdict: str) -> list[Step]:
    """Leave out whatever the history fails without in the same way, in a bounded number of runs."""
    runs, at = 0, 0
    while at < len(steps) and runs < SHRINKING_RUNS:
        shorter = steps[:at] + steps[at + 1 :]
        runs += 1
        if shorter and _way(play(seed, shorter, server)) == verdict:
            steps = shorter
        else:
            at += 1
    return steps


def _way(played: Played) -> str:
    """The failure, without what differs from history to history."""
    first = played.failure.partition("\n")[0]
    return played.verdict + re.sub(r"[0-9a-f]{6,}|\d+|/\S+|'\S+'", "", first)[:40]


def in_words(seed: int, played: Played, steps: Sequence[Step]) -> str:
    """A history and its end, and how to repeat it."""
    lines = "".join(f"    {step!r},\n" for step in steps)
    what = "\n".join(played.told)
    return f"history {seed}: {played.verdict}\n{what}\n{played.failure}\nplay({seed}, [\n{lines}], server)"
