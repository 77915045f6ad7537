"""rclone against the server, where rclone is installed."""

import json
import os
import shutil
import subprocess

import pytest

from ckptmirror.testing import GcsServerProcess

RCLONE = shutil.which("rclone")
pytestmark = pytest.mark.skipif(RCLONE is None, reason="rclone is not installed")


class Rclone:
    """The program, pointed at a server."""

    def __init__(self, server, *options):
        self._options = [
            *("--config", os.devnull, "--gcs-endpoint", f"{server.url}/storage/v1/", "--gcs-project-number", "1"),
            *("--gcs-bucket-policy-only", "--retries", "1", "--low-level-retries", "3", *options),
        ]

    def run(self, *arguments):
        command = [RCLONE, *self._options, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def __call__(self, *arguments):
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@pytest.fixture
def rclone(server):
    return Rclone(server, "--gcs-anonymous")


@pytest.fixture
def tree(tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a").write_bytes(b"one")
    (source / "sub" / "ü b").write_bytes(b"two")
    (source / "big").write_bytes(os.urandom(17 * 1024 * 1024 + 3))
    return source


@pytest.fixture
def remote(rclone, raw, tree):
    """``:gcs:`` and the place to which rclone copied the tree."""
    rclone("copy", tree, f":gcs:{raw.bucket}/dir")
    return f":gcs:{raw.bucket}"


def test_what_is_copied_there_is_checked_listed_and_copied_back(rclone, remote, tree, tmp_path):
    """Documented at https://cloud.google.com/storage/docs/uploading-objects."""
    rclone("check", "--download", tree, f"{remote}/dir")
    rclone("check", tree, f"{remote}/dir")
    assert sorted(rclone("lsf", "-R", "--files-only", remote)) == ["dir/a", "dir/big", "dir/sub/ü b"]
    assert rclone("ls", f"{remote}/dir/a")[0].split() == ["3", "a"]
    rclone("copy", f"{remote}/dir", tmp_path / "back")
    assert (tmp_path / "back" / "big").read_bytes() == (tree / "big").read_bytes()
    assert (tmp_path / "back" / "sub" / "ü b").read_bytes() == b"two"
    assert rclone("cat", f"{remote}/dir/a") == ["one"]


def test_check_finds_what_differs(rclone, remote, tree, raw):
    """Documented at https://cloud.google.com/storage/docs/data-validation."""
    raw.put("dir/a", b"eno")
    done = rclone.run("check", tree, f"{remote}/dir")
    assert done.returncode == 1
    assert "1 differences found" in done.stderr


def test_a_second_copy_sends_nothing(rclone, remote, tree, server):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    server.clear_log()
    rclone("copy", tree, f"{remote}/dir")
    assert [entry for entry in server.log() if entry["method"] != "GET"] == []


def test_copies_and_moves_within_are_the_servers_work(rclone, remote, server):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    server.clear_log()
    rclone("copy", f"{remote}/dir", f"{remote}/again")
    rclone("moveto", f"{remote}/again/a", f"{remote}/again/moved")
    assert sorted(rclone("lsf", f"{remote}/again")) == ["big", "moved", "sub/"]
    asked = {entry["operation"] for entry in server.log()}
    assert "object.rewrite" in asked
    assert not asked & {"upload.multipart", "upload.start", "object.media"}


def test_delete_and_purge_take_away_what_they_name(rclone, remote):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/delete."""
    rclone("deletefile", f"{remote}/dir/a")
    assert sorted(rclone("lsf", f"{remote}/dir")) == ["big", "sub/"]
    rclone("delete", f"{remote}/dir/sub")
    rclone("purge", f"{remote}/dir")
    assert rclone("lsf", "-R", remote) == []


def test_large_files_go_in_chunks(rclone, raw, tree, server):
    """Documented at https://cloud.google.com/storage/docs/resumable-uploads."""
    server.clear_log()
    rclone("copyto", tree / "big", f":gcs:{raw.bucket}/big")
    assert [entry["status"] for entry in server.log("upload.put")] == [200, 200]
    rclone("check", tree, f":gcs:{raw.bucket}", "--include", "big")


def test_buckets_are_made_and_removed(rclone, raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets."""
    name = f"{raw.bucket}-r"
    rclone("mkdir", f":gcs:{name}")
    assert name in [line.split()[-1] for line in rclone("lsd", ":gcs:")]
    rclone("rmdir", f":gcs:{name}")
    assert name not in [line.split()[-1] for line in rclone("lsd", ":gcs:")]


def test_an_access_list_is_refused_where_access_is_uniform(server, tree, tmp_path):
    """Documented at https://cloud.google.com/storage/docs/uniform-bucket-level-access."""
    with GcsServerProcess(tmp_path / "s", buckets=["bucket-1"]) as uniform:
        done = Rclone(uniform, "--gcs-anonymous", "--gcs-bucket-policy-only=false").run(
            "copyto", tree / "a", ":gcs:bucket-1/a"
        )
        assert done.returncode != 0
        assert "uniform bucket-level access" in done.stderr
        Rclone(uniform, "--gcs-anonymous")("copyto", tree / "a", ":gcs:bucket-1/a")


def test_a_token_may_what_it_may(tmp_path, tree):
    """Documented at https://cloud.google.com/storage/docs/access-control/iam-roles."""
    access = {
        "tokens": {"w": {"name": "w@p.example", "roles": ["roles/storage.objectAdmin"]}},
        "anonymous": {"roles": ["roles/storage.objectViewer"]},
    }
    with GcsServerProcess(tmp_path / "s", buckets=["bucket-1"], access=access) as server:
        token = json.dumps({"access_token": "w", "token_type": "Bearer", "expiry": "2999-01-01T00:00:00Z"})
        Rclone(server, "--gcs-token", token)("copyto", tree / "a", ":gcs:bucket-1/a")
        anonymous = Rclone(server, "--gcs-anonymous")
        assert anonymous("cat", ":gcs:bucket-1/a") == ["one"]
        done = anonymous.run("deletefile", ":gcs:bucket-1/a")
        assert done.returncode != 0
        assert "storage.objects.delete" in done.stderr
