"""Claiming a run: of two attempts the newer wins, whoever is alive."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmirror.cli._uploading import print_report
from ckptmirror.core import events, names
from ckptmirror.core.errors import AttemptFenced, NodeBehind, NotAuthorised, StorePermanent, StoreTemporary, Temporary
from ckptmirror.core.model import Meta
from ckptmirror.core.retention import Retention
from ckptmirror.core.start.decide import Wish
from ckptmirror.flow.drain import Drained, DrainReport
from ckptmirror.flow.places.attempt_lists import read_local_attempts, read_mirror_attempts
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.save.save import LeaderSide, Saver, SaveRequest
from ckptmirror.flow.start.bring import Bringer
from ckptmirror.flow.start.claim import RunClaim, StartOver
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.status import read_status
from ckptmirror.ranks.single import SingleRank
from ckptmirror.stores import open_store
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.claiming import claim_run, down, drain_confirmation, opened
from tests.kit.faulty_store import FaultyStore, StoreFault
from tests.kit.mirrors import memory_url
from tests.kit.saves import make_attempt, make_save, put_attempts, put_on_mirror

BUCKET = "claims"
_numbers = itertools.count(1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start an attempt on a root: it claims the run for the newest save of the lineage, and loads nothing."""
    nodes: list[Node] = []

    def start_one(root: str, *urls: str, retention: Retention = Retention()) -> Node:  # noqa: B008
        bus = events.EventBus()
        node = Node(tmp_path / root, [MirrorSpec(url) for url in urls], retention, bus)
        nodes.append(node)
        bringer = Bringer(node, Wish(), bus)
        node.start(bringer.claim(bringer.next()))
        return node

    yield start_one
    for node in nodes:
        if node.lock.held:
            node.close()


def commit_on(node: Node, step: int, number: int | None = None) -> Meta:
    claim = node.claim
    assert claim is not None
    meta = make_save(node.root, step, ("model",), claim.attempt, number or step, run_id=claim.run_id, sidecars=False)
    urls = [mirror.url for mirror in node.mirrors]
    meta_path = names.SaveName(meta.step, meta.tag).meta
    node.table.add_save(meta.save_id, step, meta.kinds, meta.artifacts, urls, meta_path=meta_path)
    node.table.release_save(meta.save_id)
    node.on_commit(meta)
    return meta


def wait_for(condition: Callable[[], object], node: Node, timeout_s: float = 60.0) -> None:
    """Wait, as the node itself does, until a condition holds that its workers bring about."""
    deadline = time.monotonic() + timeout_s
    done = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        done.wait(0.02)


# -- two attempts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["gs", "file", "memory"])
def test_i11_an_older_attempt_is_fenced_and_commits_nothing_more(
    store: str, server: GcsServerProcess, start: Callable[..., Node], tmp_path: Path
) -> None:
    url = {"gs": f"gs://{BUCKET}/{next(_numbers)}", "file": f"file://{tmp_path}/m", "memory": memory_url()}[store]
    old = start("old", url)
    first = commit_on(old, 100)
    assert old.wait_mirrored(first.save_id, 30.0)
    new = start("new", url)
    second = commit_on(old, 200)
    wait_for(old.fenced, old)
    assert not old.wait_mirrored(None, 30.0)
    there = mirror_catalog(opened(url))
    assert set(there.saves) == {first.save_id}
    third = commit_on(new, 300)
    assert new.wait_mirrored(third.save_id, 30.0)
    there = mirror_catalog(opened(url))
    assert {save.step for save in there.lineage().in_order()} == {100, 300}
    assert second.save_id not in there.saves
    assert read_status(old.root).trainer["status"] == "fenced"
    assert new.fenced() is None


