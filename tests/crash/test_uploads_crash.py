"""Killed at any crash point, the table is as before the verb or as after it, and what was acknowledged is there.

The short slice kills at every point of one life of a table; ``CKPTMIRROR_CAMPAIGN=full`` repeats it with more saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Artifact, Digest
from ckptmirror.local import crashpoints
from ckptmirror.local.uploads import Claim, UploadsTable
from tests.kit.roots import assert_sound

GS = "gs://bucket/run"
SAVES = 6 if os.environ.get("CKPTMIRROR_CAMPAIGN") == "full" else 1

Verb = Callable[[UploadsTable], object]


def artifacts_of(step: int) -> list[Artifact]:
    return [
        Artifact(f"dcp_{step:06d}/__{rank}_0.distcp", ("dcp",), rank, Digest(100, rank, 4 << 20, (rank,)))
        for rank in range(2)
    ]


def claim(table: UploadsTable) -> Claim:
    """Claim, or take over what the same worker held when it was killed (its lease lasts no time)."""
    found = table.claim("worker", GS, lease_s=0)
    assert found is not None
    return found


def verified(table: UploadsTable) -> None:
    held = claim(table)
    record = held.record
    table.verify(
        held, object_name=record.object, generation=1, size_bytes=record.size_bytes or 9, crc32c=record.crc32c or 0
    )


def verbs() -> list[Verb]:
    """One life of a table: every verb that commits, each from a state that the ones before it left."""
    life: list[Verb] = [lambda table: table.set_mirrors([(GS, True)])]
    for number in range(1, SAVES + 1):
        save_id, step = f"{number:032x}", number * 100
        life += [
            lambda t, i=save_id, s=step: t.add_save(i, s, ("dcp",), artifacts_of(s), [GS]),
            lambda t, i=save_id: t.release_save(i),
            lambda t: t.put_back(t.set_session(claim(t), "session"), "503"),
            lambda t: t.fail(t.set_object(t.renew(claim(t), 0), "other-name"), "403"),
            lambda t: t.retry_failed(),
            verified,
            verified,
            verified,
            lambda t, i=save_id, s=step: t.unverify(i, f"dcp_{s:06d}/__0_0.distcp", GS, "gone", with_meta=True),
            lambda t, i=save_id: t.skip(i, "policy"),
            lambda t, i=save_id: t.take_back([i], "policy".__eq__),
            lambda t, i=save_id: t.skip(i, "policy"),
            lambda t, i=save_id: t.remove(i, GS, "tombstone"),
            lambda t, i=save_id: t.forget_save(i),
            lambda t, i=save_id, s=step: t.add_save(f"f{i[1:]}", s, ("dcp",), artifacts_of(s), [GS]),
            lambda t, i=save_id: t.discard_unreleased([f"f{i[1:]}"]),
        ]
    return life


def picture(table: UploadsTable) -> list[object]:
    """Everything that must not be half done, without tokens, which are random."""
    return [
        [(r.path, r.state, r.object, r.session, r.reason, r.attempts_made, r.released) for r in table.records()],
        [(t.path, t.old, t.new, t.reason) for t in table.history()],
        table.saves(),
        table.mirrors(),
    ]


def run_until_killed(path: Path, crash_at: int) -> tuple[int, int]:
    """Live the life in a child that dies at a crash point; return its exit code and how many verbs it acknowledged."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            crashpoints.arm(str(crash_at))
            table = UploadsTable.open(path, create=True)
            for verb in verbs():
                verb(table)
                os.write(writer, b".")
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    acknowledged = 0
    while piece := os.read(reader, 1024):
        acknowledged += len(piece)
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), acknowledged


class Watched:
    """A table of which a picture is taken after each of its verbs; what follows in one step of a life has several."""

    def __init__(self, table: UploadsTable, seen: list[list[object]]) -> None:
        self._table = table
        self._seen = seen

    def __getattr__(self, name: str) -> Callable[..., object]:
        verb = getattr(self._table, name)

        def watched(*arguments: object, **more: object) -> object:
            result = verb(*arguments, **more)
            self._seen.append(picture(self._table))
            return result

        return watched


def pictures_and_points(tmp_path: Path) -> tuple[list[list[list[object]]], int]:
    """Return, per number of acknowledged verbs, every picture on the way to the next; and the number of points."""
    between: list[list[list[object]]] = []
    with UploadsTable.open(tmp_path / "baseline.db", create=True) as table:
        for verb in verbs():
            seen = [picture(table)]
            verb(cast(UploadsTable, Watched(table, seen)))
            between.append(seen)
        between.append([picture(table)])
    crashpoints.arm()
    try:
        with UploadsTable.open(tmp_path / "counted.db", create=True) as table:
            for verb in verbs():
                verb(table)
        return between, len(crashpoints.passed())
    finally:
        crashpoints.disarm()


def test_killed_at_any_point_the_table_is_before_or_after_and_what_was_acknowledged_is_there(tmp_path: Path) -> None:
    between, points = pictures_and_points(tmp_path)
    assert points > 2 * len(verbs())
    for crash_at in range(1, points + 1):
        path = tmp_path / f"killed-{crash_at}" / "uploads.db"
        path.parent.mkdir()
        code, acknowledged = run_until_killed(path, crash_at)
        assert code == -9, f"point {crash_at} was not passed"
        with UploadsTable.open(path, create=True) as table:
            assert_sound(table)
            assert picture(table) in between[acknowledged], f"after point {crash_at}, {acknowledged} verbs acknowledged"
        left = {p.name for p in path.parent.iterdir()} - {"uploads.db-reserve"}
        assert left == {"uploads.db"}, f"after point {crash_at}"
    code, acknowledged = run_until_killed(tmp_path / "whole.db", points + 1)
    assert (code, acknowledged) == (0, len(verbs()))


@pytest.mark.parametrize("moment", ["table.move_log", "table.set_aside"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_killed_while_a_table_is_set_aside_nothing_is_deleted_and_a_new_one_can_be_made(
    tmp_path: Path, moment: str, side: str
) -> None:
    path = tmp_path / "uploads.db"
    path.write_bytes(b"not a database" * 1000)
    (tmp_path / "uploads.db-wal").write_bytes(b"its log")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            crashpoints.arm(f"{moment}:{side}")
            UploadsTable.set_aside(path)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    contents = sorted(p.read_bytes()[:14] for p in tmp_path.iterdir())
    assert contents == [b"its log", b"not a database"]
    if path.exists():
        UploadsTable.set_aside(path)
    with UploadsTable.open(path, create=True) as table:
        assert table.records() == []


def test_after_a_kill_the_next_worker_carries_on(tmp_path: Path) -> None:
    path = tmp_path / "uploads.db"
    life = len(verbs())
    code, acknowledged = run_until_killed(path, 30)
    assert code == -9
    assert 0 < acknowledged < life
    with UploadsTable.open(path) as table:
        for record in table.records(state=RecordState.UPLOADING):
            assert table.put_back_all(str(record.claimed_by), "its process was killed") >= 1
        assert not table.records(state=RecordState.UPLOADING)
