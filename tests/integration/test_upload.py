"""Uploading against a strict server that fails on purpose: what arrives is what was saved, and nothing is replaced."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import CkptMirrorError, NotAuthorised, StorePermanent, StoreTemporary
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta
from ckptmirror.flow import upload as upload_module
from ckptmirror.flow.catalog import mirror_catalog
from ckptmirror.flow.mirrors import Mirror
from ckptmirror.flow.stage import stage_save
from ckptmirror.flow.workers import UploadWorkers, free_dead_workers, still_moving
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores.faulty import StoreFault
from ckptmirror.testing import Fault, GcsServerProcess
from tests.factory import bytes_of, digest_of, flip_bit, make_save, put_object
from tests.mirror_place import MirroredRoot, memory_url, no_confirm, object_names

MIB = 1024 * 1024
BUCKET = "uploads"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServerProcess]:
    with GcsServerProcess(tmp_path_factory.mktemp("gcs"), buckets=[BUCKET]) as server:
        yield server


@pytest.fixture
def server(running: GcsServerProcess, monkeypatch: pytest.MonkeyPatch) -> GcsServerProcess:
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.clear_faults()
    running.clear_log()
    return running


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServerProcess]:
    """One that a test may kill."""
    with GcsServerProcess(tmp_path / "gcs", buckets=[BUCKET]) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def open_root(tmp_path: Path) -> Iterator[Callable[..., MirroredRoot]]:
    opened: list[MirroredRoot] = []

    def open_one(*urls: str, name: str = "root") -> MirroredRoot:
        opened.append(MirroredRoot(tmp_path / name, urls))
        return opened[-1]

    yield open_one
    for place in opened:
        place.close()


@pytest.fixture
def gs(server: GcsServerProcess, open_root: Callable[..., MirroredRoot]) -> MirroredRoot:
    return open_root(gs_url())


@pytest.fixture
def place(open_root: Callable[..., MirroredRoot]) -> MirroredRoot:
    return open_root(memory_url())


def gs_url() -> str:
    return f"gs://{BUCKET}/run-{next(_numbers)}"


def assert_arrived(place: MirroredRoot, meta: Meta, mirror: Mirror | None = None) -> None:
    """The mirror lists the save as whole, and a copy staged from it has the very bytes."""
    mirror = mirror or place.mirrors[0]
    there = mirror_catalog(mirror).saves[meta.save_id]
    dest = place.root.parent / f"staged-{meta.save_id[:8]}-{next(_numbers)}"
    dest.mkdir()
    staged = stage_save(mirror, there, dest, kinds=meta.kinds, full=True)
    assert bytes_of(dest, staged) == bytes_of(place.root, meta)


def body_bytes(server: GcsServerProcess, name: str) -> int:
    """How many bytes of an object's upload the server was sent, all told."""
    return sum(
        entry["request_bytes"]
        for entry in server.log()
        if entry["operation"] == "upload.put" and name in str(entry.get("object", ""))
    )


# -- what goes right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["gs", "file", "memory"])
def test_i9_a_save_arrives_byte_for_byte(
    store: str, server: GcsServerProcess, open_root: Callable[..., MirroredRoot], tmp_path: Path
) -> None:
    place = open_root({"gs": gs_url(), "file": f"file://{tmp_path}/mirror", "memory": memory_url()}[store])
    sizes = {"model_000100.pt": 3 * MIB + 17, "__0_0.distcp": 0}
    meta = place.commit(100, ("dcp", "model"), sizes=sizes)
    place.upload()
    assert place.states() == {"verified"}
    assert_arrived(place, meta)
    assert any(isinstance(event, events.MirrorCommitted) and event.save_id == meta.save_id for event in place.events)