def test_i11_an_older_attempt_learns_of_its_successor_before_it_rotates(start: Callable[..., Node]) -> None:
    url, other = memory_url(), memory_url()
    old = start("old", url, other, retention=Retention(keep_last=1))
    commit_on(old, 100)
    assert old.wait_mirrored(None, 30.0)
    start("new", url, other)
    assert old._rotation_thread is not None
    old._rotation_thread.wake()
    wait_for(old.fenced, old)
    wait_for(lambda: read_status(old.root).trainer["status"] == "fenced", old)


def test_i11_save_raises_once_the_attempt_is_fenced(start: Callable[..., Node]) -> None:
    url = memory_url()
    old = start("old", url)
    start("new", url)
    commit_on(old, 100)
    wait_for(old.fenced, old)
    claim = old.claim
    assert claim is not None
    leader = LeaderSide(old.table, old.specs, old.fenced, old.on_commit)
    saver = Saver(old.root, claim.run_id, claim.attempt, SingleRank(), events.EventBus(), leader, [])
    with pytest.raises(AttemptFenced, match="has started"):
        saver.save(SaveRequest(200, ("model",)), None)  # type: ignore[arg-type]


def test_i11_a_zombies_meta_that_came_after_its_successor_committed_is_superseded(tmp_path: Path) -> None:
    """It had asked the mirror just before; the rule, not luck, keeps its save off the lineage."""
    mirror = opened(memory_url())
    zombie = claim_run(tmp_path / "zombie", mirror)
    first = make_save(tmp_path / "zombie", 100, ("model",), zombie.attempt, 1, run_id=zombie.run_id)
    put_on_mirror(mirror.store, tmp_path / "zombie", first)
    heir = claim_run(tmp_path / "heir", mirror)
    assert heir.attempt.parent == first.ref
    late = make_save(tmp_path / "zombie", 200, ("model",), zombie.attempt, 2, run_id=zombie.run_id)
    put_on_mirror(mirror.store, tmp_path / "zombie", late)
    assert set(mirror_catalog(mirror).lineage().standing_by_save().values()) == {"current"}, (
        "the heir saved nothing yet"
    )
    with pytest.raises(AttemptFenced):
        zombie.confirm(mirror)
    with pytest.raises(AttemptFenced, match="did not start from it"):
        heir.confirm(mirror, make_save(tmp_path / "heir", 150, ("model",), heir.attempt, 1, run_id=heir.run_id))


def test_an_attempt_finishes_what_it_left_behind_only_after_a_save_of_its_own(tmp_path: Path) -> None:
    """Else it would fence itself: a node may have a part of a save that was whole nowhere when its job started."""
    mirror = opened(memory_url())
    root = tmp_path / "root"
    older = claim_run(root, mirror)
    first, left, late = (
        make_save(tmp_path / where, 100 * number, ("model",), older.attempt, number, run_id=older.run_id)
        for number, where in enumerate(("root", "left", "left"), 1)
    )
    put_on_mirror(mirror.store, root, first)
    older.confirm(mirror, left)  # it may itself
    heir = claim_run(root, mirror)
    assert heir.attempt.parent == first.ref
    heir.confirm(mirror, first)
    for is_part in (False, True):
        with pytest.raises(NodeBehind, match="has a save of this attempt"):
            heir.confirm(mirror, left, is_part=is_part)
    mine = make_save(root, 150, ("model",), heir.attempt, 1, run_id=heir.run_id)
    heir.confirm(mirror, mine)
    with pytest.raises(NodeBehind):
        heir.confirm(mirror, left)  # it may, and has not yet
    put_on_mirror(mirror.store, root, mine)
    heir.confirm(mirror, left)
    put_on_mirror(mirror.store, tmp_path / "left", left)
    heir.confirm(mirror, late)
    standing = mirror_catalog(mirror).lineage().standing_by_save()
    assert standing == {first.save_id: "current", mine.save_id: "current", left.save_id: "superseded"}


