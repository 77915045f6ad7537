"""Drain, push, status and the end of a run: whoever comes next finishes the queue, and nothing unsafe goes unseen."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptmirror.core import events, names, retry_delay
from ckptmirror.core.errors import CheckpointNotFound, ConfigError, DeadlinePassed, NoTable, StorePermanent
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta
from ckptmirror.core.retention import Retention
from ckptmirror.flow.drain import Drained, drain, push
from ckptmirror.flow.places.attempt_lists import read_mirror_attempts
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.start.forget import forget_mirror
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.status import read_status
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import open_store
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.claiming import start_node
from tests.kit.faulty_store import StoreFault
from tests.kit.mirrors import memory_url, object_names
from tests.kit.roots import MirroredRoot
from tests.kit.saves import make_attempt, make_save, put_attempts
from tests.kit.training import new_state, running, saved_run

BUCKET = "drains"
_numbers = itertools.count(1)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(*urls: str, retention: Retention | None = None) -> Node:
        specs = [MirrorSpec(url) for url in urls]
        node = Node(tmp_path / "trained", specs, retention or Retention(), events.EventBus())
        nodes.append(node)
        start_node(node)
        return node

    yield start
    for node in nodes:
        if node.lock.held:
            node.close()


def commit_on(node: Node, step: int, **more: object) -> Meta:
    claim = node.claim
    assert claim is not None
    meta = make_save(node.root, step, ("model",), claim.attempt, step, run_id=claim.run_id, **more)  # type: ignore[arg-type]
    node.table.add_save(meta.save_id, step, meta.kinds, meta.artifacts, [mirror.url for mirror in node.mirrors])
    node.table.release_save(meta.save_id)
    node.on_commit(meta)
    return meta


def opened(url: str) -> Mirror:
    return Mirror(url, True, open_store(url))


DRAIN = """
import sys
from pathlib import Path
from ckptmirror.flow.drain import drain
report = drain(Path(sys.argv[1]), timeout_s=60.0)
print(report.pending, len(report.failed))
"""


def drain_elsewhere(root: Path) -> subprocess.Popen[str]:
    """A drain in a process of its own."""
    return subprocess.Popen([sys.executable, "-c", DRAIN, str(root)], stdout=subprocess.PIPE, text=True)


# -- whoever comes next ----------------------------------------------------------------------------------------


def test_next_process_continues_the_queue(server: GcsServerProcess, tmp_path: Path) -> None:
    place = MirroredRoot(tmp_path / "root", [f"gs://{BUCKET}/{next(_numbers)}"])
    metas = [place.commit(step, ("dcp", "model")) for step in (100, 200)]
    place.upload(limit=3)
    place.close()
    child = drain_elsewhere(place.root)
    assert child.communicate(timeout=90)[0].split() == ["0", "0"]
    assert set(mirror_catalog(opened(place.mirrors[0].url)).saves) == {meta.save_id for meta in metas}


def test_a_trainer_and_two_drains_share_the_queue_and_send_nothing_twice(
    server: GcsServerProcess, node: Callable[..., Node]
) -> None:
    url = f"gs://{BUCKET}/{next(_numbers)}"
    trainer = node(url)
    metas = [commit_on(trainer, step) for step in range(100, 700, 100)]
    children = [drain_elsewhere(trainer.root) for _ in range(2)]
    metas += [commit_on(trainer, step) for step in range(700, 1000, 100)]
    for child in children:
        out = child.communicate(timeout=90)[0].split()
        assert out[1] == "0"
    assert trainer.wait_mirrored(None, 60.0)
    created = [e["object"] for e in server.log() if e["operation"] == "upload.multipart" and e["status"] == 200]
    created = [name for name in created if not name.endswith(names.WRITER_NAME)]
    assert len(created) == len(set(created)) == sum(len(meta.artifacts) + 1 for meta in metas)
    assert trainer.fenced() is None
    assert set(mirror_catalog(opened(url)).saves) == {meta.save_id for meta in metas}


def test_a_drain_needs_no_trainer_fences_nobody_and_tells_the_mirror_of_the_attempts(tmp_path: Path) -> None:
    url = memory_url()
    place = MirroredRoot(tmp_path / "root", [url])
    first = place.commit(100)
    put_attempts(place.root, [first.attempt, make_attempt(1, first)])
    place.close()
    report = drain(place.root, timeout_s=30.0)
    assert (report.pending, report.failed) == (0, ())
    there, _ = read_mirror_attempts(opened(url))
    assert there is not None
    assert [attempt.number for attempt in there.attempts] == [0, 1]


def test_a_drain_of_some_mirrors_leaves_the_others_pending(tmp_path: Path) -> None:
    first, second = memory_url(), memory_url()
    place = MirroredRoot(tmp_path / "root", [first, second])
    place.commit(100)
    report = drain(place.root, only=[first], timeout_s=30.0)
    assert (report.pending, report.drained.files_done) == (0, 5)
    assert {r.state for r in place.records(mirror=second)} == {RecordState.PENDING}
    assert object_names(place.stores[second]) == []
    with pytest.raises(ConfigError, match="is not a mirror of"):
        drain(place.root, only=[memory_url()])
    place.close()


def test_i1_a_drain_of_one_mirror_deletes_nothing_that_the_other_lacks(tmp_path: Path) -> None:
    """The meta is gone, as in a rotation that was cut short; but the second mirror never had the save."""
    first, second = memory_url(), memory_url()
    place = MirroredRoot(tmp_path / "root", [first, second])
    place.commit(100)
    place.stores[second].go_down()
    place.upload(limit=30)
    (place.root / "meta_000100.json").unlink()
    place.close()
    drain(place.root, only=[first], timeout_s=10.0)
    assert (place.root / "model_000100.pt").exists()


@pytest.mark.parametrize("who", ["a drain", "a start"])
def test_the_delays_that_grew_in_an_outage_end_with(who: str, tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    saved_run(root, (1, 2), url, kinds=("model",))
    with UploadsTable.open(root / names.TABLE_NAME) as table:
        for record in table.records():
            table.unverify(record.save_id, record.path, url, "as if it had not arrived")
        while (claim := table.claim("another", url, lease_s=60)) is not None:
            table.put_back(claim, "the mirror was away", not_before_s=86_400)
    if who == "a drain":
        assert drain(root, timeout_s=20.0).pending == 0
    else:
        with running(root, url) as manager:
            manager.resume(new_state())
            manager.wait("mirrored", timeout_s=20.0)


def test_after_a_drain_that_a_mirror_did_not_answer_the_status_does_not_say_safe(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "nfs" / "run"
    mirror.parent.mkdir()
    saved_run(root, (1,), f"file://{mirror}")
    assert read_status(root).is_mirrored(None)
    mirror.rename(tmp_path / "away")
    assert not drain(root, timeout_s=0.5).is_verified
    assert not read_status(root).is_mirrored(None)
    (tmp_path / "away").rename(mirror)
    assert drain(root).is_verified
    assert read_status(root).is_mirrored(None)


def test_a_drain_does_not_wait_for_a_mirror_that_a_person_takes_out_of_the_run_meanwhile(tmp_path: Path) -> None:
    root, urls = tmp_path / "root", [f"file://{tmp_path}/{one}" for one in ("one", "two")]
    saved_run(root, (1,), *urls)
    (tmp_path / "two").rename(tmp_path / "away")
    with running(root, *urls) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(2, state).wait("committed")
    forgotten: list[str] = []

    def forget(at: Drained) -> None:
        if not forgotten and any(wait.mirror == urls[1] for wait in at.seen.waits):
            forgotten.append(forget_mirror(root, urls[1]).url)

    report = drain(root, on_progress=forget)  # without a limit
    assert forgotten == urls[1:]
    assert report.is_verified
    assert set(report.left) == set(urls[1:])


def test_a_drain_ends_and_says_so_when_a_start_has_put_another_mirror_in_the_place_of_its_only_one(
    tmp_path: Path,
) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    saved_run(root, (1,), url)
    (tmp_path / "mirror").rename(tmp_path / "away")
    with running(root, url) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(2, state).wait("committed")
    forgotten: list[str] = []

    def replace_it(at: Drained) -> None:
        if not forgotten and any(wait.mirror == url for wait in at.seen.waits):
            forgotten.append(forget_mirror(root, url).url)
            with running(root, f"file://{tmp_path}/other") as manager:
                manager.resume(new_state())

    with pytest.raises(ConfigError, match="taken out of the run meanwhile"):
        drain(root, on_progress=replace_it)  # without a limit
    assert forgotten == [url]


def test_a_drain_says_what_failed_and_what_is_pending(tmp_path: Path) -> None:
    place = MirroredRoot(tmp_path / "root", [memory_url()])
    place.commit(100, sidecars=False)
    (place.root / "model_000100.pt").write_bytes(b"rotten")
    report = drain(place.root, timeout_s=30.0)
    assert report.pending == 1  # the meta, which waits for the file
    assert len(report.failed) == 1
    assert "model_000100.pt" in report.failed[0]
    place.close()
    with pytest.raises(NoTable):
        drain(tmp_path / "nowhere")


# -- push ------------------------------------------------------------------------------------------------------


def test_push_mirrors_a_root_that_no_trainer_mirrored(tmp_path: Path) -> None:
    root, url = tmp_path / "root", memory_url()
    first = make_save(root, 100, ("model",), number=1)
    second = make_save(root, 200, ("model",), number=2)
    put_attempts(root, [first.attempt])
    assert push(root, url, step=100, timeout_s=30.0).failed == ()
    assert set(mirror_catalog(opened(url)).saves) == {first.save_id}
    assert push(root, url, timeout_s=30.0).pending == 0
    assert set(mirror_catalog(opened(url)).saves) == {first.save_id, second.save_id}
    with pytest.raises(CheckpointNotFound):
        push(root, url, step=300)


def test_a_pushed_mirror_does_not_become_a_ground_for_deletions(tmp_path: Path) -> None:
    place = MirroredRoot(tmp_path / "root", [memory_url()])
    meta = place.commit(100)
    place.commit(200)
    place.close()
    extra = memory_url()
    push(place.root, extra, timeout_s=30.0)
    again = MirroredRoot(tmp_path / "root", [place.mirrors[0].url], optional=(extra,))
    assert again.rotate().deleted == ()
    assert again.has(meta)
    again.close()


# -- status and the end ----------------------------------------------------------------------------------------


def test_status_says_what_is_unsafe_and_why(tmp_path: Path) -> None:
    first, second = memory_url(), memory_url()
    place = MirroredRoot(tmp_path / "root", [first, second])
    place.commit(100, sidecars=False)
    place.upload()
    place.commit(200, sidecars=False)
    place.stores[first].script(StoreFault("upload", when="before", error=lambda: StorePermanent("400: no")))
    place.stores[second].go_down()
    place.upload(limit=8)
    status = read_status(place.root)
    assert (status.newest_step, status.newest_safe_step) == (200, 100)
    assert status.failed_files == 1
    assert status.unsafe_files == 4
    assert status.unsafe_bytes >= 6000
    old, new = status.saves
    assert old.safe
    assert not new.safe
    assert "failed: 400: no" in new.waiting[first]
    assert "does not answer" in new.waiting[second]
    place.close()


def test_no_record_means_not_safe(tmp_path: Path) -> None:
    import sqlite3

    place = MirroredRoot(tmp_path / "root", [memory_url()])
    place.commit(100)
    place.upload()
    assert read_status(place.root).newest_safe_step == 100
    place.close()
    with sqlite3.connect(place.root / names.TABLE_NAME) as raw:
        raw.execute("UPDATE records SET state = 'verified', token = token + 1 WHERE role = 'meta'")
    raw.close()
    (line,) = read_status(place.root).saves
    assert not line.safe
    assert "the table does not say that its meta was uploaded" in line.waiting[place.mirrors[0].url]
    place.lose_table()
    (line,) = read_status(place.root).saves
    assert line.waiting[place.mirrors[0].url] == "not queued for upload yet"
    place.close()


def test_exit_nonzero_if_last_save_not_durable(node: Callable[..., Node], server: GcsServerProcess) -> None:
    trainer = node(f"gs://{BUCKET}/{next(_numbers)}")
    server.faults([Fault(operation="upload.*", status=403, times=0)])
    meta = commit_on(trainer, 100)
    with pytest.raises(DeadlinePassed, match="not verified") as passed:
        trainer.finish(0.5, is_stopped=lambda: False)
    assert passed.value.exit_code == 8
    assert "drain" in passed.value.hint
    status = read_status(trainer.root)
    assert status.trainer["status"] == "incomplete"
    assert status.trainer["pending"] == len(meta.artifacts) + 1


def test_close_with_deadline_reports_unsent(
    node: Callable[..., Node],
    server: GcsServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The mirror answers nothing: the end comes at its deadline, however long the next try is off; a drain finishes."""
    monkeypatch.delenv("CKPTMIRROR_RETRY_S")
    # long is the wait of a request for its second try (its limit is half a second), not that of a record
    long_first = SimpleNamespace(uniform=lambda _low, high: 100.0 if high < 1.0 else 0.0)
    monkeypatch.setattr(retry_delay, "_random", long_first)
    trainer = node(f"gs://{BUCKET}/{next(_numbers)}")
    server.faults([Fault(operation="upload.*", status=503, times=0)])
    meta = commit_on(trainer, 100)
    with pytest.raises(DeadlinePassed):
        trainer.finish(0.5, is_stopped=lambda: False)
    assert "busy" not in caplog.text
    server.clear_faults()
    assert drain(trainer.root, timeout_s=60.0).pending == 0
    assert set(mirror_catalog(opened(trainer.specs[0].url)).saves) == {meta.save_id}


