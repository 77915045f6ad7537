"""Claiming a run: of two attempts the newer wins, whoever is alive."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmirror.core import events, names
from ckptmirror.core.errors import AttemptFenced, NotAuthorised, Temporary
from ckptmirror.core.model import Meta
from ckptmirror.core.retention import Retention
from ckptmirror.flow.places.attempt_lists import read_local_attempts, read_mirror_attempts
from ckptmirror.flow.places.catalog import local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.save.save import LeaderSide, Saver, SaveRequest
from ckptmirror.flow.start.claim import RunClaim
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.status import read_status
from ckptmirror.local import files
from ckptmirror.ranks.single import SingleRank
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Store
from ckptmirror.stores.faulty import FaultyStore, StoreFault
from ckptmirror.testing import Fault, GcsServerProcess
from tests.factory import make_save, put_attempts, put_on_mirror
from tests.mirror_place import memory_url

BUCKET = "claims"
_numbers = itertools.count(1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start an attempt on a root: claim, then decide for the newest save of the lineage there is, if any."""
    nodes: list[Node] = []

    def start_one(root: str, *urls: str, optional: tuple[str, ...] = (), decide: bool = True) -> Node:
        specs = [MirrorSpec(url, url not in optional) for url in (*urls, *optional)]
        node = Node(tmp_path / root, specs, Retention(), events.EventBus())
        nodes.append(node)
        claim = node.start_claim()
        if decide:
            order = local_catalog(node.root).lineage(claim.known).in_order()
            metas = local_catalog(node.root).saves
            for mirror in node.mirrors:
                if mirror.url not in claim.unclaimed:
                    there = mirror_catalog(mirror)
                    order = max(order, there.lineage(claim.known).in_order(), key=len)
                    metas = {**there.saves, **metas}
            node.decide(metas[order[-1].save_id].ref if order else None)
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


def wait_for(condition: Callable[[], object], node: Node, timeout_s: float = 30.0) -> None:
    """Wait, as the node itself does, until a condition holds that its workers bring about."""
    deadline = time.monotonic() + timeout_s
    done = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        done.wait(0.02)


def opened(url: str) -> Mirror:
    return Mirror(url, True, open_store(url, retry=False))


def claim_run(root: Path, *mirrors: Mirror) -> RunClaim:
    files.make_dirs(root / names.CONTROL_DIR)
    return RunClaim.make(root, mirrors)


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


def test_i11_a_zombies_meta_that_came_after_its_successor_started_is_superseded(tmp_path: Path) -> None:
    """It had asked the mirror just before; the rule, not luck, keeps its save off the lineage."""
    mirror = opened(memory_url())
    zombie = claim_run(tmp_path / "zombie", mirror)
    zombie.decide(None, [mirror])
    first = make_save(tmp_path / "zombie", 100, ("model",), zombie.attempt, 1, run_id=zombie.run_id)
    put_on_mirror(mirror.store, tmp_path / "zombie", first)
    heir = claim_run(tmp_path / "heir", mirror)
    heir.decide(first.ref, [mirror])
    late = make_save(tmp_path / "zombie", 200, ("model",), zombie.attempt, 2, run_id=zombie.run_id)
    put_on_mirror(mirror.store, tmp_path / "zombie", late)
    standing = mirror_catalog(mirror).lineage().standing_by_save()
    assert standing == {first.save_id: "current", late.save_id: "superseded"}
    with pytest.raises(AttemptFenced):
        zombie.confirm(mirror)


def test_two_writers_one_wins(server: GcsServerProcess, tmp_path: Path) -> None:
    """Eight attempts start at once: each gets a number of its own, and all but the last are fenced."""
    url = f"gs://{BUCKET}/{next(_numbers)}"
    claims: list[RunClaim] = []
    barrier = threading.Barrier(8)

    def run(number: int) -> None:
        mirror = Mirror(url, True, open_store(url))
        barrier.wait()
        claims.append(claim_run(tmp_path / f"root-{number}", mirror))
        mirror.store.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there, _ = read_mirror_attempts(Mirror(url, True, open_store(url)))
    assert there is not None
    assert len({attempt.number for attempt in there.attempts}) == len(there.attempts) == len(claims)
    alive = []
    for claim in claims:
        try:
            claim.confirm(Mirror(url, True, open_store(url)))
            alive.append(claim)
        except AttemptFenced:
            assert claim.fenced is not None
    assert [claim.attempt.number for claim in alive] == [7]


