"""Modes: whatever a process creates has what its umask leaves of 0666 and 0777, from the moment when it exists.

The table is narrower: who may not write it may not read it either (``local/uploads/place.py``).
"""

from __future__ import annotations

import functools
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import (
    CheckpointManager,
    Retention,
    find_local_checkpoint_steps,
    list_checkpoints,
    load_checkpoint,
    resolve_checkpoint_reference,
    resolve_resume_path,
    stage_checkpoint_step,
)
from ckptmirror.cli import main as verb_here
from ckptmirror.core import names
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.flow.drain import drain
from ckptmirror.local import crashpoints
from ckptmirror.stores import open_store
from ckptmirror.testing import GcsServerProcess
from tests.kit.cli import run as cli
from tests.kit.processes import Pipe, clean_process
from tests.kit.training import new_state, running, saved_run, train

pytestmark = pytest.mark.long

_CREATED = [  # of everything that is created, one example
    "root/model_000002.pt", "root/dcp_000002/.metadata", "root/meta_000002.json", "root/tensors_000002_rank0.json",
    "root/.ckptmirror/attempts.json", "root/.ckptmirror/events.jsonl", "root/.ckptmirror/lock",
    "root/.ckptmirror/status.json", "root/.ckptmirror/trash", "root/.ckptmirror/uploads.db",
    "root/.ckptmirror/uploads.db-wal", "root/.ckptmirror/uploads.db-shm", "mirror/.ckptmirror.lock",
    "mirror/writer.json", "mirror/dcp_000002/.metadata", "mirror/meta_000002.json", "eval/model_000002.pt",
    "eval/dcp_000002/.metadata", "eval/meta_000002.json", "eval/.ckptmirror/stage_000002.lock", "timeline.html",
    "again/.ckptmirror/table.json", "state/uploads.db",
]  # fmt: skip


def _allowed(path: Path, facts: os.stat_result, mask: int) -> int:
    """The mode of a finished file or directory, by the rule."""
    if stat.S_ISDIR(facts.st_mode):
        return 0o777 & ~mask
    allowed = 0o666 & ~mask
    if path.name.startswith("uploads.db") and not path.name.endswith("-reserve"):  # which has no content
        writers = allowed & 0o222
        allowed = writers | writers << 1
    return allowed


class _Watch:
    """Looks at every file and directory of a place, at each crash point: before and after each change of the disk."""

    def __init__(self, place: Path, mask: int) -> None:
        self.place = place
        self.mask = mask
        self.seen: set[str] = set()
        self.too_wide: dict[str, str] = {}

    def look(self) -> None:
        for path, facts in _entries(self.place):
            self.seen.add(str(path.relative_to(self.place)))
            mode = stat.S_IMODE(facts.st_mode) & 0o777
            if mode & ~_allowed(path, facts, self.mask):
                self.too_wide.setdefault(str(path), f"{mode:o} at {crashpoints.passed()[-1]}")


