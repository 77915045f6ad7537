"""An uploads table that is broken, newer, another root's or no file: a sentence, a hint, a code, nothing lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

from ckptmirror import CheckpointManager, errors
from ckptmirror.core import names
from ckptmirror.flow.drain import drain
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.status import is_mirrored, read_status
from ckptmirror.local.uploads import RootIdentity, UploadsTable
from ckptmirror.stores import open_store
from tests.kit.cli import assert_explains, assert_tells, run
from tests.kit.roots import content, make_pending, whole
from tests.kit.saves import RUN_ID
from tests.kit.training import new_state, saved_run

pytestmark = pytest.mark.long

VERBS = (
    ["status"],
    ["drain"],
    ["rotate", "--keep-last", "1"],
    ["retry"],
    ["timeline"],
    ["push", "--mirror", "file:///m"],
)
PAGE_BYTES = 4096


def random_bytes(table: Path) -> None:
    table.write_bytes(random.Random(0).randbytes(40_000))


def nothing(table: Path) -> None:
    table.write_bytes(b"")


def half(table: Path) -> None:
    table.write_bytes(table.read_bytes()[: 3 * PAGE_BYTES])


def the_list_of_mirrors(table: Path) -> None:
    """A flipped byte in one fact; the pages are sound."""
    connection = apsw.Connection(str(table))
    connection.execute("UPDATE facts SET value = CAST(X'ca' || value AS BLOB) WHERE name = 'mirrors'")
    assert connection.changes() == 1
    connection.close()


def a_directory(table: Path) -> None:
    table.unlink()
    table.mkdir()


def a_newer_version(table: Path) -> None:
    connection = apsw.Connection(str(table))
    connection.pragma("user_version", 99)
    connection.close()


def another_roots(table: Path) -> None:
    other = table.parents[2] / "other"
    root, _ = make_pending(other, f"file://{other}/mirror", 100, kinds=("model",))
    with UploadsTable.open(root / names.TABLE_NAME) as opened:
        opened.claim_identity(RootIdentity.of(root, RUN_ID))
    shutil.copy(root / names.TABLE_NAME, table)


CASES: dict[Callable[[Path], None], tuple[int, str, str]] = {
    random_bytes: (6, "is damaged", "The next start of the trainer moves the table aside"),
    nothing: (6, "is not a pending-uploads table", "The next start of the trainer moves the table aside"),
    half: (6, "is damaged", "The next start of the trainer moves the table aside"),
    a_directory: (10, "is a directory, not the pending-uploads table", "Move it away"),
    a_newer_version: (10, "has schema version 99", "Use that newer version"),
    another_roots: (10, "is the table of", "move uploads.db* away"),
}


@pytest.mark.parametrize("damage", CASES, ids=lambda damage: damage.__name__)
def test_a_table_that_cannot_be_used_is_told_by_the_verbs_and_left_as_it_is(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, 200, kinds=("model",))
    damage(root / names.TABLE_NAME)
    before, listed = content(root), sorted((root / names.CONTROL_DIR).iterdir())
    exit_code, words, hint = CASES[damage]
    at = list(CASES).index(damage)  # each verb meets two of them, each of them two verbs
    for verb in (VERBS[at], VERBS[(at + 2) % len(VERBS)]):
        assert_tells(run(*verb, "--root", root), exit_code, words, hint, names.TABLE_NAME, stdout=None)
    assert content(root) == before
    if damage is not a_newer_version:
        assert [path for path in sorted((root / names.CONTROL_DIR).iterdir()) if path.suffix == ".db"] == [
            path for path in listed if path.suffix == ".db"
        ]
    assert run("ls", root).returncode == 0
    assert not (tmp_path / "mirror").exists()


@pytest.mark.parametrize("damage", [a_directory, a_newer_version, another_roots], ids=lambda damage: damage.__name__)
def test_a_trainer_refuses_a_table_that_may_be_anothers_and_goes_on_once_it_is_moved_away(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    root, url = tmp_path / "run", f"file://{tmp_path}/mirror"
    saved_run(root, (1, 2), kinds=("model",))
    table = root / names.TABLE_NAME
    damage(table)
    with pytest.raises(errors.CkptMirrorError) as caught:
        CheckpointManager(root, [url])
    assert_explains(caught.value, 10, CASES[damage][1])
    assert CASES[damage][2] in caught.value.hint
    assert sorted(whole(root)) == [1, 2]
    for path in table.parent.glob(f"{table.name}*"):
        path.rename(tmp_path / path.name)
    assert_goes_on(root, url)


def assert_goes_on(root: Path, url: str) -> None:
    """A trainer resumes from step 2, and everything gets to the mirror."""
    with CheckpointManager(root, [url], kinds=("model",)) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2
        manager.wait("mirrored", timeout_s=60)
    store = open_store(url)
    assert {meta.step for meta in mirror_catalog(Mirror(url, True, store)).saves.values()} == {1, 2}


@pytest.mark.parametrize(
    "damage", [random_bytes, nothing, half, the_list_of_mirrors], ids=lambda damage: damage.__name__
)
def test_a_trainer_moves_a_broken_table_aside_and_everything_is_mirrored(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    saved_run(root, (1, 2), kinds=("model",))
    damage(root / names.TABLE_NAME)
    assert_goes_on(root, f"file://{tmp_path}/mirror")
    assert (
        len([path for path in (root / names.CONTROL_DIR).glob("uploads.db.broken-*") if "-" not in path.suffix[8:]])
        >= 1
    )


def test_i12_a_table_cut_off_anywhere_says_nothing_is_safe_that_is_not(tmp_path: Path) -> None:
    """At every page, and in the middle of each: broken, or honest."""
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, 200, kinds=("model",))
    table = root / names.TABLE_NAME
    whole_table = table.read_bytes()
    refused, hints = 0, set()
    for length in range(0, len(whole_table), PAGE_BYTES // 2):
        table.write_bytes(whole_table[:length])
        for path in table.parent.glob(f"{table.name}-*"):
            path.unlink()
        try:
            assert not is_mirrored(root, None)
            assert read_status(root).newest_safe_step is None
            with suppress(errors.LocalStorageUnwritable):
                drain(root, timeout_s=0.0)
        except errors.BrokenTable as error:
            refused += 1
            hints.add(error.hint)
    assert all(hints)
    assert refused >= len(whole_table) // PAGE_BYTES - 1
    table.write_bytes(whole_table)
    assert drain(root, timeout_s=30.0).is_verified
