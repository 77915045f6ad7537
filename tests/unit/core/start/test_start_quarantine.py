"""What a start does with a quarantined save: it goes back one step, once, and never at the price of not starting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptmirror.core.errors import IntegrityError, Temporary
from ckptmirror.core.start.decide import Outcome, Result, Wish
from ckptmirror.core.start.evidence import Row, Voice
from tests.unit.core.start.builders import (
    THERE,
    By,
    Case,
    M,
    N,
    O,
    Saved,
    broken,
    by,
    disk,
    dropped,
    makes_room,
    mirror,
    refuses,
    silent,
    tries,
    went_wrong,
)

a = by("a", 0)
a100, a200, a300 = (a.save(step) for step in (100, 200, 300))
DIED, DIVERGED = Voice.REPORTED, Voice.DIVERGED
three = [by(f"start {number}", number, after=a200) for number in (1, 2, 3)]
ALL = [a, *three]


def failing(row: Row, *of: By, how: Voice = DIED) -> Row:
    """The row of a disk that knows of attempts (of the three starts unless given) that they failed."""
    ids = {one.attempt.id for one in of or three}
    heard = [
        replace(one, voices=one.voices | {Voice.REPORTED, how}) if one.attempt.id in ids else one for one in row.heard
    ]
    return replace(row, heard=tuple(heard))


def here(*saves: Saved, lists: list[By] = ALL, **more: object) -> Row:
    return failing(disk(lists, saved=saves or (a100, a200), **more))  # type: ignore[arg-type]


BACK = "goes back to step 100"
DECIDED = {"needs_all": True, "by_person": True}
NOT_DECIDED = {"by_person": False}
at_m = mirror(M, ALL, [a100, a200])

CASES = [
    Case("it goes back one step, and says which starts failed", [here()], tries(a100, says="attempts 1, 2, 3 died")),
    Case("it says how a person continues all the same", [here()], tries(a100, says=f"rewind --save {a200.id[:8]}`")),
    Case("that is a decision, which every mirror records", [here(), at_m], tries(a100, says=BACK, **DECIDED)),
    Case(
        "starts whose loss was not finite count too",
        [failing(disk(ALL, saved=[a100, a200]), how=DIVERGED)],
        tries(a100, says="attempts 1, 2, 3 reported a loss that is not finite", **DECIDED),
    ),
    Case(
        "a mirror tells of starts elsewhere whose loss was not finite",
        [disk([a], saved=[a100, a200]), failing(mirror(M, ALL, [a100, a200]), how=DIVERGED)],
        tries(a100, says="attempts 1, 2, 3 reported a loss that is not finite", **DECIDED),
    ),
    Case("two are not enough", [disk(ALL[:3], saved=[a100, a200])], tries(a200, **NOT_DECIDED)),
    Case("the earlier one may be on a mirror", [here(a200), at_m], tries(a100, M, says=BACK, **DECIDED)),
    Case(
        "a later save is not the one that failed",
        [here(a100, a200, a300), mirror(M, ALL, [a100, a200, a300])],
        tries(a300, **NOT_DECIDED),
    ),
    Case("there is no earlier one", [here(a200)], tries(a200, says="there is no earlier save", **NOT_DECIDED)),
    Case(
        "a required mirror is silent",
        [here(completed=[a]), silent(M)],
        tries(a200, says="every mirror has to answer", **NOT_DECIDED),
    ),
    Case("an optional mirror is silent", [here(), silent(O)], tries(a200, says="every mirror has to answer")),
    Case("a mirror is no longer configured", [here(completed=[a]), at_m, dropped(N)], tries(a200, says="has to")),
    Case(
        "something older cannot be read now",
        [here(damaged=[broken(a.save(150), "EIO", hindrance="unreadable")])],
        tries(a200, says="every save to be readable", **NOT_DECIDED),
    ),
    Case("'latest' is the newest", [here()], tries(a200), Wish("latest")),
    Case("a person names its step", [here()], tries(a200, by_person=True), Wish(200)),
    Case("a person names it", [here()], tries(a200, by_person=True), Wish(a200.id[:8])),
    Case(
        "a person chose it before",
        [here(lists=[*ALL, by("chosen", 4, after=a200, person=True)])],
        tries(a200, **NOT_DECIDED),
    ),
    Case(
        "the run has gone back there before",
        [here(lists=[by("back", 0, after=a100, person=True), *ALL]), mirror(M, [a], [a100, a200])],
        tries(a200, says="was taken back to step 100 before", **NOT_DECIDED),
    ),
    Case(
        "another root's start came in between",
        [here(lists=[*ALL, by("theirs", 4, after=a100, root=THERE)])],
        tries(a200, **NOT_DECIDED),
    ),
    Case(
        "one of them has saved on the mirror since",
        [here(), mirror(M, ALL, [a100, a200, three[2].save(250)])],
        tries(three[2].save(250), M, **NOT_DECIDED),
    ),
]


def all_went_wrong(save: Saved, result: Result, place: str = "disk") -> list[Outcome]:
    return [went_wrong(save, place, result)]


THEN = [
    Case(
        "if the earlier one is broken, the quarantined one is tried, and nothing is decided",
        [here()],
        tries(a200, says="step 100 cannot be loaded", **NOT_DECIDED),
        tried=all_went_wrong(a100, Result.BROKEN),
    ),
    Case(
        "another copy of the earlier one comes first",
        [here(), at_m],
        tries(a100, M, says=BACK, **DECIDED),
        tried=all_went_wrong(a100, Result.UNREADABLE),
    ),
    *(
        Case(f"{result.value}: nobody waits for the earlier one", [here()], tries(a200, says="cannot be"), tried=tried)
        for result in (Result.UNREADABLE, Result.NOT_BROUGHT, Result.OTHER_RANKS)
        for tried in [all_went_wrong(a100, result)]
    ),
    Case(
        "without room for it there is a rotation first",
        [here(a200), at_m],
        makes_room(a100, M),
        tried=all_went_wrong(a100, Result.NO_ROOM, M),
    ),
    Case(
        "and then the quarantined one",
        [here(a200), at_m],
        tries(a200, says="cannot be", **NOT_DECIDED),
        tried=[went_wrong(a100, M, Result.NO_ROOM), went_wrong(a100, M, Result.STILL_FULL)],
    ),
    Case(
        "once a rank has loaded a part of the earlier one, only that is tried",
        [here()],
        refuses(IntegrityError, f"save {a100.id[:8]}"),
        tried=all_went_wrong(a100, Result.TOUCHED),
    ),
    Case(
        "if both are broken, an older one is tried",
        [here(a.save(50), a100, a200)],
        tries(a.save(50), says="bit flipped", **DECIDED),
        tried=[went_wrong(a100, "disk", Result.BROKEN), went_wrong(a200, "disk", Result.BROKEN)],
    ),
    Case(
        "but not while the earlier one may be fetched later",
        [here(a.save(50), a200), mirror(M, ALL, [a.save(50), a100, a200])],
        refuses(Temporary, "step 100"),
        tried=[
            went_wrong(a100, M, Result.NOT_BROUGHT),
            went_wrong(a200, "disk", Result.BROKEN),
            went_wrong(a200, M, Result.BROKEN),
        ],
    ),
]


@pytest.mark.parametrize("case", [*CASES, *THEN], ids=lambda case: case.name)
def test_a_start_after_three_that_failed(case: Case) -> None:
    case.check()


def test_after_it_went_back_the_lineage_has_moved_and_nothing_more_is_said() -> None:
    back = by("back", 4, after=a100, person=True)
    Case("", [here(lists=[*ALL, back])], tries(a100, says="is whole and superseded", by_person=False)).check()
