"""Status says safe only of what a mirror was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, MirrorSpec
from ckptmirror.core.errors import DeadlinePassed
from ckptmirror.flow.drain import drain
from ckptmirror.flow.status import read_status
from tests.kit.cli import run as cli
from tests.kit.roots import MirroredRoot, fail_uploads, make_pending
from tests.kit.training import new_state, running, saved_run


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
    assert said.startswith(f"NOT SAFE: {url} has not confirmed yet")
    (tmp_path / "aside").rename(tmp_path / "nfs" / "run")
    assert drain(root, timeout_s=60).is_verified
    assert read_status(root).is_mirrored(None)
    assert cli("status", "--root", root).stdout.startswith("safe")


# -- for a monitor ----------------------------------------------------------------------------------------------


def code(root: Path, *more: str) -> int:
    ended = cli("status", root, "--exit-code", *more)
    assert ended.stdout
    return ended.returncode


def test_the_exit_code_of_status_says_whether_all_is_safe(tmp_path: Path) -> None:
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, 200, kinds=("model",))
    assert cli("status", root).returncode == 0, "without the option it tells, and does not judge"
    assert code(root) == 8, "uploads are pending"
    assert code(root, "--json") == 8
    fail_uploads(root, "model_000100.pt")
    assert code(root) == 8
    assert drain(root, timeout_s=60).is_verified
    assert code(root) == 0
    (root / "model_000200.pt").unlink()
    assert code(root) == 6, "what is here is damaged"
    assert f"`ckptmirror verify {root}`" in cli("status", root).stdout.splitlines()[0]


def test_the_exit_code_of_status_says_that_this_disk_holds_the_only_copy(tmp_path: Path) -> None:
    saved_run(tmp_path / "alone", (1,))
    assert code(tmp_path / "alone") == 7
    root = tmp_path / "root"
    with running(root, f"file://{tmp_path}/mirror") as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state)
        manager.wait()
        assert code(root) == 0
        manager.save_emergency_checkpoint(2, state)
    assert code(root) == 7
    assert "emergency snapshot" in cli("status", root).stdout.splitlines()[0]


def test_the_exit_code_of_status_is_0_where_nothing_is_saved_yet(tmp_path: Path) -> None:
    with running(tmp_path / "root", f"file://{tmp_path}/mirror") as manager:
        manager.resume(new_state())
    assert code(tmp_path / "root") == 0


def test_a_required_mirror_that_does_not_get_a_save_is_named(tmp_path: Path) -> None:
    """Its part of another node is lost, say: nothing waits for it, and there is one copy less than a person thinks."""
    one, two = (f"file://{tmp_path}/{name}" for name in ("one", "two"))
    place = MirroredRoot(tmp_path / "root", [one, two])
    place.commit(100)
    place.upload()
    left_out = place.commit(200)
    place.table.skip(left_out.save_id, "no disk of this job has the rest", mirror=two)
    place.upload()
    first, *_ = cli("status", "--root", place.root).stdout.splitlines()
    assert first == (
        f"safe: every save is verified on every required mirror that gets it; not on {two}: step 200 (no disk of this "
        "job has the rest)"
    )
    assert f"safe, not on {two}" in cli("status", "--root", place.root).stdout
    lines = json.loads(cli("status", "--root", place.root, "--json").stdout)["saves"]
    assert [(line["step"], line["safe"], list(line["without"])) for line in lines] == [
        (100, True, []),
        (200, True, [two]),
    ]
    place.close()


def test_an_optional_mirror_that_has_everything_is_named_where_none_is_required(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    with CheckpointManager(tmp_path / "root", [MirrorSpec(url, required=False)], kinds=("model",)) as manager:
        manager.resume(new_state())
        manager.save(1, new_state())
    assert drain(tmp_path / "root", timeout_s=60).is_verified
    said = cli("status", "--root", tmp_path / "root").stdout
    assert said.startswith(
        f"NOT SAFE: no required mirror is configured; {url}, which is optional, has every save that is here"
    )
    assert "on no required mirror" in said
    assert "local only" not in said
