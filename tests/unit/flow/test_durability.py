"""Whether everything is safe: what keeps the answer open, by the table and by mirrors that have yet to confirm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core.model import Meta
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention.durability import Durability, OpenSave, durability, why_not_same
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import open_store
from tests.kit.saves import make_save

ONE, TWO = "memory://durability-one/run", "memory://durability-two/run"


@pytest.fixture
def table(tmp_path: Path) -> Iterator[UploadsTable]:
    with UploadsTable.open(tmp_path / "uploads.db", create=True) as table:
        table.set_mirrors([(ONE, True), (TWO, True)])
        yield table


@pytest.fixture
def save(tmp_path: Path) -> Meta:
    return make_save(tmp_path / "root", 200, ("model",))


def queue(table: UploadsTable, save: Meta, *mirrors: str) -> None:
    table.add_save(save.save_id, save.step, save.kinds, save.artifacts, mirrors)
    table.release_save(save.save_id)


def verify(table: UploadsTable, mirror: str) -> None:
    while claim := table.claim("worker", mirror, lease_s=60):
        size_bytes, crc32c = claim.record.size_bytes or 50, claim.record.crc32c or 5
        table.verify(claim, object_name=claim.record.object, generation=1, size_bytes=size_bytes, crc32c=crc32c)


def test_a_save_is_open_on_each_mirror_until_its_files_and_its_meta_are_verified_there(
    table: UploadsTable, save: Meta
) -> None:
    files = len(save.artifacts) + 1
    queue(table, save, ONE, TWO)
    assert durability(table, [save], [ONE, TWO]).files == 2 * files
    verify(table, ONE)
    now = durability(table, [save], [ONE, TWO])
    assert ([one.mirror for one in now.open], now.files, now.is_safe) == ([TWO], files, False)
    verify(table, TWO)
    assert durability(table, [save], [ONE, TWO]) == Durability()
    assert durability(table, [save], [ONE, TWO]).is_safe


def test_a_save_without_a_record_is_open_where_it_counts_and_counts_as_one_file(
    table: UploadsTable, save: Meta
) -> None:
    assert durability(table, [save], [ONE, TWO]).files == 2
    table.set_mirrors([(ONE, True), (TWO, False)])
    assert [one.mirror for one in durability(table, [save], [ONE, TWO]).open] == [ONE]


def test_a_save_that_is_only_on_a_mirror_is_not_expected_on_one_that_was_added_later(
    table: UploadsTable, save: Meta
) -> None:
    queue(table, save, ONE)
    assert not durability(table, [], [ONE, TWO]).is_safe
    verify(table, ONE)
    assert durability(table, [], [ONE, TWO]).is_safe
    assert not durability(table, [save], [ONE, TWO]).is_safe


def test_a_mirror_that_has_yet_to_confirm_keeps_the_answer_open_if_it_counts(table: UploadsTable, save: Meta) -> None:
    queue(table, save, ONE, TWO)
    verify(table, ONE)
    verify(table, TWO)
    table.set_unasked([TWO])
    now = durability(table, [save], [ONE, TWO])
    assert (now.open, set(now.unasked), now.files, now.is_safe) == ((), {TWO}, 0, False)
    assert durability(table, [save], [ONE]).is_safe
    assert durability(table, [save], [ONE, TWO], unasked={}).is_safe


class TableInAnAudit:
    """A table that a mirror's answer changes as soon as one of two things was read of it."""

    def __init__(self, table: UploadsTable, answer: Callable[[], None]) -> None:
        self._table = table
        self._answers = [answer]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def _after(self, value: Any) -> Any:
        if self._answers:
            self._answers.pop()()
        return value

    def unasked(self) -> set[str]:
        return self._after(self._table.unasked())

    def standing(self, save_id: str) -> Any:
        return self._after(self._table.standing(save_id))


def test_what_a_mirror_lost_is_never_called_safe_while_the_mirror_answers(table: UploadsTable, save: Meta) -> None:
    queue(table, save, ONE)
    verify(table, ONE)
    table.set_unasked([ONE])

    def answer() -> None:
        table.unverify(save.save_id, save.artifacts[0].path, ONE, "it is missing")
        table.set_unasked([])

    now = durability(TableInAnAudit(table, answer), [save], [ONE])  # type: ignore[arg-type]
    assert not now.is_safe
    assert now.open == (OpenSave(save.save_id, ONE, 1, now.open[0].reason),)


def test_records_of_other_files_are_not_those_of_the_save_on_this_disk(
    table: UploadsTable, save: Meta, tmp_path: Path
) -> None:
    mirror = Mirror(ONE, True, open_store(ONE))
    assert why_not_same(table, [mirror], save) is not None
    queue(table, save, ONE)
    assert why_not_same(table, [mirror], save) is None
    other = make_save(tmp_path / "other", 200, ("model",), save_id=save.save_id, size_bytes=2000)
    assert why_not_same(table, [mirror], other) == f"{ONE}: the uploaded files are not the ones on this disk"
