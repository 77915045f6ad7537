"""Killed at any crash point of a change on disk, a name is absent or complete, and nothing that was there is lost.

``CKPTMIRROR_CAMPAIGN=full`` repeats every case with larger files, so with more points in each write.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror.core.errors import NameTaken
from ckptmirror.core.model import Digest
from ckptmirror.core.names import TRASH_DIR, tmp_name
from ckptmirror.local import checksummed_writer, crashpoints, direct_io, directories, files, trash
from ckptmirror.local.checksums import verify_file

SAVE_ID = "1f0c9a2e" + "0" * 24
BUFFER_SIZE_BYTES = 65536
SIZE_BYTES = (40 if os.environ.get("CKPTMIRROR_CAMPAIGN") == "full" else 3) * BUFFER_SIZE_BYTES + 777
DATA = random.Random(7).randbytes(SIZE_BYTES)

Work = Callable[[Path], object]


@pytest.fixture(params=["renameat2", "without renameat2"], autouse=True)
def either_rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small buffers, and publishing both by RENAME_NOREPLACE and as on a file system that does not offer it."""
    monkeypatch.setattr(direct_io, "BUFFER_SIZE_BYTES", BUFFER_SIZE_BYTES)
    monkeypatch.setattr(direct_io, "_kept", [])
    if request.param != "renameat2":
        monkeypatch.setattr(directories, "_libc", object())
    return str(request.param)


