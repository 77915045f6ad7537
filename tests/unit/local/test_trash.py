"""Removing renames first, stays below the root, and follows no link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptmirror.core.errors import LocalStorageUnwritable, UsageError
from ckptmirror.core.names import TRASH_DIR, tmp_name
from ckptmirror.local import trash

SAVE_ID = "1f0c9a2e" + "0" * 24
OTHER_ID = "2e1f0c9a" + "0" * 24


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "dcp_000200" / "pp0").mkdir(parents=True)
    (root / "dcp_000200" / "pp0" / "__0_0.distcp").write_bytes(b"x")
    (root / "model_000200.pt").write_bytes(b"m")
    return root


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_files_and_directories_go_to_trash_and_then_away(root: Path):
    for name in ("model_000200.pt", "dcp_000200"):
        there = trash.move_to_trash(root, root / name)
        assert there.parent == root / TRASH_DIR
        assert there.exists()
        assert not (root / name).exists()
    assert trash.empty_trash(root) == 2
    assert names(root / TRASH_DIR) == []
    assert trash.empty_trash(root) == 0


def test_the_same_name_can_be_in_trash_many_times(root: Path):
    for _ in range(5):
        (root / "f").write_bytes(b"x")
        trash.move_to_trash(root, root / "f")
    assert len(names(root / TRASH_DIR)) == 5


def test_one_thing_in_trash_can_be_deleted_alone(root: Path):
    first = trash.move_to_trash(root, root / "dcp_000200")
    second = trash.move_to_trash(root, root / "model_000200.pt")
    trash.remove_tree_in_trash(root, first)
    assert names(root / TRASH_DIR) == [second.name]
    with pytest.raises(UsageError):
        trash.remove_tree_in_trash(root, root / "dcp_000200")


def test_what_is_not_there_cannot_be_moved(root: Path):
    with pytest.raises(FileNotFoundError):
        trash.move_to_trash(root, root / "absent")


def test_a_link_goes_to_trash_itself_and_its_target_stays(root: Path):
    (root / "latest").symlink_to("dcp_000200")
    trash.move_to_trash(root, root / "latest")
    trash.empty_trash(root)
    assert (root / "dcp_000200" / "pp0" / "__0_0.distcp").exists()


def test_links_inside_what_is_deleted_are_not_followed(root: Path, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_bytes(b"p")
    (root / "dcp_000200" / "link").symlink_to(tmp_path / "outside")
    trash.move_to_trash(root, root / "dcp_000200")
    trash.empty_trash(root)
    assert (tmp_path / "outside" / "precious").exists()


def test_nothing_outside_the_root_is_moved(root: Path, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_bytes(b"p")
    (root / "door").symlink_to(tmp_path / "outside")
    for path in (
        tmp_path / "outside",
        root,
        root / ".." / "outside",
        root / "door" / "precious",
        root / ".ckptmirror",
        root / TRASH_DIR,
    ):
        with pytest.raises(UsageError):
            trash.move_to_trash(root, path)
    assert (tmp_path / "outside" / "precious").exists()


def test_a_trash_that_is_a_link_is_not_emptied(root: Path, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_bytes(b"p")
    (root / ".ckptmirror").mkdir()
    (root / TRASH_DIR).symlink_to(tmp_path / "outside")
    with pytest.raises(LocalStorageUnwritable):
        trash.empty_trash(root)
    assert (tmp_path / "outside" / "precious").exists()


def test_a_control_directory_that_is_a_link_gets_no_trash(root: Path, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (root / ".ckptmirror").symlink_to(tmp_path / "outside")
    with pytest.raises(LocalStorageUnwritable, match="symbolic link") as caught:
        trash.move_to_trash(root, root / "model_000200.pt")
    assert f"`mv {root}/.ckptmirror " in caught.value.hint
    assert (root / "model_000200.pt").read_bytes() == b"m"
    assert names(tmp_path / "outside") == []


def test_a_rank_removes_its_own_temporaries_only(root: Path):
    mine = [tmp_name("optim_000200_rank1.pt", SAVE_ID), tmp_name("extra_000200_rank1.pt", SAVE_ID)]
    others = [
        tmp_name("optim_000200_rank0.pt", SAVE_ID),
        tmp_name("optim_000200_rank11.pt", SAVE_ID),
        tmp_name("optim_000200_rank1.pt", OTHER_ID),
        tmp_name("model_000200.pt", SAVE_ID),
        tmp_name("notes.txt", SAVE_ID),
    ]
    for name in mine + others:
        (root / name).write_bytes(b"x")
    (root / tmp_name("dcp_000200", SAVE_ID)).mkdir()
    assert sorted(trash.remove_temporaries(root, SAVE_ID, rank=1)) == sorted(mine)
    assert {*others, tmp_name("dcp_000200", SAVE_ID)} <= set(names(root))
    removed = trash.remove_temporaries(root, SAVE_ID, rank=0, shared=True)
    assert sorted(removed) == sorted([others[0], others[3], tmp_name("dcp_000200", SAVE_ID)])
    assert {others[1], others[2], others[4]} <= set(names(root))
