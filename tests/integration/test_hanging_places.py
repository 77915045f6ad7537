"""A mirror, or a persistent directory, whose file system hangs: it is silent, and keeps nobody for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import DeadlinePassed, StoreTemporary, Temporary
from ckptmirror.flow.save import persistent_dir
from ckptmirror.local import hang_guard
from tests.kit.cli import LIMIT_S, clean_environment
from tests.kit.hanging_place import IMPATIENT, HangingDirectory, hanging_directory
from tests.kit.training import everything, new_state, running, same, saved_run, train

pytestmark = pytest.mark.long


@pytest.fixture
def nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDirectory]:
    """A mount that answers as yet, and a process that does not wait long for it."""
    monkeypatch.setenv("CKPTMIRROR_RETRY_S", "0")
    with hanging_directory(tmp_path / "nfs") as directory:
        yield directory


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_guard, "HANG_S", 1.0)
    monkeypatch.setattr(hang_guard, "_LOOK_S", 1.0)
    monkeypatch.setattr(persistent_dir, "_EMERGENCY_S", 1.0)


@pytest.fixture
def url(nfs: HangingDirectory) -> str:
    return f"file://{nfs.path}/run"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def verb(*arguments: str | Path) -> subprocess.Popen[str]:
    code = f"{IMPATIENT}; from ckptmirror.cli import main; raise SystemExit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=clean_environment(CKPTMIRROR_RETRY_S="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_i7_a_start_whose_mirror_hangs_goes_on_from_its_disk_and_ends_in_time(
    root: Path, url: str, nfs: HangingDirectory, impatient: None
) -> None:
    states = saved_run(root, (2,), url)
    nfs.hang()
    manager = CheckpointManager(root, [url])
    state = new_state()
    start = manager.resume(state)
    assert start is not None
    assert start.step == 2
    assert same(everything(state), states[2])
    train(state)
    manager.save(3, state).wait()
    with pytest.raises(DeadlinePassed):
        manager.close(timeout_s=0.5)
    nfs.answer()
    saved_run(root, (4,), url)
    assert sorted(path.name for path in (nfs.path / "run").glob("meta_*")) == [f"meta_00000{n}.json" for n in (2, 3, 4)]


def test_i7_a_start_that_needs_a_mirror_that_hangs_says_which_path_hangs(
    root: Path, url: str, nfs: HangingDirectory, impatient: None
) -> None:
    saved_run(root, (2,), url)
    nfs.hang()
    with running(root.with_name("other"), url) as manager, pytest.raises(StoreTemporary, match=str(nfs.path)) as raised:
        manager.resume(new_state())
    assert raised.value.exit_code == 5
    assert f"stat {nfs.path}/run" in raised.value.message
    assert "mount" in raised.value.message


VERBS = {
    ("ls", "URL"): 5,
    ("stage", "--step", "2", "--mirror", "URL", "--dest", "DEST"): 5,
    ("verify", "URL"): 5,
    ("push", "--root", "ROOT", "--mirror", "URL"): 5,
    ("drain", "--root", "ROOT", "--timeout", "6"): 8,
    ("rotate", "--root", "ROOT", "--keep-last", "1"): 7,
}


def test_i7_every_verb_that_asks_a_mirror_that_hangs_ends_and_says_so(
    root: Path, url: str, nfs: HangingDirectory
) -> None:
    saved_run(root, (1, 2), url)
    nfs.hang()
    places = {"ROOT": str(root), "URL": url, "DEST": str(root.with_name("eval"))}
    for arguments, exit_code in VERBS.items():
        asking = verb(*(places.get(argument, argument) for argument in arguments))
        said = "".join(asking.communicate(timeout=LIMIT_S))
        assert asking.returncode == exit_code, f"{arguments}: {said}"
        assert f"{nfs.path}/run does not answer" in said, arguments
        assert "Traceback" not in said, arguments
    status = verb("status", "--root", root)
    status.communicate(timeout=LIMIT_S)
    assert status.returncode == 0


def test_a_drain_of_a_mirror_that_hangs_ends_at_a_signal(root: Path, url: str, nfs: HangingDirectory) -> None:
    saved_run(root, (1,), url)
    nfs.hang()
    asking = verb("--verbose", "drain", "--root", root)
    assert asking.stderr is not None
    next(line for line in asking.stderr if f"{nfs.path}/run does not answer" in line)
    asking.send_signal(signal.SIGTERM)
    asking.communicate(timeout=LIMIT_S)
    assert asking.returncode == 143


def test_a_persistent_directory_that_hangs_may_hold_the_newest_state_and_a_person_may_go_back(
    root: Path, nfs: HangingDirectory, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent_dir, "refuse_fuse", lambda *_, **__: None)
    kept = nfs.path / "kept"
    saved_run(root, (3,), persistent_dir=kept)
    nfs.hang()
    with running(root, persistent_dir=kept) as manager, pytest.raises(Temporary, match="does not answer"):
        manager.resume(new_state())
    with running(root, persistent_dir=kept) as manager:
        start = manager.resume(new_state(), 3)
        assert start is not None
        assert start.step == 3


def test_an_emergency_snapshot_is_not_kept_waiting_by_its_second_place(
    root: Path,
    nfs: HangingDirectory,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(persistent_dir, "refuse_fuse", lambda *_, **__: None)
    kept = nfs.path / "kept"
    with running(root, persistent_dir=kept) as manager:
        state = new_state()
        manager.resume(state)
        nfs.hang()
        directory = manager.save_emergency_checkpoint(1, state)
    assert (directory / "meta_rank0.json").exists()
    assert "is only on this disk" in caplog.text
    assert f"{kept} does not answer" in caplog.text
