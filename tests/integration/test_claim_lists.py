"""Lists of attempts: they only grow, are rebuilt where they are lost, and are never trusted blindly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes, attempts_to_bytes
from ckptmirror.core.errors import (
    AttemptFenced,
    BrokenMeta,
    ConfigError,
    NewerFormat,
    StorePermanent,
)
from ckptmirror.core.model import Attempt, AttemptList, Meta, SaveRef, new_id
from ckptmirror.flow.places.attempt_lists import read_local_attempts, read_mirror_attempts
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.start.claim import RunClaim, publish_attempts
from ckptmirror.local import files
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Store
from ckptmirror.stores.faulty import FaultyStore, StoreFault
from tests.factory import FIRST_ATTEMPT, make_attempt, make_save, of_a_later_version, put_attempts, put_on_mirror
from tests.mirror_place import memory_url, object_names


def opened(url: str) -> Mirror:
    return Mirror(url, True, open_store(url, retry=False))


def claim_run(root: Path, *mirrors: Mirror) -> RunClaim:
    files.make_dirs(root / names.CONTROL_DIR)
    return RunClaim.make(root, mirrors)


def down(store: Store) -> FaultyStore:
    broken = FaultyStore(store)
    broken.go_down()
    return broken


# -- lists lost or broken --------------------------------------------------------------------------------------


def history(tmp_path: Path, mirror: Mirror) -> tuple[list[Attempt], list[Meta]]:
    """Three attempts, each with a save, each resumed from the one before; mirrored."""
    root, attempts, metas = tmp_path / "past", list[Attempt](), list[Meta]()
    for number in range(3):
        attempt = make_attempt(number, metas[-1] if metas else None)
        meta = make_save(root, 100 * (number + 1), ("model",), attempt, 1)
        put_on_mirror(mirror.store, root, meta)
        attempts.append(attempt)
        metas.append(meta)
    return attempts, metas


def test_i11_a_list_lost_everywhere_is_rebuilt_from_the_metas(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    attempts, metas = history(tmp_path, mirror)
    claim = claim_run(tmp_path / "fresh", mirror)
    assert claim.run_id == metas[0].run_id
    assert list(claim.known.attempts) == attempts
    assert claim.attempt.number == 3
    assert {save.step for save in mirror_catalog(mirror).lineage(claim.known).in_order()} == {100, 200, 300}


def test_i11_a_list_lost_on_the_mirror_is_rebuilt_even_where_the_disk_knows_less(tmp_path: Path) -> None:
    """The machine slept through two attempts: its old list must not make their saves superseded."""
    mirror = opened(memory_url())
    attempts, _ = history(tmp_path, mirror)
    root = tmp_path / "root"
    put_attempts(root, attempts[:1])
    claim = claim_run(root, mirror)
    assert list(claim.known.attempts) == attempts
    assert claim.attempt.number == 3


def test_i11_a_list_lost_on_the_disk_is_taken_from_the_mirror_and_the_metas(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    attempts, _ = history(tmp_path, mirror)
    put_attempts(mirror.store, attempts[:2])  # the last was written while the mirror's list could not be
    claim = claim_run(tmp_path / "past", mirror)
    assert list(claim.known.attempts) == attempts


def test_a_list_lost_on_the_mirror_is_written_again(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    first = claim_run(tmp_path / "root", mirror)
    first.decide(None, [mirror])
    info = mirror.store.stat(names.WRITER_NAME)
    assert info is not None
    mirror.store.delete(names.WRITER_NAME, generation=info.generation)
    second = claim_run(tmp_path / "root", mirror)
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert {attempt.id for attempt in there.attempts} == {first.attempt.id, second.attempt.id}


def test_a_broken_local_list_gives_way_to_the_mirrors(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    first = claim_run(tmp_path / "root", mirror)
    first.decide(None, [mirror])
    path = tmp_path / "root" / names.ATTEMPTS_NAME
    path.write_bytes(path.read_bytes()[:-20])
    second = claim_run(tmp_path / "root", mirror)
    assert second.attempt.number == 1
    second.decide(None, [mirror])
    assert attempts_from_bytes(path.read_bytes()).run_id == first.run_id


def test_a_broken_local_list_with_no_other_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    root = tmp_path / "root"
    put_attempts(root, [FIRST_ATTEMPT])
    (root / names.ATTEMPTS_NAME).write_bytes(b"{}")
    with pytest.raises(BrokenMeta, match="is broken") as broken:
        claim_run(root, opened(memory_url()))
    assert "Move it away" in broken.value.hint
    assert (root / names.ATTEMPTS_NAME).read_bytes() == b"{}"


def test_a_broken_list_on_a_mirror_is_rebuilt_from_its_metas(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    attempts, _ = history(tmp_path, mirror)
    mirror.store.write(names.WRITER_NAME, b"{}", if_generation=0)
    claim = claim_run(tmp_path / "root", mirror)
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert list(there.attempts) == [*attempts, claim.attempt]


# -- another run -----------------------------------------------------------------------------------------------


def test_another_runs_mirror_is_refused(tmp_path: Path) -> None:
    mirror, other = opened(memory_url()), opened(memory_url())
    claim_run(tmp_path / "one", mirror).decide(None, [mirror])
    claim_run(tmp_path / "two", other).decide(None, [other])
    with pytest.raises(ConfigError, match="holds run"):
        claim_run(tmp_path / "one", other)
    with pytest.raises(ConfigError, match="holds run"):
        claim_run(tmp_path / "fresh", mirror, other)
    with pytest.raises(ConfigError, match="holds run"):
        publish_attempts(tmp_path / "one", other)


def test_another_runs_saves_on_a_mirror_without_a_list_are_refused(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    history(tmp_path, mirror)
    root = tmp_path / "root"
    put_attempts(root, [FIRST_ATTEMPT], run_id=new_id())
    with pytest.raises(ConfigError, match="holds run"):
        claim_run(root, mirror)


def test_another_runs_mirror_that_was_silent_at_the_start_fails_its_uploads_and_fences_nobody(tmp_path: Path) -> None:
    mirror, other = opened(memory_url()), opened(memory_url())
    claim_run(tmp_path / "other", other)
    claim = claim_run(tmp_path / "root", mirror, Mirror(other.url, False, down(other.store)))
    claim.decide(None, [mirror])
    with pytest.raises(ConfigError, match="holds run"):
        claim.confirm(other)
    assert claim.fenced is None
    claim.confirm(mirror)


def test_a_drain_tells_the_mirror_of_the_attempts_and_adds_none(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    root = tmp_path / "root"
    parent = SaveRef(FIRST_ATTEMPT.id, 1, 100, new_id())
    put_attempts(root, [FIRST_ATTEMPT, make_attempt(1, parent)])
    publish_attempts(root, mirror)
    there, _ = read_mirror_attempts(mirror)
    assert there == read_local_attempts(root)


def test_lists_only_grow(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    seen: set[str] = set()
    for _ in range(4):
        claim = claim_run(tmp_path / "root", mirror)
        claim.decide(None, [mirror])
        there, _ = read_mirror_attempts(mirror)
        assert there is not None
        ids = {attempt.id for attempt in there.attempts}
        assert seen < ids
        seen = ids
        assert replace(claim.attempt) in there.attempts
    assert attempts_from_bytes(attempts_to_bytes(AttemptList(claim.run_id, tuple(there.attempts)))) == there
    assert object_names(mirror.store) == []


# -- a root's own list ------------------------------------------------------------------------------------------


def test_i12_the_root_knows_of_an_attempt_before_any_mirror_does(tmp_path: Path) -> None:
    """A start that dies undecided must not fence the next one, which cannot see the mirror, when that answers again."""
    mirror = opened(memory_url())
    claim_run(tmp_path / "root", mirror).decide(None, [mirror])
    dead = claim_run(tmp_path / "root", mirror)
    silent = Mirror(mirror.url, True, down(mirror.store))
    alive = claim_run(tmp_path / "root", silent)
    assert alive.attempt.number == dead.attempt.number + 1
    alive.decide(None, [silent])
    alive.confirm(mirror)
    assert alive.fenced is None


def test_i12_a_start_that_died_between_telling_the_mirror_and_anything_else_is_not_taken_for_another(
    tmp_path: Path,
) -> None:
    """The root's own decided attempts never set the root's own branch aside."""
    mirror = opened(memory_url())
    first = claim_run(tmp_path / "root", mirror)
    first.decide(None, [mirror])
    killed = claim_run(tmp_path / "root", mirror)
    killed.decide(SaveRef(first.attempt.id, 1, 100, new_id()), [mirror])
    alone = claim_run(tmp_path / "root", Mirror(mirror.url, True, down(mirror.store)))
    alone.decide(SaveRef(first.attempt.id, 1, 100, new_id()), [])
    after = claim_run(tmp_path / "root", mirror)
    assert after.apart == frozenset()
    assert {alone.attempt.id, killed.attempt.id} <= {attempt.id for attempt in after.attempts.attempts}


def test_a_decision_that_a_newer_attempt_fences_is_taken_back(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    claim_run(tmp_path / "root", mirror).decide(None, [mirror])
    slow = claim_run(tmp_path / "root", mirror)
    claim_run(tmp_path / "elsewhere", mirror)
    with pytest.raises(AttemptFenced):
        slow.decide(None, [mirror])
    listed = read_local_attempts(tmp_path / "root")
    assert listed is not None
    assert {attempt.id: attempt.decided for attempt in listed.attempts}[slow.attempt.id] is False


def test_an_optional_mirror_that_refuses_for_good_keeps_no_start_from_deciding(tmp_path: Path) -> None:
    mirror, other = opened(memory_url()), opened(memory_url())
    fault = StoreFault("write", times=0, when="before", error=lambda: StorePermanent("No."))
    claim = claim_run(tmp_path / "root", mirror, Mirror(other.url, False, FaultyStore(other.store, [fault])))
    claim.decide(None, [mirror, other])
    assert set(claim.unclaimed) == {other.url}
    listed = read_local_attempts(tmp_path / "root")
    assert listed is not None
    assert listed.attempts == (claim.attempt,)


def test_i11_an_old_list_of_the_root_is_completed_from_what_was_saved_there(tmp_path: Path) -> None:
    attempts, _ = history(tmp_path, opened(memory_url()))
    put_attempts(tmp_path / "past", attempts[:1])
    assert list(claim_run(tmp_path / "past").known.attempts) == attempts


def test_i11_a_branch_apart_whose_list_is_lost_is_set_aside_all_the_same(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    first = make_save(root, 100, ("model",), FIRST_ATTEMPT, 1)
    apart = make_attempt(1, first)
    make_save(root, 110, ("model",), apart, 1)
    put_attempts(mirror.store, [FIRST_ATTEMPT, make_attempt(1, first)])
    claim = claim_run(root, mirror)
    assert claim.apart == {apart.id}


def test_i11_what_the_mirrors_were_not_told_of_counts_although_the_roots_list_is_lost(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    middle = make_attempt(1, make_save(tmp_path / "gone", 100, ("model",), FIRST_ATTEMPT, 1))
    last = make_attempt(2, make_save(root, 110, ("model",), middle, 1))
    make_save(root, 120, ("model",), last, 1)
    put_attempts(mirror.store, [FIRST_ATTEMPT, middle])
    claim = claim_run(root, mirror)
    assert claim.apart == frozenset()
    assert last in claim.attempts.attempts


@pytest.mark.parametrize("place", ["root", "mirror"])
def test_a_list_of_a_later_version_is_neither_lost_nor_replaced(tmp_path: Path, place: str) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    put_attempts(root, [FIRST_ATTEMPT])
    later = of_a_later_version((root / names.ATTEMPTS_NAME).read_bytes())
    if place == "root":
        (root / names.ATTEMPTS_NAME).write_bytes(later)
    else:
        mirror.store.write(names.WRITER_NAME, later, if_generation=0)
    with pytest.raises(NewerFormat, match="version is 2") as refused:
        claim_run(root, mirror)
    assert "newer ckptmirror" in refused.value.hint
    found = (root / names.ATTEMPTS_NAME).read_bytes() if place == "root" else mirror.store.read(
        names.WRITER_NAME, limit_bytes=10_000
    )[0]  # fmt: skip
    assert found == later


# -- what a drain tells ----------------------------------------------------------------------------------------


def test_a_drain_rebuilds_a_mirrors_lost_list_before_it_writes_one(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    attempts, _ = history(tmp_path, mirror)
    put_attempts(tmp_path / "root", attempts[:2])
    publish_attempts(tmp_path / "root", mirror)
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert list(there.attempts) == attempts


def test_a_drain_of_a_root_that_lost_its_list_tells_what_its_metas_say(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    attempt = make_attempt(1, make_save(root, 100, ("model",), FIRST_ATTEMPT, 1))
    make_save(root, 110, ("model",), attempt, 1)
    publish_attempts(root, mirror)
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert list(there.attempts) == [FIRST_ATTEMPT, attempt]


def test_a_running_attempt_meets_what_a_mirrors_lost_list_knew(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    running = claim_run(root, mirror)
    running.decide(None, [mirror])
    newer = make_attempt(running.attempt.number + 1)
    meta = replace(make_save(tmp_path / "elsewhere", 100, ("model",), newer, 1), run_id=running.run_id)
    put_on_mirror(mirror.store, tmp_path / "elsewhere", meta)
    info = mirror.store.stat(names.WRITER_NAME)
    assert info is not None
    mirror.store.delete(names.WRITER_NAME, generation=info.generation)
    with pytest.raises(AttemptFenced):
        running.confirm(mirror)
