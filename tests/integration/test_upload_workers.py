"""The uploader's workers: overtaken, dead, unforeseen, bounded."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core import events, names
from ckptmirror.core.errors import (
    AttemptFenced,
    CkptMirrorError,
    LocalStorageFull,
    NotAuthorised,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.upload import record as upload_module
from ckptmirror.flow.upload.sending import LEASE_S
from ckptmirror.flow.upload.workers import UploadWorkers, free_dead_workers, still_moving
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.testing import GcsServerProcess
from tests.kit.faults import DiskFault, failing
from tests.kit.faulty_store import StoreFault
from tests.kit.mirrors import bucket_url, memory_url, object_names
from tests.kit.roots import MirroredRoot, assert_arrived, no_confirm
from tests.kit.saves import digest_of, make_save, put_object

MIB = 1024 * 1024
BUCKET = "uploads"


# -- workers ---------------------------------------------------------------------------------------------------


def test_i5_a_worker_that_was_overtaken_changes_nothing(place: MirroredRoot) -> None:
    """Its lease ran out while it slept; another has the record; what it says afterwards is not heard."""
    place.commit(100, sidecars=False)
    url = place.mirrors[0].url
    slow = place.table.claim("slow", url, lease_s=10)
    assert slow is not None
    place.clock.pass_s(11)
    fast = place.table.claim("fast", url, lease_s=10)
    assert fast is not None
    assert fast.token > slow.token
    upload_module.upload_claimed(place.context(), slow)
    assert place.records(state=RecordState.UPLOADING)[0].claimed_by == "fast"
    upload_module.upload_claimed(place.context(), fast)
    assert [r.state for r in place.records() if r.role == "artifact"] == [RecordState.VERIFIED]
    assert len([name for name in object_names(place.store) if name.startswith("model")]) == 1


def test_i11_a_fenced_worker_whose_record_another_has_is_told_that_it_is_fenced(place: MirroredRoot) -> None:
    place.commit(100, sidecars=False)
    url = place.mirrors[0].url

    def fenced(_mirror: Mirror, _meta: Meta | None, **_: bool) -> None:
        place.clock.pass_s(11)
        assert place.table.claim("fast", url, lease_s=10) is not None
        raise AttemptFenced("A newer attempt has started.")

    slow = place.table.claim("slow", url, lease_s=10)
    assert slow is not None
    with pytest.raises(AttemptFenced):
        upload_module.upload_claimed(place.context(confirm=fenced), slow)
    assert place.records(state=RecordState.UPLOADING)[0].claimed_by == "fast"


def test_a_lease_that_ran_out_frees_the_record(place: MirroredRoot) -> None:
    place.commit(100, sidecars=False)
    url = place.mirrors[0].url
    assert place.table.claim("dead", url, lease_s=300) is not None
    assert place.table.claim("other", url, lease_s=300) is None
    place.clock.pass_s(301)
    place.upload()
    assert place.states() == {"verified"}


def test_what_a_dead_process_held_is_free_at_the_next_start(place: MirroredRoot) -> None:
    import os
    import socket

    place.commit(100)
    place.commit(200)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    url, host = place.mirrors[0].url, socket.gethostname()
    odd = [f"{host}:{pid}:0" for pid in ("\xb3", "9" * 5000, "9" * 30, "-1", "")]  # of a table that somebody wrote
    names_of_workers = [f"{host}:{ended.pid}:0", f"{host}:{os.getpid()}:0", f"elsewhere:{ended.pid}:0", *odd]
    for worker in names_of_workers:
        assert place.table.claim(worker, url, lease_s=300) is not None
    assert free_dead_workers(place.table) == 1
    held = {record.claimed_by for record in place.records(state=RecordState.UPLOADING)}
    assert held == set(names_of_workers[1:])


def test_a_fault_that_nobody_foresaw_does_not_take_the_workers_down(place: MirroredRoot) -> None:
    place.commit(100)

    def unforeseen() -> CkptMirrorError:
        raise ZeroDivisionError("nobody foresaw this")

    place.store.script(StoreFault("stat", times=2, when="before", error=unforeseen))
    place.clock.time_ms = 0
    workers = UploadWorkers(place.root, place.table, place.mirrors, place.bus, no_confirm)
    seen = threading.Event()
    place.bus.subscribe(lambda event: seen.set() if isinstance(event, events.MirrorUnreachable) else None)
    workers.start()
    assert seen.wait(30.0)
    place.clock.pass_s(100)
    workers.notify()
    urls = [place.mirrors[0].url]

    def done() -> bool:
        place.clock.pass_s(60)
        return not still_moving(place.table, urls)

    assert workers.wait_until_verified(done, 60.0)
    assert workers.stop(30.0)
    assert "ZeroDivisionError" in " ".join(t.reason for t in place.table.history())


def test_a_worker_puts_back_what_it_could_not_note_the_end_of_and_waits_for_no_lease(place: MirroredRoot) -> None:
    place.commit(100, sidecars=False)
    fault = DiskFault(at=1, lasting=True, prefix=("table.verify", "table.put_back", "table.fail"))
    workers = UploadWorkers(place.root, place.table, place.mirrors, place.bus, no_confirm)
    urls = [place.mirrors[0].url]
    with failing(fault):
        workers.start()
        assert workers.wait_until_verified(lambda: bool(fault.struck), 30.0, look_every_s=0.01)
    left_s = iter(range(int(LEASE_S / 2)))  # less than a lease, but more than the delay after a try that failed

    def done() -> bool:
        if next(left_s, None) is not None:
            place.clock.pass_s(1)
        return not still_moving(place.table, urls)

    assert workers.wait_until_verified(done, 60.0)
    assert workers.stop(30.0)


def test_what_a_worker_puts_back_is_nobody_elses(open_root: Callable[..., MirroredRoot]) -> None:
    """While the table takes no changes for one mirror, a file that is being sent to another is not begun again."""
    first, second = memory_url(), memory_url()
    place = open_root(first, second)
    hold = threading.Event()
    place.stores[second].script(StoreFault("upload", times=0, hold=hold))
    meta = place.commit(100, sidecars=False)
    claim, refused = place.table.claim, []

    def claim_or_fail(worker: str, mirror: str, **more: Any) -> Any:
        if mirror == first and len(refused) < 3:
            refused.append(worker)
            raise LocalStorageFull("no space for a change")
        return claim(worker, mirror, **more)

    place.table.claim = claim_or_fail  # type: ignore[method-assign]
    workers = UploadWorkers(place.root, place.table, place.mirrors, place.bus, no_confirm, workers_per_mirror=1)
    workers.start()
    assert workers.wait_until_verified(lambda: not still_moving(place.table, [first]), 60.0, look_every_s=0.01)
    hold.set()
    assert workers.wait_until_verified(lambda: not still_moving(place.table, [second]), 60.0, look_every_s=0.01)
    assert workers.stop(30.0)
    assert_arrived(place, meta, place.mirrors[1])
    assert "could not be noted" not in " ".join(moved.reason for moved in place.table.history())


def test_a_worker_outlives_a_table_that_is_locked_for_a_while(place: MirroredRoot) -> None:
    """Another process holds the table while a file is being settled: the record is not declared failed."""
    import sqlite3

    place.commit(100, sidecars=False)
    claim = place.table.claim("w", place.mirrors[0].url, lease_s=300)
    assert claim is not None
    raw = sqlite3.connect(place.root / names.TABLE_NAME, isolation_level=None, check_same_thread=False)
    place.table.close()
    path = place.root / names.TABLE_NAME
    place.table = UploadsTable.open(path, clock=place.clock, busy_timeout_s=0.2)
    raw.execute("BEGIN IMMEDIATE")
    freed = threading.Timer(1.0, lambda: raw.execute("ROLLBACK"))
    freed.start()
    upload_module.upload_claimed(place.context(), claim)
    freed.join()
    raw.close()
    assert place.records(state=RecordState.FAILED) == []
    place.upload()
    assert place.states() == {"verified"}


def test_i7_an_upload_is_given_up_at_its_limit_and_fails_loudly(
    place: MirroredRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "TRIES_LIMIT", 4)
    place.commit(100, sidecars=False)
    place.store.go_down()
    assert place.upload() == 4
    (failed,) = place.records(state=RecordState.FAILED)
    assert "gave up after 4 tries" in str(failed.last_error)


def test_the_delay_grows_and_the_servers_wish_is_respected(place: MirroredRoot) -> None:
    def busy() -> CkptMirrorError:
        error = StoreTemporary("503")
        error.retry_after_s = 30.0
        return error

    place.commit(100, sidecars=False)
    place.store.script(StoreFault("stat", when="before", error=busy))
    place.upload(limit=1)
    place.clock.pass_s(29)
    assert place.table.claim("w", place.mirrors[0].url, lease_s=1) is None
    place.clock.pass_s(2)
    assert place.table.claim("w", place.mirrors[0].url, lease_s=1) is not None


def test_a_permanent_fault_fails_once_and_a_retry_mends_it(place: MirroredRoot) -> None:
    place.commit(100, sidecars=False)
    place.store.script(StoreFault("upload", when="before", error=lambda: StorePermanent("400: no")))
    assert place.upload() == 1
    assert place.states() == {"failed", "pending"}
    assert place.table.retry_failed() == 1
    place.upload()
    assert place.states() == {"verified"}


def test_nothing_is_uploaded_before_the_claim_of_the_mirror_is_confirmed(place: MirroredRoot) -> None:
    place.commit(100)
    asked: list[str] = []

    def refuse(mirror: Mirror, _meta: Meta | None, **_: bool) -> None:
        asked.append(mirror.url)
        raise NotAuthorised("writer.json: 403")

    for _ in range(3):
        claim = place.table.claim("w", place.mirrors[0].url, lease_s=300)
        assert claim is not None
        upload_module.upload_claimed(place.context(confirm=refuse), claim)
    assert asked
    assert object_names(place.store) == []
    assert place.states() == {"pending"}


@pytest.mark.parametrize("store", ["gs", "file"])
def test_memory_stays_bounded_while_a_large_file_is_uploaded(
    store: str, server: GcsServerProcess, tmp_path: Path
) -> None:
    """200 MiB, mostly holes, by two workers: the process grows by a fraction of it."""
    root, url = tmp_path / "root", {"gs": bucket_url(BUCKET), "file": f"file://{tmp_path}/mirror"}[store]
    place = MirroredRoot(root, [url])
    small = make_save(root, 100, ("model",), number=1, sidecars=False, write_meta=False)
    place.close()
    ended = subprocess.run(
        [sys.executable, "-c", LARGE_CHILD, str(root), url], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    grown_mib = float(ended.stdout.split()[-1])
    assert grown_mib < 80
    assert small.step == 100


LARGE_CHILD = """
import os, resource, sys
from dataclasses import replace
from pathlib import Path
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.flow.drain import drain
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.uploads import UploadsTable
from tests.kit.saves import make_save
root, url = Path(sys.argv[1]), sys.argv[2]
meta = make_save(root, 300, ("dcp",), number=3, ranks=2, sidecars=False, write_meta=False)
artifacts = []
for artifact in meta.artifacts:
    if artifact.path.endswith("distcp"):
        os.truncate(root / artifact.path, 100 << 20)
        artifact = replace(artifact, digest=digest_file(root / artifact.path))
    artifacts.append(artifact)