def test_i6_the_meta_is_created_after_every_artifact_was_verified(server: GcsServerProcess, gs: MirroredRoot) -> None:
    """Six workers on three saves; the server's own log says in what order objects came to be."""
    metas = [gs.commit(step, ("dcp", "model"), ranks=3) for step in (100, 200, 300)]
    workers = UploadWorkers(gs.root, gs.table, gs.mirrors, gs.bus, no_confirm, workers_per_mirror=6)
    workers.start()
    urls = [mirror.url for mirror in gs.mirrors]
    assert workers.wait_until_verified(lambda: not still_moving(gs.table, urls), 60.0)
    assert workers.stop(30.0)
    log = server.log()
    for meta in metas:
        prefix = gs.mirrors[0].url.removeprefix(f"gs://{BUCKET}/")
        meta_name = f"{prefix}/meta_{meta.step:06d}.json"
        made = next(i for i, e in enumerate(log) if e["object"] == meta_name and e["operation"].startswith("upload"))
        for artifact in meta.artifacts:
            asked = [i for i, e in enumerate(log) if e["object"] == f"{prefix}/{artifact.path}" and e["status"] == 200]
            assert asked, artifact.path
            verified = [i for i in asked if log[i]["operation"] == "object.get"]
            assert verified[0] < made, artifact.path
        assert_arrived(gs, meta)


def test_i5_every_create_carries_generation_zero(server: GcsServerProcess, gs: MirroredRoot) -> None:
    gs.commit(100, sizes={"model_000100.pt": 2 * MIB})
    gs.upload()
    creates = [e for e in server.log() if e["operation"] in ("upload.start", "upload.multipart", "upload.media")]
    assert creates
    assert all(str(e["query"]["ifGenerationMatch"]) == "0" for e in creates)


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["gs", "file", "memory"])
def test_i5_another_saves_objects_are_left_alone_and_the_other_name_is_used(
    store: str, server: GcsServerProcess, open_root: Callable[..., MirroredRoot], tmp_path: Path
) -> None:
    url = {"gs": gs_url(), "file": f"file://{tmp_path}/mirror", "memory": memory_url()}[store]
    place = open_root(url)
    other_root = tmp_path / "other"
    other = make_save(other_root, 100, ("dcp", "model"))
    for path in ("model_000100.pt", "dcp_000100/.metadata"):
        put_object(place.store, path, (other_root / path).read_bytes(), other)
    meta = place.commit(100, ("dcp", "model"))
    place.upload()
    assert place.states() == {"verified"}
    assert place.store.read("model_000100.pt", limit_bytes=MIB)[0] == (other_root / "model_000100.pt").read_bytes()
    there = meta_from_bytes(place.store.read("meta_000100.json", limit_bytes=MIB)[0])
    named = {artifact.path: artifact.object_name for artifact in there.artifacts}
    assert named["model_000100.pt"] == f"model_000100-{meta.save_id[:8]}.pt"
    assert named["dcp_000100/.metadata"] == f"dcp_000100-{meta.save_id[:8]}/.metadata"
    assert named["optim_000100_rank0.pt"] == "optim_000100_rank0.pt"
    assert_arrived(place, meta)


def test_i5_another_saves_meta_is_left_alone(place: MirroredRoot) -> None:
    other = make_save(place.root.parent / "other", 100, ("model",))
    data = (place.root.parent / "other" / "meta_000100.json").read_bytes()
    place.store.write("meta_000100.json", data, if_generation=0)
    meta = place.commit(100)
    place.upload()
    assert place.store.read("meta_000100.json", limit_bytes=MIB)[0] == data
    assert f"meta_000100-{meta.save_id[:8]}.json" in object_names(place.store)
    assert_arrived(place, meta)
    assert other.save_id != meta.save_id


def test_when_both_names_are_taken_the_upload_fails_and_says_so(place: MirroredRoot) -> None:
    meta = place.commit(100)
    other = make_save(place.root.parent / "other", 100, ("model",))
    for name in ("model_000100.pt", f"model_000100-{meta.save_id[:8]}.pt"):
        put_object(place.store, name, b"theirs", other)
    place.upload()
    (failed,) = place.records(state=RecordState.FAILED)
    assert "Every name" in str(failed.last_error)
    assert "meta_000100.json" not in object_names(place.store)


