"""The journal of a root: what is heard is written, what cannot be written reaches nobody."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ckptmirror.core import events, names
from ckptmirror.core.journal import FILE_LIMIT_BYTES, JournalEntry, entries_from_lines
from ckptmirror.core.names import CONTROL_DIR
from ckptmirror.local.line_file import read_lines
from ckptmirror.observe.journal import Journal

URL = "gs://bucket/run-17"


class HandClock:
    """A boot clock that a test moves."""

    boot_id = "a-boot"

    def __init__(self) -> None:
        self.ms = 5000

    def now_ms(self) -> int:
        return self.ms

    def utc(self) -> str:
        return ""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / CONTROL_DIR).mkdir()
    return tmp_path


def read(root: Path) -> list[JournalEntry]:
    paths = root / names.EVENTS_NAME, root / names.OLDER_EVENTS_NAME
    lines, problems = read_lines(paths[0], older=paths[1], limit_bytes=FILE_LIMIT_BYTES)
    found, broken = entries_from_lines(lines)
    assert (problems, broken) == ([], 0)
    return found


def copied(step: int) -> events.HostCopied:
    return events.HostCopied(step=step, kinds=("dcp",), duration_s=0.5)


def test_what_is_heard_stands_in_the_file_with_both_clocks_and_its_writer(root: Path) -> None:
    clock = HandClock()
    bus = events.EventBus()
    bus.subscribe(Journal(root, "drain", wall=lambda: 1_790_000_000.5, boot=clock))
    bus.emit(copied(1))
    clock.ms = 7000
    bus.emit(copied(2))
    first, second = read(root)
    assert (first.event, first.at_s, first.boot, first.boot_s) == (copied(1), 1_790_000_000.5, "a-boot", 5.0)
    assert (first.by, first.pid, first.number, second.number, second.boot_s) == ("drain", os.getpid(), 1, 2, 7.0)
    assert first.writer == second.writer


def test_two_journals_of_one_root_are_two_writers(root: Path) -> None:
    for journal in (Journal(root, "trainer"), Journal(root, "drain")):
        journal(copied(1))
    assert len({told.writer for told in read(root)}) == 2


def test_a_forked_child_is_a_writer_of_its_own(root: Path) -> None:
    journal = Journal(root, "trainer")
    journal(copied(1))
    pid = os.fork()
    if pid == 0:
        journal(copied(2))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    journal(copied(3))
    numbers = {(told.pid == pid, told.number) for told in read(root)}
    assert numbers == {(False, 1), (True, 1), (False, 2)}


def test_what_the_uploads_table_keeps_is_not_written_twice(root: Path) -> None:
    journal = Journal(root, "trainer")
    journal(events.RecordVerified(mirror=URL, step=1, path="model_000001.pt"))
    journal(events.RecordFailed(mirror=URL, step=1, path="model_000001.pt"))
    assert not (root / names.EVENTS_NAME).exists()


def test_single_calls_to_a_mirror_do_not_crowd_out_what_a_timeline_shows(root: Path) -> None:
    journal = Journal(root, "trainer")
    journal(events.StoreCalled(mirror=URL, operation="stat", name="meta_000001.json"))
    assert not (root / names.EVENTS_NAME).exists()


def test_what_repeats_itself_is_written_once_in_a_while(root: Path) -> None:
    clock = HandClock()
    journal = Journal(root, "trainer", boot=clock)
    for _ in range(240):
        journal(events.MirrorUnreachable(mirror=URL, reason=f"no answer at {clock.ms}"))
        journal(events.RotationRefused(step=1, save_id="a", reason=f"seen at {clock.ms}"))
        clock.ms += 15_000
    told = [type(one.event).__name__ for one in read(root)]
    assert told.count("MirrorUnreachable") == 60
    assert told.count("RotationRefused") == 1
    journal(events.RotationRefused(step=2, save_id="b", reason="another save"))
    assert len(read(root)) == len(told) + 1


def test_a_line_that_cannot_be_written_reaches_nobody_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard, failures = [], []
    bus = events.EventBus(failures.append)
    bus.subscribe(Journal(tmp_path, "trainer"))
    bus.subscribe(heard.append)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            bus.emit(copied(step))
    assert [event.step for event in heard] == [0, 1, 2]
    assert failures == []
    assert len(caplog.records) == 1
    assert "journal" in caplog.text
    assert not (tmp_path / CONTROL_DIR).exists(), "a root that is gone is not made anew"


def test_what_was_lost_shows_as_a_gap_in_the_numbers(root: Path) -> None:
    journal = Journal(root, "trainer")
    journal(copied(1))
    away = root / "away"
    (root / CONTROL_DIR).rename(away)
    journal(copied(2))
    away.rename(root / CONTROL_DIR)
    journal(copied(3))
    assert [told.number for told in read(root)] == [1, 3]


def test_the_file_has_a_limit_and_one_older_one_beside_it(root: Path) -> None:
    journal = Journal(root, "trainer", limit_bytes=20_000)
    for step in range(500):
        journal(copied(step))
    found = [told.number for told in read(root)]
    assert found == list(range(found[0], 501))
    kept = sum((root / name).stat().st_size for name in (names.EVENTS_NAME, names.OLDER_EVENTS_NAME))
    assert 20_000 < kept <= 40_000 + 8192
