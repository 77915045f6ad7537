"""Traces everything that changes a disk, once, and fails on any change without a numbered crash point around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.campaign import FULL
from tests.crash.trace import Call, covered_labels, uncovered

EXPECTED = {
    "dir.fsync", "dir.mkdir", "dir.publish", "file.create", "file.fsync", "file.publish", "file.replace", "file.write",
    "line.append", "link.create", "link.replace", "lock.create", "lock.write", "mirror.create", "mirror.fsync",
    "mirror.link", "mirror.fsync_directory", "save.publish", "table.add_save", "table.claim", "table.forget_save",
    "table.release_save", "table.verify", "trash.rename", "trash.unlink",
}  # fmt: skip


def test_every_change_of_root_and_mirror_has_a_crash_point_around_it(traced: tuple[list[Call], list[Path]]) -> None:
    found, places = traced
    assert covered_labels(found, places) >= EXPECTED
    assert uncovered(found, places) == []


@pytest.mark.skipif(not FULL, reason="`make campaign` tests the checks themselves")
def test_a_missing_crash_point_is_noticed(traced: tuple[list[Call], list[Path]]) -> None:
    found, places = traced
    for label in covered_labels(found, places):
        without = [call for call in found if call.mark is None or call.mark[0] != label]
        assert uncovered(without, places), f"a change under {label} was not missed"


def test_a_change_after_the_crash_point_is_noticed(traced: tuple[list[Call], list[Path]]) -> None:
    found, places = traced
    late = Call(found[-1].thread, "pwrite64", f'3<{places[0]}/model_000100.pt>, "x", 1, 0', "1")
    assert uncovered([*found, late], places) == [str(late)]
