"""A token shows that two paths are one directory, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core.errors import LocalStorageUnwritable
from ckptmirror.core.names import CONTROL_DIR
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.root_probe import RootProbe


def test_only_a_token_of_the_same_directory_is_seen(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "alias").symlink_to("one")
    probes = [RootProbe(tmp_path / name) for name in ("one", "alias", "two")]
    tokens = [probe.leave() for probe in probes]
    assert len(set(tokens)) == 3
    assert [probe.seen(["", *tokens]) for probe in probes] == [[1, 2], [1, 2], [3]]
    for probe in probes:
        probe.remove()
        probe.remove()
    assert [list((tmp_path / name / CONTROL_DIR).iterdir()) for name in ("one", "two")] == [[], []]
    assert probes[0].seen(tokens) == []


def test_what_a_dead_process_left_is_a_temporary(tmp_path: Path) -> None:
    token = RootProbe(tmp_path).leave()
    assert read_inventory(tmp_path).temporaries == (tmp_path / CONTROL_DIR / token,)


def test_a_full_disk_has_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_room(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", no_room)
    probe = RootProbe(tmp_path)
    assert probe.leave() == ""
    assert probe.seen([""]) == []
    probe.remove()


def test_a_control_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / CONTROL_DIR).symlink_to("elsewhere")
    with pytest.raises(LocalStorageUnwritable, match="symbolic link"):
        RootProbe(tmp_path).leave()
    assert list((tmp_path / "elsewhere").iterdir()) == []
