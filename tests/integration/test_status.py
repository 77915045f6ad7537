"""Status says safe only of what a mirror was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import DeadlinePassed
from ckptmirror.flow.drain import drain
from ckptmirror.flow.status import read_status
from tests.kit.cli import run as cli
from tests.kit.training import new_state, saved_run


def test_i8_status_calls_nothing_safe_on_a_mirror_that_does_not_answer(tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/nfs/run"
    (tmp_path / "nfs").mkdir()
    saved_run(root, (1,), url)
    assert read_status(root).newest_safe_step == 1
    (tmp_path / "nfs" / "run").rename(tmp_path / "aside")
    manager = CheckpointManager(root, [url])
    manager.resume(new_state())
    with pytest.raises(DeadlinePassed):
        manager.close(0.1)
    status = read_status(root)
    assert status.unasked == (url,)
    assert status.newest_safe_step is None
    assert not status.is_mirrored(None)
    said = cli("status", "--root", root).stdout
    assert said.startswith(f"NOT SAFE: {url} has yet to say")
    (tmp_path / "aside").rename(tmp_path / "nfs" / "run")
    assert drain(root, timeout_s=60).is_verified
    assert read_status(root).is_mirrored(None)
    assert cli("status", "--root", root).stdout.startswith("safe")
