"""When a start may begin at step 0, and what the lists, whole or lost, have to say before it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    ConfigError,
    NewerFormat,
    RefusedOnlyCopy,
    StoreTemporary,
)
from ckptmirror.core.start.decide import Wish
from ckptmirror.core.start.evidence import ListFound, Problem
from tests.unit.core.start.builders import (
    OTHER_RUN,
    THERE,
    Case,
    M,
    N,
    O,
    broken,
    by,
    disk,
    dropped,
    mirror,
    refuses,
    silent,
    step_0,
    tries,
)

SCRATCH, FORCED = Wish("scratch"), Wish("scratch", force=True)
a = by("a", 0)
a100, a200, a300 = (a.save(step) for step in (100, 200, 300))
b = by("b", 1, after=a100)
over = by("over", 1, person=True, needs=(M,))
rewind = by("rewind", 1, after=a100, person=True, needs=(M,))
theirs = by("theirs", 1, after=a100, root=THERE)
alone = by("alone", 2, after=a100)
t300 = theirs.save(300)
theirs_first = by("theirs first", 0, root=THERE)
meanwhile = by("meanwhile", 1, after=theirs_first.save(100))
over_there = by("over there", 1, root=THERE, person=True, needs=(M, N))
loose = (Problem("dcp_000002", "no valid meta names it", 2, is_save=False), a.attempt)
torn_list = replace(disk(None, saved=[a100]), listed=ListFound.BROKEN, why="attempts.json is torn")

FRESH = [
    Case("an empty place", [disk()], step_0()),
    Case("an empty place with mirrors", [disk(), mirror(M), mirror(O)], step_0()),
    Case("a list of attempts that never saved", [disk([a]), mirror(M, [a])], step_0()),
    Case("a silent required mirror", [disk(), silent(M)], refuses(StoreTemporary, "step 0 might fork the run", M)),
    Case("a silent optional mirror", [disk(), mirror(M), silent(O)], refuses(StoreTemporary, "fork the run", O)),
    Case("a mirror that is no longer configured", [disk(), mirror(N), dropped(M)], refuses(StoreTemporary, M)),
    Case(
        "one that never counted and is no longer configured",
        [disk(), mirror(N), dropped(M, was_required=False)],
        step_0(),
    ),
    Case("a broken meta", [disk(damaged=[broken(a100, "bad checksum")])], refuses(RefusedOnlyCopy, "bad checksum")),
    Case(
        "a broken meta, even after a decided start over",
        [disk([over], damaged=[broken(a100, "bad checksum", readable=False)], completed=[over])],
        refuses(RefusedOnlyCopy, "bad checksum"),
    ),
    Case(
        "an attempt that died before its first save does not undo a start from scratch",
        [
            disk([theirs_first, meanwhile], saved=[theirs_first.save(100)]),
            mirror(M, [theirs_first, over_there], [theirs_first.save(100)]),
            mirror(N, [theirs_first, over_there], [theirs_first.save(100)]),
        ],
        step_0(says="elsewhere was started from scratch; it leaves 1 saves behind, up to step 100"),
    ),
    Case(
        "an attempt continued from a save that no place has",
        [disk(), mirror(M, [theirs_first, meanwhile]), mirror(N, [theirs_first])],
        refuses(RefusedOnlyCopy),
    ),
    Case("files that no meta names", [disk(damaged=[loose])], refuses(RefusedOnlyCopy, "no valid meta names it")),
    Case(
        "a mirror that lost its metas",
        [disk(), mirror(M, damaged=[loose])],
        refuses(RefusedOnlyCopy, "dcp_000002: no valid meta names it", "policy='scratch', force=True"),
    ),
    Case(
        "a save of an attempt that no list names",
        [disk([a]), mirror(M, [a], [t300])],
        refuses(RefusedOnlyCopy, "no list names its attempt"),
    ),
    Case(
        "an emptied mirror whose list proves that there were saves",
        [disk(), mirror(M, [a, by("b", 1, after=a200)])],
        refuses(RefusedOnlyCopy, "attempt 1", "continued from step 200", "force=True"),
    ),
    Case(
        "a mirror from which retention removed all there was",
        [disk(), mirror(M, [a], removed=[a100])],
        refuses(RefusedOnlyCopy, "attempt 0", "has saved, but nothing of it is left"),
    ),
    Case(
        "a decided start over leaves superseded saves behind, whole or not",
        [disk([a, over], saved=[a100], damaged=[broken(a200)], completed=[over]), mirror(M, [a, over], [a100])],
        step_0(),
    ),
    Case(
        "but not what was saved after it",
        [disk([a, over], saved=[a100], completed=[over]), mirror(M, [a, over], removed=[over.save(10)])],
        refuses(RefusedOnlyCopy, "has saved, but nothing of it is left"),
    ),
    Case(
        "of two first attempts that ran at once the saves of the other do not go without a word",
        [disk(), mirror(M, [a, by("c", 1, root=THERE)], [a100], removed=[by("c", 1, root=THERE).save(50)])],
        refuses(RefusedOnlyCopy, "step 100"),
    ),
]

ASKED = [
    Case("a start over where nothing was saved", [disk(), mirror(M)], step_0(), SCRATCH),
    Case(
        "after an attempt that never saved it is a decision",
        [disk([a]), mirror(M, [a])],
        step_0(by_person=True),
        SCRATCH,
    ),
    Case(
        "saves are not left behind without force",
        [disk([a], saved=[a100, a200])],
        refuses(RefusedOnlyCopy, "step 100; step 200", "force=True"),
        SCRATCH,
    ),
    Case("nor damaged ones", [disk(damaged=[broken(a100)])], refuses(RefusedOnlyCopy, "torn"), SCRATCH),
    Case("nor superseded ones", [disk([over, a], saved=[a100])], refuses(RefusedOnlyCopy, "step 100"), SCRATCH),
    Case("they are with force", [disk([a], saved=[a100]), mirror(M)], step_0(by_person=True), FORCED),
    Case(
        "force does not stand in for a mirror that does not answer",
        [disk([a], saved=[a100]), silent(O)],
        refuses(StoreTemporary, "A start over needs the answer of every mirror", O),
        FORCED,
    ),
]

LISTS = [
    Case(
        "a list lost on the mirror is rebuilt from its metas",
        [disk(), mirror(M, None, [a100, a200])],
        tries(a200, M, says=f"{M} had no list of attempts, so it was rebuilt"),
    ),
    Case(
        "one lost on the disk is taken from the mirror",
        [disk(None, saved=[a100, a200]), mirror(M, [a, rewind], [a100, a200])],
        tries(a100, says="is whole and superseded", needs_all=True),
    ),
    Case(
        "a rewind that went with a lost list is missed loudly",
        [disk(None, saved=[a100, a200])],
        tries(a200, says="if you rewound the run or started it over, and made no save after that, do so again"),
    ),
    Case(
        "a broken list of this root gives way to the mirrors'",
        [
            torn_list,
            mirror(M, [a], [a100]),
        ],
        tries(a100, says="disk had no list"),
    ),
    Case(
        "with no other it is an error that says what to do",
        [torn_list],
        refuses(BrokenMeta, "attempts.json is torn, and no mirror has a list", "Move it away"),
    ),
    Case(
        "a root that lost its list vouches for nothing",
        [disk(None, saved=[a100]), silent(M)],
        refuses(StoreTemporary, "may have come from elsewhere"),
    ),
    Case(
        "a list of a later version ends the start",
        [disk([a], saved=[a100]), mirror(M, listed=ListFound.NEWER, why="version 9")],
        refuses(NewerFormat, "version 9", "A newer ckptmirror wrote it"),
    ),
    Case(
        "a mirror of another run is refused",
        [disk([a], saved=[a100]), replace(mirror(M, [a]), run_id=OTHER_RUN)],
        refuses(ConfigError, "do not belong to one run", f"{M} holds run {OTHER_RUN[:8]}", "a root, a mirror prefix"),
    ),
    Case(
        "lists that contradict one another are refused",
        [disk([a], saved=[a100]), mirror(M, [by("a", 3)], [a100])],
        refuses(ConfigError, "has the numbers"),
    ),
    Case(
        "a save of an attempt that no list names is reported",
        [disk([a], saved=[a100]), mirror(M, [a], [a100, t300])],
        tries(a100, says=f"step 300 (save {t300.id[:8]}): no list names its attempt"),
    ),
    Case(
        "who names it takes its attempt in",
        [disk([a], saved=[a100]), mirror(M, [a], [a100, t300])],
        tries(t300, M, adopt=(theirs.attempt,), by_person=True),
        Wish(t300.id[:8]),
    ),
    Case(
        "and those before it",
        [disk(), mirror(M, [by("x", 9)], [a100, t300])],
        tries(t300, M, adopt=(theirs.attempt, a.attempt)),
        Wish(t300.id),
    ),
    Case(
        "a branch that ran apart from the mirrors is superseded",
        [disk([a, alone], saved=[a100, alone.save(150)]), mirror(M, [a, theirs], [a100, t300])],
        tries(t300, M, says="ran apart from the mirrors"),
    ),
    Case(
        "it is resumed by its id",
        [disk([a, alone], saved=[a100, alone.save(150)]), mirror(M, [a, theirs], [a100, t300])],
        tries(alone.save(150), by_person=True, says="ran apart"),
        Wish(alone.save(150).id),
    ),
    Case(
        "one that only continues what the mirrors have goes on",
        [disk([a, b], saved=[a100, b.save(150)]), mirror(M, [a], [a100])],
        tries(b.save(150)),
    ),
    Case(
        "a zombie's save is superseded, also if it is the newest step",
        [disk([a, b], saved=[a100, a300, b.save(150)]), mirror(M, [a, b], [a100, a300, b.save(150)])],
        tries(b.save(150), says="step 300"),
    ),
    Case(
        "and named wherever it is",
        [disk([a, b], saved=[b.save(150)]), mirror(M, [a, b], [a100, a300, b.save(150)])],
        tries(b.save(150), says="`ckptmirror rewind --save "),
    ),
    Case(
        "a step off the lineage is named with its id",
        [disk([a, b], saved=[a100, a300, b.save(150)]), mirror(M, [a, b], [a100, b.save(150)])],
        refuses(CheckpointNotFound, "Step 300 is off the lineage", a300.id[:8]),
        Wish(300),
    ),
]


@pytest.mark.parametrize("case", [*FRESH, *ASKED, *LISTS], ids=lambda case: case.name)
def test_step_0_and_lists(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(("earlier", "last"), [("one", "other"), ("other", "one")])
def test_of_the_branches_that_were_left_the_one_that_was_left_last_is_named(earlier: str, last: str) -> None:
    left = [by(earlier, 1, after=a100), by(last, 2, after=a100)]
    saved = [a100, *(one.save(200) for one in left)]
    back = by("back", 3, after=a100, person=True)
    found = tries(a100, says=f"continue from it with policy='{saved[-1].id[:8]}'")
    Case("", [disk([a, *left, back], saved=saved, completed=[back])], found).check()
