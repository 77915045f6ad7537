"""Several disks as the one disk of a start: which saves are whole on them, what counts, and what can never be whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.errors import ConfigError
from ckptmirror.core.model import Attempt, Kind
from ckptmirror.core.problems import Hindrance
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.attempts import may_drain
from ckptmirror.core.start.decide import Try, Wish, next_move
from ckptmirror.core.start.disks import Torn, identity_of, never_whole, one_disk, seen_by_its_job, torn
from ckptmirror.core.start.evidence import (
    ANYWHERE,
    DISK,
    Copy,
    Evidence,
    Heard,
    ListFound,
    Origin,
    Part,
    Problem,
    Row,
    Voice,
    evidence_from_json,
    evidence_to_json,
)
from ckptmirror.core.start.lineage import SaveFacts
from tests.unit.core.core_builders import required
from tests.unit.core.start.start_rows import BOTH, HERE, place, ref, save

A = Attempt("A", 0, None, root=HERE)
BOTH_KINDS: tuple[Kind, ...] = ("dcp", "model")
ONE, TWO = (replace(save(name, step), kinds=BOTH_KINDS) for name, step in (("a1", 100), ("a2", 200)))


def part(facts: SaveFacts, share: int, of: int = 2, kinds: Sequence[Kind] = BOTH_KINDS, why: str = "") -> Part:
    return Part(facts, tuple(kinds), (share,), of, Origin.SAVED_HERE, f"node's {facts.save_id}.{share}", why)


def disk(*parts: Part, listed: ListFound = ListFound.SOUND, run: str | None = "run", by_person: bool = False) -> Row:
    heard = (Heard(replace(A, by_person=by_person), frozenset({Voice.CLAIMED})),) if run else ()
    return Row(DISK, "disk", listed=listed, run_id=run, requirements=required(*BOTH), heard=heard, parts=parts)


def held(row: Row) -> dict[str, tuple[Kind, ...]]:
    return {copy.save.save_id: copy.save.kinds for copy in row.copies}


def counts(row: Row) -> bool:
    return "A" in row.heard_as(Voice.COUNTS)


@given(
    of=st.integers(1, 4),
    lies=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sets(st.sampled_from(BOTH_KINDS))), max_size=12),
)
def test_a_save_is_whole_in_the_kinds_that_all_its_parts_have(of: int, lies: list[tuple[int, int, set[Kind]]]) -> None:
    """``lies``: on which disk, whose part, whole in which kinds. The order of the disks changes nothing."""
    lies = [one for one in lies if one[1] < of]
    rows = [
        disk(*(part(ONE, share, of, sorted(kinds)) for at, share, kinds in lies if at == number)) for number in range(4)
    ]
    there = {share for _, share, _ in lies}
    whole = {kind for kind in BOTH_KINDS if {share for _, share, kinds in lies if kind in kinds} == set(range(of))}
    for order in (rows, rows[::-1]):
        found = one_disk(order)
        assert set(held(found).get("a1", ())) == whole
        assert counts(found) == (there == set(range(of)))
        lacking = [kind for one in found.problems for kind in one.kinds]
        assert set(lacking) == (set(BOTH_KINDS) - whole if there else set())
        assert bool(found.parts) == (0 < len(there) < of)


def test_a_part_that_is_missing_is_named_by_its_node() -> None:
    (found,) = one_disk([disk(part(ONE, 0, 3)), disk()]).problems
    assert "3 nodes saved it, and no disk of this job has what nodes 1, 2 of those wrote" in found.why
    assert (found.step, found.save_id, found.save) == (100, "a1", ONE)


def test_a_torn_part_says_why_and_a_whole_copy_elsewhere_ends_the_problem() -> None:
    torn = [disk(part(ONE, 0)), disk(part(ONE, 1, kinds=("model",), why="a file is short"))]
    found = one_disk(torn)
    assert held(found) == {"a1": ("model",)}
    assert [(one.kinds, one.why) for one in found.problems] == [
        (("dcp",), "a file is short; in kind model it is whole")
    ]
    staged = replace(disk(), copies=(Copy(ONE, Origin.STAGED),))
    assert one_disk([*torn, staged]).problems == ()


def test_what_was_staged_in_the_place_of_a_part_is_the_jobs_own_while_it_has_another_part() -> None:
    staged = replace(disk(), copies=(Copy(ONE, Origin.STAGED),))
    beside_own = one_disk([staged, disk(part(ONE, 1))])
    assert ([copy.origin for copy in beside_own.copies], counts(beside_own)) == ([Origin.SAVED_HERE], True)
    of_others = replace(part(ONE, 1), origin=Origin.COPIED)
    for row in (disk(), disk(of_others), disk(part(TWO, 1)), staged):
        found = one_disk([staged, row])
        assert ([copy.origin for copy in found.copies], counts(found)) == ([Origin.STAGED], False)


def test_a_save_that_lost_a_kind_on_one_node_and_another_on_the_next_names_both() -> None:
    lost_model, lost_dcp = (
        part(ONE, 0, kinds=("dcp",), why="no weights"),
        part(ONE, 1, kinds=("model",), why="no shard"),
    )
    found = one_disk([disk(lost_model), disk(lost_dcp)])
    assert held(found) == {}
    assert {(one.name, one.kinds, one.why) for one in found.problems} == {
        (lost_model.name, ("model",), "no weights; so kind model is not whole"),
        (lost_dcp.name, ("dcp",), "no shard; so kind dcp is not whole"),
    }


def test_parts_that_are_torn_alike_are_counted() -> None:
    (found,) = one_disk([disk(part(ONE, share, 3, kinds=(), why=f"{share} is short")) for share in range(3)]).problems
    assert (found.kinds, found.why) == (BOTH_KINDS, "0 is short, and 2 more of its 3 parts are not whole")


@pytest.mark.parametrize(
    ("torn", "waits"),
    [
        ([(0, ("dcp",), "unreadable"), (1, ("model",), "")], True),  # in kind model it may be whole
        ([(0, ("dcp",), ""), (1, ("model",), "unreadable")], True),
        ([(0, ("dcp",), "unreadable"), (1, ("dcp",), ""), (1, (), "")], False),
        ([(0, (), "unreadable"), (1, (), "")], False),
        ([(0, (), "unreadable"), (0, (), ""), (1, BOTH_KINDS, "")], True),  # of two copies, one may be whole
        ([(0, (), ""), (0, (), "unreadable"), (1, BOTH_KINDS, "")], True),
    ],
)
def test_a_save_that_may_be_whole_in_a_kind_once_a_part_can_be_read_is_waited_for(
    torn: list[tuple[int, tuple[Kind, ...], Hindrance]], waits: bool
) -> None:
    parts = [replace(part(ONE, share, kinds=kinds, why="torn"), hindrance=found) for share, kinds, found in torn]
    found = one_disk([disk(one) for one in parts])
    assert any(one.hindrance for one in found.problems) is waits


def test_what_nodes_list_and_know_is_put_together() -> None:
    order = (ListFound.NEWER, ListFound.SOUND, ListFound.BROKEN, ListFound.LOST, ListFound.NONE)
    for first, second in itertools.combinations(order, 2):
        rows = [disk(listed=second), disk(listed=first, by_person=True)]
        for row in (one_disk(rows), one_disk(rows[::-1])):
            assert row.listed is first
            assert row.heard[0].attempt.by_person
    unlisted = replace(disk(run=None), listed=ListFound.NONE)
    assert one_disk([unlisted, disk(part(ONE, 0, 1))]).run_id == "run"
    assert one_disk([unlisted, disk(part(ONE, 0, 1))]).run_on == (1,)


def test_disks_of_two_runs_are_refused_by_node_and_run() -> None:
    with pytest.raises(ConfigError, match="node 0 holds run run; node 2 holds run other"):
        one_disk([disk(), disk(run=None), disk(run="other")])


def test_one_disk_alone_is_what_it_was() -> None:
    row = place(DISK, [A], [save("a1", 100)], uploaded="A", completed="A")
    row = replace(row, problems=(Problem("x", "broken"),))
    assert one_disk([row]) == row


def test_a_job_is_the_same_root_only_on_the_same_disks() -> None:
    assert identity_of(["one"]) == "one"
    assert identity_of(["one", "two"]) == identity_of(["two", "one"])
    others = [["one"], ["two"], ["one", "three"], ["one", "two", "three"]]
    assert len({identity_of(roots) for roots in [*others, ["one", "two"]]}) == 5
    assert identity_of(["one", ""]) == ""


def test_a_drain_on_one_node_takes_the_attempts_of_the_jobs_that_this_root_was_one_of_for_its_own() -> None:
    silent = replace(place(BOTH[1], [A], []), reach=Reach.SILENT)
    seen = Evidence((disk(part(TWO, 0)), place(BOTH[0], [A], []), silent), "node 0")
    rival = may_drain(seen_by_its_job(seen, "A", ["another job"]), BOTH[0], TWO)
    assert (rival.may, rival.waits_for, rival.rival) == ("wait", (BOTH[1],), A)
    assert may_drain(seen_by_its_job(seen, "A", ["another job", HERE]), BOTH[0], TWO).may == "commit"
    assert seen_by_its_job(seen, "unknown", [HERE]) == seen


def test_parts_survive_json() -> None:
    row = replace(disk(part(ONE, 0)), parts_here=(("a1", 1),))
    seen = Evidence((row,), HERE)
    assert evidence_from_json(evidence_to_json(seen)) == seen


# -- what a start does with it -------------------------------------------------------------------------------


def mirrors(*saves: SaveFacts) -> list[Row]:
    return [place(url, [A], saves) for url in BOTH]


@pytest.mark.parametrize(
    ("disks", "on_mirrors", "chosen"),
    [
        ([[part(TWO, 0)], [part(TWO, 1)]], (ONE,), (TWO, DISK)),
        ([[part(TWO, 1)], [part(TWO, 0)]], (ONE,), (TWO, DISK)),
        ([[part(TWO, 0)], []], (ONE, TWO), (TWO, BOTH[0])),
        ([[part(TWO, 0)], []], (ONE,), (ONE, BOTH[0])),
        ([[part(TWO, 0), part(ONE, 0)], [part(ONE, 1)]], (ONE,), (ONE, DISK)),
    ],
)
def test_a_start_takes_the_newest_save_that_is_whole_somewhere(
    disks: list[list[Part]], on_mirrors: tuple[SaveFacts, ...], chosen: tuple[SaveFacts, str]
) -> None:
    here = one_disk([disk(*parts) for parts in disks])
    move = next_move(Evidence((here, *mirrors(*on_mirrors)), HERE), Wish())
    assert isinstance(move, Try), move
    assert (move.save, move.place) == chosen
    passed = [notice.line for notice in move.notices if notice.step == TWO.step]
    assert bool(passed) == (chosen[0] is ONE)
    assert all("no disk of this job has what node 1 of those wrote" in line for line in passed)


def test_a_part_alone_is_given_up_only_if_no_other_place_can_have_the_rest() -> None:
    here = one_disk([disk(part(TWO, 0)), disk()])
    seen = Evidence((here, *mirrors(ONE)), HERE)
    assert never_whole(seen) == [TWO]
    silent = replace(seen.rows[1], reach=seen.rows[1].reach.SILENT)
    uploaded = replace(seen.rows[1], parts_here=((TWO.save_id[:8], 1),))
    unread = replace(here, problems=(*here.problems, Problem("meta_000200.json", "it is damaged", 200)))
    for rows, root in (
        ((here, silent, seen.rows[2]), HERE),  # it may be on the mirror that does not answer
        ((here, uploaded, seen.rows[2]), HERE),  # the other node's part is on a mirror
        ((here, *mirrors(ONE, TWO)), HERE),  # a mirror has the whole save
        ((here, seen.rows[1]), HERE),  # a mirror that lists name as required is not configured
        ((unread, *mirrors(ONE)), HERE),  # the damaged meta may be the other part's
        (seen.rows, "other disks"),  # the disk of the other node may come back
    ):
        assert never_whole(Evidence(tuple(rows), root)) == []


def test_disks_without_an_identity_are_not_taken_for_those_that_a_save_without_one_was_made_on() -> None:
    heard = (Heard(replace(A, root=""), frozenset({Voice.CLAIMED})),)
    here = replace(one_disk([disk(part(TWO, 0)), disk()]), heard=heard)
    assert identity_of([HERE, ""]) == ""
    assert never_whole(Evidence((here, *mirrors(ONE)), "")) == []


def test_a_part_of_a_snapshot_is_given_up_only_if_the_persistent_directory_cannot_have_the_rest() -> None:
    snapshot = replace(TWO, kinds=("emergency",))
    here = one_disk([disk(part(snapshot, 0, kinds=("emergency",))), disk()])
    where = Row("/nfs/kept", "persistent", run_id="run")
    own = Problem("meta_rank0.json", "ranks left no meta", 200, snapshot.save_id, ("emergency",), snapshot)

    def given_up(*kept: Row) -> bool:
        return never_whole(Evidence((here, *mirrors(ONE), *kept), HERE)) == [snapshot]

    digits = snapshot.save_id[:8]
    assert given_up()
    assert given_up(where)
    assert given_up(replace(where, problems=(own,), parts_here=((digits, 0),)))  # a copy of what the disk has
    assert not given_up(replace(where, problems=(own,), parts_here=((digits, 1),)))
    assert not given_up(replace(where, copies=(Copy(snapshot, Origin.REMOTE),)))
    lacking, damaged = one_disk([disk(), disk()]), one_disk([disk(part(snapshot, 0, kinds=(), why="cut")), disk()])
    whole = one_disk([disk(part(snapshot, 0, kinds=(), why="cut")), disk(part(snapshot, 1, kinds=("emergency",)))])
    alone = replace(where, parts=(part(snapshot, 1, kinds=("emergency",)),), parts_here=((digits, 1),))
    for disks, is_lost in ((lacking, True), (damaged, False), (whole, False)):  # a full disk sent a part there alone
        assert (never_whole(Evidence((disks, *mirrors(ONE), alone), HERE)) == [snapshot]) == is_lost
    for step in (None, 200):  # it cannot be listed, or a meta in it cannot be read
        unread = Problem("/nfs/kept", "it cannot be listed", step, kinds=("emergency",), hindrance="unreadable")
        assert not given_up(replace(where, problems=(unread,)))
    regular = one_disk([disk(part(TWO, 0)), disk()])
    unread = Problem("/nfs/kept", "it cannot be listed", kinds=("emergency",), hindrance="unreadable")
    seen = Evidence((regular, *mirrors(ONE), replace(where, problems=(unread,))), HERE)
    assert never_whole(seen) == [TWO]  # only snapshots are there


# -- what a job has parts of alone ---------------------------------------------------------------------------


def test_a_part_whose_rest_may_come_back_is_left_behind_once_the_run_goes_on_from_elsewhere() -> None:
    here = one_disk([disk(part(TWO, 0)), disk()])
    on, off = Attempt("next", 9, ref(TWO), root="now"), Attempt("next", 9, ref(ONE), root="now")
    elsewhere = replace(place(BOTH[0], [A], [ONE]), parts_here=((TWO.save_id[:8], 1),))
    for rows, attempt, behind in (
        ([here, *mirrors(ONE)], off, {TWO.save_id}),
        ([here, *mirrors(ONE)], on, set()),
        ([here, elsewhere, mirrors(ONE)[1]], off, set()),  # this node's part makes it whole there
        ([here, *mirrors(ONE, TWO)], off, set()),
        ([here, replace(mirrors(ONE)[0], reach=Reach.SILENT), mirrors(ONE)[1]], off, set()),
    ):
        found = torn(Evidence(tuple(rows), "now"), attempt)
        assert found.behind == behind
        assert found.all == {TWO.save_id}
    assert torn(Evidence((one_disk([disk(part(TWO, 0)), disk(part(TWO, 1))]),), "now"), on) == Torn()


def test_a_mirror_that_was_added_later_does_not_wait_for_what_another_node_has_deleted() -> None:
    here = one_disk([disk(part(ONE, 0)), disk()])
    first, added = place(BOTH[0], [A], [ONE]), place(BOTH[1], [A])
    attempt = Attempt("next", 9, ref(ONE), root="now")
    for rows, cannot in (
        ((here, first, added), {ONE.save_id: (BOTH[1],)}),
        ((here, first, replace(added, parts_here=((ONE.save_id[:8], 1),))), {}),  # the other part is there
        ((here, first, replace(added, reach=Reach.SILENT)), {}),
        ((here, replace(first, required=False), added), {}),  # an optional mirror is not enough
        ((here, place(BOTH[0], [A]), added), {}),
        ((replace(here, copies=(Copy(ONE, Origin.STAGED),)), first, added), {}),  # somebody staged the whole save
    ):
        assert torn(Evidence(rows, "now"), attempt).cannot_be_on == cannot


def test_a_mirror_that_has_a_later_save_of_the_lineage_does_not_wait_for_what_no_disk_has() -> None:
    here = one_disk([disk(part(ONE, 0)), disk()])
    there = place(BOTH[0], [A], [TWO])
    for mirror, parent, cannot in (
        (there, TWO, {ONE.save_id: (BOTH[0],)}),
        (replace(there, parts_here=((ONE.save_id[:8], 1),)), TWO, {}),
        (there, ONE, {}),  # the run went back to it
    ):
        attempt = Attempt("next", 9, ref(parent), root="now")
        assert torn(Evidence((here, mirror, place(BOTH[1], [A])), "now"), attempt).cannot_be_on == cannot


def test_nor_does_a_mirror_that_has_the_save_which_replaced_it() -> None:
    again = replace(ONE, save_id="again", number=ONE.number + 1)
    here = one_disk([disk(part(ONE, 0), part(again, 0)), disk(part(again, 1))])
    for there, parent, cannot in (
        (place(BOTH[0], [A], [again]), again, {ONE.save_id: (BOTH[0],)}),
        (place(BOTH[0], [A], [TWO]), TWO, {ONE.save_id: (BOTH[0],)}),
        (place(BOTH[0], [A]), again, {}),
        (replace(place(BOTH[0], [A], [again]), parts_here=((ONE.save_id[:8], 1),)), again, {}),
        (place(BOTH[0], [A], [again]), ONE, {}),  # the run went back to it
    ):
        attempt = Attempt("next", 9, ref(parent), root="now")
        found = torn(Evidence((here, there, place(BOTH[1], [A])), "now"), attempt)
        assert found.cannot_be_on == cannot


def test_a_save_of_the_lineage_of_which_a_mirror_has_the_rest_is_waited_for() -> None:
    here = one_disk([disk(part(ONE, 0)), disk()])
    there = replace(place(BOTH[0], [A], []), parts_here=((ONE.save_id[:8], 1),))
    anywhere = Row(ANYWHERE, "anywhere", copies=(Copy(ONE, Origin.REMOTE),))
    cases: list[tuple[Row, SaveFacts | None, set[str]]] = [
        (there, ONE, set()),
        (replace(there, required=False), ONE, {ONE.save_id}),
        (place(BOTH[0], [A], []), ONE, {ONE.save_id}),
        (there, None, {ONE.save_id}),  # a person started over
    ]
    for mirror, parent, all_torn in cases:
        attempt = Attempt("next", 9, ref(parent) if parent is not None else None, root="now")
        assert torn(Evidence((here, mirror, anywhere), "now"), attempt).all == all_torn


def test_another_mirror_waits_for_the_rest_of_it_only_until_the_one_that_has_the_rest_has_it_whole() -> None:
    here = one_disk([disk(part(ONE, 0)), disk()])
    there = replace(place(BOTH[0], [A], []), parts_here=((ONE.save_id[:8], 1),))
    anywhere = Row(ANYWHERE, "anywhere", copies=(Copy(ONE, Origin.REMOTE),))
    for other, once_whole in (
        (place(BOTH[1], [A]), {ONE.save_id: (BOTH[1],)}),
        (replace(place(BOTH[1], [A]), parts_here=there.parts_here), {}),
        (replace(place(BOTH[1], [A]), reach=Reach.SILENT), {}),
    ):
        for parent, expected in ((ONE, once_whole), (None, {})):
            attempt = Attempt("next", 9, ref(parent) if parent is not None else None, root="now")
            found = torn(Evidence((here, there, other, anywhere), "now"), attempt)
            assert (found.once_whole, found.cannot_be_on) == (expected, {})
            assert found.without(ONE.save_id).once_whole == {}