def _entries(place: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    for directory, directories, files in os.walk(place):
        for name in (*directories, *files):
            path = Path(directory, name)
            with suppress(FileNotFoundError):  # another thread has just renamed it
                if not stat.S_ISLNK((facts := path.lstat()).st_mode):
                    found.append((path, facts))
    return found


def _life(place: Path, mask: int, answer: Path, before: Callable[[], None] | None = None) -> None:
    """Two saves, their uploads, rotation, an emergency snapshot, a stage, a start on a new disk, reports."""
    os.umask(mask)
    place.mkdir()
    watch = _Watch(place, mask)
    if before is not None:
        before()
    crashpoints.arm("1", die=watch.look)
    url = f"file://{place}/mirror"
    state = new_state()
    with CheckpointManager(
        place / "root", [url], persistent_dir=place / "kept", retention=Retention(keep_last=1)
    ) as manager:
        assert manager.resume(state) is None
        for step in (1, 2):
            train(state)
            manager.save(step, state).wait("mirrored")
        manager.rotate()
        train(state)
        manager.save_emergency_checkpoint(3, state)
    stage_checkpoint_step(url, step=2, dest=place / "eval", require_kind="model", full=True)
    assert cli("stage", url, "--step", "2", "--kind", "dcp", "--dest", str(place / "eval")).returncode == 0
    assert cli("timeline", "--root", str(place / "root"), "--out", str(place / "timeline.html")).returncode == 0
    with CheckpointManager(place / "again", [url], persistent_dir=place / "kept", state_dir=place / "state") as manager:
        info = manager.resume(state)
        assert info is not None
        assert (info.step, info.kind) == (3, "emergency")
    crashpoints.disarm()
    answer.write_text(json.dumps({"seen": sorted(watch.seen), "too wide": watch.too_wide}))


def _lived(tmp_path: Path, mask: int, before: Callable[[], None] | None = None) -> tuple[list[str], dict[str, str]]:
    """What was seen during a life, and what of it was too wide."""
    child = clean_process(_life, tmp_path / "place", mask, tmp_path / "answer.json", before)
    child.start()
    child.join()
    assert child.exitcode == 0
    answer = json.loads((tmp_path / "answer.json").read_text())
    return answer["seen"], answer["too wide"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o007, 0o000], ids=lambda mask: f"{mask:03o}")
def test_whatever_is_created_has_the_mode_that_the_umask_leaves_and_is_never_wider(tmp_path: Path, mask: int) -> None:
    seen, too_wide = _lived(tmp_path, mask)
    assert too_wide == {}
    assert [name for name in _CREATED if name not in seen] == []
    assert any(name.startswith("kept/emergency") for name in seen)
    assert any(names.is_tmp_name(Path(name).name) for name in seen)
    wrong = {
        str(path): f"{facts.st_mode:o} and not {_allowed(path, facts, mask):o}"
        for path, facts in _entries(tmp_path / "place")
        if stat.S_IMODE(facts.st_mode) & 0o777 != _allowed(path, facts, mask)
    }
    assert wrong == {}


def _create_wider() -> None:
    """Have every temporary be wider than it should be until it is made durable."""
    real_open, real_fsync = os.open, os.fsync

    def wide_open(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        descriptor = real_open(path, flags, *arguments, **more)
        if flags & os.O_CREAT and str(path).endswith(".tmp"):
            os.fchmod(descriptor, 0o644)
        return descriptor

    def narrowing_fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)
        real_fsync(descriptor)

    os.open, os.fsync = wide_open, narrowing_fsync


def test_a_temporary_that_is_too_wide_until_it_is_narrowed_is_seen(tmp_path: Path) -> None:
    _, too_wide = _lived(tmp_path, 0o077, _create_wider)
    assert any("/root/model_000001.pt." in path for path in too_wide)
    assert any("/mirror/model_000001.pt." in path for path in too_wide)


def test_the_strict_server_keeps_objects_under_the_umask_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o027)
    try:
        with GcsServerProcess(tmp_path / "place", buckets=["bucket"]) as server:
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            open_store("gs://bucket/run").write("object", b"content", if_generation=0)
    finally:
        os.umask(before)
    found = {str(path): stat.S_IMODE(facts.st_mode) for path, facts in _entries(tmp_path / "place")}
    assert set(found.values()) == {0o750, 0o640}, found


# -- two users -----------------------------------------------------------------------------------------------

_TRAINER, _SIDECAR, _GROUP = 65534, 65533, 65532


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A directory of the trainer's and of the group, at a path that other users reach."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, _TRAINER, _GROUP)
        Path(folder).chmod(0o2770)
        yield Path(folder)


def _as_user(work: Callable[[Path], object], place: Path, user: int, mask: int, answer: Any) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:  # imports what this user may not read
        _save_without_upload(Path(elsewhere))
        _verbs(Path(elsewhere))
    os.setgroups([])
    os.setgid(_GROUP)
    os.setuid(user)
    os.umask(mask)
    try:
        answer.send(work(place))
    except CkptMirrorError as error:
        answer.send((type(error).__name__, str(error), error.hint))


