"""After kill -9: what was acknowledged is there, what was not is whole or absent, and sessions go on."""

import http.client
import os
import random
import threading

import google_crc32c
import pytest

from ckptmirror.testing import Fault

pytestmark = pytest.mark.long

KIB256 = 256 * 1024


def test_objects_metadata_and_generations_survive(own_server, own_raw, connect):
    bucket = connect(own_raw)
    blob = bucket.blob("a/b")
    blob.metadata = {"k": "v"}
    blob.upload_from_string(b"data")
    blob.metadata = {"k": "w"}
    blob.patch()
    bucket.blob("gone").upload_from_string(b"x")
    bucket.blob("gone").delete()
    own_server.kill()
    own_server.restart()
    again = bucket.get_blob("a/b")
    assert (again.generation, again.metageneration, again.metadata) == (blob.generation, 2, {"k": "w"})
    assert again.download_as_bytes() == b"data"
    assert bucket.get_blob("gone") is None
    other = bucket.blob("other")
    other.upload_from_string(b"")
    assert other.generation > blob.generation


def test_a_half_sent_upload_goes_on_where_its_file_ends(own_server, own_raw, crc32c):
    data = os.urandom(5 * KIB256 + 9)
    session = own_raw.start("x", {"metadata": {"k": "v"}, "crc32c": crc32c(data)}, ifGenerationMatch="0")
    own_server.faults([Fault(operation="upload.put", kill="before_work", after_bytes=3 * KIB256 + 5, nth=2)])
    assert own_raw.chunk(session, data[: 2 * KIB256], f"0-{2 * KIB256 - 1}/{len(data)}").status == 308
    with pytest.raises(ConnectionError):
        own_raw.chunk(session, data[2 * KIB256 :], f"{2 * KIB256}-{len(data) - 1}/{len(data)}")
    own_server.wait_killed()
    own_server.restart()
    start = int(own_raw.ask(session).headers["range"].removeprefix("bytes=0-")) + 1
    assert start >= 2 * KIB256
    assert start % KIB256 == 0
    done = own_raw.chunk(session, data[start:], f"{start}-{len(data) - 1}/{len(data)}")
    assert done.status == 200
    assert done.json()["metadata"] == {"k": "v"}
    assert own_raw("GET", own_raw.object_path("x") + "?alt=media").body == data


def test_finished_cancelled_and_refused_sessions_answer_as_before(own_server, own_raw):
    done, cancelled, refused = own_raw.start("x"), own_raw.start("y"), own_raw.start("x", ifGenerationMatch="1")
    resource = own_raw.chunk(done, b"data", "0-3/4").json()
    own_raw("DELETE", cancelled)
    own_raw.chunk(refused, b"data", "0-3/4")
    own_server.kill()
    own_server.restart()
    assert own_raw.ask(done).json() == resource
    assert own_raw.ask(cancelled).status == 499
    assert own_raw.ask(refused).status == 410


@pytest.mark.parametrize(("kill", "there"), [("before_work", False), ("after_work", True)])
def test_a_kill_before_the_work_leaves_nothing_and_one_after_it_leaves_all(own_server, own_raw, kill, there):
    session = own_raw.start("x")
    own_server.faults([Fault(operation="upload.put", kill=kill)])
    with pytest.raises(ConnectionError):
        own_raw.chunk(session, b"data", "0-3/4")
    own_server.wait_killed()
    own_server.restart()
    assert own_raw("GET", own_raw.object_path("x")).status == (200 if there else 404)
    assert own_raw.ask(session).status == (200 if there else 308)


