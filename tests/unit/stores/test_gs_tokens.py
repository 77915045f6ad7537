"""The gs:// store and its tokens: those that run out, those that are refused, and a token service that is down."""

from __future__ import annotations

import datetime
import json
import threading
from pathlib import Path

import pytest
from google.auth.credentials import Credentials

from ckptmirror.core.errors import (
    NotAuthorised,
    StoreTemporary,
)
from ckptmirror.testing import Fault, GcsServerProcess
from tests.contract.stores_under_test import (
    gs_store,
    upload_of,
)
from tests.unit.stores.gs_operations import DATA, EVERY, ask


class _Issued(Credentials):
    """Credentials whose tokens the test server issues."""

    def __init__(self, server: GcsServerProcess) -> None:
        super().__init__()
        self.server = server
        self.refreshed = 0

    def refresh(self, request: object) -> None:
        self.refreshed += 1
        body = b"grant_type=client_credentials"
        answer = request(f"{self.server.url}/token", method="POST", body=body)  # type: ignore[operator]
        assert answer.status == 200
        self.token = json.loads(answer.data)["access_token"]
        self.expiry = datetime.datetime(2999, 1, 1)


def test_token_expiry_refreshes_mid_queue(tmp_path: Path) -> None:
    with GcsServerProcess(tmp_path, options=["--require-auth"]) as server:
        credentials = _Issued(server)
        credentials.refresh(_token_request())
        server.create_bucket("contract", token=credentials.token)
        store = gs_store(server, "run", credentials=credentials)
        for operation in EVERY:
            if operation == "object.delete":
                store.write("x", b"1", if_generation=0)
            server.clear_faults()
            server.faults([Fault(operation=operation, unauthorised_after_s=0.0, status=401, times=0)])
            before = credentials.refreshed
            if operation == "object.delete":
                info = store.stat("x")
                assert info is not None
                store.delete("x", generation=info.generation)
                store.write("x", b"1", if_generation=0)
            else:
                ask(store, operation) if operation != "upload.put" else store.upload(upload_of("l2", DATA))
            assert credentials.refreshed == before + 1, operation
        server.clear_faults()
        server.faults([Fault(status=401, times=0, operation="object.*")])
        with pytest.raises(NotAuthorised):
            store.stat("x")


def _token_request() -> object:
    from ckptmirror.stores import gs_auth

    return gs_auth._request_token


def test_many_threads_refresh_a_refused_token_once(tmp_path: Path) -> None:
    with GcsServerProcess(tmp_path, options=["--require-auth"]) as server:
        credentials = _Issued(server)
        credentials.refresh(_token_request())
        server.create_bucket("contract", token=credentials.token)
        store = gs_store(server, "run", credentials=credentials)
        store.write("x", b"1", if_generation=0)
        server.faults([Fault(operation="object.get", unauthorised_after_s=0.0, status=401, times=0)])
        before = credentials.refreshed
        barrier = threading.Barrier(6)
        failures: list[Exception] = []

        def ask() -> None:
            barrier.wait(30)
            try:
                assert store.stat("x") is not None
            except Exception as error:  # noqa: BLE001 - told to the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failures == []
        assert credentials.refreshed == before + 1


def test_a_token_service_that_is_down_is_temporary(tmp_path: Path) -> None:
    with GcsServerProcess(tmp_path, options=["--require-auth"]) as server:
        credentials = _Issued(server)
        store = gs_store(server, "run", credentials=credentials)
    for operation in ("object.get", "upload.start"):
        with pytest.raises(StoreTemporary):
            ask(store, operation)


@pytest.mark.parametrize("operation", EVERY)
def test_a_server_that_wants_credentials_says_how_to_log_in(tmp_path: Path, operation: str) -> None:
    with GcsServerProcess(tmp_path, options=["--require-auth"]) as server:
        store = gs_store(server, "run")
        with pytest.raises(NotAuthorised) as caught:
            ask(store, "object.get" if operation == "object.media" else operation)
        assert "gcloud auth application-default login" in caught.value.hint
