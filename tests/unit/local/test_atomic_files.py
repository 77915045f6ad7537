"""Small files, directories, links and names: made durably, and never over something else."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ckptmirror.core.errors import CkptMirrorError, IntegrityError, LocalStorageUnwritable, NameTaken, UsageError
from ckptmirror.core.model import new_id
from ckptmirror.core.names import CONTROL_DIR, tmp_name
from ckptmirror.flow.places.resolve import list_checkpoints
from ckptmirror.local import directories, files
from tests.kit.saves import make_save

SAVE_ID = "1f0c9a2e" + "0" * 24


@pytest.fixture(params=["renameat2", "without renameat2"])
def either_rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish by RENAME_NOREPLACE, and as on a file system that does not offer it."""
    if request.param != "renameat2":
        monkeypatch.setattr(directories, "_libc", object())


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_write_bytes_creates_the_file_and_leaves_no_temporary(tmp_path: Path, either_rename: None):
    files.write_bytes(tmp_path / "meta_000200.json", b"{}", save_id=SAVE_ID)
    assert (tmp_path / "meta_000200.json").read_bytes() == b"{}"
    assert names(tmp_path) == ["meta_000200.json"]


def test_write_bytes_refuses_a_taken_name(tmp_path: Path, either_rename: None):
    (tmp_path / "meta_000200.json").write_bytes(b"theirs")
    with pytest.raises(NameTaken):
        files.write_bytes(tmp_path / "meta_000200.json", b"ours", save_id=SAVE_ID)
    assert (tmp_path / "meta_000200.json").read_bytes() == b"theirs"
    assert names(tmp_path) == ["meta_000200.json"]


def test_a_control_file_is_replaced_whole(tmp_path: Path):
    for content in (b"a" * 1000, b"b", b""):
        files.write_bytes(tmp_path / "status.json", content, save_id=new_id(), replace=True)
        assert (tmp_path / "status.json").read_bytes() == content
    assert names(tmp_path) == ["status.json"]


def test_a_link_that_takes_the_place_of_the_control_directory_meanwhile_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    control, home = tmp_path / "root" / CONTROL_DIR, tmp_path / "home"
    control.mkdir(parents=True)
    home.mkdir()
    (home / "status.json").write_bytes(b"the user's")

    check = files.check_own_dir

    def check_then_swap(path: Path, action: str) -> None:
        check(path, action)
        control.rename(tmp_path / "moved")
        control.symlink_to(home)

    monkeypatch.setattr(files, "check_own_dir", check_then_swap)
    with pytest.raises(LocalStorageUnwritable):
        files.write_bytes(control / "status.json", b"{}", save_id=new_id(), replace=True)
    assert names(home) == ["status.json"]
    assert (home / "status.json").read_bytes() == b"the user's"


def test_threads_may_replace_the_same_control_file(tmp_path: Path):
    contents = [bytes([number]) * 5000 for number in range(8)]
    failures: list[CkptMirrorError] = []

    def work(content: bytes) -> None:
        try:
            for _ in range(5):
                files.write_bytes(tmp_path / "status.json", content, save_id=new_id(), replace=True)
        except CkptMirrorError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (tmp_path / "status.json").read_bytes() in contents
    assert names(tmp_path) == ["status.json"]


def test_leftover_tmp_of_write_bytes_is_retried(tmp_path: Path):
    (tmp_path / tmp_name("meta_000200.json", SAVE_ID)).write_bytes(b"half")
    files.write_bytes(tmp_path / "meta_000200.json", b"whole", save_id=SAVE_ID)
    assert (tmp_path / "meta_000200.json").read_bytes() == b"whole"
    assert names(tmp_path) == ["meta_000200.json"]


def test_a_directory_is_published_only_under_a_free_name(tmp_path: Path, either_rename: None):
    temporary = tmp_path / tmp_name("dcp_000200", SAVE_ID)
    for final in (tmp_path / "dcp_000200", tmp_path / "dcp_000200"):
        temporary.mkdir(exist_ok=True)
        (temporary / ".metadata").write_bytes(b"m")
        if final.exists():
            with pytest.raises(NameTaken):
                directories.publish_dir(temporary, final)
            assert (temporary / ".metadata").exists()
        else:
            directories.publish_dir(temporary, final)
            assert names(tmp_path) == ["dcp_000200"]


def test_directories_exchange_their_names_in_one_step_or_not_at_all(tmp_path: Path, either_rename: None):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "says").write_text(name)
    does = directories.exchange_dirs(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "says").read_text() == ("new" if does else "old")
    assert (tmp_path / "new" / "says").read_text() == ("old" if does else "new")


def test_even_an_empty_directory_is_a_taken_name(tmp_path: Path, either_rename: None):
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    with pytest.raises(NameTaken):
        directories.rename_noreplace(tmp_path / "source", tmp_path / "target")
    assert names(tmp_path) == ["source", "target"]


