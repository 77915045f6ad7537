"""Every short history of a small world, by the rules of ``core.start``; and bugs planted in those rules."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptmirror.core.start import attempts, decide
from tests.simulation.explorer import explore
from tests.simulation.small_world import World

FULL = os.environ.get("CKPTMIRROR_CAMPAIGN") == "full"
STATES = 150_000 if FULL else 4_000

STATES_LIMIT = 25_000  # more than it takes to find any of the planted bugs

RUNNING = World(begun=True)
SHORT = replace(RUNNING, last_step=2, loses=False)
WORLDS = {
    "a run begins": World(),
    "a run goes on": RUNNING,
    "a person goes back": replace(RUNNING, rewinds=True),
    "a person starts over": replace(RUNNING, starts_over=True),
    "a mirror is left out": replace(RUNNING, reconfigures=True),
    "an older copy of a root is restored": replace(RUNNING, restores=True),
    "claims of several starts mingle": replace(RUNNING, claims_at_once=False, rewinds=True),
    "commits pause": replace(RUNNING, claims_at_once=False, commits_at_once=False),
}
if FULL:
    at_any_time = replace(RUNNING, claims_at_once=False, commits_at_once=False)
    WORLDS["everything"] = replace(at_any_time, restores=True, reconfigures=True, rewinds=True, starts_over=True)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world", WORLDS)
def test_no_history_loses_what_stands_or_waits_for_ever(world: str) -> None:
    report = explore(WORLDS[world], STATES)
    print(f"{world}: {report.states} states, every history of {report.steps} steps")
    assert not report.wrong, report.told()
    assert report.states == STATES or report.complete


def test_the_whole_of_a_shorter_world_is_seen() -> None:
    report = explore(SHORT, STATES_LIMIT)
    assert not report.wrong, report.told()
    assert report.complete


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _none(*_: Any) -> None:
    return None


def _persons_count_at_once(_evidence: Any, known: Any, _silent: Any) -> Any:
    return {one.id for one in known.values() if one.by_person}, ()


def _claim_that_needs_nobody(right: Callable[..., attempts.Claim]) -> Callable[..., attempts.Claim]:
    return lambda *given, **options: right(*given, **options | {"needs_all": False})


def _counts_from_its_claim(row: Any, voice: attempts.Voice) -> set[str]:
    voices = {voice, attempts.Voice.CLAIMED} if voice is attempts.Voice.COUNTS else {voice}
    return {heard.attempt.id for heard in row.heard if heard.voices & voices}


def _tells_everything(claim: attempts.Claim, there: Any) -> Any:
    return attempts.merge_attempts(claim.root_list, *([there] if there is not None else []))


REWOUND = replace(SHORT, rewinds=True)
MINGLED = replace(SHORT, claims_at_once=False)
PLANTED: dict[str, tuple[World, Any, str, Any]] = {
    "a start ignores rivals": (SHORT, decide, "rival_of", _none),
    "a start vouches for any save": (MINGLED, decide._Start, "_vouches_for", _yes),
    "a claim needs no mirror": (MINGLED, attempts, "claim_from", _claim_that_needs_nobody(attempts.claim_from)),
    "any attempt is a fast-forward": (SHORT, attempts, "is_fast_forward", _yes),
    "a first commit ignores rivals": (SHORT, attempts, "rival_of", _none),
    "an attempt counts from its claim": (SHORT, attempts, "_ids", _counts_from_its_claim),
    "a person's attempt counts at once": (REWOUND, attempts, "_of_persons", _persons_count_at_once),
    "a person's decision is told by others": (REWOUND, attempts, "mirror_list", _tells_everything),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_planted_in_the_rules_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, place, name, wrong = PLANTED[bug]
    monkeypatch.setattr(place, name, wrong)
    report = explore(world, STATES_LIMIT, stop_at_first=True)
    print(f"{report.states} states show that {bug}: {report.told()}")
    assert report.wrong, f"{report.states} states, and none shows that {bug}"
