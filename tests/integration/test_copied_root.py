"""A root that is copied, with its table, lock and notes, to another place or machine: one of the two goes on."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, errors
from ckptmirror.core import names
from ckptmirror.flow.places.catalog import Catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.stores import open_store
from tests.kit.cli import assert_explains, assert_tells, run
from tests.kit.faults import dead, faulty
from tests.kit.roots import whole
from tests.kit.training import new_state, running, saved_run, train

pytestmark = pytest.mark.long


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, str]:
    """A root with steps 1 and 2, mirrored."""
    url = f"file://{tmp_path}/mirror"
    saved_run(tmp_path / "run", (1, 2), url, kinds=("model",))
    return tmp_path / "run", url


def copied(root: Path, to: Path) -> Path:
    shutil.copytree(root, to, symlinks=True)
    return to


def mirrored(url: str) -> Catalog:
    return mirror_catalog(Mirror(url, True, open_store(url)))


def test_a_copy_at_another_path_is_refused_until_its_table_is_moved_away(
    place: tuple[Path, str], tmp_path: Path
) -> None:
    root, url = place
    copy = copied(root, tmp_path / "copy")
    with pytest.raises(errors.ForeignTable) as caught:
        CheckpointManager(copy, [url])
    assert_explains(caught.value, 10, f"is the table of {root}", f"not of {copy}")
    assert "move uploads.db* away" in caught.value.hint
    for verb in ("status", "drain", "retry"):
        assert_tells(run(verb, "--root", copy), 10, f"not of {copy}", "move uploads.db* away")
    for path in (copy / names.CONTROL_DIR).glob("uploads.db*"):
        path.unlink()
    assert sorted(saved_run(copy, (3,), url, kinds=("model",))) == [3]
    assert {meta.step for meta in mirrored(url).saves.values()} == {1, 2, 3}


def test_i11_of_two_copies_that_train_at_once_the_later_start_goes_on_and_nothing_is_lost(
    place: tuple[Path, str], tmp_path: Path
) -> None:
    root, url = place
    copy = copied(root, tmp_path / "copy")
    for path in (copy / names.CONTROL_DIR).glob("uploads.db*"):
        path.unlink()
    with running(root, url, kinds=("model",)) as first:
        state = new_state()
        assert first.resume(state) is not None
        with running(copy, url, kinds=("model",)) as second:
            other = new_state(1)
            assert second.resume(other) is not None
            train(other, 2)
            second.save(3, other).wait("mirrored", timeout_s=60)
            train(state)

            def go_on() -> None:
                for step in (3, 4, 5):
                    first.save(step, state).wait("mirrored", timeout_s=3)

            with pytest.raises((errors.AttemptFenced, errors.BackgroundSaveFailed, errors.WaitTimeout)):
                go_on()
    assert whole(root).keys() >= {1, 2}
    catalog = mirrored(url)
    standing = catalog.lineage().standing_by_save()
    current = {catalog.saves[save_id].step for save_id, what in standing.items() if what == "current"}
    assert current == {1, 2, 3}
    assert catalog.attempts is not None
    newest = max(catalog.attempts.attempts, key=lambda attempt: attempt.number)
    assert {meta.step for meta in catalog.saves.values() if meta.attempt.id == newest.id} == {3}


def test_i11_a_copy_at_the_same_path_of_another_machine_goes_on_from_what_the_mirror_has(
    place: tuple[Path, str], tmp_path: Path
) -> None:
    """Each machine in turn: what the other saved meanwhile is found on the mirror, and no step is made twice."""
    root, url = place
    elsewhere = copied(root, tmp_path / "elsewhere")
    for step in (3, 4, 5):
        assert sorted(saved_run(root, (step,), url, kinds=("model",))) == [step]
        root.rename(tmp_path / "aside")
        elsewhere.rename(root)
        (tmp_path / "aside").rename(elsewhere)
    catalog = mirrored(url)
    standing = catalog.lineage().standing_by_save()
    assert sorted(catalog.saves[save_id].step for save_id in standing) == [1, 2, 3, 4, 5]
    assert set(standing.values()) == {"current"}


def test_a_root_that_was_restored_from_an_older_copy_does_not_go_on_while_its_mirror_is_silent(
    place: tuple[Path, str], tmp_path: Path
) -> None:
    root, url = place
    backup = copied(root, tmp_path / "backup")
    saved_run(root, (3,), url, kinds=("model",))
    root.rename(tmp_path / "before")
    copied(backup, root)
    for _ in range(2):  # nor at a second start
        with running(root, url, kinds=("model",)) as manager:
            faulty(manager, dead())
            with pytest.raises(errors.StoreTemporary, match="may have come from elsewhere"):
                manager.resume(new_state())
    with running(root, url, kinds=("model",)) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 3


def test_a_copied_lock_and_status_hold_nobody_up(place: tuple[Path, str], tmp_path: Path) -> None:
    """A copy that was taken while a trainer ran has a lock file that names a process which is not here."""
    root, url = place
    with running(root, url, kinds=("model",)) as manager:
        manager.resume(new_state())
        elsewhere = copied(root, tmp_path / "elsewhere")
    root.rename(tmp_path / "aside")
    elsewhere.rename(root)
    assert run("status", "--root", root).stdout.startswith("safe")
    assert run("drain", "--root", root).returncode == 0
    with suppress(errors.DeadlinePassed):
        assert sorted(saved_run(root, (3,), url, kinds=("model",))) == [3]
