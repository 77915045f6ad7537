"""The table's file: how it is made, opened, refused, set aside, and shared by processes."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
from uploads_fakes import GS, artifacts_of

from ckptmirror.core.errors import (
    BrokenTable,
    CkptMirrorError,
    ConfigError,
    ForeignTable,
    LocalStorageUnwritable,
    NewerTable,
    NoTable,
    TableLocked,
    UsageError,
)
from ckptmirror.local.file_systems import file_system_type, refuse_network_place
from ckptmirror.local.uploads import BootClock, RootIdentity, UploadsTable
from ckptmirror.local.uploads.records import record_to_columns
from ckptmirror.local.uploads.reserve import RESERVE_BYTES, take_reserve
from tests.kit.clock import HandClock
from tests.kit.roots import assert_sound
from tests.kit.saves import save_id_of

Add = Callable[..., str]


def other_connection(path: Path) -> apsw.Connection:
    return apsw.Connection(str(path))


# -- creating and opening -----------------------------------------------------------------------------------


def test_a_table_that_is_not_there_is_not_made_unasked(tmp_path: Path) -> None:
    with pytest.raises(NoTable):
        UploadsTable.open(tmp_path / "uploads.db")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NoTable):
        UploadsTable.open(tmp_path / "no such directory" / "uploads.db", create=True)
    with pytest.raises(UsageError):
        UploadsTable.open(tmp_path / "uploads.db", create=True, read_only=True)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("ending", ["", "-wal", "-shm"])
@pytest.mark.parametrize("planted", ["symbolic link", "hard link"])
def test_neither_the_table_nor_its_log_is_opened_under_a_name_that_is_another_file(
    tmp_path: Path, planted: str, ending: str, read_only: bool
) -> None:
    path, victim = tmp_path / "uploads.db", tmp_path / "victim"
    UploadsTable.open(path, create=True).close()
    if ending:
        victim.write_bytes(b"precious" * 1000)
    else:
        path.rename(victim)
    before = victim.read_bytes()
    name = tmp_path / f"uploads.db{ending}"
    name.symlink_to(victim) if planted == "symbolic link" else name.hardlink_to(victim)
    with pytest.raises(LocalStorageUnwritable, match=planted):
        UploadsTable.open(path, read_only=read_only)
    assert victim.read_bytes() == before


def planted_journal(table: Path, super_journal: Path) -> bytes:
    """Return a hot journal of no pages that names a super-journal, which SQLite deletes after it has rolled back."""
    magic, name, page_bytes = bytes.fromhex("d9d505f920a163d7"), os.fsencode(super_journal), 4096
    header = magic + struct.pack(">5I", 0, 0, table.stat().st_size // page_bytes, 512, page_bytes)
    last_page = 0x40000000 // page_bytes + 1
    return header.ljust(512, b"\0") + struct.pack(f">I{len(name)}sII", last_page, name, len(name), sum(name)) + magic


def test_a_planted_rollback_journal_is_refused_and_nothing_that_it_names_is_deleted(tmp_path: Path) -> None:
    path, journal, victim = tmp_path / "uploads.db", tmp_path / "uploads.db-journal", tmp_path / "thesis.txt"
    UploadsTable.open(path, create=True).close()
    victim.write_text("precious")
    journal.write_bytes(planted_journal(path, victim))
    for options in ({"read_only": True}, {"create": True}, {}):
        with pytest.raises(LocalStorageUnwritable, match="rollback journal") as caught:
            UploadsTable.open(path, **options)
        assert f"`mv {journal} " in caught.value.hint
    assert victim.read_text() == "precious"
    assert journal.exists()


def test_sqlite_itself_deletes_no_file_that_a_journal_names(tmp_path: Path) -> None:
    """Somebody may plant the journal between our look and SQLite's."""
    path, victim = tmp_path / "uploads.db", tmp_path / "thesis.txt"
    UploadsTable.open(path, create=True).close()
    victim.write_text("precious")
    Path(f"{path}-journal").write_bytes(planted_journal(path, victim))
    connection = other_connection(path)
    assert connection.execute("SELECT count(*) FROM records").fetchall() == [(0,)]
    connection.close()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o600), (0o027, 0o600), (0o077, 0o600), (0o007, 0o660)])
