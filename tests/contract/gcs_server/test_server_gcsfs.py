"""gcsfs against the server: what its users do all day.

Rules:
* The plain class of ``gcsfs.core``: the default one asks a gRPC service first.
* Listings are not cached, so that what is asserted is what the server says.
"""

import os

import pytest

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is imported

import fsspec
from fsspec import asyn
from gcsfs.core import GCSFileSystem
from google.oauth2.credentials import Credentials

from ckptmirror.testing import Fault, GcsServerProcess


def _fs(server, token="anon"):
    return GCSFileSystem(
        project="p", token=token, endpoint_url=server.url, skip_instance_cache=True, use_listings_cache=False
    )


@pytest.fixture
def fs(server):
    return _fs(server)


@pytest.fixture
def tree(fs, raw, tmp_path):
    """A bucket with ``dir/a``, ``dir/sub/b`` and ``dir/big`` as gcsfs put them there."""
    source = tmp_path / "dir"
    (source / "sub").mkdir(parents=True)
    (source / "a").write_bytes(b"one")
    (source / "sub" / "b").write_bytes(b"two")
    (source / "big").write_bytes(os.urandom(6 * 1024 * 1024 + 3))
    fs.put(f"{source}/", f"{raw.bucket}/dir/", recursive=True)
    return source


def test_what_is_put_is_got_back_the_same(fs, raw, tree, tmp_path):
    """Documented at https://cloud.google.com/storage/docs/uploading-objects."""
    fs.get(f"{raw.bucket}/dir/", f"{tmp_path}/back/", recursive=True)
    for path in ("a", "big", "sub/b"):
        assert (tmp_path / "back" / path).read_bytes() == (tree / path).read_bytes()
    assert fs.cat_file(f"{raw.bucket}/dir/big", start=5, end=9) == (tree / "big").read_bytes()[5:9]


def test_ls_find_info_and_exists_say_what_is_there(fs, raw, tree, crc32c):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    top = f"{raw.bucket}/dir"
    assert sorted(fs.ls(top, detail=False)) == [f"{top}/a", f"{top}/big", f"{top}/sub"]
    assert fs.find(raw.bucket) == [f"{top}/a", f"{top}/big", f"{top}/sub/b"]
    info = fs.info(f"{top}/a")
    assert (info["type"], info["size"], info["crc32c"]) == ("file", 3, crc32c(b"one"))
    assert fs.info(top)["type"] == "directory"
    assert fs.exists(f"{top}/sub/b")
    assert not fs.exists(f"{top}/absent")
    with pytest.raises(FileNotFoundError):
        fs.info(f"{top}/absent")
    with pytest.raises(FileNotFoundError):
        fs.cat_file(f"{raw.bucket}/absent")


def test_copy_move_and_merge_are_the_servers_work(fs, raw, tree, server):
    """Documented at https://cloud.google.com/storage/docs/copying-renaming-moving-objects."""
    top = f"{raw.bucket}/dir"
    server.clear_log()
    fs.copy(f"{top}/a", f"{raw.bucket}/copied")
    fs.mv(f"{top}/sub/b", f"{raw.bucket}/moved")
    fs.merge(f"{raw.bucket}/merged", [f"{raw.bucket}/copied", f"{raw.bucket}/moved"])
    assert fs.cat_file(f"{raw.bucket}/merged") == b"onetwo"
    assert not fs.exists(f"{top}/sub/b")
    asked = {entry["operation"] for entry in server.log()}
    assert {"object.rewrite", "object.move", "object.compose"} <= asked
    assert not asked & {"upload.media", "upload.multipart", "upload.start"}


def test_a_copy_in_several_calls_is_followed_to_its_end(tmp_path):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    options = ["--rewrite-bytes-per-call", "1000"]
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], options=options) as server:
        fs = _fs(server)
        fs.pipe_file("bucket-1/a", b"x" * 3500)
        fs.copy("bucket-1/a", "bucket-1/b")
        assert fs.cat_file("bucket-1/b") == b"x" * 3500
        assert len(server.log("object.rewrite")) == 4


