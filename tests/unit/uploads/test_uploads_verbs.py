"""Adding, releasing and claiming records of the pending-uploads table: what each verb does, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from uploads_fakes import GS, NFS, answer, artifacts_of, take

from ckptmirror.core.errors import CheckpointNotFound, ClaimLost, IntegrityError
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.local import crashpoints
from ckptmirror.local.uploads import UploadsTable
from tests.kit.clock import HandClock
from tests.kit.saves import save_id_of

Add = Callable[..., str]


# -- adding and releasing -----------------------------------------------------------------------------------


def test_a_save_gets_a_record_per_artifact_and_mirror_and_one_for_its_meta(table: UploadsTable) -> None:
    added = table.add_save(
        save_id_of(1), 200, ("dcp",), artifacts_of(200), [GS, NFS], meta_path="meta_000200-1f0c9a2e.json"
    )
    assert added == 6
    assert [(r.mirror, r.path, r.role, r.size_bytes) for r in table.records(mirror=GS)] == [
        (GS, "dcp_000200/__0_0.distcp", "artifact", 100),
        (GS, "dcp_000200/__1_0.distcp", "artifact", 101),
        (GS, "meta_000200-1f0c9a2e.json", "meta", None),
    ]
    assert {r.state for r in table.records()} == {RecordState.PENDING}


def test_records_cannot_be_claimed_before_the_meta_is_on_disk(table: UploadsTable, add: Add) -> None:
    save_id = add(200, released=False)
    assert table.claim("worker", GS, lease_s=60) is None
    assert not table.records()[0].released
    table.release_save(save_id)
    assert take(table).record.released


def test_adding_a_save_again_changes_nothing_and_a_new_mirror_gets_its_records(table: UploadsTable, add: Add) -> None:
    add(200)
    answer(table, take(table))
    before = table.records()
    assert table.add_save(save_id_of(200), 200, ("dcp",), artifacts_of(200), [GS]) == 0
    assert table.records() == before
    assert table.add_save(save_id_of(200), 200, ("dcp",), artifacts_of(200), [GS, NFS]) == 3
    assert table.claim("worker", NFS, lease_s=60) is not None


def test_a_save_never_changes(table: UploadsTable, add: Add) -> None:
    save_id = add(200)
    other = [*artifacts_of(200)[:1], artifacts_of(300)[1]]
    with pytest.raises(IntegrityError, match="never changes"):
        table.add_save(save_id, 200, ("dcp",), artifacts_of(200, 3), [GS])
    swapped = [
        type(a)(a.path, a.kinds, a.rank, type(a.digest)(a.digest.size_bytes, a.digest.crc32c ^ 1, 4 << 20, (1,)))
        for a in artifacts_of(200)
    ]
    with pytest.raises(IntegrityError, match="other contents"):
        table.add_save(save_id, 200, ("dcp",), swapped, [GS])
    with pytest.raises(IntegrityError, match="twice"):
        table.add_save(save_id_of(9), 9, ("dcp",), [other[0], other[0]], [GS])
    assert len(table.records()) == 3


def test_records_left_by_a_crash_before_the_commit_are_discarded_but_released_ones_stay(
    table: UploadsTable, add: Add
) -> None:
    released, wreck = add(200), add(300, released=False)
    assert table.discard_unreleased([released, wreck, save_id_of(999)]) == 1
    assert {r.save_id for r in table.records()} == {released}
    assert [s.save_id for s in table.saves()] == [released]
    assert table.history(wreck)[-1].reason.startswith("discarded")


def test_releasing_an_unknown_save_is_an_error(table: UploadsTable) -> None:
    with pytest.raises(CheckpointNotFound):
        table.release_save(save_id_of(1))


def test_five_thousand_artifacts_are_added_in_one_transaction(table: UploadsTable) -> None:
    crashpoints.arm()
    try:
        assert table.add_save(save_id_of(1), 1, ("dcp",), artifacts_of(1, 5000), [GS]) == 5001
        assert crashpoints.passed()[:2] == ["table.add_save:before", "table.add_save:after"]
        assert set(crashpoints.passed()[2:]) == {"table.reserve:before", "table.reserve:after"}
    finally:
        crashpoints.disarm()


# -- claiming -----------------------------------------------------------------------------------------------


def test_the_oldest_save_is_sent_first_and_its_meta_last(table: UploadsTable, add: Add) -> None:
    add(9000)
    add(100)  # a rewind: lower step, added later
    sent = []
    while claim := table.claim("worker", GS, lease_s=60):
        sent.append(claim.record.path)
        table.verify(
            claim,
            object_name=claim.record.object,
            generation=1,
            size_bytes=claim.record.size_bytes or 1,
            crc32c=claim.record.crc32c or 1,
        )
    assert sent == [
        "dcp_009000/__0_0.distcp",
        "dcp_009000/__1_0.distcp",
        "meta_009000.json",
        "dcp_000100/__0_0.distcp",
        "dcp_000100/__1_0.distcp",
        "meta_000100.json",
    ]


@pytest.mark.parametrize("settle", ["uploading", "pending", "failed", "removed"])
def test_i6_a_meta_is_not_claimable_while_an_artifact_is_not_verified(
    table: UploadsTable, add: Add, settle: str
) -> None:
    add(200)
    answer(table, take(table))
    second = take(table)
    if settle == "pending":
        table.put_back(second, "busy", not_before_s=3600)
    elif settle == "failed":
        table.fail(second, "refused")
    elif settle == "removed":
        answer(table, second)
        table.remove(save_id_of(200), GS, "tombstone")
    assert table.claim("other", GS, lease_s=60) is None


def test_a_claim_holds_the_record_until_its_lease_runs_out(table: UploadsTable, add: Add, clock: HandClock) -> None:
    add(200, count=1)
    first = take(table, lease_s=60)
    clock.pass_s(59.9)
    assert table.claim("other", GS, lease_s=60) is None
    clock.pass_s(0.2)
    second = take(table, worker="other")
    assert second.record.path == first.record.path
    assert second.token == first.token + 1
    assert [(t.old, t.new) for t in table.history(save_id_of(200))[-2:]] == [
        (RecordState.UPLOADING, RecordState.PENDING),
        (RecordState.PENDING, RecordState.UPLOADING),
    ]


def test_a_lease_of_another_boot_is_over(table: UploadsTable, add: Add, clock: HandClock) -> None:
    add(200, count=1)
    take(table, lease_s=3600)
    clock.reboot()
    assert take(table, worker="after the reboot").record.attempts_made == 2


def test_a_lease_further_ahead_than_it_was_granted_for_is_over(table: UploadsTable, add: Add, clock: HandClock) -> None:
    add(200, count=1)
    take(table, lease_s=60)
    clock.time_ms -= 500_000  # another machine's clock under the same name
    assert take(table, worker="other").record.attempts_made == 2


def test_a_renewed_lease_holds_on(table: UploadsTable, add: Add, clock: HandClock) -> None:
    add(200, count=1)
    claim = take(table, lease_s=60)
    clock.pass_s(50)
    claim = table.renew(claim, 60)
    clock.pass_s(50)
    assert table.claim("other", GS, lease_s=60) is None
    assert answer(table, claim).state is RecordState.VERIFIED


@pytest.mark.parametrize("verb", ["verify", "put_back", "fail", "renew", "set_session", "set_object"])
@pytest.mark.parametrize("why", ["overtaken", "ended", "skipped", "forgotten", "verified", "table rebuilt"])
def test_a_stale_worker_gets_claim_lost_and_changes_nothing(
    table: UploadsTable, add: Add, clock: HandClock, verb: str, why: str
) -> None:
    save_id = add(200, count=1)
    stale = take(table, lease_s=1)
    clock.pass_s(2)
    if why in ("overtaken", "verified"):
        newer = take(table, worker="other")
        if why == "verified":
            answer(table, newer)
    elif why == "ended":
        table.put_back_all("worker", "its process is dead")
    elif why == "skipped":
        table.skip(save_id, "policy")
    else:
        table.forget_save(save_id)
        if why == "table rebuilt":
            add(200, count=1)
            take(table, worker="other")
    before, history = table.records(), table.history()
    verbs: dict[str, Callable[[], object]] = {
        "verify": lambda: answer(table, stale),
        "put_back": lambda: table.put_back(stale, "late"),
        "fail": lambda: table.fail(stale, "late"),
        "renew": lambda: table.renew(stale, 60),
        "set_session": lambda: table.set_session(stale, "s"),
        "set_object": lambda: table.set_object(stale, "o"),
    }
    with pytest.raises(ClaimLost):
        verbs[verb]()
    assert table.records() == before
    assert table.history() == history


def test_a_late_worker_that_nobody_overtook_may_finish(table: UploadsTable, add: Add, clock: HandClock) -> None:
    add(200, count=1)
    claim = take(table, lease_s=1)
    clock.pass_s(100)
    assert answer(table, claim).state is RecordState.VERIFIED


def test_a_record_put_back_waits_its_time_and_not_past_a_reboot(
    table: UploadsTable, add: Add, clock: HandClock
) -> None:
    add(200, count=1)
    table.put_back(take(table), "503", not_before_s=30)
    assert table.records()[0].last_error == "503"
    assert table.claim("worker", GS, lease_s=60) is None
    clock.pass_s(30)
    table.put_back(take(table), "503 again", not_before_s=10**9)
    clock.pass_s(3600)
    assert table.claim("worker", GS, lease_s=60) is None
    clock.reboot()
    assert take(table).record.attempts_made == 3


def test_no_waiting_time_is_longer_than_a_day(table: UploadsTable, add: Add, clock: HandClock) -> None:
    add(200, count=1)
    table.put_back(take(table), "503", not_before_s=10**9)
    clock.pass_s(24 * 3600)
    assert take(table)


def test_excluded_saves_are_passed_over(table: UploadsTable, add: Add) -> None:
    first, second = add(100), add(200)
    claim = table.claim("worker", GS, lease_s=60, exclude=[first])
    assert claim is not None
    assert claim.record.save_id == second
    assert table.claim("worker", GS, lease_s=60, exclude=[first, second]) is None


def test_mirrors_do_not_wait_for_one_another(table: UploadsTable, add: Add, verify_all: Callable[[str], int]) -> None:
    add(200, mirrors=(GS, NFS))
    assert verify_all(GS) == 3
    assert take(table, NFS).record.role == "artifact"


def test_a_session_is_kept_for_the_next_worker_and_is_not_shown(table: UploadsTable, add: Add) -> None:
    add(200, count=1)
    claim = table.set_session(take(table), "https://upload/key-to-the-bucket")
    assert "key-to-the-bucket" not in repr(claim)
    table.put_back(claim, "connection lost")
    again = take(table, worker="next process")
    assert again.record.session == "https://upload/key-to-the-bucket"
    assert table.set_object(again, "meta_000200-1f0c9a2e.json").record.session is None


def test_verified_is_written_on_nothing_less_than_the_saved_size_and_crc32c(table: UploadsTable, add: Add) -> None:
    add(200, count=1)
    claim = take(table)
    record = claim.record
    with pytest.raises(IntegrityError):
        table.verify(claim, object_name=record.path, generation=1, size_bytes=100, crc32c=7001)
    with pytest.raises(IntegrityError):
        table.verify(claim, object_name=record.path, generation=1, size_bytes=99, crc32c=7000)
    assert table.records()[0] == record


def test_a_meta_record_learns_its_size_when_it_is_verified(
    table: UploadsTable, add: Add, verify_all: Callable[[str], int]
) -> None:
    add(200)
    verify_all(GS)
    meta = table.records()[-1]
    assert (meta.role, meta.state, meta.size_bytes, meta.crc32c) == ("meta", RecordState.VERIFIED, 50, 5)