def test_a_created_table_is_read_by_those_only_who_may_write_it_and_leaves_no_temporary(
    tmp_path: Path, mask: int, mode: int
) -> None:
    old = os.umask(mask)
    try:
        table = UploadsTable.open(tmp_path / "uploads.db", create=True)
    finally:
        os.umask(old)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"uploads.db", "uploads.db-wal", "uploads.db-shm"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}
    table.close()
    assert [path.name for path in tmp_path.iterdir()] == ["uploads.db"]
    assert table.path.stat().st_nlink == 1


def test_commits_are_durable_in_a_write_ahead_log(table: UploadsTable) -> None:
    with table._database.reading() as connection:
        assert connection.pragma("journal_mode") == "wal"
        assert connection.pragma("synchronous") == 2  # FULL
        assert connection.pragma("application_id") == int.from_bytes(b"ckpt", "big")


def test_creating_again_opens_what_is_there(table: UploadsTable, add: Add) -> None:
    add(200)
    with UploadsTable.open(table.path, create=True) as again:
        assert len(again.records()) == 3


EVIL = "file:///m\nsafe: everything is on every mirror"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("mirrors", value) for value in ({"a": 1}, [[1, 2, 3]], [[5, True]], [[GS, "x"]], [[EVIL, True]])),
        *(("pushed", value) for value in (5, [1], [EVIL])),
        *(("unasked", value) for value in (5, [1], [EVIL])),
        *(("identity", value) for value in ([1], {}, {"run_id": 1, "root": "/", "device": 1, "inode": 1})),
    ],
)
def test_a_fact_that_was_not_written_so_is_a_broken_table(table: UploadsTable, name: str, value: object) -> None:
    table.set_mirrors([(GS, True)])
    table._database.write_fact(name, value)
    with pytest.raises(BrokenTable, match=f"the fact '{name}'"):
        table.mirrors(), table.unasked(), table.identity()


def test_a_record_of_a_mirror_whose_url_has_two_lines_is_broken(table: UploadsTable, add: Add) -> None:
    add(200)
    for record in table.records():
        columns = record_to_columns(replace(record, mirror=EVIL))
        with table._database.change("test") as connection:
            change = "UPDATE records SET mirror = ?, row_crc = ? WHERE id = ?"
            connection.execute(change, (EVIL, columns["row_crc"], record.id))
    assert table.records() == []


LOCKS_A_DIRECTORY = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_whoever_locks_the_directory_keeps_no_table_that_exists_from_being_opened_and_is_named(tmp_path: Path) -> None:
    """Whoever may read a directory can lock it."""
    (tmp_path / "new").mkdir()
    UploadsTable.open(tmp_path / "uploads.db", create=True).close()
    for directory in (tmp_path, tmp_path / "new"):
        command = [sys.executable, "-c", LOCKS_A_DIRECTORY, str(directory)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            if directory == tmp_path:
                UploadsTable.open(directory / "uploads.db", create=True).close()
            else:
                with pytest.raises(TableLocked, match=rf"process ids: {other.pid}\)"):
                    UploadsTable.open(directory / "uploads.db", create=True, busy_timeout_s=0.1)
            other.kill()


def test_many_threads_that_create_at_once_get_one_table(tmp_path: Path) -> None:
    start = threading.Barrier(6)
    failures: list[CkptMirrorError] = []

    def work(number: int) -> None:
        try:
            start.wait(30)
            with UploadsTable.open(tmp_path / "uploads.db", create=True) as table:
                table.add_save(save_id_of(number), number, ("dcp",), artifacts_of(number), [GS])
        except CkptMirrorError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    with UploadsTable.open(tmp_path / "uploads.db") as table:
        assert len(table.saves()) == 6


def test_a_log_left_behind_without_its_table_is_not_replayed_into_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "uploads.db"
    with UploadsTable.open(path, create=True) as table:
        table.add_save(save_id_of(1), 1, ("dcp",), artifacts_of(1), [GS])
        log = (tmp_path / "uploads.db-wal").read_bytes()
        assert log
    path.unlink()
    (tmp_path / "uploads.db-wal").write_bytes(log)
    with UploadsTable.open(path, create=True) as table:
        assert table.records() == []
        assert_sound(table)
    assert [p.read_bytes() for p in tmp_path.glob("*.stray-*-wal")] == [log]


def test_a_newer_table_is_refused_and_left_as_it_is(table: UploadsTable) -> None:
    table.close()
    connection = other_connection(table.path)
    connection.pragma("user_version", 99)
    connection.close()
    with pytest.raises(NewerTable, match="99"):
        UploadsTable.open(table.path)


def test_an_older_table_is_migrated_by_a_writer_and_refused_to_a_reader(
    table: UploadsTable, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptmirror.local.uploads import database

    add(200)
    table.close()
    steps = (*database.migrations(), "ALTER TABLE saves ADD COLUMN note TEXT;")
    monkeypatch.setattr(database, "migrations", lambda: steps)
    with pytest.raises(TableLocked):
        UploadsTable.open(table.path, read_only=True)
    with UploadsTable.open(table.path) as migrated:
        assert len(migrated.records()) == 3
    monkeypatch.undo()
    with pytest.raises(NewerTable):
        UploadsTable.open(table.path)


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 400, b"SQLite format 3\0" + bytes(4080)])
def test_a_corrupt_file_is_refused_with_what_happens_next_and_can_be_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "uploads.db"
    path.write_bytes(content)
    with pytest.raises(BrokenTable) as caught:
        UploadsTable.open(path, create=True)
    assert caught.value.exit_code == 6
    assert "rebuilds" in caught.value.hint or "builds a new one" in caught.value.hint
    aside = UploadsTable.set_aside(path)
    assert aside.read_bytes() == content
    with UploadsTable.open(path, create=True) as table:
        assert table.records() == []


