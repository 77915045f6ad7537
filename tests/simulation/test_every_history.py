"""Every short history of a small world, by the rules of ``core.start``; and bugs planted in those rules."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptmirror.core import meta_merging, names
from ckptmirror.core.start import attempts, decide, disks, evidence, lineage, quarantine
from ckptmirror.core.start.lineage import SaveFacts
from tests.simulation import small_histories, small_uploads, small_world
from tests.simulation.explorer import explore, wander
from tests.simulation.small_histories import Histories
from tests.simulation.small_world import Mirror, World, part_name

FULL = os.environ.get("CKPTMIRROR_CAMPAIGN") == "full"
STATES = 150_000 if FULL else 2_000
HISTORIES = 300 if FULL else 8
STATES_LIMIT = 30_000  # more than it takes to find any of the planted bugs

RUNNING = World(begun=True)
SHORT = replace(RUNNING, last_step=2, loses=False)
WORLDS = {
    "a run begins": World(),
    "a run goes on": RUNNING,
    "a person goes back": replace(RUNNING, rewinds=True),
    "a person goes back before each mirror has a list": World(rewinds=True),
    "a person starts over": replace(RUNNING, starts_over=True),
    "a mirror is left out": replace(RUNNING, reconfigures=True),
    "a mirror is taken out of the run": replace(RUNNING, reconfigures=True, forgets=True),
    "an older copy of a root is restored": replace(RUNNING, restores=True),
    "a save is staged into a root": replace(RUNNING, stages=True),
    "claims of several starts mingle": replace(RUNNING, claims_at_once=False, rewinds=True),
    "starts fail and go back": replace(RUNNING, reports=True, loses=False),
    "starts fail where a person goes back": replace(RUNNING, reports=True, loses=False, rewinds=True, mirrors=1),
    "commits pause": replace(RUNNING, claims_at_once=False, commits_at_once=False),
}
TWO = ((0, 1),)
SPARE = ((0, 1), (0, 2))
ON_TWO = replace(RUNNING, jobs=TWO)
APART = World(jobs=((0, 1), (2, 3)), mirrors=1, outages=False, loses=False, attempts=2, last_step=1)
ON_ONE_MIRROR = replace(ON_TWO, mirrors=1)
ON_NODES = {
    "two nodes begin": World(jobs=TWO),
    "two nodes go on": ON_TWO,
    "two nodes and a spare": replace(ON_TWO, jobs=((0, 1), (0, 2), (2, 1))),
    "two nodes change places": replace(ON_ONE_MIRROR, jobs=((0, 1), (1, 0))),
    "a crash between the commits of two nodes": replace(ON_ONE_MIRROR, publishes_at_once=False),
    "a node outlives the other": replace(ON_ONE_MIRROR, jobs=SPARE, survives=True, publishes_at_once=False),
    "three nodes": replace(ON_ONE_MIRROR, jobs=((0, 1, 2), (0, 2)), publishes_at_once=False),
    "one node of two goes on alone": replace(ON_ONE_MIRROR, jobs=((0, 1), (0,))),
    "a part rots": replace(ON_ONE_MIRROR, rots=True),
    "a save is staged into the root of a node": replace(ON_TWO, jobs=SPARE, stages=True),
    "starts of two nodes fail": replace(ON_ONE_MIRROR, reports=True, jobs=((0, 1), (2, 1))),
    "a mirror is taken out of the run of two nodes": replace(ON_TWO, reconfigures=True, forgets=True),
    "a person goes back on two nodes": replace(ON_TWO, rewinds=True),
    "two jobs on other nodes": replace(ON_TWO, jobs=((0, 1), (2, 3)), claims_at_once=False),
    "commits of two nodes pause": replace(ON_ONE_MIRROR, commits_at_once=False, survives=True, sends_files=True),
}
if FULL:
    at_any_time = replace(RUNNING, claims_at_once=False, commits_at_once=False)
    WORLDS["everything"] = replace(at_any_time, restores=True, reconfigures=True, rewinds=True, starts_over=True)
    torn = replace(ON_TWO, publishes_at_once=False, claims_at_once=False, commits_at_once=False, sends_files=True)
    ON_NODES["everything on nodes"] = replace(
        torn, jobs=((0, 1), (2, 0), (1, 2)), survives=True, rots=True, rewinds=True
    )
WORLDS |= ON_NODES
each_world = pytest.mark.parametrize(
    "world", [pytest.param(name, marks=pytest.mark.long if name in ON_NODES else ()) for name in WORLDS]
)


@pytest.fixture(autouse=True)
def one_failure_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world has few starts, so one that failed quarantines its save."""
    monkeypatch.setattr(quarantine, "FAILED_STARTS", 1)


