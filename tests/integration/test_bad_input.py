"""What a person can get wrong, and what a disk or a mirror can do to them: a sentence, a hint, a code, nothing lost.

Errors of the command line are seen as processes, errors of a training loop as exceptions of the manager. What other
files test in depth (a full disk in mid save, faults in mid download) has one row here too, from the outside.
"""

from __future__ import annotations

import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import CheckpointManager, Retention, TrainState, errors
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import IMPATIENT, assert_explains, assert_tells, run
from tests.kit.roots import make_mirrored, make_pending

pytestmark = pytest.mark.long

GS_URL = "gs://test-bucket/run"


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServerProcess]:
    with GcsServerProcess(buckets=["test-bucket"]) as found:
        yield found


@pytest.fixture(autouse=True)
def _well_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").clear_faults()


def new_state() -> TrainState:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    return TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


# -- the local disk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["size=256k", "size=8m,nr_inodes=26"], ids=["no space", "no inodes"])
def test_a_disk_that_fills_up_while_saving_fails_the_save_and_keeps_the_earlier_one(
    options: str,
    mounted: Callable[..., Path],
):
    root = mounted(options)
    of_another_program = root / "log"
    of_another_program.touch()
    manager = CheckpointManager(root / "run", kinds=("model",))
    state = new_state()
    manager.resume(state)
    last = 0

    def save_until_it_fails() -> None:
        nonlocal last
        for step in range(1, 40):
            manager.save(step, state).wait("committed", 60)
            last = step

    with pytest.raises(errors.BackgroundSaveFailed) as caught:
        save_until_it_fails()
    cause = caught.value.__cause__
    assert isinstance(cause, errors.LocalStorageFull)
    assert_explains(cause, 5, "left")
    assert str(cause) in str(caught.value)
    manager.close(timeout_s=0)
    assert last >= 1
    assert not list(root.rglob("*.tmp"))
    of_another_program.unlink()  # a start writes its claim: it needs one name, the least that a person can free
    again = CheckpointManager(root / "run", kinds=("model",))
    start = again.resume(new_state())
    assert start is not None
    assert start.step == last
    again.close(timeout_s=0)


@pytest.mark.parametrize("options", ["size=64k", "size=8m,nr_inodes=6"], ids=["no space", "no inodes"])
def test_a_disk_that_is_too_small_to_stage_to_is_named_and_a_larger_one_works(
    options: str,
    mounted: Callable[..., Path],
    tmp_path: Path,
):
    _, url, _ = make_mirrored(tmp_path, 200, size_bytes=100_000)
    dest = mounted(options)
    ended = run("stage", "--step", "200", "--full", "--mirror", url, "--dest", dest / "eval")
    assert_tells(ended, 5, str(dest))
    assert not list(dest.rglob("meta_*.json"))
    assert run("stage", "--step", "200", "--full", "--mirror", url, "--dest", tmp_path / "eval").returncode == 0


@pytest.fixture
def read_only(mounted: Callable[..., Path]) -> Callable[[Path], Path]:
    """Copy a folder onto a file system that is then mounted read-only."""

    def copied(folder: Path) -> Path:
        place = mounted("size=4m")
        shutil.copytree(folder, place, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        return place

    return copied


def test_a_read_only_root_is_refused_by_who_writes_and_served_by_who_reads(
    read_only: Callable[[Path], Path], tmp_path: Path
):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 200, kinds=("model",))
    frozen = read_only(root)
    with pytest.raises(errors.LocalStorageUnwritable) as caught:
        CheckpointManager(frozen)
    assert_explains(caught.value, 10, "read-only")
    assert_tells(run("drain", "--root", frozen), 10, "read-only")
    assert run("ls", frozen).stdout == run("ls", root).stdout
    (tmp_path / "m").mkdir()
    assert_tells(run("stage", "--step", "1", "--mirror", f"file://{tmp_path}/m", "--dest", frozen), 3)
    assert_tells(run("stage", "--step", "1", "--mirror", f"file://{tmp_path}/n", "--dest", frozen), 10, "not exist")


def test_a_read_only_destination_is_refused(read_only: Callable[[Path], Path], tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    (tmp_path / "empty").mkdir()
    frozen = read_only(tmp_path / "empty")
    assert_tells(run("stage", "--step", "200", "--mirror", url, "--dest", frozen), 10, "read-only")


def test_a_second_writer_on_a_root_is_told_who_the_first_is(tmp_path: Path):
    first = CheckpointManager(tmp_path / "run")
    first.resume(new_state())
    try:
        with pytest.raises(errors.RootLocked) as caught:
            CheckpointManager(tmp_path / "run")
        assert_explains(caught.value, 11, "This process already writes to")
    finally:
        first.close(timeout_s=0)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path):
    place = tmp_path / "root"
    place.write_text("mine")
    with pytest.raises(errors.LocalStorageUnwritable) as caught:
        CheckpointManager(place)
    assert_explains(caught.value, 10, f"{place} is a file, not a directory")
    for arguments in (
        ["status"],
        ["timeline"],
        ["drain"],
        ["push", "--mirror", "file:///m"],
        ["rotate", "--keep-last", "1"],
    ):
        assert_tells(run(*arguments, "--root", place), 2, "is a file")
    assert_tells(run("ls", place), 3, "is not a checkpoint", "Name a model file")
    assert place.read_text() == "mine"