def test_i11_equal_numbers_are_ordered_by_id_and_both_stop(tmp_path: Path) -> None:
    """Each saw another mirror only: whoever meets the other stops, and the lineage knows one answer."""
    here, there = opened(memory_url()), opened(memory_url())
    base = claim_run(tmp_path / "one", here, there)
    base.decide(None, [here, there])
    save = make_save(tmp_path / "one", 100, ("model",), base.attempt, 1, run_id=base.run_id)
    other_root = tmp_path / "two"
    files.make_dirs(other_root / names.CONTROL_DIR)
    put_attempts(other_root, base.attempts.attempts, run_id=base.run_id)
    down_here, down_there = Mirror(here.url, True, down(here.store)), Mirror(there.url, True, down(there.store))
    one = claim_run(tmp_path / "one", here, down_there)
    two = claim_run(other_root, down_here, there)
    assert one.attempt.number == two.attempt.number == 1
    one.decide(save.ref, [here, down_there])
    two.decide(save.ref, [down_here, there])
    with pytest.raises(AttemptFenced):
        one.confirm(there)
    with pytest.raises(AttemptFenced):
        two.confirm(here)


def down(store: Store) -> FaultyStore:
    broken = FaultyStore(store)
    broken.go_down()
    return broken


def test_a_lost_answer_to_the_announcement_is_no_rival(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    faulty = FaultyStore(mirror.store, [StoreFault("write", names.WRITER_NAME, when="after")])
    with_faults = Mirror(mirror.url, True, faulty)
    first = claim_run(tmp_path / "root", with_faults)
    assert first.unclaimed == {}  # a run begins only where that is known: it asked again
    faulty.script(StoreFault("write", names.WRITER_NAME, when="after"))
    claim = claim_run(tmp_path / "root", with_faults)
    assert claim.unclaimed  # not known whether it arrived
    claim.confirm(with_faults)
    assert claim.unclaimed == {}
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert [attempt.id for attempt in there.attempts] == [first.attempt.id, claim.attempt.id]


# -- mirrors that are down -------------------------------------------------------------------------------------


def test_a_mirror_that_was_down_at_the_start_is_claimed_before_anything_is_uploaded_there(
    server: GcsServerProcess, start: Callable[..., Node], tmp_path: Path
) -> None:
    url = f"gs://{BUCKET}/{next(_numbers)}"
    first = start("root", url)
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
    original.decide(None, [mirror])
    fresh = tmp_path / "fresh"
    with pytest.raises(Temporary):
        claim_run(fresh, Mirror(mirror.url, True, down(mirror.store)))
    assert read_local_attempts(fresh) is None
    later = claim_run(fresh, mirror)
    assert later.run_id == original.run_id
    assert later.attempt.number == 1


def test_a_silent_mirror_that_is_not_required_does_not_hold_up_a_first_start(tmp_path: Path) -> None:
    mirror, optional = opened(memory_url()), opened(memory_url())
    claim = claim_run(tmp_path / "root", mirror, Mirror(optional.url, False, down(optional.store)))
    assert set(claim.unclaimed) == {optional.url}


def test_credentials_that_are_refused_at_a_restart_delay_uploads_only(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    claim_run(tmp_path / "root", mirror).decide(None, [mirror])
    denied = FaultyStore(mirror.store, [StoreFault(times=0, when="before", error=lambda: NotAuthorised("403"))])
    again = claim_run(tmp_path / "root", Mirror(mirror.url, True, denied))
    again.decide(None, [Mirror(mirror.url, True, denied)])
    assert "403" in again.unclaimed[mirror.url]
    with pytest.raises(NotAuthorised):
        claim_run(tmp_path / "fresh", Mirror(mirror.url, True, denied))


def test_a_mirror_that_hangs_does_not_hold_up_the_confirmation_of_another(tmp_path: Path) -> None:
    slow, quick = opened(memory_url()), opened(memory_url())
    claim = claim_run(tmp_path / "root", slow, quick)
    claim.decide(None, [slow, quick])
    released = threading.Event()
    hanging = FaultyStore(slow.store, [StoreFault("read", hold=released)])
    thread = threading.Thread(target=claim.confirm, args=(Mirror(slow.url, True, hanging),))
    thread.start()
    other = threading.Thread(target=claim.confirm, args=(quick,))
    other.start()
    other.join(10.0)
    assert not other.is_alive()
    released.set()
    thread.join()