def test_an_attempt_finishes_what_it_left_behind_on_no_mirror_before_a_save_of_its_own_there(tmp_path: Path) -> None:
    """Else, if the other mirror were lost, its own saves would be off the lineage, by what this one has."""
    mirrors = one, other = opened(memory_url()), opened(memory_url())
    root = tmp_path / "root"
    older = claim_run(root, *mirrors)
    first, left = (
        make_save(tmp_path / where, 100 * number, ("model",), older.attempt, number, run_id=older.run_id)
        for number, where in enumerate(("root", "left"), 1)
    )
    for mirror in mirrors:
        put_on_mirror(mirror.store, root, first)
    heir = claim_run(root, *mirrors)
    mine = make_save(root, 150, ("model",), heir.attempt, 1, run_id=heir.run_id)
    put_on_mirror(one.store, root, mine)
    heir.confirm(one, left)
    with pytest.raises(NodeBehind, match="has a save of this attempt"):
        heir.confirm(other, left)
    heir.confirm(other, first)
    put_on_mirror(other.store, root, mine)
    heir.confirm(other, left)
    put_on_mirror(other.store, tmp_path / "left", left)
    standing = mirror_catalog(other).lineage().standing_by_save()
    assert standing == {first.save_id: "current", mine.save_id: "current", left.save_id: "superseded"}


def left_on(root: Path, mirror: Mirror) -> tuple[Meta, Meta]:
    """Two saves of an attempt of this root: one on the mirror, and one on the disk alone."""
    older = claim_run(root, mirror)
    first, left = (make_save(root, 100 * n, ("model",), older.attempt, n, run_id=older.run_id) for n in (1, 2))
    put_on_mirror(mirror.store, root, first)
    return first, left


def test_an_attempt_asks_anew_before_its_first_commit_what_a_drain_elsewhere_has_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The drain changes no list. An attempt that had asked before, for an older save, committed over it."""
    mirror = opened(memory_url())
    root, gone = tmp_path / "root", tmp_path / "gone"
    first, left = left_on(gone, mirror)
    heir = claim_run(root, mirror)
    heir.confirm(mirror, first)
    drain = drain_confirmation(gone, mirror)
    for is_part in (True, False, False):
        drain(mirror, left, is_part=is_part)
    (said,) = (record.getMessage() for record in caplog.records if record.name == "ckptmirror.claim")
    assert said == (
        f"{mirror.url} lists attempt 1 ({heir.attempt.id[:8]}), which began from step 100 and has no save there yet; "
        "the run now continues from step 200. If that attempt still trains, it stops at its first commit: start it "
        "again, and it continues from step 200"
    )
    put_on_mirror(mirror.store, gone, left)
    with pytest.raises(AttemptFenced, match="has committed, and did not start from it"):
        heir.confirm(mirror, make_save(root, 150, ("model",), heir.attempt, 1, run_id=heir.run_id))


def test_a_drain_lists_the_attempt_of_a_save_when_the_save_is_whole_and_not_for_a_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A part commits nothing, but what listed it fenced a newer attempt, which was training, for nothing."""
    mirror = opened(memory_url())
    root, gone = tmp_path / "root", tmp_path / "gone"
    left_on(gone, mirror)
    unlisted = claim_run(gone, Mirror(mirror.url, True, down(mirror.store)))
    left = make_save(gone, 300, ("model",), unlisted.attempt, 1, run_id=unlisted.run_id)
    heir = claim_run(root, mirror)
    caplog.clear()
    drain = drain_confirmation(gone, mirror)
    drain(mirror, left, is_part=True)
    heir.confirm(mirror)
    assert caplog.records == []
    assert unlisted.attempt.id not in listed_on(mirror)
    drain(mirror, left)
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"lists attempt 1 ({heir.attempt.id[:8]}), which began from step 100" in said
    assert unlisted.attempt.id in listed_on(mirror)
    with pytest.raises(AttemptFenced) as fenced:
        heir.confirm(mirror)
    assert fenced.value.message == (
        f"Attempt 1 ({unlisted.attempt.id[:8]}) of this run, of which this one did not know, is listed on "
        f"{mirror.url}. This is attempt 1 ({heir.attempt.id[:8]})."
    )


