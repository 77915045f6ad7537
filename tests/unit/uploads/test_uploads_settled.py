"""What the pending-uploads table does with records that are settled, and what it says of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from uploads_fakes import GS, NFS, answer, take

from ckptmirror.core.errors import CheckpointNotFound, IllegalTransition
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.local.uploads import MirrorRow, StateCount, UploadsTable
from tests.kit.saves import save_id_of

Add = Callable[..., str]


# -- settled records ----------------------------------------------------------------------------------------


def test_a_failed_record_waits_for_a_retry(table: UploadsTable, add: Add) -> None:
    add(200, count=1)
    table.fail(take(table), "403 forbidden")
    assert table.records()[0].last_error == "403 forbidden"
    assert table.claim("worker", GS, lease_s=60) is None
    assert table.retry_failed(mirror=NFS) == 0
    assert table.retry_failed(step=100) == 0
    assert table.retry_failed(GS, 200) == 1
    assert take(table)


def test_a_verified_record_whose_object_is_gone_is_pending_again(
    table: UploadsTable, add: Add, verify_all: Callable[[str], int]
) -> None:
    save_id = add(200, count=1)
    verify_all(GS)
    table.unverify(save_id, "dcp_000200/__0_0.distcp", GS, "the object is gone")
    table.unverify(save_id, "meta_000200.json", GS, "the object is gone")
    assert [(r.state, r.generation, r.size_bytes) for r in table.records()] == [
        (RecordState.PENDING, None, 100),
        (RecordState.PENDING, None, None),
    ]
    with pytest.raises(IllegalTransition):
        table.unverify(save_id, "meta_000200.json", GS, "again")
    with pytest.raises(CheckpointNotFound):
        table.unverify(save_id, "nothing", GS, "no such record")


def test_a_file_that_is_gone_takes_the_meta_of_its_mirror_along(
    table: UploadsTable, add: Add, verify_all: Callable[[str], int]
) -> None:
    save_id = add(200, count=2, mirrors=(GS, NFS))
    verify_all(GS)
    verify_all(NFS)
    table.unverify(save_id, "dcp_000200/__0_0.distcp", GS, "the object is gone", with_meta=True)
    pending = {(record.path, record.mirror) for record in table.records(state=RecordState.PENDING)}
    assert pending == {("dcp_000200/__0_0.distcp", GS), ("meta_000200.json", GS)}


def test_skipping_leaves_what_is_verified_alone(table: UploadsTable, add: Add) -> None:
    save_id = add(200, mirrors=(GS, NFS))
    answer(table, take(table))
    assert table.skip(save_id, "intermediate save") == 5
    assert [r.state for r in table.records(mirror=GS)] == [
        RecordState.VERIFIED,
        RecordState.SKIPPED,
        RecordState.SKIPPED,
    ]
    assert table.claim("worker", GS, lease_s=60) is None
    assert [s.skipped for s in table.standing(save_id)] == [True, True]


def test_under_a_tombstone_every_record_is_removed(
    table: UploadsTable, add: Add, verify_all: Callable[[str], int]
) -> None:
    save_id = add(200, mirrors=(GS, NFS))
    verify_all(GS)
    assert table.remove(save_id, GS, "retention") == 3
    assert table.remove(save_id, GS, "retention") == 0
    assert {r.state for r in table.records(mirror=GS)} == {RecordState.REMOVED}
    assert {r.state for r in table.records(mirror=NFS)} == {RecordState.PENDING}


def test_a_forgotten_save_leaves_its_history(table: UploadsTable, add: Add, verify_all: Callable[[str], int]) -> None:
    save_id = add(200, count=1)
    verify_all(GS)
    table.forget_save(save_id)
    assert table.records() == []
    assert [(t.old, t.new) for t in table.history(save_id) if t.path.startswith("dcp")] == [
        (None, RecordState.PENDING),
        (RecordState.PENDING, RecordState.UPLOADING),
        (RecordState.UPLOADING, RecordState.VERIFIED),
        (RecordState.VERIFIED, None),
    ]


# -- what it says -------------------------------------------------------------------------------------------


def test_standing_counts_only_what_is_verified_and_no_record_is_not_durable(
    table: UploadsTable, add: Add, verify_all: Callable[[str], int]
) -> None:
    table.set_mirrors([(GS, True), (NFS, False)])
    save_id = add(200)
    assert [(s.mirror, s.verified, s.committed) for s in table.standing(save_id)] == [
        (GS, False, False),
        (NFS, False, False),
    ]
    answer(table, take(table))
    answer(table, take(table))
    assert [(s.verified, s.committed) for s in table.standing(save_id)] == [(True, False), (False, False)]
    verify_all(GS)
    done, missing = table.standing(save_id)
    assert (done.verified, done.committed, done.reason) == (True, True, "")
    assert missing.reason == "2 of 2 artifacts have no sound record"
    assert [(s.verified, s.committed) for s in table.standing(save_id_of(77))] == [(False, False), (False, False)]


def test_records_and_bytes_are_counted_by_mirror_and_state(
    table: UploadsTable, add: Add, verify_all: Callable[[str], int]
) -> None:
    add(100)
    verify_all(GS)
    add(200)
    table.fail(take(table), "refused")
    assert set(table.counts()) == {
        StateCount(GS, RecordState.VERIFIED, 3, 251),
        StateCount(GS, RecordState.FAILED, 1, 100),
        StateCount(GS, RecordState.PENDING, 2, 101),
    }


def test_the_list_of_mirrors_is_replaced_as_a_whole(table: UploadsTable) -> None:
    assert table.mirrors() == []
    table.set_mirrors([(GS, True), (NFS, False)])
    table.set_mirrors([(NFS, True)])
    assert table.mirrors() == [MirrorRow(NFS, True)]


def test_history_is_bounded(table: UploadsTable, add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmirror.local.uploads.table.HISTORY_KEPT", 5)
    for step in range(1, 6):
        add(step)
    assert len(table.history()) == 5


def test_threads_may_share_one_table(table: UploadsTable, add: Add) -> None:
    add(200, count=60)
    claimed: list[str] = []

    def work() -> None:
        while claim := table.claim(threading.current_thread().name, GS, lease_s=600):
            claimed.append(claim.record.path)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(claimed) == len(set(claimed)) == 60