@pytest.mark.parametrize("verb", ["status", "drain", "rotate", "timeline"])
def test_a_directory_that_no_trainer_saved_to_has_no_table(verb: str, tmp_path: Path):
    ended = run(verb, "--root", tmp_path, *(["--keep-last", "1"] if verb == "rotate" else []))
    assert_tells(ended, 10, "has no pending-uploads table", "Give the directory that the trainer saves to.")
    assert list(tmp_path.iterdir()) == []


def test_push_of_a_directory_without_saves_leaves_it_as_it_is(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    ended = run("push", "--root", tmp_path, "--mirror", f"file://{tmp_path}/m")
    assert_tells(ended, 3, "holds no whole save")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "setting",
    [
        *({"kinds": ()}, {"kinds": "dcp"}, {"kinds": ("zip",)}, {"mode": "fast"}),
        *({"retention": 2}, {"timeout_s": "x"}, {"timeout_s": -1}),
        *({"workers_per_mirror": given} for given in (0, True, None, "2")),
        *({"state_dir": 5}, {"persistent_dir": b"kept"}, {"state_dir": ""}, {"persistent_dir": "a\0b"}),
        *({"mirrors": None}, {"mirrors": [None]}, {"kinds": 5}, {"signing_key": 5}),
        *({"verify_keys": "run.pub"}, {"verify_keys": 5}, {"verify_keys": [5]}),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_before_anything_is_made(setting: dict[str, Any], tmp_path: Path):
    with pytest.raises(errors.ConfigError) as caught:
        CheckpointManager(tmp_path / "run", **setting)
    assert_explains(caught.value, 10, next(iter(setting)))
    assert not (tmp_path / "run").exists()


def test_a_wrong_argument_of_a_call_is_named_and_changes_nothing(tmp_path: Path):
    state = new_state()
    with CheckpointManager(tmp_path) as manager:
        calls: list[tuple[str, Callable[[], object]]] = [
            ("exclude holds None", lambda: manager.resume(state, exclude=None)),  # type: ignore[arg-type]
            ("exclude holds 5", lambda: manager.load(state, 1, exclude=5)),  # type: ignore[arg-type]
        ]
        for words, call in calls:
            with pytest.raises(errors.UsageError, match=words):
                call()
        manager.resume(state)
        calls = [
            ("timeout_s is None", lambda: manager.wait(timeout_s=None)),  # type: ignore[arg-type]
            ("never 'verified'", lambda: manager.wait("verified")),  # type: ignore[arg-type]
            ("timeout_s is '9'", lambda: manager.close(timeout_s="9")),  # type: ignore[arg-type]
            ("timeout_s is nan", lambda: manager.rotate(timeout_s=float("nan"))),
            ("metrics is 5", lambda: manager.save(1, state, metrics=5)),  # type: ignore[arg-type]
            ("'1' is not a step", lambda: manager.save("1", state)),  # type: ignore[arg-type]
        ]
        for words, call in calls:
            with pytest.raises(errors.UsageError, match=words) as wrong:
                call()
            assert "--help" not in "".join(traceback.format_exception(wrong.value))  # nobody called a verb
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        ragged = replace(state, extra={**(state.extra or {}), "ragged": nested})
        with pytest.raises(errors.UsageError, match="ragged is a tensor of layout nested"):
            manager.save(1, ragged)
        handle = manager.save(1, state).wait()
        with pytest.raises(errors.UsageError, match="timeout_s is '5'"):
            handle.wait("mirrored", "5")  # type: ignore[arg-type]
        manager.close(timeout_s=-0.5)  # what was left of a deadline


def test_what_is_passed_as_a_state_and_is_none_is_named(tmp_path: Path):
    state = new_state()
    with CheckpointManager(tmp_path) as manager:
        for load in (manager.resume, manager.load):
            with pytest.raises(errors.UsageError, match="of type Linear; it must be a TrainState") as refused:
                load(state.model)  # type: ignore[operator]
            assert "Write TrainState(model=model" in refused.value.hint
        manager.resume(state)
        for wrong in (state.model, {"model": state.model}):
            for save in (manager.save, manager.save_emergency_checkpoint):
                with pytest.raises(errors.UsageError, match="it must be a TrainState"):
                    save(1, wrong)  # type: ignore[arg-type]
        manager.save(1, state).wait()


@pytest.mark.parametrize("policy", [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": 1}])
def test_a_wrong_retention_is_refused_when_it_is_made(policy: dict[str, int]):
    with pytest.raises(errors.ConfigError) as caught:
        Retention(**policy)
    assert_explains(caught.value, 10)


# -- mirrors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://", "does not name a valid bucket"),
        ("gs://B!/x", "does not name a valid bucket"),
        ("gs://user:hush@bucket/x", "without user"),
        ("gs://bucket/x?token=hush", "without user, query or fragment"),
        ("s3://key:hush/of+40@bucket/x", "without user, query or fragment"),
        ("s3://key:hush%40bucket/x", "without user, query or fragment"),
        ("file://user:hush@host/x", "without host, query or fragment"),
        ("gs://bucket/a/../b", ".."),
        ("s3cret://bucket/x", "There is no store for s3cret:// URLs"),
        ("bucket/prefix", "a URL or an absolute path"),
        ("file://relative/path", ""),
        ("file:///", ""),
    ],
)
def test_a_wrong_mirror_url_is_refused_and_no_secret_is_repeated(url: str, words: str, tmp_path: Path):
    with pytest.raises(errors.ConfigError) as caught:
        CheckpointManager(tmp_path / "run", mirrors=[url])
    assert_explains(caught.value, 10, words)
    assert "hush" not in f"{caught.value} {caught.value.hint}"
    assert not (tmp_path / "run").exists()
    ended = run("stage", "--step", "1", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 10, words)
    assert "hush" not in ended.stderr
    assert not (tmp_path / "e").exists()


def test_one_url_instead_of_a_list_is_seen(tmp_path: Path):
    with pytest.raises(errors.ConfigError) as caught:
        CheckpointManager(tmp_path / "run", mirrors="gs://bucket/run")  # type: ignore[arg-type]
    assert_explains(caught.value, 10, "a list")


def test_a_missing_bucket_is_named_and_push_leaves_no_trace_of_it(server: GcsServerProcess, tmp_path: Path):
    url = "gs://no-such-bucket/run"
    root, _, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    for arguments in (
        ["ls", url],
        ["stage", "--step", "1", "--mirror", url],
        ["push", "--root", root, "--mirror", url],
    ):
        ended = run(*arguments, env=server.environment, cwd=tmp_path)
        assert_tells(ended, 10, "no-such-bucket", "ucket")
    assert_tells(run("status", "--root", root), 10, "no pending-uploads table")


@pytest.mark.parametrize("verb", ["stage", "drain"])
def test_without_credentials_the_answer_comes_soon(verb: str, tmp_path: Path):
    """No file, no login, and a metadata server that is not there."""
    env = {"HOME": str(tmp_path), "GCE_METADATA_HOST": "127.0.0.1:1", "GCE_METADATA_IP": "127.0.0.1:1"}
    ended = run(*on_gs(verb, tmp_path), env=env)
    assert_tells(ended, 12, "gcloud auth application-default login", stdout=None)


@pytest.mark.parametrize(
    ("verb", "status"),
    [("ls", 401), ("ls", 403), ("stage", 401), ("stage", 403), ("push", 401), ("push", 403), ("drain", 403)],
)
def test_credentials_that_the_mirror_refuses_end_in_12_and_the_same_command_continues(
    verb: str, status: int, server: GcsServerProcess, tmp_path: Path
):
    server.faults([Fault(times=0, status=status)])
    arguments = on_gs(verb, tmp_path)
    ended = run(*arguments, env=server.environment)
    assert_tells(ended, 12, stdout=None)
    if verb == "drain":
        server.clear_faults()
        assert run(*arguments, env=server.environment).returncode == 0


def on_gs(verb: str, folder: Path) -> list[str]:
    if verb == "ls":
        return ["ls", GS_URL]
    if verb == "stage":
        return ["stage", "--step", "200", "--mirror", GS_URL, "--dest", str(folder / "eval")]
    url = f"gs://test-bucket/{folder.name}"
    root, _ = make_pending(folder, url, 200, kinds=("model",), sidecars=False)
    return [verb, "--root", str(root), *(["--mirror", url] if verb == "push" else [])]


def test_a_mirror_that_does_not_answer_is_temporary(tmp_path: Path):
    ended = run("ls", GS_URL, env=IMPATIENT | {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"})
    assert_tells(ended, 5)


def test_a_directory_mirror_that_is_not_mounted_is_no_empty_mirror(tmp_path: Path):
    url = f"file://{tmp_path}/nfs/run"
    ended = run("stage", "--step", "1", "--mirror", url, "--dest", tmp_path / "e", env=IMPATIENT)
    assert_tells(ended, 10, "nfs/run: ", "nfs does not exist", "mount its file system")
    assert not (tmp_path / "nfs").exists()