@pytest.mark.timeout(3000)
@each_world
def test_no_history_loses_what_stands_or_waits_for_ever(world: str) -> None:
    report = explore(WORLDS[world], STATES)
    print(f"{world}: {report.states} states, every history of {report.steps} steps")
    assert not report.wrong, report.told()
    assert report.states == STATES or report.complete


@pytest.mark.parametrize("world", [pytest.param(SHORT, marks=pytest.mark.long), APART], ids=["one host", "nodes"])
def test_the_whole_of_a_shorter_world_is_seen(world: World) -> None:
    report = explore(world, STATES_LIMIT)
    assert not report.wrong, report.told()
    assert report.complete


@pytest.mark.timeout(3000)
@each_world
def test_no_long_random_history_loses_what_stands(world: str) -> None:
    longer = replace(WORLDS[world], attempts=7, last_step=6)
    report = wander(longer, HISTORIES, steps=80, seed=1)
    assert not report.wrong, report.told()


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


def _as_they_are(_parts: Any) -> None:
    return None


def _parts_that_are_there(self: Histories, mirror: Mirror, save: SaveFacts, of: int) -> list[tuple[SaveFacts, int]]:
    there = {name: (one, share) for name, one, share in mirror.parts}
    return [there[name] for share in range(of) if (name := part_name(save, share, of)) in there]


def _named_by_step(save: SaveFacts, share: int, of: int) -> str:
    return names.part_name(save.step, "0" * 32, share + 1, of)


def _merged_anyhow(parts: Any) -> Any:
    return replace(parts[0], artifacts=tuple(file for part in parts for file in part.artifacts))


def _may(_evidence: Any, *_: Any) -> attempts.Verdict:
    return attempts.Verdict("commit")


