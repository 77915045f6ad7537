"""Verify with `--deep`: every byte is read, and what is damaged is told from what cannot be read."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from ckptmirror.core.codec import tombstone_to_bytes
from ckptmirror.core.model import MIN_BLOCK_SIZE_BYTES, Tombstone
from ckptmirror.flow.fetch.blocks import WORKERS, FileToRead, ObjectToRead, read_all
from ckptmirror.flow.verify.verify import Target, verify
from ckptmirror.stores import memory, open_store
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import LIMIT_S, assert_tells, run, start
from tests.kit.faults import flip_bit
from tests.kit.formats import dcp_contents
from tests.kit.mirrors import SpyStore
from tests.kit.roots import drained, make_mirrored, states
from tests.kit.saves import put_on_mirror

BUCKET = "verify-deep"
BIG = 2 * MIN_BLOCK_SIZE_BYTES + 5000


def test_deep_finds_one_flipped_bit_that_the_structure_cannot_show(tmp_path: Path) -> None:
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",), sizes={"model_000200.pt": BIG})
    flip_bit(root / "model_000200.pt", MIN_BLOCK_SIZE_BYTES + 7)
    flip_bit(tmp_path / "mirror" / "model_000200.pt", -1)
    for target, block in ((Target(root), 1), (Target(mirrors=(url,)), 2)):
        assert verify(target).outcome == "whole"
        told: list[tuple[int, int]] = []
        found = verify(target, deep=True, on_progress=lambda done, total, told=told: told.append((done, total)))
        assert states(found) == [(100, "current", "whole"), (200, "current", "damaged")]
        assert (
            f"the crc32c of block {block} (from byte {block * MIN_BLOCK_SIZE_BYTES}) is wrong"
            in found.saves[1].faults[0]
        )
        whole, damaged = found.saves
        assert whole.read_bytes == whole.size_bytes
        assert damaged.read_bytes == damaged.size_bytes - BIG
        assert told[-1][0] == told[-1][1] == whole.size_bytes + damaged.size_bytes


def test_every_damaged_block_is_counted_and_other_files_are_read_all_the_same(tmp_path: Path) -> None:
    root, _, (meta,) = make_mirrored(tmp_path, 100, kinds=("model",), sizes={"model_000100.pt": BIG})
    for offset in (3, MIN_BLOCK_SIZE_BYTES, BIG - 1):
        flip_bit(root / "model_000100.pt", offset)
    flip_bit(root / "extra_000100_rank0.pt")
    found = verify(Target(root), deep=True).saves[0]
    assert len(found.faults) == 2
    assert any(
        "the crc32c of block 0 (from byte 0) is wrong, and 2 more of 3 blocks are damaged" in fault
        for fault in found.faults
    )
    assert found.read_bytes == meta.size_bytes - BIG - 3000


def test_pieces_that_do_not_make_up_their_tensor_are_damage_although_every_checksum_is_right(
    server: GcsServerProcess, tmp_path: Path
) -> None:
    """A save that somebody forged, with the right checksums; no load takes it either."""
    honest = dcp_contents("__0_0.distcp", "__1_0.distcp")
    forged = dcp_contents("__0_0.distcp", "__1_0.distcp", overlap=True)
    for name, contents, outcome in (("honest", honest, "whole"), ("forged", forged, "damaged")):
        root, url, _ = drained(
            tmp_path / name, 100, url=f"gs://{BUCKET}/{name}", kinds=("dcp", "model"), ranks=2, contents=contents
        )
        for target in (Target(root), Target(mirrors=(url,))):
            assert verify(target).outcome == "whole"
            found = verify(target, deep=True)
            assert found.outcome == outcome
    (save,) = found.saves
    assert save.whole_kinds == ("model",)
    assert len(save.faults) == 1
    assert ".metadata: dcp_000100: the pieces of model.w overlap" in save.faults[0]


def test_a_file_that_shrinks_a_link_and_a_directory_in_its_place_are_damage(tmp_path: Path) -> None:
    root, _, (meta,) = make_mirrored(tmp_path, 100, kinds=("model",), size_bytes=9000)
    digest = meta.artifacts[0].digest
    (tmp_path / "short").write_bytes(b"x" * 4096)
    (tmp_path / "link").symlink_to(root / meta.artifacts[0].path)
    (tmp_path / "folder").mkdir()
    found = read_all([FileToRead(tmp_path / name, digest) for name in ("short", "link", "folder", "none")])
    assert all(one is not None for one in found)
    assert [(one.state, one.is_gone) for one in found if one is not None] == [("damaged", False)] * 3 + [
        ("damaged", True)
    ]


def test_a_block_that_breaks_on_its_way_is_asked_for_again(server: GcsServerProcess, tmp_path: Path) -> None:
    _, url, _ = drained(tmp_path, 100, url=f"gs://{BUCKET}/way")
    server.faults([Fault(operation="object.media", object="model_000100.pt", corrupt_byte_at=10, times=2)])
    assert verify(Target(mirrors=(url,)), deep=True).outcome == "whole"
    server.faults([Fault(operation="object.media", object="model_000100.pt", corrupt_byte_at=10, times=0)])
    assert verify(Target(mirrors=(url,)), deep=True).outcome == "damaged"


def test_a_mirror_that_stops_answering_is_not_damaged(server: GcsServerProcess, tmp_path: Path) -> None:
    _, url, _ = drained(tmp_path, 100, 200, url=f"gs://{BUCKET}/silent")
    server.faults([Fault(operation="object.media", object="model_", status=403, times=0)])
    ended = run("verify", url, "--deep", env=server.environment)
    assert_tells(ended, 12, "could not be read", stdout=None)
    assert "it was not read to its end" in ended.stdout


def test_ctrl_c_ends_the_reading_of_a_slow_mirror_soon(server: GcsServerProcess, tmp_path: Path) -> None:
    _, url, _ = drained(tmp_path, 100, 200, url=f"gs://{BUCKET}/slow", size_bytes=1_000_000)
    server.faults([Fault(operation="object.media", object=r"\.pt$", times=0, slow_bytes_per_s=1000.0)])
    process = start("verify", url, "--deep", env=server.environment)
    try:
        while server.faults_seen()[0]["seen"] < WORKERS:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LIMIT_S)  # the rest would take half an hour
        assert (process.returncode, stdout) == (130, "")
        assert stderr.startswith("ckptmirror: interrupted")
    finally:
        process.kill()


def test_an_interrupt_waits_for_no_reader_that_gets_no_answer(tmp_path: Path) -> None:
    memory.drop("verify-silent")
    store = SpyStore(open_store("memory://verify-silent/run"))
    root, _, (meta,) = make_mirrored(tmp_path, 100, kinds=("model",), ranks=WORKERS)
    put_on_mirror(store, root, meta)  # type: ignore[arg-type]
    reading, answer, left = threading.Barrier(WORKERS), threading.Event(), threading.Semaphore(0)

    def say_nothing(_name: str, _offset: int) -> None:
        if reading.wait(60) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        answer.wait()
        left.release()

    store.before = say_nothing
    infos = [store.stat(artifact.path) for artifact in meta.artifacts]
    with pytest.raises(KeyboardInterrupt):
        read_all(
            [
                ObjectToRead(store, info.name, info.generation, artifact.digest)  # type: ignore[arg-type]
                for info, artifact in zip(infos, meta.artifacts, strict=True)
                if info is not None
            ]
        )
    answer.set()
    for _ in range(WORKERS):
        assert left.acquire(timeout=60)


def test_an_object_is_read_at_the_generation_that_was_listed(tmp_path: Path) -> None:
    memory.drop("verify-pinned")
    store = open_store("memory://verify-pinned/run")
    root, _, (meta,) = make_mirrored(tmp_path, 100, kinds=("model",))
    put_on_mirror(store, root, meta)
    artifact = meta.artifacts[0]
    info = store.stat(artifact.path)
    assert info is not None
    store.write(artifact.path, (root / artifact.path).read_bytes(), if_generation=info.generation)
    (found,) = read_all([ObjectToRead(store, artifact.path, info.generation, artifact.digest)])
    assert found is not None
    assert found.is_gone


@pytest.mark.parametrize("tombstone", [False, True])
def test_what_is_deleted_in_order_while_it_is_read_is_no_damage(tmp_path: Path, tombstone: bool) -> None:
    """A rotation takes the meta first. A file that goes while its meta stays is damage."""
    root, _, (meta, _) = make_mirrored(tmp_path, 100, 200, kinds=("model",), sizes={"model_000100.pt": BIG})

    def rotate(_done: int, _total: int) -> None:
        if tombstone:
            (root / "meta_000100.json").unlink(missing_ok=True)
        for artifact in meta.artifacts:
            (root / artifact.path).unlink(missing_ok=True)

    found = verify(Target(root), deep=True, on_progress=rotate)
    gone = [one for one in found.saves if one.verdict.step == 100 and one.verdict.state == "damaged"]
    if tombstone:
        assert found.outcome == "whole"
    else:
        assert "it is gone" in gone[0].faults[0]


def test_a_save_under_a_tombstone_is_not_missed(tmp_path: Path) -> None:
    _, url, (meta, _) = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    stone = Tombstone(meta.save_id, 100, meta.kinds, "by policy", "2026-01-01T00:00:00Z")
    (tmp_path / "mirror" / "meta_000100.json").write_bytes(tombstone_to_bytes(stone))
    assert states(verify(Target(mirrors=(url,)), deep=True)) == [(200, "current", "whole")]


def test_memory_is_bounded_by_the_readers_whatever_there_is_to_read(tmp_path: Path) -> None:
    root, _, (meta,) = make_mirrored(tmp_path, 100, ranks=6)
    readers: set[str] = set()
    read_all(
        [FileToRead(root / a.path, a.digest) for a in meta.artifacts],
        on_bytes=lambda _count: readers.add(threading.current_thread().name),
    )
    assert len(readers) <= WORKERS