def in_child(work: Work, root: Path, crash_at: str | None) -> tuple[int | None, list[str]]:
    """Do the work in a forked child, killed at a point if given; return the signal it died of and the points passed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            crashpoints.arm(crash_at)
            work(root)
            os.write(writer, "\n".join(crashpoints.passed()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader) as answer:
        points = answer.read().split("\n")
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), f"the work itself failed ({status})"
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else None), points


def kill_everywhere(
    tmp_path: Path, prepare: Work, work: Work, check: Callable[[Path, str], None], expected: set[str]
) -> None:
    """Kill the work once at each of its points, each time in a fresh root, and check what is left."""
    root = tmp_path / "baseline"
    root.mkdir()
    prepare(root)
    died, points = in_child(work, root, None)
    assert died is None
    assert expected <= {point.partition(":")[0] for point in points}
    for number, point in enumerate(points, start=1):
        root = tmp_path / f"killed_at_{number}"
        root.mkdir()
        prepare(root)
        (root / "committed").write_bytes(b"precious")
        died, _ = in_child(work, root, str(number))
        assert died == signal.SIGKILL, point
        check(root, point)
        assert (root / "committed").read_bytes() == b"precious", point


def nothing(root: Path) -> None:
    """Prepare nothing."""


def finals(root: Path) -> set[str]:
    """Return what lies in the root without temporaries, trash and the file that stands for committed saves."""
    return {name for name in os.listdir(root) if not name.endswith(".tmp")} - {".ckptmirror", "committed"}


def write_artifact(root: Path) -> Digest:
    with checksummed_writer.ArtifactWriter(root / "model_000200.pt", SAVE_ID) as writer:
        for start in range(0, SIZE_BYTES, 10_000):
            writer.write(memoryview(DATA)[start : start + 10_000])
        return writer.publish()


def again(work: Work, root: Path) -> None:
    """Do the work once more, as the next start would; a name that is complete already is fine."""
    with contextlib.suppress(NameTaken):
        work(root)


def test_crash_during_save_leaves_no_final_file(tmp_path: Path):
    (tmp_path / "reference").mkdir()
    digest = write_artifact(tmp_path / "reference")

    def check(root: Path, point: str) -> None:
        assert finals(root) <= {"model_000200.pt"}, point
        if finals(root):
            verify_file(root / "model_000200.pt", digest)
        again(write_artifact, root)
        verify_file(root / "model_000200.pt", digest)

    kill_everywhere(
        tmp_path,
        nothing,
        write_artifact,
        check,
        {"file.create", "file.write", "file.fsync", "file.publish", "dir.fsync"},
    )


def test_a_sealed_artifact_is_complete_under_its_temporary_name(tmp_path: Path):
    def seal(root: Path) -> None:
        with checksummed_writer.ArtifactWriter(root / "model_000200.pt", SAVE_ID) as writer:
            writer.write(DATA)
            writer.seal()

    def check(root: Path, point: str) -> None:
        assert finals(root) == set(), point
        if point == "file.fsync:after":
            assert (root / tmp_name("model_000200.pt", SAVE_ID)).read_bytes() == DATA

    kill_everywhere(tmp_path, nothing, seal, check, {"file.fsync"})


def test_crash_while_writing_a_small_file_leaves_it_absent_or_whole(tmp_path: Path):
    def write(root: Path) -> None:
        files.write_bytes(root / "meta_000200.json", b"content", save_id=SAVE_ID)

    def check(root: Path, point: str) -> None:
        if finals(root):
            assert (root / "meta_000200.json").read_bytes() == b"content", point
        again(write, root)
        assert (root / "meta_000200.json").read_bytes() == b"content", point

    kill_everywhere(tmp_path, nothing, write, check, {"file.write", "file.fsync", "file.publish", "dir.fsync"})


def test_crash_while_replacing_a_control_file_leaves_the_old_or_the_new(tmp_path: Path):
    def old(root: Path) -> None:
        (root / "attempts.json").write_bytes(b"old")

    def write(root: Path) -> None:
        files.write_bytes(root / "attempts.json", b"new!", save_id=SAVE_ID, replace=True)

    def check(root: Path, point: str) -> None:
        assert (root / "attempts.json").read_bytes() in (b"old", b"new!"), point

    kill_everywhere(tmp_path, old, write, check, {"file.replace", "dir.fsync"})


def fill(directory: Path) -> None:
    (directory / "pp0").mkdir(parents=True)
    (directory / ".metadata").write_bytes(b"metadata")
    (directory / "pp0" / "__0_0.distcp").write_bytes(b"shard")


def whole(directory: Path) -> bool:
    try:
        return (directory / ".metadata").read_bytes() + (
            directory / "pp0" / "__0_0.distcp"
        ).read_bytes() == b"metadatashard"
    except FileNotFoundError:
        return False


def test_crash_while_publishing_a_directory_leaves_it_absent_or_whole(tmp_path: Path, either_rename: str):
    temporary = tmp_name("dcp_000200", SAVE_ID)

    def publish(root: Path) -> None:
        directories.publish_dir(root / temporary, root / "dcp_000200")

    def check(root: Path, point: str) -> None:
        if (root / "dcp_000200").exists() and not whole(root / "dcp_000200"):
            # Only where directories cannot be renamed without replacing: the claimed name, empty.
            assert either_rename != "renameat2", point
            assert os.listdir(root / "dcp_000200") == [], point
        assert whole(root / "dcp_000200") != whole(root / temporary), point

    kill_everywhere(tmp_path, lambda root: fill(root / temporary), publish, check, {"dir.publish", "dir.fsync"})


def test_crash_while_removing_leaves_it_whole_or_gone(tmp_path: Path):
    def remove(root: Path) -> None:
        trash.move_to_trash(root, root / "dcp_000200")
        directories.fsync_dir(root)
        trash.empty_trash(root)

    def check(root: Path, point: str) -> None:
        if (root / "dcp_000200").exists() and os.listdir(root / "dcp_000200"):
            assert whole(root / "dcp_000200"), point
            trash.move_to_trash(root, root / "dcp_000200")
        trash.empty_trash(root)
        assert os.listdir(root / TRASH_DIR) == [], point
        assert finals(root) == set(), point

    kill_everywhere(
        tmp_path,
        lambda root: fill(root / "dcp_000200"),
        remove,
        check,
        {"dir.mkdir", "trash.rename", "trash.unlink", "trash.rmdir"},
    )


def test_crash_while_pointing_latest_leaves_the_old_or_the_new_target(tmp_path: Path):
    def point_new(root: Path) -> None:
        directories.replace_link(root / "latest", "dcp_000200")

    def check(root: Path, point: str) -> None:
        assert os.readlink(root / "latest") in ("dcp_000100", "dcp_000200"), point
        again(point_new, root)
        assert os.readlink(root / "latest") == "dcp_000200", point

    kill_everywhere(
        tmp_path,
        lambda root: (root / "latest").symlink_to("dcp_000100"),
        point_new,
        check,
        {"link.create", "link.replace"},
    )


def test_crash_while_making_directories_can_be_done_again(tmp_path: Path):
    def make(root: Path) -> None:
        directories.make_dirs(root / "a" / "b" / "c")

    def check(root: Path, point: str) -> None:
        make(root)
        assert (root / "a" / "b" / "c").is_dir(), point

    kill_everywhere(tmp_path, nothing, make, check, {"dir.mkdir", "dir.fsync"})