def test_renaming_what_is_not_there_is_a_file_not_found(tmp_path: Path, either_rename: None):
    with pytest.raises(FileNotFoundError):
        directories.rename_noreplace(tmp_path / "absent", tmp_path / "target")
    assert names(tmp_path) == []


def test_renaming_into_a_missing_directory_says_so(tmp_path: Path, either_rename: None):
    (tmp_path / "source").write_bytes(b"x")
    with pytest.raises(LocalStorageUnwritable, match="does not exist"):
        directories.rename_noreplace(tmp_path / "source", tmp_path / "gone" / "target")
    assert names(tmp_path) == ["source"]


def test_of_two_that_publish_at_once_one_wins(tmp_path: Path, either_rename: None):
    for number in range(20):
        barrier, won = threading.Barrier(2), []
        target = tmp_path / f"target{number}"

        def race(
            source: Path, target: Path = target, barrier: threading.Barrier = barrier, won: list[Path] = won
        ) -> None:
            barrier.wait()
            try:
                directories.rename_noreplace(source, target)
                won.append(source)
            except NameTaken:
                pass

        sources = [tmp_path / f"source{number}_{i}" for i in range(2)]
        for source in sources:
            source.write_text(source.name)
        threads = [threading.Thread(target=race, args=(source,)) for source in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [target.read_text()] == [source.name for source in won]


def test_make_dirs_makes_all_parents_and_may_be_repeated(tmp_path: Path):
    directories.make_dirs(tmp_path / "a" / "b" / "c")
    directories.make_dirs(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_root_that_is_a_file_is_named_in_the_error(tmp_path: Path):
    (tmp_path / "root").write_bytes(b"")
    for path in (tmp_path / "root", tmp_path / "root" / ".ckptmirror"):
        with pytest.raises(LocalStorageUnwritable, match=f"{tmp_path}/root is a file, not a directory") as caught:
            directories.make_dirs(path)
        assert caught.value.hint
    with pytest.raises(LocalStorageUnwritable, match="is a file, not a directory"):
        files.write_bytes(tmp_path / "root" / "f", b"", save_id=SAVE_ID)


def test_a_root_that_is_a_dangling_link_is_an_error(tmp_path: Path):
    (tmp_path / "root").symlink_to("nowhere")
    with pytest.raises(LocalStorageUnwritable, match="symbolic link"):
        directories.make_dirs(tmp_path / "root")


def test_missing_permission_is_named_in_the_error(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    tmp_path.chmod(0o755)
    readable = tmp_path / "readable"
    readable.mkdir(mode=0o755)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.chdir(readable)
        os.setuid(65534)
        try:
            files.write_bytes(Path("f"), b"", save_id=SAVE_ID)
        except LocalStorageUnwritable as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as answer:
        assert "user id 65534 has no permission" in answer.read()


def test_the_link_names_what_it_was_last_told(tmp_path: Path):
    for target in ("dcp_000100", "dcp_000200"):
        (tmp_path / target).mkdir()
        directories.replace_link(tmp_path / "latest", target)
        assert os.readlink(tmp_path / "latest") == target
    assert names(tmp_path) == ["dcp_000100", "dcp_000200", "latest"]


def test_the_link_replaces_nothing_but_a_link(tmp_path: Path):
    (tmp_path / "latest").write_bytes(b"someone's file")
    with pytest.raises(NameTaken, match="not a symbolic link"):
        directories.replace_link(tmp_path / "latest", "dcp_000100")
    assert names(tmp_path) == ["latest"]


@pytest.mark.parametrize("target", ["/etc", "../outside", "a/../../b", ""])
def test_the_link_never_leads_out_of_its_directory(tmp_path: Path, target: str):
    with pytest.raises(UsageError):
        directories.replace_link(tmp_path / "latest", target)
    assert names(tmp_path) == []


def test_fsync_tree_takes_links_and_pipes_as_they_are(tmp_path: Path):
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f").write_bytes(b"x")
    (tmp_path / "d" / "link").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "d" / "pipe")
    directories.fsync_tree(tmp_path)
    directories.fsync_file(tmp_path / "d" / "e" / "f")
    with pytest.raises(LocalStorageUnwritable):
        directories.fsync_file(tmp_path / "d" / "link")


def test_reading_is_limited_and_follows_no_link(tmp_path: Path):
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("f")
    assert files.read_limited(tmp_path / "f", 5) == b"12345"
    for path, why in ((tmp_path / "f", "5 bytes; the limit is 4"), (tmp_path / "link", "link"), (tmp_path, "regular")):
        with pytest.raises(IntegrityError, match=why):
            files.read_limited(path, 4)
    with pytest.raises(FileNotFoundError):
        files.read_limited(tmp_path / "absent", 4)
    with pytest.raises(FileNotFoundError):
        files.read_limited(tmp_path / "f" / "below", 4)
    with closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind(str(tmp_path / "socket"))
        with pytest.raises(IntegrityError, match="regular"):
            files.read_limited(tmp_path / "socket", 4)


def test_a_directory_whose_control_directory_is_a_file_is_listed_without_it(tmp_path: Path):
    make_save(tmp_path, 200)
    (tmp_path / ".ckptmirror").write_bytes(b"not a directory")
    assert [one.step for one in list_checkpoints(tmp_path)] == [200]


def test_a_file_source_reads_any_range_and_is_short_only_at_the_end(tmp_path: Path):
    data = random.Random(1).randbytes(100_000)
    (tmp_path / "f").write_bytes(data)
    with files.FileSource(tmp_path, "f") as source:
        assert source.size_bytes == len(data)
        for offset, size in ((0, 10), (99_990, 10), (12_345, 50_000), (99_990, 100), (100_000, 5)):
            buffer = memoryview(bytearray(size))
            count = source.read_into(offset, buffer)
            assert bytes(buffer[:count]) == data[offset : offset + size]


def test_a_file_source_follows_no_link(tmp_path: Path):
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to("f")
    with pytest.raises(IntegrityError, match="is a symbolic link"):
        files.FileSource(tmp_path, "link")


def test_a_file_source_follows_no_link_on_the_way_but_its_root_may_be_one(tmp_path: Path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "id_rsa").write_bytes(b"secret")
    (tmp_path / "root" / "dcp_000200" / "below").mkdir(parents=True)
    (tmp_path / "root" / "dcp_000200" / "below" / "x").write_bytes(b"x")
    (tmp_path / "link").symlink_to("root")
    with files.FileSource(tmp_path / "link", "dcp_000200/below/x") as source:
        assert source.size_bytes == 1
    for planted in ("dcp_000200/below", "dcp_000200"):
        (tmp_path / "root" / planted).rename(tmp_path / "root" / "moved")
        (tmp_path / "root" / planted).symlink_to(tmp_path / "home")
        with pytest.raises(IntegrityError, match="is behind a symbolic link"):
            files.FileSource(tmp_path / "root", f"{planted}/id_rsa")
        (tmp_path / "root" / planted).unlink()
        (tmp_path / "root" / "moved").rename(tmp_path / "root" / planted)
    for missing in ("dcp_000200/y", "dcp_000201/x", "dcp_000200/below/x/y"):
        with pytest.raises(FileNotFoundError):
            files.FileSource(tmp_path / "root", missing)


ORDER = """
import os, sys
from pathlib import Path
from ckptmirror.local import checksummed_writer, direct_io, files
direct_io.BUFFER_SIZE_BYTES = 65536
root = Path(sys.argv[1])
os.access("/begin", 0)
with checksummed_writer.ArtifactWriter(root / "model_000200.pt", "1f0c9a2e" + "0" * 24) as writer:
    writer.write(bytes(200_001))
    writer.publish()
files.write_bytes(root / "meta_000200.json", b"{}", save_id="1f0c9a2e" + "0" * 24)
"""


def test_order_of_write_fsync_rename(tmp_path: Path, run_traced: Callable[..., tuple[str, list[str]]]):
    _, trace = run_traced(
        [sys.executable, "-c", ORDER, str(tmp_path)],
        "write,pwrite64,ftruncate,fsync,fdatasync,rename,renameat2,link,unlink",
    )
    events: list[str] = []
    for line in trace:
        if "resumed>" in line:
            continue
        call = line.partition("(")[0].split()[-1]
        what = next((name for name in ("model", "meta") if f"{tmp_path}/{name}_000200" in line), "")
        what = what or ("root" if f"<{tmp_path}>" in line else "")
        if what and (call, what) != tuple((events or [" "])[-1].split(" ")):
            events.append(f"{call} {what}")
    assert events == [
        "pwrite64 model",
        "fsync model",
        "renameat2 model",
        "fsync root",
        "pwrite64 meta",
        "fsync meta",
        "renameat2 meta",
        "fsync root",
    ]


DIRECTORIES = """
import os, sys
from pathlib import Path
from ckptmirror.local import directories
root = Path(sys.argv[1])
os.access("/begin", 0)
directories.make_dirs(root / "tmp" / "pp0")
directories.publish_dir(root / "tmp", root / "dcp_000200")
"""


def test_each_new_directory_and_each_published_name_is_fsynced(
    tmp_path: Path, run_traced: Callable[..., tuple[str, list[str]]]
):
    _, trace = run_traced([sys.executable, "-c", DIRECTORIES, str(tmp_path)], "mkdir,fsync,renameat2")
    calls = [line.partition("(")[0].split()[-1] for line in trace]
    where = [line.partition("<")[2].partition(">")[0] if "fsync" in line else "" for line in trace]
    root = str(tmp_path)
    assert list(zip(calls, where, strict=True)) == [
        ("fsync", str(tmp_path.parent)),
        ("mkdir", ""),
        ("fsync", root),
        ("mkdir", ""),
        ("fsync", f"{root}/tmp"),
        ("fsync", f"{root}/tmp/pp0"),
        ("fsync", f"{root}/tmp"),
        ("renameat2", ""),
        ("fsync", root),
    ]