def test_a_drain_of_a_save_without_which_the_run_went_on_says_what_can_be_done_and_not_to_mend_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = opened(memory_url())
    root, gone = tmp_path / "root", tmp_path / "gone"
    _, left = left_on(gone, mirror)
    heir = claim_run(root, mirror)
    mine = make_save(root, 150, ("model",), heir.attempt, 1, run_id=heir.run_id)
    put_on_mirror(mirror.store, gone, left)
    with pytest.raises(StorePermanent, match="is superseded, and is not committed on") as refused:
        drain_confirmation(root, mirror)(mirror, mine)
    assert f"`ckptmirror rewind --root {root} --save {mine.save_id[:8]}`" in refused.value.message
    failed = f"{mirror.url}: meta_000150.json: {refused.value.message}"
    for others in ((), (f"{mirror.url}: model_000200.pt: HTTP 403",)):
        report = DrainReport(Drained(1, 2, 1, 2), pending=0, failed=(failed, *others))
        assert print_report(root, report, as_json=False) == 8
        said = capsys.readouterr().err
        assert refused.value.message in said
        assert ("Fix what failed" in said) == bool(others)


def test_an_attempt_that_completes_a_save_of_an_earlier_one_lists_that_one(tmp_path: Path) -> None:
    """Else the mirror would have a stranger's save, if nobody but drains of its parts had been there."""
    one, other = mirrors = opened(memory_url()), opened(memory_url())
    root = tmp_path / "root"
    older = claim_run(root, *mirrors)
    first = make_save(root, 100, ("model",), older.attempt, 1, run_id=older.run_id)
    for mirror in mirrors:
        put_on_mirror(mirror.store, root, first)
    unlisted = claim_run(root, *(Mirror(mirror.url, True, down(mirror.store)) for mirror in mirrors))
    left = make_save(tmp_path / "gone", 200, ("model",), unlisted.attempt, 1, run_id=unlisted.run_id)
    heir = claim_run(root, *mirrors)
    assert heir.attempt.parent == first.ref
    put_attempts(one.store, [older.attempt, unlisted.attempt, heir.attempt], run_id=heir.run_id)
    put_on_mirror(one.store, tmp_path / "gone", left)
    heir.confirm(other, left, is_part=True)
    assert listed_on(other) == {older.attempt.id, heir.attempt.id}
    heir.confirm(other, left)
    assert listed_on(other) == {older.attempt.id, unlisted.attempt.id, heir.attempt.id}
    heir.confirm(other)


def listed_on(mirror: Mirror) -> set[str]:
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    return {one.id for one in there.attempts}


