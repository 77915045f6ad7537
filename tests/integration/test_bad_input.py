"""What a person can get wrong, and what a disk or a mirror can do to them: a sentence, a hint, a code, nothing lost.

Errors of the command line are seen as processes, errors of a training loop as exceptions of the manager. What other
files test in depth (a full disk in mid save, faults in mid download) has one row here too, from the outside.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager, Retention, TrainState, errors, resolve_checkpoint_reference
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.sealed_json import seal
from ckptmirror.testing import Fault, GcsServerProcess
from tests.cli_place import assert_tells, make_mirrored, make_pending, run
from tests.factory import flip_bit
from tests.unit.local.conftest import mounted  # noqa: F401 - a fixture

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


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but for what is under ``.ckptmirror``."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".ckptmirror" not in path.parts
    }


def new_state() -> TrainState:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    return TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def assert_explains(error: errors.CkptMirrorError, exit_code: int, *words: str) -> None:
    assert error.exit_code == exit_code
    assert error.hint
    for word in words:
        assert word in str(error)


# -- the local disk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["size=240k", "size=8m,nr_inodes=24"], ids=["no space", "no inodes"])
def test_a_disk_that_fills_up_while_saving_fails_the_save_and_keeps_the_earlier_one(
    options: str,
    mounted: Callable[..., Path],  # noqa: F811
):
    root = mounted(options)
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
    again = CheckpointManager(root / "run", kinds=("model",))
    start = again.resume(new_state())
    assert start is not None
    assert start.step == last
    again.close(timeout_s=0)


@pytest.mark.parametrize("options", ["size=64k", "size=8m,nr_inodes=6"], ids=["no space", "no inodes"])
def test_a_disk_that_is_too_small_to_stage_to_is_named_and_a_larger_one_works(
    options: str,
    mounted: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
):
    _, url, _ = make_mirrored(tmp_path, 200, size_bytes=100_000)
    dest = mounted(options)
    ended = run("stage", "--step", "200", "--full", "--mirror", url, "--dest", dest / "eval")
    assert_tells(ended, 5, str(dest))
    assert not list(dest.rglob("meta_*.json"))
    assert run("stage", "--step", "200", "--full", "--mirror", url, "--dest", tmp_path / "eval").returncode == 0


@pytest.fixture
def read_only(mounted: Callable[..., Path]) -> Callable[[Path], Path]:  # noqa: F811
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
    assert_tells(run("stage", "--step", "1", "--mirror", f"file://{tmp_path}/m", "--dest", frozen), 3)


def test_a_read_only_destination_is_refused(read_only: Callable[[Path], Path], tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    (tmp_path / "empty").mkdir()
    frozen = read_only(tmp_path / "empty")
    assert_tells(run("stage", "--step", "200", "--mirror", url, "--dest", frozen), 10, "read-only")


def test_a_second_writer_on_a_root_is_told_who_the_first_is(tmp_path: Path):
    first = CheckpointManager(tmp_path / "run")
    first.resume(new_state())
    try:
        with pytest.raises(errors.RootLocked, match=r"pid \d+|\d+") as caught:
            CheckpointManager(tmp_path / "run")
        assert_explains(caught.value, 11)
    finally:
        first.close(timeout_s=0)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path):
    place = tmp_path / "root"
    place.write_text("mine")
    with pytest.raises(errors.LocalStorageUnwritable) as caught:
        CheckpointManager(place)
    assert_explains(caught.value, 10, f"{place} is a file, not a directory")
    for arguments in (["status"], ["drain"], ["push", "--mirror", "file:///m"], ["rotate", "--keep-last", "1"]):
        assert_tells(run(*arguments, "--root", place), 2, "is a file")
    assert_tells(run("ls", place), 3, "is not a directory")
    assert place.read_text() == "mine"


@pytest.mark.parametrize("verb", ["status", "drain", "rotate"])
def test_a_directory_that_no_trainer_saved_to_has_no_table(verb: str, tmp_path: Path):
    ended = run(verb, "--root", tmp_path, *(["--keep-last", "1"] if verb == "rotate" else []))
    assert_tells(ended, 10, "has no pending-uploads table", "Pass the root that the trainer saves to.")
    assert list(tmp_path.iterdir()) == []


def test_push_of_a_directory_without_saves_leaves_it_as_it_is(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    ended = run("push", "--root", tmp_path, "--mirror", f"file://{tmp_path}/m")
    assert_tells(ended, 3, "holds no whole save")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("setting", [{"kinds": ()}, {"kinds": "dcp"}, {"kinds": ("zip",)}, {"mode": "fast"}])
def test_a_wrong_setting_is_refused_before_anything_is_made(setting: dict[str, Any], tmp_path: Path):
    with pytest.raises(errors.ConfigError) as caught:
        CheckpointManager(tmp_path / "run", **setting)
    assert_explains(caught.value, 10, next(iter(setting)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("policy", [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": 1}])
def test_a_wrong_retention_is_refused_when_it_is_made(policy: dict[str, int]):
    with pytest.raises(errors.ConfigError) as caught:
        Retention(**policy)
    assert_explains(caught.value, 10)


# -- mirrors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://", "does not name a bucket"),
        ("gs://B!/x", "does not name a bucket"),
        ("gs://user:hush@bucket/x", "without user"),
        ("gs://bucket/x?token=hush", "without user, query or fragment"),
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
    started = time.monotonic()
    ended = run(*on_gs(verb, tmp_path), env=env)
    assert time.monotonic() - started < 20.0
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
    ended = run("ls", GS_URL, env={"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"})
    assert_tells(ended, 5)


def test_a_directory_mirror_that_is_not_mounted_is_no_empty_mirror(tmp_path: Path):
    url = f"file://{tmp_path}/nfs/run"
    ended = run("stage", "--step", "1", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 5, "nfs/run is not there", "Is its file system mounted?")
    assert not (tmp_path / "nfs").exists()


# -- what is on a mirror ------------------------------------------------------------------------------------


def hostile(meta: dict[str, Any], path: str) -> bytes:
    meta["artifacts"][0]["path"] = path
    return seal(meta["format"], {key: value for key, value in meta.items() if key not in ("checksum", "format")})


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda data: data[: len(data) // 2], "JSON"),
    "empty": (lambda data: data[:0], ""),
    "not UTF-8": (lambda data: b"\xff\xfe" + data, "UTF-8"),
    "another version": (lambda data: data.replace(b'"version":1', b'"version":99'), "version"),
    "a wrong checksum": (lambda data: data.replace(b'"step":200', b'"step":201'), "checksum"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("place", ["mirror", "root"])
def test_a_meta_that_cannot_be_trusted_is_never_staged_or_loaded_and_the_reason_is_told(
    damage: str, place: str, tmp_path: Path
):
    root, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    path = tmp_path / place / "meta_000200.json"
    change, reason = DAMAGES[damage]
    data = change(path.read_bytes())
    assert data != path.read_bytes()
    path.write_bytes(data)
    before = content(tmp_path / place)
    if place == "mirror":
        ended = run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
        assert_tells(ended, 3, "meta_000200.json", reason)
        assert not (tmp_path / "e").exists() or not content(tmp_path / "e")
        listed = run("ls", url).stdout
    else:
        with pytest.raises(errors.BrokenMeta) as caught:
            resolve_checkpoint_reference(root / "model_000200.pt")
        assert_explains(caught.value, 6, "meta_000200.json", reason)
        assert_tells(run("push", "--root", root, "--mirror", f"file://{tmp_path}/second"), 3)
        listed = run("ls", root).stdout
    assert re.search(rf"200 +- .*incomplete .*{reason}", listed)
    assert content(tmp_path / place) == before


@pytest.mark.parametrize(
    "path", ["../../escaped.pt", "/etc/escaped", "a\u0000b", "model_000200.pt/../../x", ".ckptmirror/lock"]
)
def test_a_hostile_path_in_a_meta_leaves_the_destination_alone(path: str, tmp_path: Path):
    root, url, metas = make_mirrored(tmp_path, 200, kinds=("model",), sidecars=False)
    data = hostile(json.loads(meta_to_bytes(metas[0])), path)
    for place in (tmp_path / "mirror", root):
        (place / "meta_000200.json").write_bytes(data)
    before = {name for name in content(tmp_path) if not name.startswith("e/")}
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
    assert ended.returncode in (3, 6)
    assert_tells(ended, ended.returncode)
    assert "incomplete" in run("ls", root).stdout
    assert {name for name in content(tmp_path) if not name.startswith("e/")} == before


def test_a_truncated_artifact_on_a_mirror_is_seen_before_the_download(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    path = tmp_path / "mirror" / "model_000200.pt"
    path.write_bytes(path.read_bytes()[:-1])
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 3, "model_000200.pt has 2999 bytes, the meta says 3000")


def test_a_bit_flipped_artifact_on_a_mirror_is_never_published_and_a_mended_one_is(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    flip_bit(tmp_path / "mirror" / "model_000200.pt")
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 6, "model_000200.pt is not what was saved: block 0")
    assert not [name for name in content(tmp_path / "e") if not name.endswith(".tmp")]
    flip_bit(tmp_path / "mirror" / "model_000200.pt")
    assert run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e").returncode == 0


def test_a_bit_flipped_artifact_on_disk_is_never_mirrored_and_is_replaced_by_refresh(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 200, kinds=("model",), sidecars=False)
    flip_bit(root / "model_000200.pt")
    ended = run("drain", "--root", root)
    assert ended.returncode == 8
    assert "Traceback" not in ended.stderr
    assert "model_000200.pt" in ended.stderr
    assert run("status", "--root", root).stdout.startswith("NOT SAFE")
    assert not list((tmp_path / "mirror").glob("meta_*"))

    _, url, _ = make_mirrored(tmp_path / "other", 200, kinds=("model",))
    stage = ["stage", "--step", "200", "--mirror", url, "--dest", str(tmp_path / "e")]
    good = Path(run(*stage).stdout.strip())
    saved = good.read_bytes()
    flip_bit(good)
    assert run(*stage, "--refresh").returncode == 0
    assert good.read_bytes() == saved


# -- what was asked for -------------------------------------------------------------------------------------


def test_a_step_that_is_not_there_lists_the_nearest(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 100, 200, 300, kinds=("model",), sidecars=False)
    ended = run("stage", "--step", "250", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 3, "has no step 250. The nearest are 100, 200, 300.", "ckptmirror ls")
    assert_tells(run("push", "--root", tmp_path / "root", "--mirror", url, "--step", "250"), 3, "step 250")


def test_a_kind_that_is_not_there_lists_the_kinds(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    ended = run("stage", "--step", "200", "--kind", "dcp", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 4, "Step 200 has no kind dcp", "it has model")


def test_the_latest_of_an_empty_mirror_is_not_found(tmp_path: Path):
    (tmp_path / "mirror").mkdir()
    ended = run("stage", "--step", "latest", "--mirror", f"file://{tmp_path}/mirror", "--dest", tmp_path / "e")
    assert_tells(ended, 3, "holds no checkpoint")


# -- the destination ----------------------------------------------------------------------------------------


def test_someone_elses_files_in_the_destination_stay(tmp_path: Path):
    _, url, metas = make_mirrored(tmp_path, 200, kinds=("model",))
    dest = tmp_path / "e"
    dest.mkdir()
    (dest / "model_000200.pt").write_text("mine")
    (dest / "notes.txt").write_text("mine")
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", dest)
    assert (ended.returncode, ended.stdout) == (0, f"{dest}/model_000200-{metas[0].save_id[:8]}.pt\n")
    assert (dest / "model_000200.pt").read_text() == (dest / "notes.txt").read_text() == "mine"
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    for name in ("model_000200.pt", f"model_000200-{metas[0].save_id[:8]}.pt"):
        (occupied / name).write_text("mine")
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", occupied)
    assert_tells(ended, 7, str(occupied), "Choose an empty --dest")
    assert set(content(occupied).values()) == {b"mine"}


def test_a_destination_that_is_a_file_or_below_one_is_refused(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    place = tmp_path / "file"
    place.write_text("mine")
    assert_tells(run("stage", "--step", "200", "--mirror", url, "--dest", place), 2, "is a file")
    assert_tells(run("stage", "--step", "200", "--mirror", url, "--dest", place / "sub"), 10, "is a file")
    assert place.read_text() == "mine"