def test_a_flipped_bit_in_the_header_is_a_broken_table_or_none(table: UploadsTable, add: Add) -> None:
    add(200)
    table.close()
    header = table.path.read_bytes()[:100]
    for place in range(8 * len(header)):
        damaged = bytearray(header)
        damaged[place // 8] ^= 1 << place % 8
        with open(table.path, "r+b") as file:
            file.write(damaged)
        try:
            with UploadsTable.open(table.path) as opened:
                assert len(opened.records()) == 3
        except (BrokenTable, NewerTable):
            pass


def test_damaged_pages_are_found_when_the_table_is_opened(table: UploadsTable, add: Add) -> None:
    for step in range(1, 20):
        add(step, count=20)
    table.close()
    size_bytes = table.path.stat().st_size
    with open(table.path, "r+b") as file:
        file.seek(4096)
        file.write(bytes(size_bytes - 4096))
    with pytest.raises(BrokenTable):
        UploadsTable.open(table.path)


def test_a_table_set_aside_takes_its_log_along(table: UploadsTable, add: Add, tmp_path: Path) -> None:
    add(200)
    table.close()
    (tmp_path / "uploads.db-wal").write_bytes(b"log")
    aside = UploadsTable.set_aside(table.path)
    assert {path.name for path in tmp_path.iterdir()} == {aside.name, aside.name + "-wal", "uploads.db-reserve"}
    with pytest.raises(NoTable):
        UploadsTable.set_aside(table.path)


def test_a_table_of_another_kind_of_database_is_refused(tmp_path: Path) -> None:
    connection = other_connection(tmp_path / "uploads.db")
    connection.execute("CREATE TABLE holiday_photos (name)")
    connection.close()
    with pytest.raises(BrokenTable):
        UploadsTable.open(tmp_path / "uploads.db", create=True)


# -- whose it is --------------------------------------------------------------------------------------------


def test_another_roots_table_is_recognised(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("a", "b")]
    for root in roots:
        root.mkdir()
    path = tmp_path / "uploads.db"
    mine = RootIdentity.of(roots[0], "r" * 32)
    UploadsTable.open(path, create=True, identity=mine).close()
    with UploadsTable.open(path, identity=mine) as table:
        assert table.identity() == mine
        with pytest.raises(ForeignTable):
            table.claim_identity(RootIdentity.of(roots[1], "r" * 32))
    with pytest.raises(ForeignTable) as caught:
        UploadsTable.open(path, identity=RootIdentity.of(roots[0], "another run"))
    assert "state_dir" in caught.value.hint
    moved = roots[0].rename(tmp_path / "moved")
    UploadsTable.open(path, identity=RootIdentity.of(moved, "r" * 32)).close()


# -- where it may lie ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0x6969, 0x65735546, 0xFF534D42, 0x0BD00BD0, 0x01021997])
def test_a_network_file_system_is_refused_with_the_hint_state_dir(tmp_path: Path, kind: int) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_network_place(tmp_path, lambda _: kind)
    assert "state_dir" in caught.value.hint


def test_local_file_systems_are_accepted(tmp_path: Path) -> None:
    for kind in (0xEF53, 0x58465342, 0x01021994, 0x9123683E, 0x794C7630):  # ext4, XFS, tmpfs, btrfs, overlay
        refuse_network_place(tmp_path, lambda _, kind=kind: kind)  # type: ignore[misc]
    assert file_system_type(Path("/proc")) == 0x9FA0


# -- sharing it ---------------------------------------------------------------------------------------------


def test_a_table_held_by_another_for_too_long_is_an_error_that_may_be_tried_again(
    table: UploadsTable, add: Add
) -> None:
    add(200)
    other = other_connection(table.path)
    other.execute("BEGIN IMMEDIATE")
    with UploadsTable.open(table.path, busy_timeout_s=0.05) as hasty:
        with pytest.raises(TableLocked) as caught:
            hasty.release_save(save_id_of(200))
        assert caught.value.temporary
        assert len(hasty.records()) == 3  # readers do not wait for writers
        other.execute("ROLLBACK")
        hasty.release_save(save_id_of(200))
    other.close()


def test_a_reader_changes_nothing_and_sees_new_commits(table: UploadsTable, add: Add) -> None:
    with UploadsTable.open(table.path, read_only=True) as reader:
        assert reader.records() == []
        add(200)
        assert len(reader.records()) == 3
        with pytest.raises(LocalStorageUnwritable):
            reader.release_save(save_id_of(200))


def test_a_closed_table_says_so(table: UploadsTable) -> None:
    table.close()
    table.close()
    with pytest.raises(NoTable, match="closed"):
        table.records()


def test_after_a_fork_both_sides_go_on_with_connections_of_their_own(table: UploadsTable, add: Add) -> None:
    add(200, count=4)
    assert table.claim("parent", GS, lease_s=600) is not None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if table.claim("child", GS, lease_s=600) is not None else 2
        finally:
            os._exit(status)
    assert table.claim("parent", GS, lease_s=600) is not None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(str(r.claimed_by) for r in table.records() if r.claimed_by) == ["child", "parent", "parent"]
    assert_sound(table)


def test_a_fork_waits_for_the_change_of_another_thread(table: UploadsTable, add: Add) -> None:
    add(200)
    inside, forked = threading.Event(), threading.Event()

    def change() -> None:
        with table._database.change("test"):
            inside.set()
            forked.wait(0.2)  # the fork cannot come before this ends

    thread = threading.Thread(target=change)
    thread.start()
    assert inside.wait(30)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if len(table.records()) == 3 else 2
        finally:
            os._exit(status)
    forked.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(table.records()) == 3


def test_the_machines_own_clock_names_its_boot_and_rises() -> None:
    clock = BootClock()
    assert len(clock.boot_id) == 36
    assert clock.now_ms() <= clock.now_ms()
    assert clock.utc().endswith("Z")


def test_the_lease_clock_is_injectable(clock: HandClock, table: UploadsTable, add: Add) -> None:
    add(200)
    claim = table.claim("worker", GS, lease_s=5)
    assert claim is not None
    assert claim.record.lease_until_ms == clock.time_ms + 5000


def test_a_letter_flipped_in_the_schema_is_a_broken_table(tmp_path: Path) -> None:
    """It would forbid every change that it does not name, for ever."""
    path = tmp_path / "uploads.db"
    UploadsTable.open(path, create=True).close()
    data = path.read_bytes()
    assert data.count(b"'verified'") > 0
    path.write_bytes(data.replace(b"'verified'", b"'verif\xe9ed'", 1))
    with pytest.raises(BrokenTable, match="its schema"):
        UploadsTable.open(path)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_view_whose_rows_have_no_end_is_no_table(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "uploads.db"
    UploadsTable.open(path, create=True).close()
    connection = other_connection(path)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(records)")]
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "
    connection.execute("DROP TABLE records")
    connection.execute(f"CREATE VIEW records AS {endless}{', '.join(f'i AS {name}' for name in columns)} FROM n")
    connection.close()
    with pytest.raises(BrokenTable, match="its schema"):
        UploadsTable.open(path, read_only=read_only)


def test_a_reserve_that_takes_no_space_is_none(tmp_path: Path) -> None:
    """A root that was restored file by file may have holes where nothing was written."""
    reserve = tmp_path / "uploads.db-reserve"
    with reserve.open("wb") as file:
        file.truncate(RESERVE_BYTES)
    assert reserve.stat().st_blocks == 0
    assert take_reserve(tmp_path / "uploads.db")
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
