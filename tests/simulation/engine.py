"""The engine: histories from a seed, played, and made small when one fails.

Rules:
* A history is a list of steps; a step draws its choices from its own number, so any step can be left out and the rest
  still means something. That is how a failing history is made small.
* Every failure prints its seed and the small history as code, to be kept as a test of its own.
"""

from __future__ import annotations

import random
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptmirror.local import crashpoints
from tests.simulation.finale import put_in_order
from tests.simulation.rules import MEANWHILE, RULES
from tests.simulation.watch import Watch
from tests.simulation.world import World, arm, repeatable

LENGTH = 45
SHRINKING_RUNS = 400


@dataclass(frozen=True)
class Step:
    """One thing that happens.

    Attributes:
        draw: What the rule draws its choices from.
        crash: The crash point at which who acts dies; 0: it does not.
        meanwhile: What happens at the ``at``-th request to a mirror.
    """

    rule: str
    draw: int
    crash: int = 0
    meanwhile: Step | None = None
    at: int = 0


@dataclass
class Played:
    """How a history went."""

    failure: str | None = None
    steps: int = 0
    rules: Counter[str] = field(default_factory=Counter)


def history(seed: int, length: int = LENGTH) -> list[Step]:
    """The history of a seed."""
    rng = random.Random(f"history {seed}")
    return [Step("start", rng.randrange(10_000)), *(_step(rng) for _ in range(length))]


def _step(rng: random.Random) -> Step:
    step = Step(_pick(rng, tuple(RULES)), rng.randrange(10_000))
    if rng.random() < 0.15:
        step = replace(step, crash=rng.choice([rng.randrange(1, 12), rng.randrange(1, 90)]))
    if rng.random() < 0.08:
        meanwhile = Step(_pick(rng, MEANWHILE), rng.randrange(10_000))
        step = replace(step, meanwhile=meanwhile, at=rng.randrange(1, 12))
    return step


def _pick(rng: random.Random, rules: Sequence[str]) -> str:
    return rng.choices(rules, [RULES[rule][1] for rule in rules])[0]


def play(seed: int, steps: Sequence[Step]) -> Played:
    """Play a history; the seed gives the ids and the mirrors."""
    played = Played()
    with _directory() as directory, repeatable(seed):
        world = World.make(directory, random.Random(f"world {seed}"))
        watch = Watch(world)
        try:
            for step in steps:
                _take(world, watch, step)
                played.steps += 1
                played.rules[step.rule] += 1
                watch.look(step.rule if step.meanwhile is None or step.meanwhile.rule != "stage" else "stage")
            put_in_order(world, watch)
        except Exception as error:  # noqa: BLE001  every kind of failure is a finding
            last = traceback.format_exc(limit=-6)
            played.failure = f"{type(error).__name__}: {error}\n{last}"
        finally:
            crashpoints.disarm()
            world.close()
    return played


def _take(world: World, watch: Watch, step: Step) -> None:
    if step.meanwhile is not None:
        other = step.meanwhile
        world.interruption = lambda: RULES[other.rule][0](world, watch, random.Random(other.draw))
        world.requests_before_interruption = step.at
    arm(step.crash)
    try:
        RULES[step.rule][0](world, watch, random.Random(step.draw))
    finally:
        crashpoints.disarm()
        world.interruption = None


@contextmanager
def _directory() -> Iterator[Path]:
    """In memory where there is such a place: thousands of fsyncs teach nothing here."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="ckptmirror-sim-", dir=memory if memory.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def smaller(seed: int, steps: list[Step]) -> list[Step]:
    """Leave out of a failing history whatever it fails without in the same way, in a bounded number of runs."""
    runs = 0
    way = _way(play(seed, steps))

    def fails(shorter: Sequence[Step]) -> bool:
        nonlocal runs
        runs += 1
        return runs <= SHRINKING_RUNS and _way(play(seed, shorter)) == way

    size = len(steps) // 2
    while size >= 1 and runs <= SHRINKING_RUNS:
        at = 0
        while at < len(steps):
            shorter = steps[:at] + steps[at + size :]
            if fails(shorter):
                steps = shorter
            else:
                at += size
        size //= 2
    for index, step in enumerate(steps):
        for simpler in (replace(step, crash=0), replace(step, meanwhile=None, at=0)):
            if simpler != steps[index] and fails([*steps[:index], simpler, *steps[index + 1 :]]):
                steps = [*steps[:index], simpler, *steps[index + 1 :]]
    return steps


def _way(played: Played) -> str:
    """The failure, without what differs from history to history."""
    first = (played.failure or "").partition("\n")[0]
    return re.sub(r"[0-9a-f]{6,}|\d+|/\S+|'\S+'", "", first)[:50]


def told(seed: int, steps: Sequence[Step]) -> str:
    """A history as code."""
    lines = "".join(f"    {step!r},\n" for step in steps)
    return f"play({seed}, [\n{lines}])"
