"""The gs:// store against a server that fails on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror.core.errors import (
    IntegrityError,
    NotAuthorised,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.stores.base import Store
from ckptmirror.stores.gs import GsStore
from ckptmirror.stores.gs_endpoint import Limits
from ckptmirror.stores.retrying import RetryingStore
from ckptmirror.testing import Fault, GcsServerProcess
from tests.contract.stores_under_test import gs_store, server_with_bucket, upload_of
from tests.kit.saves import BytesSource, digest_of
from tests.unit.stores.gs_operations import DATA, EVERY, MIB, ask

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServerProcess]:
    with server_with_bucket(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture
def server(running: GcsServerProcess) -> GcsServerProcess:
    running.clear_faults()
    running.clear_log()
    return running


@pytest.fixture
def store(server: GcsServerProcess, request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = gs_store(server, request.node.name, limits=Limits(2.0, 5.0))
    yield opened
    opened.close()


def _starts(server: GcsServerProcess) -> int:
    return len(server.log("upload.start"))


def test_503_retry_is_idempotent(server: GcsServerProcess, store: Store) -> None:
    retrying = RetryingStore(store, wait=lambda _delay_s: None)
    server.faults(
        [
            Fault(operation="upload.start", status=503),
            Fault(operation="upload.put", status=503),
            Fault(operation="upload.put", nth=2, lose_answer=True),
            Fault(operation="object.get", status=503, times=2),
            Fault(operation="object.delete", lose_answer=True),
        ]
    )
    info = retrying.upload(upload_of("x", DATA))
    assert retrying.stat("x") == info
    assert [found.generation for found in store.list()] == [info.generation]
    retrying.delete("x", generation=info.generation)
    assert store.stat("x") is None
    assert all(fault["fired"] == fault.get("times", 1) for fault in server.faults_seen())


def test_a_create_whose_answer_was_lost_is_reported_as_taken_for_the_caller_to_compare(
    server: GcsServerProcess, store: Store
) -> None:
    retrying = RetryingStore(store, wait=lambda _delay_s: None)
    server.faults([Fault(operation="upload.multipart", lose_answer=True)])
    with pytest.raises(PreconditionFailed):
        retrying.write("x", b"ours", if_generation=0)
    assert store.read("x", limit_bytes=10)[0] == b"ours"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(operation="upload.put", nth=2, reset_after_bytes=3 * MIB),
        Fault(operation="upload.put", nth=2, status=503, after_bytes=3 * MIB),
        Fault(operation="upload.put", nth=2, lose_answer=True),
    ],
)
def test_upload_continues_from_308_range(server: GcsServerProcess, store: Store, fault: Fault) -> None:
    sessions: list[str] = []
    server.faults([fault])
    with pytest.raises(StoreTemporary):
        store.upload(upload_of("x", DATA, on_session=sessions.append))
    source, progress = BytesSource(DATA), []
    later = gs_store(server, "/".join(store.url.split("/")[3:]))
    info = later.upload(upload_of("x", DATA, source=source, session=sessions[0], on_progress=progress.append))
    assert (info.size_bytes, info.crc32c) == (len(DATA), digest_of(DATA).crc32c)
    assert source.read_bytes < len(DATA) - 7 * MIB
    assert progress[0] >= 8 * MIB
    assert _starts(server) == 1


_KILLED_UPLOADER = """
import os, signal, sys
from tests.contract.stores_under_test import *
from ckptmirror.stores import open_store
data = pattern_bytes(20 * 1024 * 1024)
store = open_store(sys.argv[1])
keep = lambda session: print(session, flush=True)
store.upload(upload_of("x", data, on_session=keep, on_progress=lambda _: os.kill(os.getpid(), signal.SIGKILL)))
"""


def test_another_process_continues_the_upload_of_a_killed_one(server: GcsServerProcess, store: Store) -> None:
    command = [sys.executable, "-c", _KILLED_UPLOADER, store.url]
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": server.url}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    source = BytesSource(DATA)
    info = store.upload(upload_of("x", DATA, source=source, session=done.stdout.strip()))
    assert info.crc32c == digest_of(DATA).crc32c
    assert source.read_bytes <= len(DATA) - 8 * MIB
    assert _starts(server) == 1


def test_a_finished_session_answers_with_its_object(server: GcsServerProcess, store: Store) -> None:
    sessions: list[str] = []
    first = store.upload(upload_of("x", DATA, on_session=sessions.append))
    source = BytesSource(DATA)
    assert store.upload(upload_of("x", DATA, source=source, session=sessions[0])) == first
    assert source.read_bytes == 0


def test_upload_survives_sigkill_of_the_server(tmp_path: Path) -> None:
    with server_with_bucket(tmp_path) as server:
        store = gs_store(server, "run")
        sessions: list[str] = []
        server.faults([Fault(operation="upload.put", nth=2, kill="before_work")])
        with pytest.raises(StoreTemporary):
            store.upload(upload_of("x", DATA, on_session=sessions.append))
        server.wait_killed()
        with pytest.raises(StoreTemporary):
            store.stat("x")
        server.restart()
        assert store.stat("x") is None
        source = BytesSource(DATA)
        store.upload(upload_of("x", DATA, source=source, session=sessions[0]))
        assert source.read_bytes <= len(DATA) - 8 * MIB


@pytest.mark.parametrize("status", [404, 410])
def test_expired_session_restarts_once(server: GcsServerProcess, store: Store, status: int) -> None:
    server.faults([Fault(operation="upload.put", nth=2, status=status)])
    sessions: list[str] = []
    info = store.upload(upload_of("x", DATA, on_session=sessions.append))
    assert info.size_bytes == len(DATA)
    assert len(sessions) == len(set(sessions)) == 2
    server.clear_faults()
    server.clear_log()
    server.faults([Fault(operation="upload.*", method="PUT", status=status, times=0)])
    with pytest.raises(StoreTemporary):
        store.upload(upload_of("y", DATA))
    assert _starts(server) == 2
    with pytest.raises(StoreTemporary):
        store.upload(upload_of("z", DATA, session=sessions[1].replace("upload_id=", "upload_id=gone")))
    assert _starts(server) == 3


def test_bytes_changed_on_the_way_are_refused_by_the_service(server: GcsServerProcess, store: Store) -> None:
    server.faults([Fault(operation="upload.*", method="PUT", nth=2, corrupt_received_byte_at=MIB)])
    with pytest.raises(IntegrityError):
        store.upload(upload_of("x", DATA))
    assert list(store.list()) == []


@pytest.mark.parametrize(("size_bytes", "operation"), [(1000, "upload.multipart"), (9 * MIB, "upload.put")])
def test_a_byte_of_a_write_that_changed_on_its_way_is_sent_again(
    server: GcsServerProcess, store: Store, size_bytes: int, operation: str
) -> None:
    """Its source is memory, and the crc32c was taken just before: nothing there has rotted."""
    fault = Fault(operation=operation, corrupt_received_byte_at=900)
    server.faults([fault])
    with pytest.raises(StoreTemporary, match=r"(?i)crc32c"):
        store.write("x", DATA[:size_bytes], if_generation=0)
    assert list(store.list()) == []
    server.faults([fault])
    retrying = RetryingStore(store, wait=lambda _delay_s: None)
    retrying.write("x", DATA[:size_bytes], if_generation=0)
    assert [seen["fired"] for seen in server.faults_seen()] == [1, 1]
    assert store.read("x", limit_bytes=size_bytes)[0] == DATA[:size_bytes]


def test_a_byte_of_a_small_upload_that_changed_may_have_rotted_in_its_source(
    server: GcsServerProcess, store: Store
) -> None:
    server.faults([Fault(operation="upload.multipart", corrupt_received_byte_at=900)])
    with pytest.raises(IntegrityError):
        store.upload(upload_of("x", DATA[:1000]))
    assert list(store.list()) == []


@pytest.mark.parametrize("stored", [False, True])
def test_a_write_whose_answer_describes_other_bytes_is_asked_again(
    server: GcsServerProcess, store: Store, stored: bool
) -> None:
    prefix = store.url.split("/", 3)[3]
    other = {"name": f"{prefix}/x", "size": "4", "generation": "5", "crc32c": "AAAAAA=="}
    server.faults([Fault(operation="upload.multipart", status=200, body=json.dumps(other), times=2)])
    with pytest.raises(StoreTemporary, match="bytes other than those sent"):
        store.write("x", b"ours", if_generation=0)

    def store_it(_delay_s: float) -> None:  # the answer was wrong, but the bytes had arrived
        if stored:
            store.write("x", b"ours", if_generation=0)

    retrying = RetryingStore(store, wait=store_it)
    if stored:
        with pytest.raises(PreconditionFailed):
            retrying.write("x", b"ours", if_generation=0)
    else:
        retrying.write("x", b"ours", if_generation=0)
    assert store.read("x", limit_bytes=10)[0] == b"ours"


def test_a_flipped_bit_in_a_small_read_is_read_again_and_rot_is_reported(
    server: GcsServerProcess, store: Store
) -> None:
    store.write("x", b"content", if_generation=0)
    server.faults([Fault(operation="object.media", corrupt_byte_at=3)])
    assert store.read("x", limit_bytes=10)[0] == b"content"
    server.clear_faults()
    server.faults([Fault(operation="object.media", corrupt_byte_at=3, times=0)])
    with pytest.raises(IntegrityError):
        store.read("x", limit_bytes=10)


def test_an_answer_that_describes_other_bytes_is_no_success(store: Store) -> None:
    """The client library accepts a wrong crc32c in the answer to a small upload; we must not."""
    assert isinstance(store, GsStore)
    answer = {"name": f"{store.url.rpartition('/')[2]}/x", "size": "1", "generation": "5", "crc32c": "AAAAAA=="}
    assert store._compared("x", answer, 1, 0).generation == 5
    for wrong in ({"size": "2"}, {"crc32c": "AAAAAQ=="}, {"name": "other/x"}):
        with pytest.raises(IntegrityError):
            store._compared("x", {**answer, **wrong}, 1, 0)
    for missing in answer:
        with pytest.raises(StoreTemporary):
            store._compared("x", {key: value for key, value in answer.items() if key != missing}, 1, 0)


@pytest.mark.parametrize("truncate_at", [0, 10, 3 * MIB])
def test_a_truncated_answer_is_temporary(server: GcsServerProcess, store: Store, truncate_at: int) -> None:
    info = store.upload(upload_of("x", DATA))
    server.faults([Fault(operation="object.media", truncate_after_bytes=truncate_at)])
    with pytest.raises(StoreTemporary):
        store.download("x", generation=info.generation, offset=5, buffer=memoryview(bytearray(5 * MIB)))
    for operation in ("object.get", "object.list", "upload.put", "upload.multipart"):
        server.clear_faults()
        server.faults([Fault(operation=operation, nth=2 if operation == "upload.put" else 1, truncate_after_bytes=10)])
        with pytest.raises(StoreTemporary):
            ask(store, operation)


MEANING = {
    400: StorePermanent,
    403: NotAuthorised,
    408: StoreTemporary,
    412: PreconditionFailed,
    429: StoreTemporary,
    500: StoreTemporary,
    503: StoreTemporary,
}


@pytest.mark.parametrize("operation", EVERY)
def test_every_status_means_the_same_whoever_asks(server: GcsServerProcess, store: Store, operation: str) -> None:
    store.write("x", b"1", if_generation=0)
    for status, error in MEANING.items():
        server.clear_faults()
        server.faults([Fault(operation=operation, status=status, times=0, retry_after_s=7)])
        with pytest.raises(error) as caught:
            ask(store, operation)
        if error is StoreTemporary:
            assert caught.value.retry_after_s == 7


@pytest.mark.parametrize("operation", EVERY)
def test_stalled_socket_times_out(server: GcsServerProcess, operation: str) -> None:
    store = gs_store(server, f"stall-{operation}", limits=Limits(1.0, 0.5))
    store.write("x", b"1", if_generation=0)
    server.faults([Fault(operation=operation, stall_s=600.0)])
    with pytest.raises(StoreTemporary):
        ask(store, operation)


def test_a_download_that_stalls_half_way_times_out(server: GcsServerProcess) -> None:
    store = gs_store(server, "stall-half", limits=Limits(1.0, 0.5))
    info = store.upload(upload_of("x", DATA))
    server.faults([Fault(operation="object.media", stall_s=8.0, after_bytes=3 * MIB)])
    with pytest.raises(StoreTemporary):
        store.download("x", generation=info.generation, offset=0, buffer=memoryview(bytearray(len(DATA))))
    buffer = bytearray(len(DATA))
    store.download("x", generation=info.generation, offset=0, buffer=memoryview(buffer))
    assert buffer == DATA


def test_a_paused_server_times_out_and_a_resumed_one_answers(tmp_path: Path) -> None:
    with server_with_bucket(tmp_path) as server:
        store = gs_store(server, "run", limits=Limits(1.0, 0.5))
        store.write("x", b"1", if_generation=0)
        server.pause()
        try:
            for operation in ("object.get", "object.list", "upload.multipart", "upload.start"):
                with pytest.raises(StoreTemporary):
                    ask(store, operation)
        finally:
            server.resume()
        assert store.stat("x") is not None


def test_nobody_listening_is_temporary(tmp_path: Path) -> None:
    with server_with_bucket(tmp_path) as server:
        store = gs_store(server, "run")
        store.write("x", b"1", if_generation=0)
    for operation in EVERY:
        with pytest.raises(StoreTemporary):
            ask(store, operation)


def test_a_kept_connection_that_the_server_closed_is_opened_again(tmp_path: Path) -> None:
    with server_with_bucket(tmp_path) as server:
        store = gs_store(server, "run")
        info = store.write("x", b"1", if_generation=0)
        assert store.stat("x") == info
        server.restart()
        assert store.stat("x") == info


@pytest.mark.parametrize("operation", [name for name in EVERY if name != "object.media"])
def test_a_missing_bucket_is_said_to_be_missing(server: GcsServerProcess, operation: str) -> None:
    from ckptmirror.stores.gs_endpoint import Endpoint
    from ckptmirror.stores.locations import BucketLocation

    store = GsStore(BucketLocation("gs", "not-there", ""), endpoint=Endpoint.parse(server.url))
    with pytest.raises(StorePermanent, match="bucket") as caught:
        ask(store, operation)
    assert "bucket" in caught.value.hint


def test_listing_goes_through_all_pages(server: GcsServerProcess, store: Store) -> None:
    names = [f"n/{number:05d}" for number in range(1003)]

    def write(mine: list[str]) -> None:
        for name in mine:
            store.write(name, b"", if_generation=0)

    threads = [threading.Thread(target=write, args=(names[part::4],)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    server.clear_log()
    assert [info.name for info in store.list("n/")] == names
    assert len(server.log("object.list")) == 2
    server.faults([Fault(operation="object.list", nth=2, status=503)])
    assert [info.name for info in RetryingStore(store, wait=lambda _s: None).list("n/")] == names


def test_objects_with_foreign_names_are_not_listed(store: Store) -> None:
    assert isinstance(store, GsStore)
    prefix = store.url.split("/", 3)[3]
    for name in (f"{prefix}/", f"{prefix}/folder/", f"{prefix}/a//b", f"{prefix}/..", f"{prefix}beside"):
        store._changes.write(name, b"", 0, {}, 0)
    store.write("x", b"1", if_generation=0)
    assert [info.name for info in store.list()] == ["x"]


def test_a_write_larger_than_one_request_is_whole(store: Store) -> None:
    info = store.write("x", DATA[: 9 * MIB], if_generation=0)
    data, read = store.read("x", limit_bytes=9 * MIB)
    assert (data, read) == (DATA[: 9 * MIB], info)
    with pytest.raises(PreconditionFailed):
        store.write("x", DATA[: 9 * MIB], if_generation=0)