def _save_without_upload(place: Path) -> None:
    with running(place / "root", f"file://{place}/mirror", uploads=False) as manager:
        state = new_state()
        manager.resume(state)
        train(state)
        manager.save(1, state).wait()


def _save_and_upload(place: Path) -> list[int]:
    return [*saved_run(place / "root", (2,), f"file://{place}/mirror")]


def _verbs(place: Path) -> dict[str, tuple[int, str]]:
    """The exit code of verbs that are run in this process, and what each says."""
    ended = {}
    for verb in ("status", "ls", "verify", "drain", "timeline", "retry"):
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as shown:
            ended[verb] = verb_here([verb, str(place / "root")]), shown.getvalue()
    return ended


def _drain(place: Path) -> bool:
    return drain(place / "root", timeout_s=60.0).is_verified


def _answer_of(user: int, mask: int, work: Callable[[Path], object], place: Path) -> Any:
    mine, theirs = Pipe()
    child = clean_process(_as_user, work, place, user, mask, theirs)
    child.start()
    theirs.close()
    try:
        return mine.recv()
    finally:
        child.join()


def test_a_trainer_and_a_sidecar_of_one_group_share_a_root_with_the_umask_007(shared_place: Path) -> None:
    _answer_of(_TRAINER, 0o007, _save_without_upload, shared_place)
    assert _answer_of(_SIDECAR, 0o007, _drain, shared_place) is True
    assert _answer_of(_TRAINER, 0o007, _save_and_upload, shared_place) == [2]
    assert _answer_of(_SIDECAR, 0o007, _drain, shared_place) is True


def test_what_a_file_system_has_for_itself_in_the_mirror_hinders_nobody(shared_place: Path) -> None:
    """A mirror that is the top of an ext4 file system has ``lost+found``, which only root may enter."""
    (shared_place / "mirror").mkdir()
    os.chown(shared_place / "mirror", _TRAINER, _GROUP)
    (shared_place / "mirror" / "lost+found").mkdir(mode=0o700)
    assert _answer_of(_TRAINER, 0o022, _save_and_upload, shared_place) == [2]
    assert _answer_of(_TRAINER, 0o022, _drain, shared_place) is True


def test_a_user_who_may_not_read_the_table_is_told_whose_it_is_and_what_to_do(shared_place: Path) -> None:
    _answer_of(_TRAINER, 0o022, _save_without_upload, shared_place)
    kind, why, hint = _answer_of(_SIDECAR, 0o022, _drain, shared_place)
    assert kind == "LocalStorageUnwritable"
    assert f"it belongs to user id {_TRAINER}, and user id {_SIDECAR} may not read it" in why
    assert "umask 007" in hint


@pytest.mark.parametrize("locked", [".", names.CONTROL_DIR])
def test_a_root_that_a_user_may_not_read_is_named_by_every_verb(locked: str, shared_place: Path) -> None:
    _answer_of(_TRAINER, 0o022, _save_without_upload, shared_place)
    root = shared_place / "root"
    for user, mode in ((_SIDECAR, 0o700), (_TRAINER, 0o000)):
        (root / locked).chmod(mode)
        ended = _answer_of(user, 0o022, _verbs, shared_place)
        for verb, (code, shown) in ended.items():
            if locked == "." and verb not in ("ls", "verify"):  # click looks whether their argument is readable
                assert code == 2
            else:
                assert (verb, code) == (verb, 10)
                assert f"user id {user} has no permission" in shown


@pytest.mark.parametrize("locked", [".", names.CONTROL_DIR])
def test_a_root_that_loses_its_modes_in_training_is_an_error_of_ckptmirror(locked: str, shared_place: Path) -> None:
    raised = _answer_of(_TRAINER, 0o022, functools.partial(_lose_the_root, locked), shared_place)
    assert raised == dict.fromkeys(raised, "LocalStorageUnwritable")
    assert raised.keys() >= {"status", "wait", "close"}
    assert list((shared_place / "kept").glob("emergency_*/meta_rank0.json"))