def test_what_was_staged_under_a_tag_finds_its_own_objects(place: MirroredRoot) -> None:
    """A save comes back beside another one's files: nothing is sent, and the mirror's meta fits."""
    meta = place.commit(100)
    place.upload()
    elsewhere = MirroredRoot(place.root.parent / "elsewhere", [place.mirrors[0].url])
    (elsewhere.root / "model_000100.pt").write_bytes(b"in the way")
    there = mirror_catalog(place.mirrors[0]).saves[meta.save_id]
    staged = stage_save(place.mirrors[0], there, elsewhere.root, kinds=("model",), full=True)
    assert staged.tag
    elsewhere.add(staged)
    elsewhere.table.release_save(staged.save_id)
    before = object_names(place.store)
    elsewhere.upload()
    assert elsewhere.states() == {"verified"}
    assert object_names(place.store) == before
    newer = elsewhere.commit(200)
    elsewhere.upload()
    assert elsewhere.rotate().deleted == ((100, meta.save_id),)
    assert elsewhere.has(newer)
    elsewhere.close()


# -- faults of the service -------------------------------------------------------------------------------------

FAULTS = {
    "412 though nobody is there": {"operation": "upload.multipart", "status": 412},
    "503": {"operation": "", "status": 503, "times": 3},
    "429": {"operation": "upload.*", "status": 429, "retry_after_s": 1},
    "408": {"operation": "object.*", "status": 408},
    "reset before": {"operation": "upload.start", "reset_after_bytes": 0},
    "reset in the middle": {"operation": "upload.put", "reset_after_bytes": MIB},
    "answer lost after the commit, small": {"operation": "upload.multipart", "lose_answer": True, "times": 2},
    "answer lost after the commit, large": {"operation": "upload.put", "lose_answer": True},
    "answer of the start lost": {"operation": "upload.start", "lose_answer": True},
    "truncated answer": {"operation": "upload.*", "truncate_after_bytes": 20, "times": 2},
    "truncated description": {"operation": "object.get", "truncate_after_bytes": 20, "times": 2},
    "corrupt byte in flight, small": {"operation": "upload.multipart", "corrupt_received_byte_at": 900},
    "corrupt byte in flight, large": {"operation": "upload.put", "corrupt_received_byte_at": MIB},
    "corrupt byte on the way back": {"operation": "object.media", "corrupt_byte_at": 30},
    "chunk kept in part": {"operation": "upload.put", "keep_bytes": 256 * 1024},
    "session gone": {"operation": "upload.put", "status": 410},
    "500 at the end": {"operation": "upload.put", "status": 500, "after_bytes": 2 * MIB},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_i9_a_fault_delays_an_upload_and_changes_nothing(
    server: GcsServerProcess, gs: MirroredRoot, fault: str
) -> None:
    meta = gs.commit(100, sizes={"model_000100.pt": 3 * MIB})
    server.faults([Fault(**FAULTS[fault])])  # type: ignore[arg-type]
    gs.upload()
    assert any(seen["fired"] for seen in server.faults_seen())
    assert gs.states() == {"verified"}, [record.last_error for record in gs.records()]
    assert object_names(gs.store) == sorted([artifact.path for artifact in meta.artifacts] + ["meta_000100.json"])
    assert_arrived(gs, meta)


def test_stalled_socket_times_out(server: GcsServerProcess, tmp_path: Path) -> None:
    """The service accepts everything and answers nothing: the record is back in the queue within the limit."""
    from ckptmirror.stores.gs import GsStore
    from ckptmirror.stores.gs_http import Endpoint, Limits
    from ckptmirror.stores.locations import BucketLocation

    url = gs_url()
    place = MirroredRoot(tmp_path / "root", [url])
    impatient = GsStore(
        BucketLocation("gs", BUCKET, url.removeprefix(f"gs://{BUCKET}/")),
        endpoint=Endpoint.parse(server.url),
        limits=Limits(1.0, 0.5),
    )
    meta = place.commit(100, sizes={"model_000100.pt": 2 * MIB})
    server.faults([Fault(operation="upload.put", stall_s=4.0), Fault(operation="object.get", stall_s=4.0)])
    mirror = Mirror(url, True, impatient)
    for _ in range(20):
        claim = place.table.claim("w", url, lease_s=300)
        if claim is None:
            place.clock.pass_s(60)
            continue
        upload_module.upload_claimed(place.context(mirror), claim)
    reasons = [t.reason for t in place.table.history() if t.new is RecordState.PENDING and t.old is not None]
    assert len(reasons) == 2
    assert all("time" in reason.lower() for reason in reasons)
    assert place.states() == {"verified"}
    assert_arrived(place, meta)
    impatient.close()
    place.close()


def test_i5_our_own_object_after_a_lost_answer_is_success_and_nothing_is_sent_twice(
    server: GcsServerProcess, gs: MirroredRoot
) -> None:
    gs.commit(100, sidecars=False)
    server.faults([Fault(operation="upload.multipart", object="model", lose_answer=True)])
    gs.upload()
    creates = [e for e in server.log("upload.multipart") if e["object"].endswith("model_000100.pt")]
    assert len(creates) <= 2  # the second, if the client library asks again, meets a 412
    assert gs.states() == {"verified"}


def test_i9_a_store_that_answers_with_another_crc32c_is_not_believed(
    gs: MirroredRoot, server: GcsServerProcess
) -> None:
    """The service's disk rots between the upload and the question."""
    gs.commit(100, sidecars=False)
    server.faults([Fault(operation="upload.multipart", object="model", corrupt_byte_at=10)])
    gs.upload()
    # the bytes rotted after the checksum was taken: the service still answers with the checksum that was committed
    assert gs.states() == {"verified"}


# -- faults of the local disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["gs", "file", "memory"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "gone"])
def test_i9_a_file_that_changed_since_the_commit_fails_loudly(
    store: str, damage: str, server: GcsServerProcess, open_root: Callable[..., MirroredRoot], tmp_path: Path
) -> None:
    place = open_root({"gs": gs_url(), "file": f"file://{tmp_path}/mirror", "memory": memory_url()}[store])
    meta = place.commit(100, sizes={"model_000100.pt": 2 * MIB})
    path = place.root / "model_000100.pt"
    if damage == "flipped":
        flip_bit(path, MIB)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "truncated" else path.read_bytes() + b"x")
    place.upload()
    (failed,) = place.records(state=RecordState.FAILED)
    assert failed.path == "model_000100.pt"
    assert any(isinstance(event, events.RecordFailed) and event.path == failed.path for event in place.events)
    assert "meta_000100.json" not in object_names(place.store)
    assert "model_000100.pt" not in object_names(place.store)
    assert mirror_catalog(place.mirrors[0]).saves == {}
    place.commit(200)
    place.upload()
    assert {step for step, _ in place.rotate().deleted} == set()
    assert meta.save_id in place.table.saves()[0].save_id


