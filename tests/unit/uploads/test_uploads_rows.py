"""A row that does not read back as it was written counts as no record, whatever it says."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
from uploads_fakes import GS, artifacts_of

from ckptmirror.core.errors import BrokenTable, CkptMirrorError
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.local.uploads import UploadsTable, records, rows, statements
from tests.kit.clock import HandClock
from tests.kit.roots import assert_sound
from tests.kit.saves import save_id_of

Add = Callable[..., str]
VerifyAll = Callable[[str], int]


def tamper(table: UploadsTable, sql: str) -> None:
    """Change the file behind the table's back, as a flipped bit would."""
    connection = apsw.Connection(str(table.path))
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("DROP TRIGGER IF EXISTS a_record_changed_its_state")
    connection.execute(sql)
    connection.close()


CHANGED = {
    "save_order": "save_order + 1",
    "save_id": "'00000000000000000000000000000aaa'",
    "step": "step + 1",
    "path": "'dcp_000200/__9_0.distcp'",
    "mirror": "'gs://bucket/rum'",
    "kinds": "'[\"model\"]'",
    "rank": "3",
    "size_bytes": "size_bytes + 1",
    "crc32c": "crc32c + 1",
    "state": "'pending'",
    "object": "'dcp_000200/__0_1.distcp'",
    "generation": "2",
    "attempts_made": "0",
    "token": "token + 1",
    "reason": "CAST(x'ff' AS TEXT)",
    "row_crc": "row_crc + 1",
    "lease_ms": "'text where a number belongs'",
    "session": "x'00'",
}


@pytest.mark.parametrize("column", CHANGED)
def test_a_changed_column_makes_the_row_no_record(
    table: UploadsTable, add: Add, verify_all: VerifyAll, column: str
) -> None:
    save_id = add(200)
    verify_all(GS)
    assert table.standing(save_id)[0].verified
    tamper(table, f"UPDATE records SET {column} = {CHANGED[column]} WHERE path GLOB '*__0_0*'")
    assert [r.path for r in table.records()] == ["dcp_000200/__1_0.distcp", "meta_000200.json"]
    standing = table.standing(save_id)[0]
    assert not standing.verified
    assert "1 of 2 artifacts" in standing.reason
    (broken,) = table.drop_broken_rows()
    assert broken.table == "records"


def test_a_row_that_vanished_keeps_the_save_from_being_verified_or_committed(table: UploadsTable, add: Add) -> None:
    save_id = add(200)
    tamper(table, "DELETE FROM records WHERE path GLOB '*__0_0*'")
    claim = table.claim("worker", GS, lease_s=60)
    assert claim is not None
    table.verify(claim, object_name=claim.record.path, generation=1, size_bytes=101, crc32c=7001)
    assert not table.standing(save_id)[0].verified
    assert table.claim("worker", GS, lease_s=60) is None  # I6: the meta is not handed out


def test_i6_a_row_flipped_to_verified_does_not_let_the_meta_out(table: UploadsTable, add: Add) -> None:
    add(200)
    tamper(table, "UPDATE records SET state = 'verified' WHERE role = 'artifact'")
    assert table.claim("worker", GS, lease_s=60) is None


