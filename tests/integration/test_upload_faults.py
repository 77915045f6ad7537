"""Uploading to a service that fails on purpose: faults delay an upload and change nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.flow.drain import drain
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.upload import record as upload_module
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.faulty_store import StoreFault
from tests.kit.mirrors import bucket_url, object_names
from tests.kit.roots import MirroredRoot, assert_arrived, make_pending
from tests.kit.saves import make_save

MIB = 1024 * 1024
BUCKET = "uploads"


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServerProcess]:
    """One that a test may kill."""
    with GcsServerProcess(tmp_path / "gcs", buckets=[BUCKET]) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


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
    "truncated description": {"operation": "object.get", "truncate_after_bytes": 20, "times": 4},
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


def test_a_byte_of_an_artifact_that_changes_in_flight_is_refused_and_the_artifact_sent_again(
    server: GcsServerProcess, gs: MirroredRoot
) -> None:
    meta = gs.commit(100, sidecars=False, sizes={"model_000100.pt": 2000})
    server.faults([Fault(operation="upload.multipart", object="model_", corrupt_received_byte_at=900)])
    gs.upload()
    sent = [e["status"] for e in server.log("upload.multipart") if e["object"].endswith("model_000100.pt")]
    assert sent == [400, 200]
    assert gs.states() == {"verified"}
    assert_arrived(gs, meta)


@pytest.mark.parametrize("name", ["meta_000100.json", "writer.json"])
@pytest.mark.parametrize("trouble", ["a byte in flight", "the service's word"])
def test_one_refused_checksum_of_a_small_write_fails_nothing(
    own_server: GcsServerProcess, tmp_path: Path, name: str, trouble: str
) -> None:
    """What is written from memory and refused for its checksum changed on its way: it is sent again."""
    root, _ = make_pending(tmp_path, bucket_url(BUCKET), 100, kinds=("model",), sidecars=False)
    words: dict[str, object] = {"corrupt_received_byte_at": 100}
    if trouble == "the service's word":
        words = {"status": 400, "body": 'Provided CRC32C "AAAAAA==" doesn\'t match calculated CRC32C "wWcwVg==".'}
    own_server.faults([Fault(operation="upload.multipart", object=name, **words)])  # type: ignore[arg-type]
    report = drain(root, timeout_s=60.0)
    assert (report.pending, report.failed) == (0, ())
    assert [seen["fired"] for seen in own_server.faults_seen()] == [1]
    sent = [e["status"] for e in own_server.log("upload.multipart") if e["object"].endswith(name)]
    assert sent[:2] == [400, 200]


def test_the_damaged_meta_of_another_save_of_the_step_leaves_a_save_its_other_names(
    server: GcsServerProcess, gs: MirroredRoot
) -> None:
    make_save(gs.root.parent / "other", 100)
    gs.store.write("meta_000100.json", (gs.root.parent / "other/meta_000100.json").read_bytes(), if_generation=0)
    server.faults([Fault(operation="object.media", object="meta_000100.json", corrupt_byte_at=30, times=0)])
    meta = gs.commit(100)
    gs.upload()
    server.clear_faults()
    assert_arrived(gs, meta)
    there = [one for one in object_names(gs.store) if one != "meta_000100.json"]
    assert [one for one in there if names.untagged(one) == one] == []


def test_stalled_socket_times_out(server: GcsServerProcess, tmp_path: Path) -> None:
    """The service accepts everything and answers nothing: the record is back in the queue within the limit."""
    from ckptmirror.stores.gs import GsStore
    from ckptmirror.stores.gs_endpoint import Endpoint, Limits
    from ckptmirror.stores.locations import BucketLocation

    url = bucket_url(BUCKET)
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
    place = open_root(bucket_url(BUCKET))
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


def test_an_object_that_went_away_before_it_was_verified_is_sent_again_although_its_session_was_complete(
    server: GcsServerProcess, gs: MirroredRoot
) -> None:
    meta = gs.commit(100, sidecars=False, sizes={"model_000100.pt": 20 * MIB})
    gs.store.write("model_000100.pt", b"of somebody else", if_generation=0)
    gs.store.script(StoreFault("upload", "model", when="after"))
    claim = gs.table.claim("w", gs.mirrors[0].url, lease_s=300)
    assert claim is not None
    upload_module.upload_claimed(gs.context(), claim)
    assert gs.records()[0].session is not None
    name = names.tagged("model_000100.pt", meta.save_id)
    info = gs.store.stat(name)
    assert info is not None
    gs.store.delete(name, generation=info.generation)
    gs.upload()
    assert gs.states() == {"verified"}, [record.last_error for record in gs.records()]
    assert_arrived(gs, meta)


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
    from ckptmirror.stores.gs_endpoint import Endpoint
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
