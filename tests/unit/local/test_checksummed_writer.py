"""An artifact gets its name only when it is complete, and its checksum from the bytes that were written."""

from __future__ import annotations

import array
import io
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmirror.core.errors import IntegrityError, LocalStorageUnwritable, NameTaken
from ckptmirror.core.names import tmp_name
from ckptmirror.local import direct_io
from ckptmirror.local.checksummed_writer import ArtifactWriter
from ckptmirror.local.checksums import digest_file, verify_file

SAVE_ID = "1f0c9a2e" + "0" * 24


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch):
    """Small buffers, so that small files take the path of large ones."""
    monkeypatch.setattr(direct_io, "BUFFER_SIZE_BYTES", 65536)
    monkeypatch.setattr(direct_io, "_kept", [])


def write(path: Path, *pieces: bytes) -> None:
    with ArtifactWriter(path, SAVE_ID) as writer:
        for piece in pieces:
            assert writer.write(piece) == len(piece)
        writer.publish()


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 65535, 65536, 65537, 3 * 65536, 500_001])
def test_what_was_written_is_what_lies_there(tmp_path: Path, size: int):
    data = random.Random(size).randbytes(size)
    path = tmp_path / "model_000200.pt"
    with ArtifactWriter(path, SAVE_ID) as writer:
        writer.write(data)
        assert writer.tell() == size
        digest = writer.publish()
    assert path.read_bytes() == data
    assert digest == digest_file(path)
    assert names(tmp_path) == [path.name]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sizes=st.lists(st.integers(0, 150_000), max_size=8), seed=st.integers(0, 99))
def test_any_split_of_writes_gives_the_same_file_and_digest(tmp_path: Path, sizes: list[int], seed: int):
    path = tmp_path / "model_000200.pt"
    path.unlink(missing_ok=True)
    pieces = [random.Random(seed + i).randbytes(size) for i, size in enumerate(sizes)]
    write(path, *pieces)
    assert path.read_bytes() == b"".join(pieces)


def test_all_kinds_of_buffers_are_written_by_their_bytes(tmp_path: Path):
    numbers = array.array("i", range(1000))
    with ArtifactWriter(tmp_path / "f", SAVE_ID) as writer:
        assert writer.write(numbers) == 4000
        assert writer.write(memoryview(numbers)) == 4000
        assert writer.write(memoryview(numbers).cast("B").cast("i", (10, 100))) == 4000
        assert writer.write(bytearray(b"tail")) == 4
        assert writer.write(b"") == 0
        writer.publish()
    assert (tmp_path / "f").read_bytes() == numbers.tobytes() * 3 + b"tail"


def test_pickle_and_torch_write_into_it(tmp_path: Path):
    import torch

    state = {"weight": torch.arange(100_000), "step": 7}
    with ArtifactWriter(tmp_path / "model_000200.pt", SAVE_ID) as writer:
        torch.save(state, writer)  # type: ignore[arg-type]
        digest = writer.publish()
    verify_file(tmp_path / "model_000200.pt", digest)
    loaded = torch.load(tmp_path / "model_000200.pt", weights_only=True)
    assert torch.equal(loaded["weight"], state["weight"])
    with ArtifactWriter(tmp_path / "extra_000200_rank0.pt", SAVE_ID) as writer:
        pickle.dump({"big": bytes(200_000)}, writer, protocol=5)
        writer.publish()
    assert pickle.loads((tmp_path / "extra_000200_rank0.pt").read_bytes()) == {"big": bytes(200_000)}


def test_it_says_what_it_can_do(tmp_path: Path):
    with ArtifactWriter(tmp_path / "f", SAVE_ID) as writer:
        assert writer.writable()
        assert not writer.readable()
        assert not writer.seekable()
        writer.flush()
        with pytest.raises(io.UnsupportedOperation):
            writer.fileno()