def test_a_lost_local_meta_fails_its_records(place: MirroredRoot) -> None:
    place.commit(100)
    (place.root / "meta_000100.json").unlink()
    place.upload()
    assert place.states() == {"failed", "pending"}
    assert object_names(place.store) == []


def test_an_unreadable_local_file_is_tried_again(place: MirroredRoot) -> None:
    """EIO and the like are nobody's fault that we know of: the record waits, and says why."""
    place.commit(100, sidecars=False)
    path = place.root / "model_000100.pt"
    data = path.read_bytes()
    path.unlink()
    path.mkdir()
    place.upload(limit=3)
    (record,) = [r for r in place.records() if r.role == "artifact"]
    assert record.last_error
    path.rmdir()
    path.write_bytes(data)
    place.table.retry_failed()
    place.upload()
    assert place.states() == {"verified"}


# -- resumable sessions ----------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from ckptmirror.flow.drain import drain
report = drain(Path(sys.argv[1]), timeout_s=60.0)
print(report.pending, len(report.failed))
"""


def test_a_half_sent_file_is_continued_by_another_process_after_the_server_was_killed(
    own_server: GcsServerProcess, open_root: Callable[..., MirroredRoot]
) -> None:
    place = open_root(gs_url())
    meta = place.commit(100, sidecars=False, sizes={"model_000100.pt": 40 * MIB})
    own_server.faults([Fault(operation="upload.put", nth=2, after_bytes=9 * MIB, kill="before_work")])
    claim = place.table.claim("w", place.mirrors[0].url, lease_s=300)
    assert claim is not None
    upload_module.upload_claimed(place.context(), claim)
    own_server.wait_killed()
    (record,) = [r for r in place.records() if r.role == "artifact"]
    assert record.state is RecordState.PENDING
    assert record.session is not None
    url = place.mirrors[0].url
    place.table.close()
    own_server.start()
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(place.root)], capture_output=True, text=True, timeout=90, check=True
    )
    assert ended.stdout.split() == ["0", "0"], ended.stderr
    sent = sum(e.get("received_bytes") or e.get("request_bytes") or 0 for e in own_server.log("upload.put"))
    assert own_server.log("upload.start") == []
    assert 0 < sent <= 40 * MIB - 8 * MIB
    place.table = place.open_table()
    assert place.states() == {"verified"}
    assert_arrived(place, meta, Mirror(url, True, place.store))


def test_expired_session_restarts_once(server: GcsServerProcess, gs: MirroredRoot) -> None:
    gs.commit(100, sidecars=False, sizes={"model_000100.pt": 20 * MIB})
    server.faults([Fault(operation="upload.put", nth=2, reset_after_bytes=MIB)])
    claim = gs.table.claim("w", gs.mirrors[0].url, lease_s=300)
    assert claim is not None
    upload_module.upload_claimed(gs.context(), claim)
    server.clear_faults()
    server.clear_log()
    server.faults([Fault(operation="upload.status", status=410)])
    gs.upload()
    assert len(server.log("upload.start")) == 1
    assert gs.states() == {"verified"}


def test_a_session_that_holds_other_bytes_is_not_continued(server: GcsServerProcess, gs: MirroredRoot) -> None:
    """Bytes that rotted in flight spoil the session: the next try begins a new one."""
    gs.commit(100, sidecars=False, sizes={"model_000100.pt": 3 * MIB})
    server.faults([Fault(operation="upload.put", corrupt_received_byte_at=MIB)])
    gs.upload()
    assert gs.states() == {"verified"}
    assert len(server.log("upload.start")) == 2


# -- credentials -----------------------------------------------------------------------------------------------


def test_a_denied_upload_waits_is_seen_and_goes_on_by_itself_once_granted(
    server: GcsServerProcess, gs: MirroredRoot
) -> None:
    from ckptmirror.flow.status import read_status

    gs.commit(100, sidecars=False)
    server.faults([Fault(operation="upload.*", status=403, times=0)])
    gs.upload(limit=3)
    (line,) = read_status(gs.root).saves
    assert not line.safe
    assert "403" in line.waiting[gs.mirrors[0].url]
    assert "pending" in line.waiting[gs.mirrors[0].url]
    server.clear_faults()
    gs.upload()
    assert gs.states() == {"verified"}


def test_token_expiry_refreshes_mid_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of twelve files outlives its token: nobody is asked to log in again."""
    from google.oauth2.credentials import Credentials

    from ckptmirror.stores.gs import GsStore
    from ckptmirror.stores.gs_http import Endpoint
    from ckptmirror.stores.locations import BucketLocation

    with GcsServerProcess(tmp_path / "gcs", options=["--require-auth", "--token", "root"]) as server:
        server.create_bucket(BUCKET, token="root")
        credentials = Credentials(
            None, refresh_token="r", token_uri=f"{server.url}/token", client_id="c", client_secret="s"
        )
        url = f"gs://{BUCKET}/run"
        store = GsStore(
            BucketLocation("gs", BUCKET, "run"), endpoint=Endpoint.parse(server.url), credentials=credentials
        )
        place = MirroredRoot(tmp_path / "root", [url])
        place.commit(100, ("dcp", "model"), ranks=2, sizes={"model_000100.pt": 2 * MIB})
        mirror = Mirror(url, True, store)
        for turn in range(40):
            if turn in (2, 5):
                server.faults([Fault(unauthorised_after_s=0.0, times=0)])
            claim = place.table.claim("w", url, lease_s=300)
            if claim is None:
                place.clock.pass_s(60)
                continue
            upload_module.upload_claimed(place.context(mirror), claim)
        assert place.states() == {"verified"}
        assert len(server.log("token")) >= 2
        store.close()
        place.close()


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
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    url, host = place.mirrors[0].url, socket.gethostname()
    names_of_workers = [f"{host}:{ended.pid}:0", f"{host}:{os.getpid()}:0", f"elsewhere:{ended.pid}:0"]
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

    def refuse(mirror: Mirror) -> None:
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
    root, url = tmp_path / "root", {"gs": gs_url(), "file": f"file://{tmp_path}/mirror"}[store]
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
from tests.factory import make_save
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
