"""A root under FUSE is refused, a table on a network file system too: before anything is made, with what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, errors
from ckptmirror.flow.drain import push
from ckptmirror.local import file_systems
from ckptmirror.local.file_systems import mount_of, refuse_fuse
from ckptmirror.local.table_place import check_place
from tests.cli_place import assert_explains, assert_tells, make_mirrored, run
from tests.small_training import saved_run, whole

FUSE, NFS, EXT4 = 0x65735546, 0x6969, 0xEF53
MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / {here}/bucket rw,nosuid,nodev - fuse.gcsfuse bucket rw,user_id=0
31 22 0:41 / {here}/with\\040space rw,nosuid - fuse.sshfs host:/data rw
32 22 0:42 / {here}/lent rw - virtiofs shared rw
33 22 0:43 / {here}/twice rw - autofs systemd-1 rw
34 22 0:44 / {here}/twice rw shared:9 master:1 - fuse.juicefs JuiceFS:x rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS.format(here=tmp_path))
    return table


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Path]:
    """A directory that a FUSE file system shows."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("a FUSE file system needs bindfs and /dev/fuse")
    (tmp_path / "behind").mkdir()
    place = tmp_path / "fuse"
    place.mkdir()
    done = subprocess.run(["bindfs", str(tmp_path / "behind"), str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not allow FUSE: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize(
    ("below", "kind"),
    [("bucket/run", "fuse.gcsfuse"), ("with space/a/b", "fuse.sshfs"), ("twice", "fuse.juicefs")],
)
def test_fuse_root_is_refused(below: str, kind: str, mounts: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        refuse_fuse(tmp_path / below, mounts, lambda _: FUSE)
    point = tmp_path / Path(below).parts[0]
    assert_explains(caught.value, 10, str(tmp_path / below), f"on {kind}, mounted on {point}", "no rename is atomic")
    assert "gs://" in caught.value.hint


def test_what_a_host_lends_its_guest_is_no_fuse_root(mounts: Path, tmp_path: Path) -> None:
    refuse_fuse(tmp_path / "lent" / "run", mounts, lambda _: FUSE)


def test_a_mount_table_that_cannot_be_read_makes_no_fuse_root_allowed(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="is on FUSE"):
        refuse_fuse(tmp_path / "run", tmp_path / "none", lambda _: FUSE)


def test_a_link_into_fuse_is_seen_through(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "link").symlink_to("bucket")
    assert mount_of(tmp_path / "link" / "run", mounts) == (tmp_path / "bucket", "fuse.gcsfuse")


def test_this_machines_own_disk_is_accepted_and_found_in_its_mount_table(tmp_path: Path) -> None:
    check_place(tmp_path / "not" / "made" / "yet")
    found = mount_of(tmp_path)
    assert found is not None
    assert tmp_path.is_relative_to(found[0])


def test_a_trainer_and_push_on_a_real_fuse_root_are_refused_and_make_nothing(fuse: Path, tmp_path: Path) -> None:
    for state_dir in (None, tmp_path / "state"):
        with pytest.raises(errors.ConfigError) as caught:
            CheckpointManager(fuse / "run", state_dir=state_dir)
        assert_explains(caught.value, 10, "on fuse", f"mounted on {fuse}")
    assert not (tmp_path / "state").exists()
    with pytest.raises(errors.ConfigError) as caught:
        CheckpointManager(tmp_path / "own", persistent_dir=fuse / "run")
    assert_explains(caught.value, 10, "persistent_dir", "on fuse", f"mounted on {fuse}")
    assert [path for path in fuse.rglob("*") if path.is_file()] == []
    root, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    shutil.copytree(root, fuse / "copied", symlinks=True)
    pushed = run("push", "--root", fuse / "copied", "--mirror", f"file://{tmp_path}/second")
    assert_tells(pushed, 10, "on fuse", "Choose a root on this machine's own disk", f"mounted on {fuse}")
    assert not (tmp_path / "second").exists()
    assert run("ls", fuse / "copied").stdout == run("ls", root).stdout
    assert run("stage", "--step", "200", "--mirror", url, "--dest", fuse / "eval").returncode == 0


def test_a_root_on_a_network_file_system_needs_a_state_dir_and_takes_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nfs = tmp_path / "nfs"
    nfs.mkdir()
    honest = file_systems.file_system_type

    def as_if_nfs(path: Path) -> int:
        return NFS if path.is_relative_to(nfs) else honest(path)

    monkeypatch.setattr(file_systems.refuse_network_place, "__defaults__", (as_if_nfs,))
    with pytest.raises(errors.ConfigError) as caught:
        CheckpointManager(nfs / "run")
    assert_explains(caught.value, 10, f"{nfs}/run/.ckptmirror is on NFS")
    assert "state_dir" in caught.value.hint
    assert [path for path in nfs.rglob("*") if path.is_file()] == []
    assert saved_run(nfs / "run", (1,), kinds=("model",), state_dir=tmp_path / "state")
    assert sorted(whole(nfs / "run")) == [1]
    root, _, _ = make_mirrored(nfs, 200, kinds=("model",))
    with pytest.raises(errors.ConfigError, match="is on NFS"):
        push(root, f"file://{tmp_path}/second")
    assert push(root, f"file://{tmp_path}/second", state_dir=tmp_path / "pushes").is_verified


def test_push_notes_where_the_table_lies_and_later_verbs_follow(tmp_path: Path) -> None:
    root, _, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    state, url = tmp_path / "state", f"file://{tmp_path}/second"
    assert run("push", "--root", root, "--mirror", url, "--state-dir", state).returncode == 0
    assert (state / "uploads.db").exists()
    assert not (root / ".ckptmirror" / "uploads.db").exists()
    assert run("drain", "--root", root).returncode == 0
    assert run("status", "--root", root).returncode == 0
