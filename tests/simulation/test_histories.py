"""Random histories of a run, with everything that goes wrong in one, in which no checkpoint may be lost."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation.engine import history, play, smaller, told
from tests.simulation.seeded_bugs import SEEDED_BUGS, planted

pytestmark = pytest.mark.long

FULL = os.environ.get("CKPTMIRROR_CAMPAIGN") == "full"
SEED = int(os.environ.get("CKPTMIRROR_CAMPAIGN_SEED") or (random.SystemRandom().randrange(1_000_000) if FULL else 1))
CAMPAIGN_S = 600.0
ALWAYS = 8  # the same histories in every run, before those that the seed gives
SLICE = 20  # so many histories in `make test`, those included
HISTORIES_PER_BUG = 400 if FULL else 60


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of expected errors would be logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _fail(seed: int) -> None:
    small = smaller(seed, history(seed))
    pytest.fail(f"history {seed} (campaign seed {SEED}):\n{told(seed, small)}\n{play(seed, small).failure}")


@pytest.mark.timeout(CAMPAIGN_S + 600)
def test_no_history_loses_a_checkpoint() -> None:
    until = time.monotonic() + CAMPAIGN_S if FULL else 0.0
    played, steps = 0, Counter[str]()
    while played < SLICE or time.monotonic() < until:
        seed = played if played < ALWAYS else SEED * 100_000 + played
        found = play(seed, history(seed))
        if found.failure is not None:
            _fail(seed)
        played += 1
        steps += found.rules
    print(f"{played} histories, {steps.total()} steps, campaign seed {SEED}: {dict(steps)}")
    assert min(steps[rule] for rule in ("start", "save", "upload", "rotate", "stage")) > 0


FOUND_SOON = ("rotation does not ask whether a save is on the mirror",)
"""What a few histories show; the others are planted in a full campaign only."""


@pytest.mark.timeout(CAMPAIGN_S + 600)
@pytest.mark.parametrize("bug", SEEDED_BUGS if FULL else FOUND_SOON)
def test_the_simulation_finds_a_planted_bug(bug: str) -> None:
    with planted(bug):
        found = next((seed for seed in range(HISTORIES_PER_BUG) if play(seed, history(seed)).failure is not None), None)
    assert found is not None, f"{HISTORIES_PER_BUG} histories, and none shows that {bug}"
    print(f"history {found} shows that {bug}")