def test_rm_deletes_one_and_many(fs, raw, tree):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/delete."""
    top = f"{raw.bucket}/dir"
    fs.rm(f"{top}/a")
    assert fs.find(raw.bucket) == [f"{top}/big", f"{top}/sub/b"]
    fs.rm(top, recursive=True)
    assert fs.find(raw.bucket) == []
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{top}/a")


def test_its_batches_of_deletions_are_understood(fs, raw, server):
    """Documented at https://cloud.google.com/storage/docs/batch; gcsfs sends them to Google's own hosts only."""
    paths = [f"{raw.bucket}/d/{number} ü" for number in range(100)]
    fs.pipe(dict.fromkeys(paths, b"x"))
    server.faults([Fault(operation="object.delete", status=503, object="d/7 ", times=1)])
    asked = [*paths[:50], f"{raw.bucket}/absent"]
    answers = asyn.sync(fs.loop, fs._rm_files, asked)
    assert [path for path in answers if not isinstance(path, Exception)] != []
    assert sum(isinstance(answer, Exception) for answer in answers) == 1
    assert fs.find(raw.bucket) == sorted(paths[50:])
    assert len(server.log("batch")) >= 2


def test_a_file_is_written_and_read_in_pieces(fs, raw):
    """Documented at https://cloud.google.com/storage/docs/resumable-uploads."""
    data = os.urandom(3 * 256 * 1024 + 11)
    with fs.open(f"{raw.bucket}/x", "wb", block_size=256 * 1024, metadata={"k": "v"}) as file:
        for start in range(0, len(data), 100_000):
            file.write(data[start : start + 100_000])
    with fs.open(f"{raw.bucket}/x", "rb", block_size=100_000) as file:
        file.seek(1000)
        assert file.read(5) == data[1000:1005]
        file.seek(0)
        assert file.read() == data
    assert fs.getxattr(f"{raw.bucket}/x", "k") == "v"
    fs.setxattrs(f"{raw.bucket}/x", k="w")
    assert fs.info(f"{raw.bucket}/x")["metadata"] == {"k": "w"}


def test_buckets_are_made_listed_and_removed(fs, raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets."""
    name = f"{raw.bucket}-fs"
    fs.mkdir(name)
    assert f"{name}/" in fs.ls("", detail=False) or name in fs.ls("", detail=False)
    fs.rmdir(name)
    assert not fs.exists(name)


def test_versions_are_read_by_their_generation(server, raw):
    """Documented at https://cloud.google.com/storage/docs/using-versioned-objects."""
    fs = GCSFileSystem(
        project="p",
        token="anon",
        endpoint_url=server.url,
        version_aware=True,
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    name = f"{raw.bucket}-v"
    fs.mkdir(name, enable_versioning=True)
    fs.pipe_file(f"{name}/x", b"one")
    first = fs.info(f"{name}/x")["generation"]
    fs.pipe_file(f"{name}/x", b"two")
    assert fs.cat_file(f"{name}/x") == b"two"
    assert fs.cat_file(f"{name}/x#{first}") == b"one"
    assert fs.ls(name, detail=True, versions=True)[0]["generation"] == first
    assert len(fs.ls(name, versions=True)) == 2


def test_a_token_may_what_it_may(tmp_path):
    """Documented at https://cloud.google.com/storage/docs/access-control/iam-roles."""
    access = {
        "tokens": {
            "w": {"name": "w@p.example", "roles": ["roles/storage.objectAdmin"]},
            "r": {"name": "r@p.example", "roles": ["roles/storage.objectViewer"]},
        }
    }
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], access=access) as server:
        writer, reader = (_fs(server, Credentials(token=token)) for token in ("w", "r"))
        writer.pipe_file("bucket-1/x", b"data")
        assert reader.cat_file("bucket-1/x") == b"data"
        with pytest.raises(OSError, match=r"storage\.objects\.create"):
            reader.pipe_file("bucket-1/y", b"data")
        with pytest.raises(OSError, match=r"storage\.objects\.delete"):
            reader.rm("bucket-1/x")
        assert writer.find("bucket-1") == ["bucket-1/x"]


def test_a_create_only_write_is_refused_when_the_name_is_taken(fs, raw):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    fs.pipe_file(f"{raw.bucket}/x", b"one", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{raw.bucket}/x", b"two", mode="create")
    assert fs.cat_file(f"{raw.bucket}/x") == b"one"


def test_fsspec_finds_it_by_its_url(server, raw):
    """Documented at https://cloud.google.com/storage/docs/request-endpoints."""
    options = {"token": "anon", "endpoint_url": server.url, "project": "p"}
    with fsspec.open(f"gs://{raw.bucket}/x", "wb", **options) as file:
        file.write(b"data")
    assert fsspec.filesystem("gs", **options).cat_file(f"{raw.bucket}/x") == b"data"