def test_seal_leaves_a_durable_temporary_and_nothing_open(tmp_path: Path):
    with ArtifactWriter(tmp_path / "model_000200.pt", SAVE_ID) as writer:
        writer.write(b"x" * 70_000)
        digest = writer.seal()
        open_files = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        assert str(writer.temporary) not in open_files
        assert writer.seal() == digest
        with pytest.raises(ValueError, match="sealed"):
            writer.write(b"more")
    temporary = tmp_path / tmp_name("model_000200.pt", SAVE_ID)
    assert names(tmp_path) == [temporary.name]
    verify_file(temporary, digest)


def test_leaving_the_body_seals_and_publish_may_follow(tmp_path: Path):
    with ArtifactWriter(tmp_path / "f", SAVE_ID) as writer:
        writer.write(b"12345")
    assert writer.closed
    assert writer.publish().size_bytes == 5
    assert names(tmp_path) == ["f"]


def test_no_tmp_files_after_save(tmp_path: Path):
    for step in range(3):
        write(tmp_path / f"model_{step:06d}.pt", b"x" * 100_000)
    assert [name for name in names(tmp_path) if name.endswith(".tmp")] == []


@pytest.mark.parametrize("size", [10, 200_000])
def test_an_error_while_serializing_leaves_nothing(tmp_path: Path, size: int):
    def serialize() -> None:
        with ArtifactWriter(tmp_path / "f", SAVE_ID) as writer:
            writer.write(bytes(size))
            raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        serialize()
    assert names(tmp_path) == []


def test_a_taken_name_is_never_replaced(tmp_path: Path):
    (tmp_path / "model_000200.pt").write_bytes(b"another save's")
    with pytest.raises(NameTaken, match="model_000200"):
        write(tmp_path / "model_000200.pt", b"mine")
    assert (tmp_path / "model_000200.pt").read_bytes() == b"another save's"
    assert names(tmp_path) == ["model_000200.pt"]


def test_a_dangling_link_under_the_final_name_is_a_taken_name(tmp_path: Path):
    (tmp_path / "f").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NameTaken):
        write(tmp_path / "f", b"mine")
    assert not (tmp_path / "elsewhere").exists()


def test_leftover_tmp_is_retried(tmp_path: Path):
    leftover = tmp_path / tmp_name("model_000200.pt", SAVE_ID)
    leftover.write_bytes(b"half of it, from a process that died")
    write(tmp_path / "model_000200.pt", b"all of it")
    assert (tmp_path / "model_000200.pt").read_bytes() == b"all of it"
    assert names(tmp_path) == ["model_000200.pt"]


def test_a_link_left_under_the_temporary_name_is_not_written_through(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / tmp_name("f", SAVE_ID)).symlink_to(victim)
    write(tmp_path / "f", b"mine")
    assert victim.read_bytes() == b"precious"


def test_the_temporary_of_a_live_writer_is_not_touched(tmp_path: Path):
    with ArtifactWriter(tmp_path / "f", SAVE_ID) as first:
        first.write(b"first")
        with pytest.raises(NameTaken):
            ArtifactWriter(tmp_path / "f", SAVE_ID)
        first.publish()
    assert (tmp_path / "f").read_bytes() == b"first"


def test_a_sealed_temporary_that_was_exchanged_is_not_published(tmp_path: Path):
    with ArtifactWriter(tmp_path / "f", SAVE_ID) as writer:
        writer.write(b"mine")
        writer.seal()
        os.unlink(writer.temporary)
        writer.temporary.write_bytes(b"another's")
        with pytest.raises(IntegrityError, match="share a save id"):
            writer.publish()
    assert names(tmp_path) == [tmp_name("f", SAVE_ID)]


def test_a_missing_directory_is_an_error_that_says_so(tmp_path: Path):
    with pytest.raises(LocalStorageUnwritable, match="does not exist"):
        ArtifactWriter(tmp_path / "gone" / "f", SAVE_ID)


def test_bytes_lost_by_the_disk_are_noticed_before_the_name_is_given(tmp_path: Path):
    def write_and_lose() -> None:
        with ArtifactWriter(tmp_path / "f", SAVE_ID) as writer:
            writer.write(bytes(65536))
            assert writer._queue is not None
            writer._queue.drain()
            os.truncate(writer.temporary, 10)
            writer.publish()

    with pytest.raises(IntegrityError, match="has 10 bytes, but 65536"):
        write_and_lose()
    assert names(tmp_path) == []


