"""Lists of attempts: they only grow, are rebuilt where they are lost, and are never trusted blindly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes, attempts_to_bytes
from ckptmirror.core.errors import (
    AttemptFenced,
    BrokenMeta,
    ConfigError,
    IntegrityError,
    NewerFormat,
    StorePermanent,
    StoreTemporary,
    Temporary,
)
from ckptmirror.core.model import Attempt, AttemptList, Meta, new_id
from ckptmirror.core.start.decide import Wish
from ckptmirror.flow.places.attempt_lists import read_local_attempts, read_mirror_attempts
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.start.claim import StartOver, check_of_run
from ckptmirror.local import files
from ckptmirror.stores.base import ObjectInfo
from tests.kit.claiming import claim_run, down, drain_confirmation, opened
from tests.kit.faults import of_a_later_version
from tests.kit.faulty_store import FaultyStore, StoreFault
from tests.kit.mirrors import memory_url, object_names
from tests.kit.saves import FIRST_ATTEMPT, make_attempt, make_save, put_attempts, put_on_mirror


def known(listed: AttemptList) -> set[str]:
    return {attempt.id for attempt in listed.attempts}


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
    assert known(claim.attempts) >= {attempt.id for attempt in attempts}
    assert claim.attempt.number == 3
    assert claim.attempt.parent == metas[-1].ref
    assert {save.step for save in mirror_catalog(mirror).lineage().in_order()} == {100, 200, 300}


def test_i11_a_list_lost_on_the_mirror_is_rebuilt_even_where_the_disk_knows_less(tmp_path: Path) -> None:
    """The machine slept through two attempts: its old list must not make their saves superseded."""
    mirror = opened(memory_url())
    attempts, _ = history(tmp_path, mirror)
    root = tmp_path / "root"
    put_attempts(root, attempts[:1])
    claim = claim_run(root, mirror)
    assert known(claim.attempts) >= {attempt.id for attempt in attempts}
    assert claim.attempt.number == 3


def test_i11_a_list_lost_on_the_disk_is_taken_from_the_mirror_and_the_metas(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    attempts, _ = history(tmp_path, mirror)
    put_attempts(mirror.store, attempts[:2])  # the last was written while the mirror's list could not be
    claim = claim_run(tmp_path / "past", mirror)
    assert known(claim.attempts) >= {attempt.id for attempt in attempts}


def test_a_list_lost_on_the_mirror_is_written_again(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    first = claim_run(tmp_path / "root", mirror)
    make_save(tmp_path / "root", 100, ("model",), first.attempt, 1, run_id=first.run_id)
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
    path = tmp_path / "root" / names.ATTEMPTS_NAME
    path.write_bytes(path.read_bytes()[:-20])
    second = claim_run(tmp_path / "root", mirror)
    assert second.attempt.number == 1
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
    assert known(there) == {attempt.id for attempt in (*attempts, claim.attempt)}


# -- another run -----------------------------------------------------------------------------------------------


def test_another_runs_mirror_is_refused(tmp_path: Path) -> None:
    mirror, other = opened(memory_url()), opened(memory_url())
    claim_run(tmp_path / "one", mirror)
    claim_run(tmp_path / "two", other)
    with pytest.raises(ConfigError, match="holds run"):
        claim_run(tmp_path / "one", other)
    with pytest.raises(ConfigError, match="holds run"):
        claim_run(tmp_path / "fresh", mirror, other)
    with pytest.raises(ConfigError, match="holds run"):
        check_of_run(tmp_path / "one", other)


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
    first = claim_run(tmp_path / "root", mirror)
    make_save(tmp_path / "root", 100, ("model",), first.attempt, 1, run_id=first.run_id)
    claim = claim_run(tmp_path / "root", mirror, Mirror(other.url, False, down(other.store)))
    with pytest.raises(ConfigError, match="holds run"):
        claim.confirm(other)
    assert claim.fenced is None
    claim.confirm(mirror)


def test_lists_only_grow(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    seen: set[str] = set()
    for _ in range(4):
        claim = claim_run(tmp_path / "root", mirror)
        there, _ = read_mirror_attempts(mirror)
        assert there is not None
        ids = {attempt.id for attempt in there.attempts}
        assert seen < ids
        seen = ids
        assert claim.attempt in there.attempts
    assert attempts_from_bytes(attempts_to_bytes(there)) == there
    assert object_names(mirror.store) == []


# -- a root's own list ------------------------------------------------------------------------------------------


def test_i12_a_start_that_died_after_its_claim_does_not_fence_the_next_one_here(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    first = claim_run(root, mirror)
    make_save(root, 100, ("model",), first.attempt, 1, run_id=first.run_id)
    dead = claim_run(root, mirror)
    alive = claim_run(root, Mirror(mirror.url, True, down(mirror.store)))
    assert alive.attempt.number == dead.attempt.number + 1
    alive.confirm(mirror)
    assert alive.fenced is None


def test_a_start_that_meets_an_attempt_that_it_did_not_see_starts_over(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    first = claim_run(root, mirror)

    class Racing(FaultyStore):
        """While the start is about to claim, another does."""

        def write(self, name: str, *args: Any, **more: Any) -> ObjectInfo:
            if name == names.WRITER_NAME and len(met) < 1:
                met.append(claim_run(tmp_path / "elsewhere", mirror).attempt)
            return super().write(name, *args, **more)

    met: list[Attempt] = []
    with pytest.raises(StartOver, match="has started"):
        claim_run(root, Mirror(mirror.url, True, Racing(mirror.store)))
    again = claim_run(root, mirror)
    assert again.attempt.number > max(first.attempt.number, met[0].number)


def test_what_fenced_an_attempt_is_noted_for_the_next_start(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    slow = claim_run(tmp_path / "root", mirror)
    make_save(tmp_path / "root", 100, ("model",), slow.attempt, 1, run_id=slow.run_id)
    claim_run(tmp_path / "elsewhere", mirror)
    with pytest.raises(AttemptFenced):
        slow.confirm(mirror)
    with pytest.raises(StoreTemporary, match=r"started elsewhere \(attempt 1 "):
        claim_run(tmp_path / "root", Mirror(mirror.url, True, down(mirror.store)))


def test_an_optional_mirror_that_refuses_for_good_keeps_no_start_from_claiming(tmp_path: Path) -> None:
    mirror, other = opened(memory_url()), opened(memory_url())
    first = claim_run(tmp_path / "root", mirror)
    make_save(tmp_path / "root", 100, ("model",), first.attempt, 1, run_id=first.run_id)
    fault = StoreFault("write", times=0, when="before", error=lambda: StorePermanent("No."))
    claim = claim_run(tmp_path / "root", mirror, Mirror(other.url, False, FaultyStore(other.store, [fault])))
    assert set(claim.unclaimed) == {other.url}
    listed = read_local_attempts(tmp_path / "root")
    assert listed is not None
    assert claim.attempt in listed.attempts


def test_i11_an_old_list_of_the_root_is_completed_from_what_was_saved_there(tmp_path: Path) -> None:
    attempts, _ = history(tmp_path, opened(memory_url()))
    put_attempts(tmp_path / "past", attempts[:1])
    assert known(claim_run(tmp_path / "past").attempts) > {attempt.id for attempt in attempts}


def test_i11_what_the_mirrors_were_not_told_of_counts_although_the_roots_list_is_lost(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    middle = make_attempt(1, make_save(tmp_path / "gone", 100, ("model",), FIRST_ATTEMPT, 1))
    last = make_attempt(2, make_save(root, 110, ("model",), middle, 1))
    save = make_save(root, 120, ("model",), last, 1)
    put_attempts(mirror.store, [FIRST_ATTEMPT, middle])
    assert claim_run(root, mirror).attempt.parent == save.ref


def test_i11_who_continues_from_an_attempt_that_no_list_tells_of_takes_it_in_and_a_higher_number(
    tmp_path: Path,
) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    first = claim_run(root, mirror)
    stranger = make_attempt(7)
    save = make_save(tmp_path / "elsewhere", 500, ("model",), stranger, 1, run_id=first.run_id)
    put_on_mirror(mirror.store, tmp_path / "elsewhere", save)
    claim = claim_run(root, mirror, wish=Wish(save.save_id))
    assert claim.attempt.number == 8
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert known(there) == {first.attempt.id, stranger.id, claim.attempt.id}


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("required", [True, False])
def test_i12_a_run_that_could_not_begin_is_joined_to_the_one_that_another_machine_began(
    tmp_path: Path, operation: str, required: bool
) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    faulty = FaultyStore(mirror.store, [StoreFault(operation, names.WRITER_NAME, times=0, when="before")])
    with pytest.raises(Temporary):
        claim_run(root, Mirror(mirror.url, required, faulty))
    elsewhere = claim_run(tmp_path / "elsewhere", mirror)
    assert claim_run(root, mirror).run_id == elsewhere.run_id


def test_a_list_that_the_disk_does_not_give_back_is_taken_from_the_mirrors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    first = claim_run(root, mirror)
    read = files.read_limited

    def fail(path: Path, limit_bytes: int) -> bytes:
        if path == root / names.ATTEMPTS_NAME:
            raise IntegrityError(f"{path} cannot be read: Input/output error.")
        return read(path, limit_bytes)

    monkeypatch.setattr(files, "read_limited", fail)
    assert first.attempt.id in known(claim_run(root, mirror).attempts)


@pytest.mark.parametrize("place", ["root", "mirror"])
def test_a_list_of_a_later_version_is_neither_lost_nor_replaced(tmp_path: Path, place: str) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    put_attempts(root, [FIRST_ATTEMPT])
    later = of_a_later_version((root / names.ATTEMPTS_NAME).read_bytes())
    if place == "root":
        (root / names.ATTEMPTS_NAME).write_bytes(later)
    else:
        mirror.store.write(names.WRITER_NAME, later, if_generation=0)
    with pytest.raises(NewerFormat, match="version is 4") as refused:
        claim_run(root, mirror)
    assert "newer ckptmirror" in refused.value.hint
    found = (root / names.ATTEMPTS_NAME).read_bytes() if place == "root" else mirror.store.read(
        names.WRITER_NAME, limit_bytes=10_000
    )[0]  # fmt: skip
    assert found == later


# -- what a drain tells ----------------------------------------------------------------------------------------


def test_a_drain_tells_the_mirror_of_the_attempts_and_adds_none(tmp_path: Path) -> None:
    mirror = opened(memory_url())
    attempts, metas = history(tmp_path, opened(memory_url()))
    put_attempts(tmp_path / "past", attempts)
    confirm = drain_confirmation(tmp_path / "past", mirror)
    confirm(mirror, None)
    assert read_mirror_attempts(mirror)[0] is None, "files may be sent before anything is listed"
    confirm(mirror, metas[-1])
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert known(there) == {attempt.id for attempt in attempts}


def test_a_drain_of_a_root_that_lost_its_list_tells_what_its_metas_say(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    attempt = make_attempt(1, make_save(root, 100, ("model",), FIRST_ATTEMPT, 1))
    last = make_save(root, 110, ("model",), attempt, 1)
    drain_confirmation(root, mirror)(mirror, last)
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert known(there) == {FIRST_ATTEMPT.id, attempt.id}


def test_a_drain_does_not_commit_what_the_run_continued_without(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    first = make_save(root, 100, ("model",), FIRST_ATTEMPT, 1)
    put_on_mirror(mirror.store, root, first)
    apart, other = make_attempt(1, first), make_attempt(2, first)
    late = make_save(root, 110, ("model",), apart, 1)
    put_on_mirror(mirror.store, tmp_path / "two", make_save(tmp_path / "two", 120, ("model",), other, 1))
    put_attempts(root, [FIRST_ATTEMPT, apart])
    put_attempts(mirror.store, [FIRST_ATTEMPT, other])
    drain_confirmation(root, mirror)(mirror, late)  # older by number: it changes nothing
    newest = make_save(root, 130, ("model",), make_attempt(3, late), 1)
    put_attempts(root, [FIRST_ATTEMPT, apart, newest.attempt])
    with pytest.raises(StorePermanent, match="superseded") as refused:
        drain_confirmation(root, mirror)(mirror, newest)
    assert f"--save {newest.save_id[:8]}`" in refused.value.message


def test_a_running_attempt_meets_what_a_mirrors_lost_list_knew(tmp_path: Path) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    running = claim_run(root, mirror)
    newer = make_attempt(running.attempt.number + 1)
    meta = replace(make_save(tmp_path / "elsewhere", 100, ("model",), newer, 1), run_id=running.run_id)
    put_on_mirror(mirror.store, tmp_path / "elsewhere", meta)
    info = mirror.store.stat(names.WRITER_NAME)
    assert info is not None
    mirror.store.delete(names.WRITER_NAME, generation=info.generation)
    with pytest.raises(AttemptFenced):
        running.confirm(mirror)


def test_a_claim_is_complete_only_once_every_required_mirror_has_taken_it_also_one_configured_no_more(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    kept, dropped = opened(memory_url()), opened(memory_url())
    first = claim_run(root, kept, dropped)
    assert first.attempts.completed == (first.attempt.id,)
    save = make_save(root, 100, ("model",), first.attempt, 1, run_id=first.run_id)
    for mirror in (kept, dropped):
        put_on_mirror(mirror.store, root, save)
    second = claim_run(root, kept)
    assert dropped.url in second.attempts.required
    assert second.attempt.id not in second.attempts.completed
