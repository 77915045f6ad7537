"""After kill -9: compositions, rewrites, moves, restores and versions are whole or absent, and no bytes are lost."""

from __future__ import annotations

import base64
import http.client
import json
import threading

import google_crc32c
import pytest

from ckptmirror.testing import Fault

pytestmark = pytest.mark.long

KEPT = {"versioning": {"enabled": True}}
SOFT = {"softDeletePolicy": {"retentionDurationSeconds": 7 * 86400}}


def _list(raw, query=""):
    items = raw("GET", f"/storage/v1/b/{raw.bucket}/o?maxResults=1000{query}").json().get("items", [])
    return {(item["name"], item["generation"]): item for item in items}


def _everything(raw):
    """Live, noncurrent and soft-deleted versions."""
    return {**_list(raw, "&versions=true"), **_list(raw, "&softDeleted=true")}


def _settings(raw, settings):
    assert raw("PATCH", f"/storage/v1/b/{raw.bucket}", json.dumps(settings)).status == 200


def _request(raw, operation):
    """What sends that operation, from ``x`` to ``y``."""
    raw.put("x", b"data")
    path = raw.object_path("x")
    if operation == "object.restore":
        _settings(raw, SOFT)
        generation = raw.put("y", b"data").json()["generation"]
        assert raw("DELETE", raw.object_path("y")).status == 204
        return ("POST", f"{raw.object_path('y')}/restore?generation={generation}")
    return {
        "object.compose": ("POST", f"{raw.object_path('y')}/compose", '{"sourceObjects": [{"name": "x"}]}'),
        "object.rewrite": ("POST", f"{path}/rewriteTo/b/{raw.bucket}/o/y"),
        "object.copy": ("POST", f"{path}/copyTo/b/{raw.bucket}/o/y"),
        "object.move": ("POST", f"{path}/moveTo/o/y"),
    }[operation]


@pytest.mark.parametrize(("kill", "done"), [("before_work", False), ("after_work", True)])
@pytest.mark.parametrize(
    "operation", ["object.compose", "object.rewrite", "object.copy", "object.move", "object.restore"]
)
def test_a_kill_before_the_work_leaves_nothing_and_one_after_it_leaves_all(own_server, own_raw, operation, kill, done):
    request = _request(own_raw, operation)
    own_server.faults([Fault(operation=operation, kill=kill)])
    with pytest.raises(ConnectionError):
        own_raw(*request)
    own_server.wait_killed()
    own_server.restart()
    answer = own_raw("GET", f"{own_raw.object_path('y')}?alt=media")
    assert (answer.status, answer.body) == ((200, b"data") if done else (404, answer.body))
    moved = operation == "object.move" and done
    assert own_raw("GET", f"{own_raw.object_path('x')}?alt=media").status == (404 if moved else 200)


def test_of_a_batch_that_is_killed_the_first_calls_are_done_and_the_last_are_not(own_server, own_raw):
    for name in "abcd":
        own_raw.put(name, b"x")
    own_server.faults([Fault(operation="object.delete", object="^c$", kill="before_work")])
    body = "".join(
        f"--b\r\nContent-Type: application/http\r\n\r\nDELETE {own_raw.object_path(name)} HTTP/1.1\r\n\r\n\r\n"
        for name in "abcd"
    )
    with pytest.raises(ConnectionError):
        own_raw("POST", "/batch/storage/v1", f"{body}--b--", {"Content-Type": "multipart/mixed; boundary=b"})
    own_server.wait_killed()
    own_server.restart()
    assert [name for name, _ in _list(own_raw)] == ["c", "d"]


def test_killed_at_any_moment_under_load_every_version_is_whole_and_every_acknowledged_one_there(own_server, own_raw):
    _settings(own_raw, {**KEPT, **SOFT})
    known: dict[tuple[str, str], str] = {}
    for round_number in range(4):
        killed, progress = threading.Event(), threading.Semaphore(0)
        arguments = [(own_raw, f"{round_number}-{number}", known, killed, progress) for number in range(3)]
        threads = [threading.Thread(target=_work, args=one) for one in arguments]
        for thread in threads:
            thread.start()
        for _ in range(4 + 7 * round_number):
            assert progress.acquire(timeout=30)
        own_server.kill()
        killed.set()
        for thread in threads:
            thread.join(30)
        own_server.restart()
        _check(own_server, own_raw, known)
    assert len(known) >= 40


def _work(raw, prefix, known, killed, progress):
    """Write, compose, copy and delete until the server is killed; note each version that was acknowledged."""
    number = 0
    while not killed.is_set():
        name, two = f"{prefix}-{number % 3}", json.dumps({"sourceObjects": [{"name": f"{prefix}-{number % 3}"}] * 2})
        try:
            answers = [
                raw.put(name, prefix.encode() * (1 + number * 1000 % 50_000)),
                raw("POST", f"{raw.object_path(f'{name}-two')}/compose", two),
                raw("POST", f"{raw.object_path(name)}/rewriteTo/b/{raw.bucket}/o/{name}-copy"),
            ]
            raw("DELETE", f"{raw.object_path(f'{name}-copy')}")
        except (OSError, http.client.HTTPException):
            if not killed.wait(30):
                raise
            return
        for answer in answers:
            assert answer.status == 200, answer
            resource = answer.json().get("resource", answer.json())
            known[resource["name"], resource["generation"]] = resource["crc32c"]
            progress.release()
        number += 1


def _check(server, raw, known):
    found = _everything(raw)
    assert set(known) <= set(found)
    assert sum("softDeleteTime" not in item and "timeDeleted" not in item for item in found.values()) > 0
    for (name, generation), item in found.items():
        assert known.get((name, generation), item["crc32c"]) == item["crc32c"]
        body = raw("GET", f"{raw.object_path(name)}?alt=media&generation={generation}").body
        assert len(body) == int(item["size"])
        assert google_crc32c.value(body).to_bytes(4, "big") == base64.b64decode(item["crc32c"])
    assert len(list((server.directory / "data").iterdir())) <= len(found)