def test_a_finished_run_with_everything_verified_ends_in_peace(node: Callable[..., Node]) -> None:
    trainer = node(memory_url())
    commit_on(trainer, 100)
    trainer.finish(30.0, is_stopped=lambda: False)
    assert read_status(trainer.root).trainer["status"] == "finished"


def test_a_stopped_run_says_how_much_is_pending_and_raises_nothing(
    node: Callable[..., Node], server: GcsServerProcess
) -> None:
    trainer = node(f"gs://{BUCKET}/{next(_numbers)}")
    server.faults([Fault(operation="upload.*", status=403, times=0)])
    commit_on(trainer, 100)
    trainer.finish(30.0, is_stopped=lambda: True)
    assert read_status(trainer.root).trainer["status"] == "stopped"
    assert read_status(trainer.root).trainer["pending"] > 0


def test_a_failed_upload_ends_the_wait_at_once(node: Callable[..., Node]) -> None:
    trainer = node(memory_url())
    failed = threading.Event()
    trainer._bus.subscribe(lambda event: failed.set() if isinstance(event, events.RecordFailed) else None)
    claim = trainer.claim
    assert claim is not None
    meta = make_save(trainer.root, 100, ("model",), claim.attempt, 1, run_id=claim.run_id, sidecars=False)
    (trainer.root / "model_000100.pt").write_bytes(b"rotten")
    trainer.table.add_save(meta.save_id, 100, meta.kinds, meta.artifacts, [trainer.mirrors[0].url])
    trainer.table.release_save(meta.save_id)
    trainer.on_commit(meta)
    assert failed.wait(30.0)
    assert not trainer.wait_mirrored(None, 600.0)


