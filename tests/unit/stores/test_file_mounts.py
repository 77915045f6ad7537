"""What counts as mounted: a mount that fits what fstab lists, and no bind of a directory on itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror.stores.file_mounts import unmounted_point

ROOT = "27 1 254:0 / / rw,relatime - ext4 /dev/root rw"
BOUND = "63 27 254:0 /nfs /nfs rw,relatime shared:5 - ext4 /dev/root rw"  # by ReadWritePaths=/nfs


def unmounted(tmp_path: Path, listed: str, *mounts: str, place: str = "/nfs/run-17") -> Path | None:
    (tmp_path / "fstab").write_text(f"# what should be mounted\n{listed}\n")
    (tmp_path / "mountinfo").write_text("\n".join([ROOT, *mounts]) + "\n")
    return unmounted_point(Path(place), tmp_path / "fstab", tmp_path / "mountinfo")


@pytest.mark.parametrize("listed", ["nfs defaults", "nfs4 defaults,nofail 0 0", "cifs rw", "xfs rw", "sshfs rw"])
@pytest.mark.parametrize(
    "mounts",
    [
        [],
        [BOUND],
        ["63 27 0:50 / /nfs rw - autofs systemd-1 rw"],
        ["63 27 0:51 / /nfs rw - tmpfs tmpfs rw"],
        ["63 27 0:52 / /nfs/run-17 rw - nfs4 server:/other rw"],
    ],
    ids=["nothing", "bound on itself", "automount that waits", "tmpfs", "elsewhere"],
)
def test_what_does_not_fit_is_not_mounted(tmp_path: Path, listed: str, mounts: list[str]) -> None:
    assert unmounted(tmp_path, f"server:/export /nfs {listed}", *mounts) == Path("/nfs")


@pytest.mark.parametrize(
    ("listed", "mounted"),
    [
        ("nfs defaults", "nfs"),
        ("nfs defaults", "nfs4"),
        ("nfs4 defaults", "nfs4"),
        ("smb3 rw", "cifs"),
        ("ext3 rw", "ext4"),
        ("xfs rw", "xfs"),
        ("nfs4,nfs rw", "nfs"),
        ("tmpfs rw", "tmpfs"),
        ("autofs rw", "autofs"),
        ("auto rw", "ext4"),
        ("auto", "nfs4"),
        ("sshfs rw", "fuse.sshfs"),
        ("fuse.glusterfs rw", "fuse.glusterfs"),
        ("glusterfs rw", "fuse.glusterfs"),
        ("efs _netdev", "nfs4"),
        ("ceph rw", "ceph"),
    ],
)
def test_what_fits_is_mounted(tmp_path: Path, listed: str, mounted: str) -> None:
    row = f"63 27 0:50 / /nfs rw,relatime shared:1 master:2 - {mounted} server:/export rw"
    assert unmounted(tmp_path, f"server:/export /nfs {listed}", row) is None
    assert unmounted(tmp_path, f"server:/export /nfs {listed}", row, BOUND) is None


@pytest.mark.parametrize("listed", ["none bind", "none rbind,ro 0 0", "auto bind"])
def test_a_bind_that_fstab_lists_is_mounted_as_whatever_it_binds(tmp_path: Path, listed: str) -> None:
    assert unmounted(tmp_path, f"/data /nfs {listed}", BOUND) is None
    assert unmounted(tmp_path, f"/data /nfs {listed}") == Path("/nfs")


def test_the_nearest_point_above_is_found_and_others_do_not_matter(tmp_path: Path) -> None:
    listed = (
        "a:/x /nfs nfs rw\na:/y /nfs/team nfs rw\nproc /proc proc rw\nUUID=1 / ext4 rw\nUUID=2 none swap sw\nbroken"
    )
    mounted = "63 27 0:50 / /nfs rw - nfs4 a:/x rw"
    assert unmounted(tmp_path, listed, mounted, place="/nfs/team/run") == Path("/nfs/team")
    assert unmounted(tmp_path, listed, mounted, place="/nfs/teams/run") is None
    assert unmounted(tmp_path, listed, place="/home/run") is None


def test_spaces_in_a_mount_point_are_understood(tmp_path: Path) -> None:
    listed = "a:/x /my\\040nfs/ nfs rw"
    assert unmounted(tmp_path, listed, place="/my nfs/run") == Path("/my nfs")
    assert unmounted(tmp_path, listed, "63 27 0:50 / /my\\040nfs rw - nfs a:/x rw", place="/my nfs/run") is None


def test_tables_that_cannot_be_read_forbid_nothing(tmp_path: Path) -> None:
    assert unmounted_point(Path("/nfs/run"), tmp_path / "none", tmp_path / "none") is None
