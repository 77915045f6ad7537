"""What a start does with copies that are broken, missing, in the way or out of order, where every place answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptmirror.core.errors import (
    CheckpointNotFound,
    IntegrityError,
    LocalStorageFull,
    NotAuthorised,
    RefusedOnlyCopy,
    StoreTemporary,
    Temporary,
    UsageError,
)
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.decide import Result, Wish
from ckptmirror.core.start.evidence import ANYWHERE, Origin
from tests.unit.core.start.builders import (
    BOTH,
    KEPT,
    OTHER_RUN,
    THERE,
    Case,
    M,
    N,
    O,
    broken,
    by,
    disk,
    kept,
    makes_room,
    mirror,
    refuses,
    silent,
    step_0,
    together,
    tries,
    went_wrong,
)

a = by("a", 0)
a100, a200, a300 = (a.save(step, *BOTH) for step in (100, 200, 300))
first, second, third = a.save(200, *BOTH, number=1), a.save(200, *BOTH, number=2), a.save(200, number=3)
left = a.save(250, "emergency")
by_two = replace(left, ranks=2)
c = by("c", 1, after=a100, person=True, needs=(M,))
older, newer = by("older", 1, after=a100), by("newer", 2, after=a100)
c150 = c.save(150)
unreadable = broken(a200, "Input/output error", hindrance="unreadable")

ORDER = [
    Case("the newest save first, in kind dcp", [disk([a], saved=[a100, a200])], tries(a200, kind="dcp")),
    Case(
        "steps are ordered as numbers",
        [disk([a], saved=[a.save(1_000_000), a.save(999_999)])],
        tries(a.save(1_000_000)),
    ),
    Case(
        "then its model",
        [disk([a], saved=[a100, a200])],
        tries(a200, kind="model", says="a bit flipped"),
        tried=[went_wrong(a200, "disk", Result.BROKEN)],
    ),
    Case(
        "a copy on a mirror comes before another kind on the disk",
        [disk([a], saved=[a100, a200]), mirror(M, [a], [a200])],
        tries(a200, M, "dcp", says="a bit flipped"),
        tried=[went_wrong(a200, "disk", Result.BROKEN)],
    ),
    Case(
        "the mirrors come in configured order, the persistent directory last",
        [disk([a]), mirror(N, [a], [left]), mirror(M, [a], [left]), kept(left)],
        tries(left, KEPT, says="a bit flipped"),
        tried=[went_wrong(left, place, Result.BROKEN, "emergency") for place in (N, M)],
    ),
    Case(
        "what all places have together comes after each of them",
        [disk([a], saved=[a100, a200]), mirror(M, [a], [a200]), together(a100, a200)],
        tries(a200, ANYWHERE, "dcp", says="a bit flipped"),
        tried=[went_wrong(a200, place, Result.BROKEN) for place in ("disk", M)],
    ),
    Case(
        "and before an older save, where no place has it whole",
        [disk([a], saved=[a100], damaged=[broken(a200)]), mirror(M, [a], [a100]), together(a100, a200)],
        tries(a200, ANYWHERE, needs_all=True, by_person=False),
    ),
    Case(
        "a copy here whose repair was cut short comes after the mirrors'",
        [disk([a], saved=[replace(a200, unfinished=True)]), mirror(M, [a], [a200])],
        tries(a200, M),
    ),
    Case(
        "an emergency snapshot that is newer than the newest save",
        [disk([a], saved=[a200, left])],
        tries(left, kind="emergency"),
    ),
    Case(
        "of one step the newer of a save and a snapshot",
        [disk([a], saved=[a.save(250, number=999), left])],
        tries(a.save(250, number=999), kind="dcp"),
    ),
    Case("the later of two saves of one step", [disk([a], saved=[first, second])], tries(second)),
    Case(
        "then the one that it replaced, before an older step",
        [disk([a], saved=[a100, second, third])],
        tries(second, kind="dcp", says=f"save {second.id[:8]}, which it replaced, is tried"),
        tried=[went_wrong(third, "disk", Result.BROKEN), went_wrong(second, "disk", Result.BROKEN, "model")],
    ),
    Case(
        "a replaced save of a later attempt is newer whatever its number",
        [disk([a, by("b", 1, after=second)], saved=[second, by("b", 1, after=second).save(200, number=1)])],
        tries(second, says="replaced"),
        tried=[went_wrong(by("b", 1, after=second).save(200, number=1), "disk", Result.BROKEN)],
        wish=Wish(kind="dcp"),
    ),
]

REFERENCES = [
    Case("a step", [disk([a], saved=[a100, a200])], tries(a100, by_person=True, needs_all=True), Wish(100)),
    Case("the first digits of a save id", [disk([a], saved=[a100, a200])], tries(a100), Wish(a100.id[:8])),
    Case(
        "the latest is nobody's choice of a save",
        [disk([a], saved=[a200])],
        tries(a200, by_person=False),
        Wish("latest"),
    ),
    Case(
        "a kind is never replaced by another",
        [disk([a], saved=[a200.only("dcp")])],
        refuses(CheckpointNotFound, "There is no whole save 200"),
        Wish(200, kind="model"),
    ),
    Case(
        "latest of an empty root is an error and no start at step 0",
        [disk()],
        refuses(CheckpointNotFound, "There is no whole save 'latest'"),
        Wish("latest"),
    ),
    Case(
        "a step that is missing names the nearest",
        [disk([a], saved=[a.save(step) for step in (1, 2, 5, 9, 50, 60)])],
        refuses(CheckpointNotFound, "There is no save of step 7. The nearest are 1, 2, 5, 9", "ckptmirror ls"),
        Wish(7),
    ),
    *(
        Case(
            f"{word!r} is not a reference",
            [disk([a], saved=[a100])],
            refuses(UsageError, "neither a step", "ckptmirror ls"),
            Wish(word),
        )
        for word in ("newest", "abc", "000100", "dcp_000100", "DEADBEEF")
    ),
    Case(
        "a save id that nothing begins with",
        [disk([a], saved=[a100])],
        refuses(CheckpointNotFound, "No whole save has an id that starts with 0123456789"),
        Wish("0123456789"),
    ),
    Case(
        "the id of a save that is not whole says why",
        [disk([a], saved=[a100], damaged=[broken(a200, "extra_000200_rank0.pt is missing")])],
        refuses(CheckpointNotFound, "meta_000200.json is not whole: extra_000200_rank0.pt is missing"),
        Wish(a200.id[:10]),
    ),
    Case(
        "the id of a save that cannot be read now may be whole later",
        [disk([a], saved=[a100], damaged=[unreadable])],
        refuses(Temporary, "Input/output error"),
        Wish(a200.id[:10]),
    ),
]

BROKEN = [
    Case(
        "a save that is broken everywhere gives way to the older one, and that is said",
        [disk([a], saved=[a100, a200.only("dcp")]), mirror(M, [a], [a100])],
        tries(a100, says=f"step 200 (save {a200.id[:8]}, disk): a bit flipped"),
        tried=[went_wrong(a200, "disk", Result.BROKEN)],
    ),
    Case(
        "which is a decision, for a save that looks whole is left behind: every required mirror takes it down",
        [disk([a], saved=[a100, a200.only("dcp")]), mirror(M, [a], [a100])],
        tries(a100, says="step 200", by_person=True, needs_all=True),
        tried=[went_wrong(a200, "disk", Result.BROKEN)],
    ),
    Case(
        "so the next start goes on from what was saved after it",
        [disk([a, c], saved=[a100, a200, c150], completed=[c]), mirror(M, [a, c], [a100, a200])],
        tries(c150, says="step 200"),
    ),
    Case(
        "a save that is not whole anywhere is passed by loudly",
        [disk([a], saved=[a100], damaged=[broken(a200, "extra_000200_rank0.pt is missing")])],
        tries(a100, says="step 200 (meta_000200.json): extra_000200_rank0.pt is missing"),
    ),
    Case(
        "one that a mirror has whole is brought from there without a word",
        [disk([a], saved=[a100], damaged=[broken(a200, readable=False)]), mirror(M, [a], [a200])],
        tries(a200, M),
    ),
    Case(
        "once training went on without it, it is older",
        [disk([a, by("b", 1, after=a100)], saved=[a100, by("b", 1, after=a100).save(150)], damaged=[broken(a200)])],
        tries(by("b", 1, after=a100).save(150)),
    ),
    Case(
        "a meta that cannot be read now is an error that may pass",
        [disk([a], saved=[a100], damaged=[unreadable])],
        refuses(Temporary, "meta_000200.json cannot be read now: Input/output error", "policy=<step>"),
    ),
    Case(
        "and so it is for latest, which an empty lineage asks for",
        [disk([a], damaged=[unreadable])],
        refuses(Temporary, "cannot be read now"),
        Wish("latest"),
    ),
    Case(
        "and for that step",
        [disk([a], saved=[a100], damaged=[unreadable])],
        refuses(Temporary, "cannot be read now"),
        Wish(200),
    ),
    Case(
        "a mirror that does not accept these credentials for it says so",
        [disk([a], saved=[a100]), mirror(M, [a], [a100], damaged=[broken(a200, "403", hindrance="refused")])],
        refuses(NotAuthorised, "403"),
    ),
    Case(
        "nothing waits for what an optional mirror cannot read",
        [disk([a], saved=[a100]), mirror(O, [a], [a100], damaged=[broken(a200, "403", hindrance="refused")])],
        tries(a100, says="403"),
    ),
    Case("a person may go back past it", [disk([a], saved=[a100], damaged=[unreadable])], tries(a100), Wish(100)),
    Case(
        "an older save that cannot be read does not block",
        [disk([a], saved=[a300], damaged=[unreadable])],
        tries(a300),
    ),
    Case(
        "a save that retention removed from a mirror is missed by nobody",
        [disk([a], saved=[a100], damaged=[broken(a200, "its meta is gone")]), mirror(M, [a], [a100], removed=[a200])],
        tries(a100),
    ),
    Case(
        "a named step whose newer save is not whole says so",
        [disk([a], saved=[first, a300], damaged=[broken(second)])],
        tries(first, says="step 200 (meta_000200.json): torn", by_person=True),
        Wish(200),
    ),
    Case(
        "what lies in the place and names no step is passed by loudly",
        [disk([a], saved=[a100], damaged=[(replace(broken(a200)[0], step=None, save_id="", save=None), a.attempt)])],
        tries(a100, says="meta_000200.json: torn"),
    ),
]

TRIED = [
    Case(
        "after a half load only another copy of the same save is tried",
        [disk([a], saved=[a100, a200]), mirror(M, [a], [a200])],
        tries(a200, M, says="a bit flipped"),
        tried=[went_wrong(a200, "disk", Result.TOUCHED)],
    ),
    Case(
        "and then nothing",
        [disk([a], saved=[a100, a200.only("dcp")])],
        refuses(IntegrityError, f"No copy of save {a200.id[:8]} could be loaded: step 200", "a bit flipped"),
        tried=[went_wrong(a200, "disk", Result.TOUCHED)],
    ),
    Case(
        "bytes that a rank cannot read now do not set training back",
        [disk([a], saved=[a100, a200.only("dcp")])],
        refuses(Temporary, "The copy of step 200 cannot be read now: a bit flipped", "policy=<step>"),
        tried=[went_wrong(a200, "disk", Result.UNREADABLE)],
    ),
    Case(
        "nor to the save that it replaced, where a person named the step",
        [disk([a], saved=[first.only("dcp"), second.only("dcp")])],
        refuses(Temporary, "cannot be read now"),
        Wish(200),
        [went_wrong(second, "disk", Result.UNREADABLE)],
    ),
    Case(
        "a copy that cannot be fetched now gives way to another copy of it",
        [disk([a]), mirror(M, [a], [a100, a200]), mirror(N, [a], [a100, a200])],
        tries(a200, N, says="cannot be fetched now: a bit flipped"),
        tried=[went_wrong(a200, M, Result.NOT_BROUGHT, error=StoreTemporary("503"))],
    ),
    Case(
        "and never to an older save",
        [disk([a], saved=[a100]), mirror(M, [a], [a100, a200.only("dcp")])],
        refuses(StoreTemporary, "the download was cut off"),
        tried=[went_wrong(a200, M, Result.NOT_BROUGHT, error=StoreTemporary("the download was cut off"))],
    ),
    Case(
        "a disk that is full makes room",
        [disk([a], saved=[a100]), mirror(M, [a], [a200])],
        makes_room(a200, M),
        tried=[went_wrong(a200, M, Result.NO_ROOM, error=LocalStorageFull())],
    ),
    Case(
        "and tries again",
        [disk([a], saved=[a100]), mirror(M, [a], [a200])],
        tries(a200, M),
        tried=[went_wrong(a200, M, result) for result in (Result.NO_ROOM, Result.MADE_ROOM)],
    ),
    Case(
        "once",
        [disk([a], saved=[a100]), mirror(M, [a], [a200.only("dcp")])],
        refuses(LocalStorageFull),
        tried=[
            went_wrong(a200, M, result, error=LocalStorageFull())
            for result in (Result.NO_ROOM, Result.MADE_ROOM, Result.NO_ROOM)
        ],
    ),
    Case(
        "where no room can be made nothing older is taken",
        [disk([a], saved=[a100]), mirror(M, [a], [a200.only("dcp")])],
        refuses(LocalStorageFull),
        tried=[went_wrong(a200, M, r, error=LocalStorageFull()) for r in (Result.NO_ROOM, Result.STILL_FULL)],
    ),
    Case(
        "a named save of which no copy can be loaded is an error",
        [disk([a], saved=[a100, a200.only("dcp")])],
        refuses(IntegrityError, "No copy of 200 could be loaded", "a bit flipped"),
        Wish(200),
        [went_wrong(a200, "disk", Result.BROKEN)],
    ),
    Case(
        "broken saves alone are no reason for step 0",
        [disk([a], saved=[a200.only("dcp")])],
        refuses(RefusedOnlyCopy, "step 0 is never a silent fallback", "a bit flipped"),
        tried=[went_wrong(a200, "disk", Result.BROKEN)],
    ),
]

SNAPSHOTS = [
    Case(
        "a snapshot that another number of ranks took is tried, for they may be able to load it",
        [disk([a], saved=[a100, by_two])],
        tries(left, kind="emergency"),
    ),
    Case(
        "a snapshot that only two ranks can load is not left behind by one",
        [disk([a], saved=[a100, by_two])],
        refuses(RefusedOnlyCopy, "step 250, in which each of 2 ranks", "this start has 1", "Start with 2 ranks"),
        tried=[went_wrong(left, "disk", Result.OTHER_RANKS, "emergency")],
    ),
    Case(
        "unless a save of the same step can be loaded",
        [disk([a], saved=[a.save(250, number=240), by_two])],
        tries(a.save(250, number=240), kind="dcp", says="step 250"),
        tried=[went_wrong(left, "disk", Result.OTHER_RANKS, "emergency")],
    ),
    Case(
        "or a person goes back",
        [disk([a], saved=[a100, by_two])],
        tries(a100, by_person=True),
        Wish(100),
    ),
    Case(
        "one that a person names and these ranks cannot load is an error that says who can",
        [disk([a], saved=[a100, by_two])],
        refuses(RefusedOnlyCopy, "Start with 2 ranks"),
        Wish(left.id),
        [went_wrong(left, "disk", Result.OTHER_RANKS, "emergency")],
    ),
    Case(
        "a snapshot of this run comes from the persistent directory",
        [disk([a], saved=[a100]), mirror(M, [a], [a100]), kept(left)],
        tries(left, KEPT),
    ),
    Case(
        "of another run it is left alone",
        [disk([a], saved=[a100]), kept(by("other", 7).save(900, "emergency"), run=OTHER_RUN)],
        tries(a100, says="snapshots of another run"),
    ),
    Case(
        "a broken one of another run does not block a new run that has its list",
        [disk([a]), kept(damaged=[broken(by("other", 7).save(900, "emergency"))], run=OTHER_RUN)],
        step_0(),
    ),
    Case(
        "one that cannot be read and names no run may be of this one",
        [
            disk([a], saved=[a100]),
            kept(damaged=[broken(left, "EIO", readable=False, hindrance="unreadable")], run=None),
        ],
        refuses(Temporary, "cannot be read now: EIO"),
    ),
    Case(
        "a start follows the lineage and not the newest snapshot",
        [disk([a, by("b", 1, after=a100, person=True, needs=())], saved=[a100]), kept(left)],
        tries(a100, says="step 250"),
    ),
    Case(
        "while no place but the persistent directory names a run a person tells whose the snapshot is",
        [disk(), mirror(M), kept(left)],
        refuses(RefusedOnlyCopy, "snapshot of step 250", f"policy='{left.id[:8]}'", "force=True"),
    ),
    Case("and then it is of that run", [disk(), mirror(M), kept(left)], tries(left, KEPT), Wish(left.id[:8])),
    Case(
        "a step does not tell whose it is",
        [disk(), mirror(M), kept(left)],
        refuses(RefusedOnlyCopy, "whether it is of this run"),
        Wish(250),
    ),
    Case("without any mirror a single run there is this one", [disk(), kept(left)], tries(left, KEPT)),
    Case(
        "and a start over leaves it behind only with force as well",
        [disk(), kept(left)],
        refuses(RefusedOnlyCopy, "step 250"),
        Wish("scratch"),
    ),
    Case(
        "of two runs there nobody can tell",
        [disk(), kept(left), kept(by("other", 5).save(900, "emergency"), run=OTHER_RUN)],
        refuses(RefusedOnlyCopy, "snapshot of step 900"),
    ),
    Case(
        "a start over leaves it behind only with force",
        [disk(), mirror(M), kept(left)],
        refuses(RefusedOnlyCopy, "step 250", "force=True"),
        Wish("scratch"),
    ),
    Case(
        "which is a person's decision",
        [disk(), mirror(M), kept(left)],
        step_0(by_person=True),
        Wish("scratch", force=True),
    ),
    Case(
        "with a mirror that tells of the run they are told apart",
        [disk(), mirror(M, [a], [a100]), kept(left), kept(by("other", 0).save(900, "emergency"), run=OTHER_RUN)],
        tries(left, KEPT, says="snapshots of another run"),
    ),
    Case(
        "a snapshot of a run whose mirror is silent is not continued from on a new disk until the mirror answers",
        [disk(), silent(M), kept(left)],
        refuses(StoreTemporary, "snapshot of step 250", "whether it is of this run", "forget-mirror --url file:///m"),
    ),
    Case(
        "nor while an optional mirror is, unless a person says so",
        [disk(), mirror(M), silent(O), kept(left)],
        refuses(StoreTemporary, "file:///optional does not answer", f"policy='{left.id[:8]}'"),
    ),
    Case(
        "also where it refuses the credentials",
        [disk(), mirror(M), silent(O, reach=Reach.REFUSED), kept(left)],
        refuses(NotAuthorised, "does not accept", f"policy='{left.id[:8]}'"),
    ),
    Case(
        "which names it",
        [disk(), mirror(M), silent(O), kept(left)],
        tries(left, KEPT, says="does not answer"),
        Wish(left.id[:8]),
    ),
    Case(
        "what this root made is put together from its disks while the mirror is silent",
        [disk([a], saved=[a100], damaged=[broken(a200)]), silent(M), together(a200, origin=Origin.SAVED_HERE)],
        tries(a200, ANYWHERE, says="does not answer"),
    ),
    Case(
        "of two attempts that no mirror has a save of the newer counts, though some of its parts are on a mirror alone",
        [
            disk([a, older, newer], saved=[older.save(200)]),
            mirror(M, [a, newer], [a100]),
            together(newer.save(300), committed=[newer]),
        ],
        tries(newer.save(300), ANYWHERE),
    ),
    Case(
        "and what another made is not",
        [disk([a], saved=[a100], damaged=[broken(a200)]), silent(M), together(a200)],
        refuses(StoreTemporary, "Step 200, the newest that can be seen, is not on this disk"),
    ),
    Case(
        "what another root left there is not continued from while the mirror is silent",
        [disk([a], saved=[a100]), silent(M), kept(by("b", 1, after=a100, root=THERE).save(250, "emergency"))],
        refuses(StoreTemporary, "Step 250, the newest that can be seen, is not on this disk"),
    ),
]


@pytest.mark.parametrize("case", [*ORDER, *REFERENCES, *BROKEN, *TRIED, *SNAPSHOTS], ids=lambda case: case.name)
def test_where_every_place_answers(case: Case) -> None:
    case.check()


def test_what_is_said_first_does_not_depend_on_the_order_of_a_listing() -> None:
    other = broken(a300, "EIO", hindrance="unreadable")
    for damaged in ([unreadable, other], [other, unreadable]):
        Case(
            "", [disk([a], saved=[a100], damaged=damaged)], refuses(Temporary, "meta_000200.json cannot be read")
        ).check()


def test_an_ambiguous_id_is_an_error() -> None:
    one, other = (replace(a100, facts=replace(a100.facts, save_id="1234567890" + end * 22)) for end in "ab")
    other = replace(other, facts=replace(other.facts, number=2))
    want = refuses(UsageError, "2 save ids start with 1234567890")
    Case("", [disk([a], saved=[one, other])], want, Wish("1234567890")).check()