def test_works_where_the_file_system_has_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct_io, "allow_direct", lambda _: False)
    write(tmp_path / "f", bytes(200_001))
    assert digest_file(tmp_path / "f").size_bytes == 200_001


def test_large_artifacts_go_past_the_page_cache_where_the_file_system_can(tmp_path: Path):
    with ArtifactWriter(tmp_path / "f", SAVE_ID) as writer:
        if not direct_io.allow_direct(writer._descriptor):
            pytest.skip("this file system has no direct I/O")
        direct_io.forbid_direct(writer._descriptor)
        writer.write(bytes(65536))
        assert direct_io.is_direct(writer._descriptor)
        writer.write(b"an unaligned tail")
        digest = writer.publish()
    verify_file(tmp_path / "f", digest)


def test_kept_buffers_are_bounded_and_used_again(tmp_path: Path):
    writers = [ArtifactWriter(tmp_path / f"f{i}", SAVE_ID) for i in range(2 * direct_io.KEPT_BUFFERS)]
    for writer in writers:
        writer.write(bytes(100_000))
    for writer in writers:
        writer.publish()
        writer.close()
    assert len(direct_io._kept) == direct_io.KEPT_BUFFERS
    kept = {id(buffer) for buffer in direct_io._kept}
    with direct_io.kept_buffer() as buffer:
        assert id(buffer) in kept


def test_many_writers_at_once_do_not_mix_their_bytes(tmp_path: Path):
    def work(number: int) -> None:
        write(tmp_path / f"f{number}", *[bytes([number]) * 30_000] * 10)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        assert (tmp_path / f"f{number}").read_bytes() == bytes([number]) * 300_000


def test_a_forked_child_that_leaves_the_body_does_not_remove_its_parents_temporary(tmp_path: Path):
    with ArtifactWriter(tmp_path / "f", SAVE_ID) as writer:
        writer.write(bytes(200_000))
        pid = os.fork()
        if pid == 0:
            writer.abandon()
            os._exit(0)
        os.waitpid(pid, 0)
        writer.publish()
    assert (tmp_path / "f").stat().st_size == 200_000


FAILING = """
import os, sys
from pathlib import Path
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.local.checksummed_writer import ArtifactWriter
from ckptmirror.local.files import write_bytes
root = Path(sys.argv[1])
os.access("/begin", 0)
try:
    if sys.argv[2] == "artifact":
        with ArtifactWriter(root / "f", "0" * 32) as writer:
            writer.write(bytes(100))
            writer.publish()
    else:
        write_bytes(root / "f", bytes(100), save_id="0" * 32, replace=sys.argv[2] == "replace")
except CkptMirrorError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("what", ["artifact", "bytes", "replace"])
def test_an_fsync_that_fails_is_not_tried_again_and_nothing_is_published(
    tmp_path: Path, run_traced: Callable[..., tuple[str, list[str]]], what: str
):
    output, trace = run_traced(
        [sys.executable, "-c", FAILING, str(tmp_path), what],
        "fsync,rename,renameat,renameat2,unlink,unlinkat,link,linkat",
        inject="fsync:error=EIO:when=1",
    )
    assert output.startswith("IntegrityError")
    assert "I/O error" in output
    assert names(tmp_path) == []
    calls = [line.partition("(")[0].split()[-1].removesuffix("at") for line in trace]
    assert calls == ["fsync", "unlink"]


def test_memory_of_a_large_write_stays_bounded(tmp_path: Path):
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from ckptmirror.local.checksummed_writer import ArtifactWriter\n"
        "piece = bytes(1 << 20)\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "with ArtifactWriter(Path(sys.argv[1]) / 'f', '0' * 32) as writer:\n"
        "    before = peak()\n"
        "    for _ in range(128): writer.write(piece)\n"
        "    writer.publish()\n"
        "print(peak() - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 48 * 1024  # KiB: three buffers of 8 MiB, and some room
