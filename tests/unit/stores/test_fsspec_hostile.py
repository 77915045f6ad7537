"""A bucket through gcsfs, against a service that answers whatever it likes: what gcsfs returns is not all believed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from fsspec.config import conf

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.stores import fsspec_any
from tests.kit.servers.hostile_server import Asked, answer, hostile_server

OBJECT = {"kind": "storage#object", "name": "p/x", "bucket": "contract", "size": "100", "generation": "5", "etag": "e"}


def described(**fields: Any) -> bytes:
    return answer(200, json.dumps({**OBJECT, **fields}).encode())


@pytest.mark.parametrize("answered_bytes", [49, 51, 70])
def test_a_range_of_another_length_is_refused(answered_bytes: int) -> None:
    def script(asked: Asked) -> Iterable[bytes]:
        if "alt=media" not in asked.target:
            return [described()]
        return [answer(206, b"x" * answered_bytes, Content_Range=f"bytes 0-{answered_bytes - 1}/100")]

    with hostile_server(script) as server:
        store = fsspec_any.open("gcsfs+gs://contract/p", token="anon", endpoint_url=server.url)
        info, buffer = store.stat("x"), bytearray(50)
        assert info is not None
        with pytest.raises(StoreTemporary):
            store.download("x", generation=info.generation, offset=0, buffer=memoryview(buffer))
        assert buffer == bytes(50)


@pytest.mark.parametrize("size", ["-5", -5, "9" * 30, "1.5", [1], None])
def test_a_size_that_no_object_has_is_refused(size: object) -> None:
    with hostile_server(lambda _asked: [described(size=size)]) as server:
        store = fsspec_any.open("gcsfs+gs://contract/p", token="anon", endpoint_url=server.url)
        for ask in (lambda: store.stat("x"), lambda: store.read("x", limit_bytes=10)):
            with pytest.raises(StoreTemporary):
                ask()
    page = answer(200, json.dumps({"kind": "storage#objects", "items": [OBJECT | {"size": size}]}).encode())
    with hostile_server(lambda _asked: [page]) as server:
        store = fsspec_any.open("gcsfs+gs://contract/p", token="anon", endpoint_url=server.url)
        with pytest.raises(StoreTemporary):
            list(store.list())


def test_a_request_of_gcsfs_ends_some_day(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fsspec_any.open("gcsfs+gs://contract/p", token="anon")._fs().requests_timeout == fsspec_any._REQUEST_S
    assert fsspec_any.open("gcsfs+gs://contract/p", token="anon", requests_timeout=5)._fs().requests_timeout == 5
    monkeypatch.setitem(conf, "gs", {"requests_timeout": 7})
    assert fsspec_any.open("gcsfs+gs://contract/p", token="anon")._fs().requests_timeout == 7