def _without_the_last(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: right(*given)[:-1]


def _leader_alone(roots: Any) -> Any:
    return roots[0]


def _first_disk(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda sight: right(sight._replace(disks=sight.disks[:1]))


def _any_part_is_all(found: Any, kind: Any = None) -> list[int]:
    return []


def _given_up_at_once(evidence: Any) -> Any:
    return [part.save for part in evidence.disk.parts]


def _reads_no_parts(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda sight: right(
        sight._replace(mirrors=tuple(one and one._replace(parts=frozenset()) for one in sight.mirrors))
    )


def _does_not_count(right: Callable[..., Any]) -> Callable[..., Any]:
    def evidence_of_start(sight: Any) -> Any:
        found = right(sight)
        rows = [replace(row, heard=()) if row.sort == "anywhere" else row for row in found.rows]
        return replace(found, rows=tuple(rows))

    return evidence_of_start


def _ends_are_deaths(right: Callable[..., Any]) -> Callable[..., Any]:
    def quarantined(heard: Any, voices: Any, saved: Any, **more: Any) -> Any:
        return right(heard, {one: said - {attempts.Voice.ENDED} for one, said in voices.items()}, saved, **more)

    return quarantined


def _nothing_was_chosen(_attempts: Any) -> frozenset[str]:
    return frozenset()


def _removed_for_ever(requirements: Any) -> Any:
    newest: dict[str, Any] = {}
    for one in requirements:
        known = newest.setdefault(one.url, one)
        newest[one.url] = max(known, one, key=lambda word: (word.is_removed, word.number))
    return tuple(newest.values())


FAILING = replace(SHORT, reports=True, attempts=4, mirrors=1, outages=False)
REWOUND = replace(SHORT, rewinds=True)
MINGLED = replace(SHORT, claims_at_once=False)
TORN = replace(ON_TWO, mirrors=1, outages=False, publishes_at_once=False, survives=True)
Planted = tuple[Any, str, Any]
PLANTED: dict[str, tuple[World, list[Planted]]] = {
    "a start ignores rivals": (SHORT, [(decide, "rival_of", _none)]),
    "a start vouches for any save": (MINGLED, [(decide._Start, "_vouches_for", _yes)]),
    "a claim needs no mirror": (MINGLED, [(attempts, "claim_from", _claim_that_needs_nobody(attempts.claim_from))]),
    "any attempt is a fast-forward": (SHORT, [(attempts, "is_fast_forward", _yes)]),
    "a first commit ignores rivals": (SHORT, [(attempts, "rival_of", _none)]),
    "an attempt counts from its claim": (SHORT, [(attempts, "_ids", _counts_from_its_claim)]),
    "a person's attempt counts at once": (REWOUND, [(attempts, "_of_persons", _persons_count_at_once)]),
    "a person's decision is told by others": (REWOUND, [(attempts, "mirror_list", _tells_everything)]),
    "a merge does not wait for a part": (
        TORN,
        [(Histories, "_parts_of", _parts_that_are_there), (meta_merging, "merge_parts", _merged_anyhow)],
    ),
    "parts of two saves are merged": (
        replace(TORN, jobs=SPARE),
        [(small_uploads, "part_name", _named_by_step), (meta_merging, "merge_parts", _merged_anyhow)],
    ),
    "a meta comes before the files of its parts": (
        replace(TORN, sends_files=True),
        [(Histories, "_may_publish", _yes)],
    ),
    "the parts of a job that was replaced count": (APART, [(attempts, "may_commit", _may)]),
    "a vote without one node": (replace(TORN, rots=True), [(Histories, "_votes", _without_the_last(Histories._votes))]),
    "a start without one node's disk": (
        TORN,
        [(small_histories, "evidence_of_start", _first_disk(small_world.evidence_of_start))],
    ),
    "the identity of one root is that of all": (
        replace(ON_TWO, jobs=SPARE),
        [(place, "identity_of", _leader_alone) for place in (small_histories, small_uploads)],
    ),
    "a start goes back again and again": (
        replace(FAILING, last_step=3, attempts=5),
        [(place, "chosen_saves", _nothing_was_chosen) for place in (decide, quarantine)],
    ),
    "a start that ended in order has failed": (
        FAILING,
        [(quarantine, "quarantined", _ends_are_deaths(quarantine.quarantined))],
    ),
    "a mirror that was removed is never required again": (
        replace(SHORT, outages=False, reconfigures=True, forgets=True),
        [(place, "merge_requirements", _removed_for_ever) for place in (lineage, evidence, attempts, disks)],
    ),
    "a number of which a removal knows is given again": (
        replace(SHORT, outages=False, reconfigures=True, forgets=True, last_step=2),
        [(attempts, "next_number", lambda listed: max((one.number for one in listed.attempts), default=-1) + 1)],
    ),
    "a start reads no part on a mirror": (
        replace(TORN, jobs=SPARE),
        [(small_histories, "evidence_of_start", _reads_no_parts(small_world.evidence_of_start))],
    ),
    "an attempt of which a part is on a mirror does not count": (
        replace(TORN, jobs=SPARE),
        [(small_histories, "evidence_of_start", _does_not_count(small_world.evidence_of_start))],
    ),
    "one part is the whole save": (TORN, [(disks, "_absent", _any_part_is_all)]),
    "a part is given up although another disk may have the rest": (
        replace(TORN, jobs=SPARE),
        [(disks, "never_whole", _given_up_at_once)],
    ),
}
SLOW = (
    "a start goes back again and again",
    "a number of which a removal knows is given again",
    "a claim needs no mirror",
    "a mirror that was removed is never required again",
    "a start that ended in order has failed",
    "an attempt of which a part is on a mirror does not count",
)
"""Planted in a full campaign only."""


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(one, marks=pytest.mark.long if one in SLOW or "merged" in one else ())
        for one in PLANTED
        if FULL or one not in SLOW
    ],
)
def test_a_bug_planted_in_the_rules_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, planted = PLANTED[bug]
    for place, name, wrong in planted:
        monkeypatch.setattr(place, name, wrong)
    report = explore(world, STATES_LIMIT, stop_at_first=True)
    print(f"{report.states} states show that {bug}: {report.told()}")
    assert report.wrong, f"{report.states} states, and none shows that {bug}"