def _lose_the_root(locked: str, place: Path) -> dict[str, str]:
    """What each call of a manager raises."""
    root, state, raised = place / "root", new_state(), {}
    manager = CheckpointManager(root, [f"file://{place}/mirror"], persistent_dir=place / "kept")
    manager.resume(state)
    manager.save(1, state).wait("mirrored", timeout_s=60.0)
    (root / locked).chmod(0)
    calls: dict[str, Callable[[], object]] = {
        "emergency": lambda: manager.save_emergency_checkpoint(2, state),
        "status": manager.status,
        "wait": lambda: manager.wait("mirrored", timeout_s=5.0),
        "rotate": lambda: manager.rotate(1.0),
        "close": lambda: manager.close(timeout_s=5.0),
    }
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the kind of the error is the question
            raised[name] = type(error).__name__
    (root / locked).chmod(0o755)
    return raised


def _look_at(places: list[str], _place: Path) -> dict[str, tuple[str, str]]:
    """What each reader says of each place: the kind of its error, or the exit code, and the words."""
    calls: dict[str, Callable[[str], object]] = {
        "load": load_checkpoint,
        "list": list_checkpoints,
        "resolve": resolve_checkpoint_reference,
        "steps": find_local_checkpoint_steps,
        "resume": resolve_resume_path,
    }
    found = {}
    for place in places:
        for name, call in calls.items():
            try:
                found[f"{name} {place}"] = "value", str(call(place))
            except Exception as error:  # noqa: BLE001 - the kind of the error is the question
                found[f"{name} {place}"] = type(error).__name__, str(error)
        for verb in ("ls", "verify"):
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as shown:
                found[f"{verb} {place}"] = str(verb_here([verb, place])), shown.getvalue()
    return found


def test_a_place_that_a_user_may_not_enter_is_not_called_missing(shared_place: Path) -> None:
    """The person looked for a typo, and a script took it for no checkpoint yet."""
    (shared_place / "nfs").mkdir()
    saved_run(shared_place / "ssd/run", (1,), f"file://{shared_place}/nfs/run")
    for locked in ("ssd", "nfs"):
        (shared_place / locked).chmod(0o700)
    places = [str(shared_place / place) for place in ("ssd/run", "ssd/run/dcp_000001", "nfs/run")]
    found = _answer_of(_SIDECAR, 0o022, functools.partial(_look_at, places), shared_place)
    assert {kind for kind, _ in found.values()} == {"LocalStorageUnwritable", "10"}
    assert all(f"user id {_SIDECAR} has no permission" in words for _, words in found.values())


def test_a_file_that_a_user_may_not_read_takes_only_its_save_from_a_mirror(shared_place: Path) -> None:
    """Names and sizes could not be asked for either, so that the whole mirror was refused, and no file named."""
    mirror = shared_place / "mirror"
    saved_run(shared_place / "root", (1, 2), f"file://{mirror}")
    for path in (mirror, *mirror.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (mirror / "model_000001.pt").chmod(0o600)
    url = f"file://{mirror}"
    found = _answer_of(_SIDECAR, 0o022, functools.partial(_look_at, [url, f"{url}/model_000001.pt"]), shared_place)
    assert found[f"ls {url}"] == ("0", "")
    assert found[f"verify {url}"] == ("0", "2 of 2 saves are whole\n")
    assert found[f"load {url}"][0] == "value"
    kind, words = found[f"load {url}/model_000001.pt"]
    assert kind == "NotAuthorised"
    assert f"{url}/model_000001.pt: Permission denied" in words
    (mirror / "dcp_000001").chmod(0o700)
    assert (
        f"{url}/dcp_000001: Permission denied"
        in _answer_of(_SIDECAR, 0o022, functools.partial(_look_at, [url]), shared_place)[f"ls {url}"][1]
    )