meta = replace(meta, artifacts=tuple(artifacts))
(root / "meta_000300.json").write_bytes(meta_to_bytes(meta))
with UploadsTable.open(root / ".ckptmirror/uploads.db") as table:
    table.add_save(meta.save_id, 300, meta.kinds, meta.artifacts, [url])
    table.release_save(meta.save_id)
import google.cloud.storage
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = drain(root, timeout_s=100.0)
assert (report.pending, report.failed) == (0, ()), report
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_a_dead_mirror_delays_no_other(open_root: Callable[..., MirroredRoot]) -> None:
    dead, alive = memory_url(), memory_url()
    place = open_root(dead, alive)
    hold = threading.Event()
    place.stores[dead].script(StoreFault(times=0, when="before", hold=hold, hold_limit_s=60.0))
    meta = place.commit(100)
    workers = UploadWorkers(place.root, place.table, place.mirrors, place.bus, no_confirm)
    workers.start()
    assert workers.wait_until_verified(lambda: not still_moving(place.table, [alive]), 30.0)
    assert still_moving(place.table, [dead]) > 0
    assert_arrived(place, meta, place.mirrors[1])
    hold.set()
    assert workers.stop(30.0)


def test_sees_objects_written_by_another_process(place: MirroredRoot) -> None:
    """Between our question and our upload another process finishes the same file: no second copy, no error."""
    meta = place.commit(100, sidecars=False)
    claim = place.table.claim("w", place.mirrors[0].url, lease_s=300)
    assert claim is not None
    held = threading.Event()
    place.store.script(StoreFault("upload", hold=held))
    thread = threading.Thread(target=upload_module.upload_claimed, args=(place.context(), claim))
    thread.start()
    from ckptmirror.stores import open_store

    put_object(open_store(place.mirrors[0].url), "model_000100.pt", (place.root / "model_000100.pt").read_bytes(), meta)
    held.set()
    thread.join()
    place.upload()
    assert place.states() == {"verified"}
    assert object_names(place.store) == ["meta_000100.json", "model_000100.pt"]
    assert digest_of(b"").size_bytes == 0


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("gone", ["artifact", "meta"])
def test_a_save_that_rotation_deletes_while_it_is_sent_is_no_fault(
    gone: str, rotates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optional mirror lacks it still: a rotation does not wait for that, and takes the records out at its end.

    It moves the meta first, so that the file which is sent may still be there.
    """
    place = MirroredRoot(tmp_path / "root", [memory_url()])
    meta = place.commit(100)
    failed: list[events.RecordFailed] = []
    place.bus.subscribe(lambda event: failed.append(event) if isinstance(event, events.RecordFailed) else None)
    claim = place.table.claim("worker", place.mirrors[0].url, lease_s=300)
    assert claim is not None
    path = claim.record.path if gone == "artifact" else names.SaveName(100).meta
    (place.root / path).unlink()

    @contextmanager
    def ends(_path: Path, *, timeout_s: float) -> Iterator[None]:
        assert timeout_s > 0
        place.table.forget_save(meta.save_id)
        yield

    if rotates:
        monkeypatch.setattr(upload_module, "exclusive", ends)
    upload_module.upload_claimed(place.context(), claim)
    assert len(failed) == (not rotates)
    place.close()