# -- weak dependency -------------------------------------------------------------------------------------------


def test_dead_mirror_does_not_slow_training(node: Callable[..., Node], server: GcsServerProcess) -> None:
    """I8: what the training's side calls returns although no request is ever answered."""
    url = f"gs://{BUCKET}/{next(_numbers)}"
    trainer = node(url)
    server.pause()
    try:
        over = threading.Event()

        def train() -> None:
            for step in range(100, 2100, 100):
                commit_on(trainer, step, sidecars=False)
            over.set()

        thread = threading.Thread(target=train)
        thread.start()
        assert over.wait(15.0)
        thread.join()
        status = read_status(trainer.root)
        assert status.newest_step == 2000
        assert status.newest_safe_step is None
    finally:
        server.resume()


def test_a_rotator_outlives_what_nobody_foresaw(node: Callable[..., Node]) -> None:
    trainer = node(memory_url(), retention=Retention(keep_last=1))
    first = commit_on(trainer, 100)
    assert trainer.wait_mirrored(None, 30.0)
    lock = trainer.root / ".ckptmirror" / "rotate.lock"
    rotated = threading.Event()
    trainer._bus.subscribe(lambda event: rotated.set() if isinstance(event, events.SaveRotated) else None)
    while not lock.is_dir():  # a rotation under way may create it again
        lock.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            lock.mkdir()
    commit_on(trainer, 200)
    assert trainer.wait_mirrored(None, 30.0)
    lock.rmdir()
    commit_on(trainer, 300)
    assert rotated.wait(30.0)
    assert first.step == 100
