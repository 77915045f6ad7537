"""A rotation that was killed, and what the next start finds: also with other mirrors than the rotation asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.retention import Retention
from ckptmirror.flow.retention.rotation import rotate_root
from tests.kit.cli import run
from tests.kit.processes import killed_at
from tests.kit.roots import names_in
from tests.kit.training import new_state, train

pytestmark = pytest.mark.long


def rotate_to_one(root: str) -> None:
    rotate_root(Path(root), Retention(keep_last=1))


@pytest.mark.parametrize("killed", ["trash.rename:after", "trash.rename:after@2"], ids=["files left", "nothing left"])
def test_a_mirror_that_is_added_after_a_rotation_was_killed_does_not_wait_for_the_save_that_was_going(
    tmp_path: Path, killed: str
) -> None:
    root, first, added = tmp_path / "root", f"file://{tmp_path}/first", f"file://{tmp_path}/added"
    state = new_state()
    with CheckpointManager(root, mirrors=[first], kinds=("model",), retention=Retention(keep_last=9)) as manager:
        manager.resume(state)
        for step in (100, 200):
            train(state)
            manager.save(step, state).wait("committed")
    assert killed_at(killed, rotate_to_one, str(root))
    assert not (root / "meta_000100.json").exists()
    with CheckpointManager(root, mirrors=[first, added], kinds=("model",), timeout_s=60.0) as manager:
        start = manager.resume(state)
        assert start is not None
        assert start.step == 200
        train(state)
        manager.save(300, state)
        manager.wait()
    assert [name for name in names_in(root) if "000100" in name] == []
    ended = run("drain", "--root", root)
    assert ended.returncode == 0, ended.stderr
    assert run("status", root, "--exit-code").returncode == 0