def test_files_that_nothing_names_are_removed_at_the_start(own_server, own_raw):
    own_raw.put("x", b"one")
    own_server.faults([Fault(operation="upload.media", kill="before_work", after_bytes=2)])
    with pytest.raises(ConnectionError):
        own_raw.put("y", b"four")
    own_server.wait_killed()
    (own_server.directory / "data" / "stray").write_bytes(b"?")
    own_server.restart()
    assert len(list((own_server.directory / "data").iterdir())) == 1


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_chunks_breaks_overlaps_and_kills_ends_in_the_same_bytes(own_server, own_raw, crc32c, seed):
    rng = random.Random(seed)
    data = rng.randbytes(rng.choice([1, KIB256, 9 * KIB256, 20 * KIB256 + rng.randrange(KIB256)]))
    session = own_raw.start("x", {"crc32c": crc32c(data)}, ifGenerationMatch="0")
    kills = 0
    for _ in range(60):
        answer = own_raw.ask(session)
        if answer.status == 200:
            break
        kept = int(answer.headers.get("range", "bytes=0--1").removeprefix("bytes=0-")) + 1
        first = rng.choice([kept, kept, max(kept - KIB256, 0), rng.randint(0, kept)])
        end = min(first + rng.randint(1, 8) * KIB256, len(data))
        trouble = rng.choice(["", "", "reset", "status", "lost", "short", "kill"])
        if trouble == "kill":
            kills += 1
            trouble = "kill" if kills <= 2 else ""
        at = rng.randrange(end - first)
        own_server.faults(_script(trouble, at))
        try:
            status = own_raw.chunk(session, data[first:end], f"{first}-{end - 1}/{len(data)}").status
            assert status in (200, 308, 503)
        except ConnectionError:
            pass
        if trouble == "kill":
            own_server.wait_killed()
            own_server.restart()
        own_server.clear_faults()
    assert own_raw.ask(session).json()["crc32c"] == crc32c(data)
    assert own_raw("GET", own_raw.object_path("x") + "?alt=media").body == data


def _script(trouble, at):
    effects = {
        "reset": {"reset_after_bytes": at},
        "status": {"status": 503, "after_bytes": at},
        "lost": {"lose_answer": True},
        "short": {"keep_bytes": at},
        "kill": {"kill": "before_work", "after_bytes": at},
    }
    return [Fault(operation="upload.put", **effects[trouble])] if trouble else []


def test_killed_at_any_moment_under_load_nothing_acknowledged_is_lost_or_wrong(own_server, own_raw):
    acknowledged: dict[str, str] = {}
    for round_number in range(4):
        killed = threading.Event()
        first_done = threading.Semaphore(0)
        threads = [
            threading.Thread(target=_write, args=(own_raw, f"{round_number}-{n}", acknowledged, killed, first_done))
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        for _ in range(3 + 6 * round_number):
            assert first_done.acquire(timeout=30)
        own_server.kill()
        killed.set()
        for thread in threads:
            thread.join(30)
        own_server.restart()
        _check_all(own_raw, acknowledged)
    assert len(acknowledged) >= 30


def _write(raw, prefix, acknowledged, killed, done):
    number = 0
    while not killed.is_set():
        name = f"{prefix}-{number}"
        data = os.urandom(1000) * (1 + number % 700)
        try:
            if number % 2:
                answer = raw.put(name, data, ifGenerationMatch="0")
            else:
                answer = raw("PUT", raw.start(name, ifGenerationMatch="0"), data)
        except (OSError, http.client.HTTPException):
            if not killed.wait(30):
                raise
            return
        assert answer.status == 200, answer
        acknowledged[name] = answer.json()["crc32c"]
        done.release()
        number += 1


def _check_all(raw, acknowledged):
    items = raw("GET", f"/storage/v1/b/{raw.bucket}/o?maxResults=1000").json()["items"]
    found = {item["name"]: item for item in items}
    assert set(acknowledged) <= set(found)
    for name, item in found.items():
        assert acknowledged.get(name, item["crc32c"]) == item["crc32c"]
        body = raw("GET", raw.object_path(name) + "?alt=media").body
        assert len(body) == int(item["size"])
        import base64

        assert google_crc32c.value(body).to_bytes(4, "big") == base64.b64decode(item["crc32c"])