def test_an_attempt_whose_first_commit_was_allowed_and_failed_asks_anew_before_it_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain may have committed meanwhile. Once the mirror has a save of the attempt, nothing is asked any more."""
    mirror = opened(memory_url())
    root, gone = tmp_path / "root", tmp_path / "gone"
    _, left = left_on(gone, mirror)
    heir = claim_run(root, mirror)
    mine = [make_save(root, 50 * n, ("model",), heir.attempt, n - 2, run_id=heir.run_id) for n in (3, 4)]
    heir.confirm(mirror, mine[0])
    drain_confirmation(gone, mirror)(mirror, left)
    put_on_mirror(mirror.store, gone, left)
    with pytest.raises(AttemptFenced, match="has committed, and did not start from it"):
        heir.confirm(mirror, mine[0])

    heir = claim_run(root, mirror)
    mine = [make_save(root, 200 + 50 * n, ("model",), heir.attempt, n, run_id=heir.run_id) for n in (1, 2, 3)]
    heir.confirm(mirror, mine[0])
    put_on_mirror(mirror.store, root, mine[0])
    heir.confirm(mirror, mine[1])
    monkeypatch.setattr(heir._places, "survey", None)
    heir.confirm(mirror, mine[2])


def test_a_drain_asks_anew_whether_an_attempt_that_was_listed_before_has_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = opened(memory_url())
    root, gone = tmp_path / "root", tmp_path / "gone"
    first, left = left_on(gone, mirror)
    heir = claim_run(root, mirror)
    drain = drain_confirmation(gone, mirror)
    drain(mirror, first)
    mine = make_save(root, 150, ("model",), heir.attempt, 1, run_id=heir.run_id)
    heir.confirm(mirror, mine)
    put_on_mirror(mirror.store, root, mine)
    drain(mirror, left)
    assert caplog.records == []  # it is superseded, and fences nobody


def test_a_drain_of_two_attempts_sees_on_a_slow_mirror_the_save_that_it_has_just_committed_itself(
    tmp_path: Path,
) -> None:
    """The newer attempt counts on the other mirror already; the older save waited for ever for what was there."""
    one, slow = mirrors = opened(memory_url()), opened(memory_url())
    root = tmp_path / "root"
    older = claim_run(root, *mirrors)
    first, left = (make_save(root, 100 * n, ("model",), older.attempt, n, run_id=older.run_id) for n in (1, 2))
    for mirror in mirrors:
        put_on_mirror(mirror.store, root, first)
    newer = make_attempt(1, first)
    mine = make_save(root, 210, ("model",), newer, 1, run_id=older.run_id)
    attempts = [older.attempt, newer]
    for place in (root, one.store, slow.store):
        put_attempts(place, attempts, run_id=older.run_id)
    put_on_mirror(one.store, root, mine)
    drain = drain_confirmation(root, *mirrors)
    with pytest.raises(NodeBehind, match="has a save of attempt 1"):
        drain(slow, left)
    drain(slow, mine)
    put_on_mirror(slow.store, root, mine)
    drain(slow, left)


def test_i11_a_save_that_a_zombie_commits_after_its_successors_is_superseded(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    zombie = claim_run(tmp_path / "zombie", mirror)
    saves = []
    for number in (1, 2):
        saves.append(
            make_save(tmp_path / "zombie", 100 * number, ("model",), zombie.attempt, number, run_id=zombie.run_id)
        )
        if number == 1:
            put_on_mirror(mirror.store, tmp_path / "zombie", saves[0])
            heir = claim_run(tmp_path / "heir", mirror)
            mine = make_save(tmp_path / "heir", 150, ("model",), heir.attempt, 1, run_id=heir.run_id)
            heir.confirm(mirror, mine)
            put_on_mirror(mirror.store, tmp_path / "heir", mine)
    put_on_mirror(mirror.store, tmp_path / "zombie", saves[1])
    standing = mirror_catalog(mirror).lineage().standing_by_save()
    assert standing == {saves[0].save_id: "current", mine.save_id: "current", saves[1].save_id: "superseded"}


def test_two_writers_one_wins(server: GcsServerProcess, tmp_path: Path) -> None:
    """Eight attempts start at once: each that claims has a number of its own, and all but the last are fenced."""
    url = f"gs://{BUCKET}/{next(_numbers)}"
    claims: list[RunClaim] = []
    barrier = threading.Barrier(8)

    def run(number: int) -> None:
        mirror = Mirror(url, True, open_store(url))
        barrier.wait()
        while True:
            with contextlib.suppress(StartOver):  # it lost the race
                claims.append(claim_run(tmp_path / f"root-{number}", mirror))
                break

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there, _ = read_mirror_attempts(Mirror(url, True, open_store(url)))
    assert there is not None
    assert len({claim.run_id for claim in claims}) == 1
    assert len({attempt.number for attempt in there.attempts}) == len(there.attempts) == len(claims)
    alive = []
    for claim in claims:
        try:
            claim.confirm(Mirror(url, True, open_store(url)))
            alive.append(claim)
        except AttemptFenced:
            assert claim.fenced is not None
    assert [claim.attempt.number for claim in alive] == [7]


def test_a_lost_answer_to_a_claim_is_no_rival(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    faulty = FaultyStore(mirror.store, [StoreFault("write", names.WRITER_NAME, when="after")])
    with_faults = Mirror(mirror.url, True, faulty)
    with pytest.raises(StoreTemporary, match="must record where training continues"):
        claim_run(tmp_path / "root", with_faults)  # not known whether it arrived, and step 0 needs to know
    claim = claim_run(tmp_path / "root", with_faults)
    claim.confirm(with_faults)
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert [attempt.number for attempt in there.attempts] == [0, 1]


# -- mirrors that are down -------------------------------------------------------------------------------------


def test_a_mirror_that_was_down_at_the_start_is_claimed_before_anything_is_uploaded_there(
    server: GcsServerProcess, start: Callable[..., Node], tmp_path: Path
) -> None:
    url = f"gs://{BUCKET}/{next(_numbers)}"
    first = start("root", url)
    assert first.wait_mirrored(commit_on(first, 50).save_id, 30.0)
    first.close()
    server.faults([Fault(object="writer", status=403, times=0)])
    again = start("root", url)
    assert again.claim is not None
    assert url in again.claim.unclaimed
    server.clear_log()
    meta = commit_on(again, 100)
    wait_for(lambda: any(record.attempts_made for record in again.table.records()), again)
    assert [entry for entry in server.log() if entry["operation"].startswith("upload.")] == []
    server.clear_faults()
    assert again.wait_mirrored(meta.save_id, 60.0)
    assert again.claim.unclaimed == {}
    made = [e["object"].rpartition("/")[2] for e in server.log() if e["operation"].startswith("upload.")]
    assert made[0] == "writer.json"
    assert sorted(made[1:]) == ["meta_000100.json", "model_000100.pt"]


def test_an_outage_at_the_first_start_never_begins_a_second_run(tmp_path: Path) -> None:
    """A fresh machine, the mirror silent: nothing may be written that would contradict the run it holds."""
    mirror = opened(memory_url())
    original = claim_run(tmp_path / "original", mirror)
    fresh = tmp_path / "fresh"
    with pytest.raises(Temporary):
        claim_run(fresh, Mirror(mirror.url, True, down(mirror.store)))
    assert read_local_attempts(fresh) is None
    later = claim_run(fresh, mirror)
    assert later.run_id == original.run_id
    assert later.attempt.number == 1


def test_credentials_that_are_refused_at_a_restart_delay_uploads_only(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    first = claim_run(tmp_path / "root", mirror)
    make_save(tmp_path / "root", 100, ("model",), first.attempt, 1, run_id=first.run_id)
    denied = FaultyStore(mirror.store, [StoreFault(times=0, when="before", error=lambda: NotAuthorised("403"))])
    again = claim_run(tmp_path / "root", Mirror(mirror.url, True, denied))
    assert "403" in again.unclaimed[mirror.url]
    with pytest.raises(NotAuthorised):
        claim_run(tmp_path / "fresh", Mirror(mirror.url, True, denied))


def test_a_mirror_that_hangs_does_not_hold_up_the_confirmation_of_another(tmp_path: Path) -> None:
    slow, quick = opened(memory_url()), opened(memory_url())
    claim = claim_run(tmp_path / "root", slow, quick)
    released = threading.Event()
    hanging = FaultyStore(slow.store, [StoreFault("read", hold=released)])
    thread = threading.Thread(target=claim.confirm, args=(Mirror(slow.url, True, hanging),))
    thread.start()
    other = threading.Thread(target=claim.confirm, args=(quick,))
    other.start()
    other.join(60.0)
    assert not other.is_alive()
    released.set()
    thread.join()