def test_rows_of_another_save_that_a_damaged_index_gives_are_not_counted(
    table: UploadsTable, add: Add, verify_all: VerifyAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(100)
    verify_all(GS)
    pending = add(200)
    misled = dict(statements.statements())
    name = "read the records of a save"
    misled[name] = misled[name].replace("r.save_id = :save_id", "r.save_id IN (:save_id, printf('%032x', 100))")
    monkeypatch.setattr(rows, "statement", misled.__getitem__)
    with pytest.raises(BrokenTable, match="index is damaged"):
        table.standing(pending)


def test_a_row_that_an_index_gives_twice_counts_once(
    table: UploadsTable, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_id = add(200)
    claim = table.claim("worker", GS, lease_s=60)
    assert claim is not None
    table.verify(claim, object_name=claim.record.path, generation=1, size_bytes=100, crc32c=7000)
    tamper(table, "DELETE FROM records WHERE path GLOB '*__1_0*'")
    twice = dict(statements.statements())
    for name in ("read the records of a save", "read the records of a save on a mirror"):
        twice[name] = twice[name].replace("FROM records r", "FROM (VALUES (1), (2)), records r")
    monkeypatch.setattr(rows, "statement", twice.__getitem__)
    assert not table.standing(save_id)[0].verified
    assert table.claim("worker", GS, lease_s=60) is None


def test_a_broken_row_does_not_hold_up_the_others(table: UploadsTable, add: Add) -> None:
    add(200)
    tamper(table, "UPDATE records SET size_bytes = 1 WHERE path GLOB '*__0_0*'")
    claim = table.claim("worker", GS, lease_s=60)
    assert claim is not None
    assert claim.record.path == "dcp_000200/__1_0.distcp"


def test_a_worker_whose_row_breaks_is_told_so(table: UploadsTable, add: Add) -> None:
    add(200)
    claim = table.claim("worker", GS, lease_s=60)
    assert claim is not None
    tamper(table, "UPDATE records SET size_bytes = 1 WHERE path GLOB '*__0_0*'")
    with pytest.raises(BrokenTable):
        table.renew(claim, 60)


def test_a_broken_save_is_not_claimable_and_has_no_standing(table: UploadsTable, add: Add) -> None:
    save_id = add(200, released=False)
    tamper(table, "UPDATE saves SET released = 1")
    assert table.claim("worker", GS, lease_s=60) is None
    assert table.saves() == []
    with pytest.raises(BrokenTable):
        table.standing(save_id)


def test_a_broken_list_of_mirrors_is_an_error_and_not_a_shorter_list(table: UploadsTable) -> None:
    table.set_mirrors([(GS, True)])
    tamper(table, "UPDATE facts SET value = replace(value, 'true', 'false')")
    with pytest.raises(BrokenTable):
        table.mirrors()


def test_dropped_broken_rows_are_added_again_as_pending(table: UploadsTable, add: Add, verify_all: VerifyAll) -> None:
    save_id = add(200)
    verify_all(GS)
    tamper(table, "UPDATE records SET reason = CAST(x'ff' AS TEXT) WHERE path GLOB '*__0_0*'")
    assert table.add_save(save_id, 200, ("dcp",), artifacts_of(200), [GS]) == 0  # the broken row is in the way
    (broken,) = table.drop_broken_rows()
    assert "__0_0" in broken.content
    assert table.add_save(save_id, 200, ("dcp",), artifacts_of(200), [GS]) == 1
    assert [r.state for r in table.records()][:2] == [RecordState.VERIFIED, RecordState.PENDING] or [
        r.state for r in table.records()
    ][:2] == [RecordState.PENDING, RecordState.VERIFIED]
    assert verify_all(GS) == 1
    assert_sound(table)


def test_a_broken_save_row_is_dropped_and_added_again(table: UploadsTable, add: Add) -> None:
    save_id = add(200)
    tamper(table, "UPDATE saves SET step = 300")
    assert [row.table for row in table.drop_broken_rows()] == ["saves"]
    table.add_save(save_id, 200, ("dcp",), artifacts_of(200), [GS])
    assert not table.saves()[0].released
    table.release_save(save_id)
    assert table.claim("worker", GS, lease_s=60) is not None


@pytest.mark.parametrize("kinds", ["5", "null", '["dcp", 7]', '["other"]', '[["dcp"]]', "[" * 100_000, '"dcp"'])
def test_a_row_whose_kinds_are_no_kinds_is_broken_though_its_checksum_is_right(
    table: UploadsTable, add: Add, kinds: str
) -> None:
    add(200)
    record, save = table.records()[0], table.saves()[0]
    for sealed, read, released in (
        (records.record_to_columns(record), records.record_from_row, [1]),
        (records.save_to_columns(save), records.save_from_row, []),
    ):
        values = {**sealed, "kinds": kinds}
        del values["row_crc"]
        row = [value.encode() if isinstance(value, str) else value for value in values.values()]
        found = read([1, *row, records.canonical_crc(list(values.values())), *released])
        assert isinstance(found, records.BrokenRow)
        assert found.why == "kinds is not a list of kinds"


def test_a_session_is_not_shown_by_the_report_of_a_broken_row(table: UploadsTable, add: Add) -> None:
    add(200)
    claim = table.claim("worker", GS, lease_s=60)
    assert claim is not None
    table.set_session(claim, "https://upload/key-to-the-bucket")
    tamper(table, "UPDATE records SET step = 7 WHERE session IS NOT NULL")
    (broken,) = table.drop_broken_rows()
    assert "key-to-the-bucket" not in broken.content


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_never_make_a_record_verified_and_raise_only_our_errors(
    tmp_path: Path, clock: HandClock, seed: int
) -> None:
    whole = tmp_path / "whole.db"
    with UploadsTable.open(whole, create=True, clock=clock) as table:
        table.set_mirrors([(GS, True)])
        for step in range(1, 10):
            table.add_save(save_id_of(step), step, ("dcp",), artifacts_of(step, 6), [GS])
            table.release_save(save_id_of(step))
        for _ in range(45):
            claim = table.claim("worker", GS, lease_s=60)
            assert claim is not None
            size_bytes, crc32c = claim.record.size_bytes or 5, claim.record.crc32c or 5
            table.verify(claim, object_name=claim.record.path, generation=1, size_bytes=size_bytes, crc32c=crc32c)
        known = {(r.save_id, r.path): r for r in table.records()}
        complete = {s.save_id for s in table.saves() if table.standing(s.save_id)[0].verified}
    chance = random.Random(seed)
    for number in range(40):
        broken = tmp_path / f"{number}.db"
        shutil.copyfile(whole, broken)
        with open(broken, "r+b") as file:
            place = chance.randrange(broken.stat().st_size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
        try:
            with UploadsTable.open(broken, clock=clock) as table:
                for record in table.records():
                    assert replace(record, released=True) == known[record.save_id, record.path]
                for save in table.saves():
                    assert not table.standing(save.save_id)[0].verified or save.save_id in complete
                table.drop_broken_rows()
                table.counts()
                table.history()
                while claim := table.claim("worker", GS, lease_s=60):
                    if claim.record.role == "meta":
                        assert all(
                            r.state is RecordState.VERIFIED
                            for r in table.records(save_id=claim.record.save_id)
                            if r.role == "artifact"
                        )
                        table.fail(claim, "enough")
                    else:
                        table.verify(
                            claim,
                            object_name=claim.record.path,
                            generation=1,
                            size_bytes=claim.record.size_bytes or 0,
                            crc32c=claim.record.crc32c or 0,
                        )
        except CkptMirrorError:
            pass  # refused with a reason: also an answer
