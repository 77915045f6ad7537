"""What a start does while a place does not answer: it goes on from what this root vouches for, or waits."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import CheckpointNotFound, NotAuthorised, StoreTemporary
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.decide import Result, Wish
from tests.unit.core.core_builders import required
from tests.unit.core.start.builders import (
    THERE,
    Case,
    M,
    N,
    O,
    broken,
    by,
    disk,
    dropped,
    kept,
    mirror,
    refuses,
    silent,
    tries,
    went_wrong,
)

a = by("a", 0)
a100, a200 = a.save(100), a.save(200)
theirs = by("theirs", 0, root=THERE)
t100, t200, t300 = theirs.save(100), theirs.save(200), theirs.save(300)
here_after_t200 = by("here after", 1, after=t200)
there_after_a200 = by("there after", 1, after=a200, root=THERE)
again = by("again", 1, after=a100)
again_there = by("again there", 1, after=t200, root=THERE)
here_after_t100 = by("here after", 2, after=t100)
h300 = here_after_t100.save(300)
torn = broken(again_there.save(300, "emergency"))
u300 = there_after_a200.save(300)

OUTAGES = [
    Case(
        "its own save is continued from while the only mirror is silent",
        [disk([a], saved=[a100, a200]), silent(M)],
        tries(a200, says=f"{M} does not answer (503): what only it holds was not seen", needs_all=False),
    ),
    Case(
        "a copy that somebody staged is not continued from while the mirror is silent",
        [disk(staged=[t200]), silent(M)],
        refuses(StoreTemporary, "There is nothing here to continue the run from", M),
    ),
    Case(
        "saves that somebody copied into a new root are not continued from while the mirror is silent",
        [disk(copied=[t200]), silent(M)],
        refuses(StoreTemporary, "may have come from elsewhere"),
    ),
    Case(
        "what an earlier start here continued from is continued from while the mirror is silent",
        [disk([a, by("again", 1, after=a200)], staged=[a200], completed=[by("again", 1, after=a200)]), silent(M)],
        tries(a200, says=M, needs_all=False),
    ),
    Case(
        "but not if that start's claim did not reach every required mirror",
        [disk([a, by("again", 1, after=a200)], staged=[a200]), silent(M)],
        refuses(StoreTemporary, "may have come from elsewhere"),
    ),
    Case(
        "nor if another root made it: that one may have saved again, as far as the lists of this root tell",
        [disk([theirs, here_after_t200], staged=[t200], completed=[here_after_t200]), silent(M)],
        refuses(StoreTemporary, "started elsewhere (attempt 0"),
    ),
    Case(
        "nothing older is brought from a mirror that lags behind a silent one",
        [disk(), silent(M), mirror(N, [theirs], [t100])],
        refuses(StoreTemporary, "Step 100, the newest that can be seen, is not on this disk", M),
    ),
    Case(
        "with every required mirror there the newest of them is brought",
        [disk(), mirror(M, [theirs], [t100, t200]), mirror(N, [theirs], [t100])],
        tries(t200, M, needs_all=True, by_person=False),
    ),
    Case(
        "a rival that is listed where somebody answers may have saved where nobody does",
        [disk([a], saved=[a200]), mirror(M, [a, there_after_a200], [a200]), silent(N)],
        refuses(StoreTemporary, "started elsewhere (attempt 1", "may since have saved", N),
    ),
    Case(
        "a rival of which only an attempt of this root heard is waited for too",
        [disk([a], saved=[a200], met=[there_after_a200]), silent(M)],
        refuses(StoreTemporary, "started elsewhere"),
    ),
    Case(
        "an attempt that an older list has as undecided is a rival too",
        [disk([a, by("undecided", 1, decided=False, root="")], saved=[a200]), silent(M)],
        refuses(StoreTemporary, "started elsewhere"),
    ),
    Case(
        "an older attempt of another root is a rival until a save of this root was committed after it",
        [disk([theirs, here_after_t200], saved=[here_after_t200.save(250)], staged=[t200]), silent(M)],
        refuses(StoreTemporary, "started elsewhere (attempt 0"),
    ),
    Case(
        "and then it is none",
        [
            disk(
                [theirs, here_after_t200],
                saved=[here_after_t200.save(250)],
                staged=[t200],
                uploaded=[here_after_t200],
            ),
            silent(M),
        ],
        tries(here_after_t200.save(250), says=M),
    ),
    Case(
        "a save brought from elsewhere keeps an older one of this root from being continued from",
        [disk([a, there_after_a200], saved=[a200], staged=[u300]), silent(M)],
        refuses(StoreTemporary, "started elsewhere"),
    ),
    Case(
        "an attempt that is known to have saved on the silent mirror is not taken for one that never saved",
        [disk([a, again], saved=[a100], staged=[again.save(200)], uploaded=[again]), silent(M)],
        refuses(StoreTemporary, "Step 200, the newest that can be seen, may have come from elsewhere", M),
    ),
    Case(
        "an own save on a silent optional mirror is not given up for an earlier attempt's emergency snapshot",
        [
            disk([theirs, again_there, here_after_t100], saved=[h300], staged=[t100], uploaded=[here_after_t100]),
            mirror(M, [theirs, again_there, here_after_t100], [t100]),
            silent(O),
            kept(again_there.save(250, "emergency")),
        ],
        tries(h300, says=O),
    ),
    Case(
        "a torn snapshot of an attempt does not stand in for what that attempt saved on a silent optional mirror",
        [disk(), mirror(M, [theirs, again_there], [t200]), silent(O), kept(damaged=[torn])],
        refuses(StoreTemporary, "started elsewhere (attempt 1", O),
    ),
    Case(
        "nor does a staged copy of one of its saves",
        [disk(staged=[again_there.save(300)]), mirror(M, [theirs, again_there], [t200]), silent(O)],
        refuses(StoreTemporary, "started elsewhere (attempt 1", O),
    ),
    Case(
        "a mirror that was taken out of the configuration is missed like a silent one",
        [disk([a], saved=[a200]), mirror(M, [a, there_after_a200], [a200]), dropped(N)],
        refuses(
            StoreTemporary, f"{N} is no longer configured", "configured again", f"ckptmirror forget-mirror --url {N}"
        ),
    ),
    Case(
        "it is named where this root goes on",
        [disk([a], saved=[a200]), mirror(M), dropped(N)],
        tries(a200, says=f"{N} is no longer configured: what only it holds was not seen"),
    ),
    Case(
        "a mirror that counted before and is optional now is missed where it may have what is broken here",
        [disk([a], saved=[a100], damaged=[broken(a200)]), silent(O, was_required=True), mirror(N)],
        refuses(StoreTemporary, "meta_000200.json is not whole (torn), and may be there", O),
    ),
    Case(
        "a required mirror that a list names and nobody configured is missed as well",
        [disk(), mirror(M, [theirs], [t100], requirements=required(M, N))],
        refuses(StoreTemporary, "is not on this disk", N),
    ),
    Case(
        "a mirror that does not accept the credentials is as silent as any, and the error says so",
        [disk(), silent(M, "403", reach=Reach.REFUSED)],
        refuses(NotAuthorised, "does not accept these credentials (403)"),
    ),
    Case(
        "an optional one that says no for good does not",
        [disk([a], saved=[a200]), mirror(M, [a], [a200]), silent(O, "no such bucket", reach=Reach.REFUSED)],
        tries(a200, says="no such bucket"),
    ),
]

OPTIONAL = [
    Case(
        "a silent optional mirror does not block a start of which it need not tell",
        [disk(), mirror(M, [theirs], [t100]), silent(O)],
        tries(t100, M, says=O, needs_all=True),
    ),
    Case(
        "but a newer attempt that nobody who answers has a save of may have saved there",
        [disk(), mirror(M, [theirs, by("b", 1, after=t100, root=THERE)], [t100]), silent(O)],
        refuses(StoreTemporary, "attempt 1", "may since have saved", O, "policy=<step>"),
    ),
    Case(
        "and the list that was restored to an older one may be whole there",
        [disk(), mirror(M, [theirs], [t100, by("b", 1, after=t100, root=THERE).save(200)]), silent(O)],
        refuses(StoreTemporary, "attempt 1", O),
    ),
    Case(
        "a snapshot of another root, beside which this one saved again, may be the run's as far as they tell there",
        [
            disk([a], saved=[a100, a200]),
            mirror(M, [a, by("b", 1, after=a100, root=THERE)]),
            silent(O),
            kept(by("b", 1, after=a100, root=THERE).save(300, "emergency")),
        ],
        refuses(StoreTemporary, "attempt 1", O),
    ),
    Case(
        "an attempt of this root that saved nothing has nothing there",
        [disk([a, by("b", 1, after=a100)], saved=[a100]), mirror(M, [a], [a100]), silent(O)],
        tries(a100, says=O),
    ),
    Case(
        "a broken newest save may be whole there",
        [disk([a], saved=[a100], damaged=[broken(a200)]), mirror(M, [a], [a100]), silent(O)],
        refuses(StoreTemporary, "meta_000200.json is not whole", O, "policy=<step>"),
    ),
    Case(
        "a person may go back without it",
        [disk([a], saved=[a100], damaged=[broken(a200)]), mirror(M, [a], [a100]), silent(O)],
        tries(a100, says=O, by_person=True, needs_all=True),
        Wish(100),
    ),
]

PERSONS = [
    Case(
        "a person's choice needs every required mirror",
        [disk([a], saved=[a100, a200]), silent(M)],
        refuses(StoreTemporary, "A person's choice is recorded on every required mirror", M),
        Wish(100),
    ),
    Case(
        "a named step that a silent mirror may hold is an error that may pass",
        [disk([a], saved=[a100]), silent(M)],
        refuses(StoreTemporary, "There is no save of step 300", "It may be there", M),
        Wish(300),
    ),
    Case(
        "a named step that no mirror has is an error",
        [disk([a], saved=[a100]), mirror(M, [a], [a100])],
        refuses(CheckpointNotFound, "There is no save of step 300. The nearest is 100."),
        Wish(300),
    ),
    Case(
        "every start waits while nobody can tell whether a person's decision stands",
        [
            disk([a], saved=[a100, a200]),
            mirror(M, [a, by("rewind", 1, after=a100, root=THERE, person=True, needs=(M, N))], [a200]),
            silent(N),
        ],
        refuses(StoreTemporary, "A person decided where the run continues (attempt 1", N),
    ),
    Case(
        "it counts once every mirror that it needed lists it",
        [
            disk([a], saved=[a100, a200]),
            *(
                mirror(m, [a, by("rewind", 1, after=a100, root=THERE, person=True, needs=(M, N))], [a100, a200])
                for m in (M, N)
            ),
        ],
        tries(a100, says="step 200"),
    ),
    Case(
        "on one of two it does not count, and the others' list of it is passed by",
        [
            disk([a], saved=[a100, a200]),
            mirror(M, [a, by("rewind", 1, after=a100, root=THERE, person=True, needs=(M, N))], [a100, a200]),
            mirror(N, [a], [a100, a200]),
        ],
        tries(a200),
    ),
    Case(
        "this root's own decision counts while the mirror is silent, for it completed it",
        [
            disk(
                [a, by("rewind", 1, after=a100, person=True, needs=(M,))],
                saved=[a100, a200],
                completed=[by("rewind", 1, after=a100, person=True, needs=(M,))],
            ),
            silent(M),
        ],
        tries(a100, says="ckptmirror rewind --save"),
    ),
]

BROKEN_WHILE_SILENT = [
    Case(
        "a broken newest copy is not left behind while a required mirror is silent",
        [disk([a], saved=[a100, a200]), silent(M)],
        refuses(StoreTemporary, "The copy of step 200 is broken (a bit flipped)", "may be there", M),
        tried=[went_wrong(a200, "disk", Result.BROKEN)],
    ),
    *(
        Case(
            f"a save that is not whole is waited for while the mirror is silent: {what}",
            [disk([a], saved=[a100], damaged=[broken(a200, what, readable=readable)]), silent(M)],
            refuses(StoreTemporary, f"meta_000200.json is not whole ({what}), and may be there", M),
        )
        for what, readable in (("cut short", True), ("bad checksum", False))
    ),
    Case(
        "older and unfinished things do not block while the mirror is silent",
        [disk([a], saved=[a200], damaged=[broken(a100)]), silent(M)],
        tries(a200, says=M),
    ),
    Case(
        "a broken emergency snapshot does not make a start wait for a mirror",
        [disk([a], saved=[a100], damaged=[broken(a.save(200, "emergency"))]), silent(M)],
        tries(a100, says="step 200"),
    ),
]


@pytest.mark.parametrize("case", [*OUTAGES, *OPTIONAL, *PERSONS, *BROKEN_WHILE_SILENT], ids=lambda case: case.name)
def test_while_a_place_does_not_answer(case: Case) -> None:
    case.check()
