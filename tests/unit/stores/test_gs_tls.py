"""The gs:// store over TLS, as in production."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmirror.testing import GcsServerProcess
from tests.contract.stores_under_test import BUCKET
from tests.kit.servers.certificates import make_certificate

_ROUND_TRIP = """
import sys
from tests.contract.stores_under_test import *
store = gs.GsStore(BucketLocation("gs", BUCKET, "tls"), endpoint=Endpoint.parse(sys.argv[1]))
data = pattern_bytes(10_000_001)
info = store.upload(upload_of("x", data))
buffer = bytearray(len(data))
store.download("x", generation=info.generation, offset=0, buffer=memoryview(buffer))
assert buffer == data and store.stat("x") == info == next(store.list())
small = store.write("y", b"1", if_generation=0)
store.delete("y", generation=small.generation)
print("done")
"""


@pytest.mark.parametrize("trusted", [True, False])
def test_everything_works_over_tls_with_a_trusted_certificate_and_nothing_without(
    tmp_path: Path, trusted: bool
) -> None:
    certificate = make_certificate(tmp_path / "tls.pem")
    with GcsServerProcess(tmp_path / "server", buckets=[BUCKET], certificate=certificate) as server:
        assert server.url.startswith("https://")
        trust = {"SSL_CERT_FILE": str(certificate), "REQUESTS_CA_BUNDLE": str(certificate)}
        done = subprocess.run(
            [sys.executable, "-c", _ROUND_TRIP, server.url],
            env={**os.environ, **(trust if trusted else {})},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.stdout == "done\n") == trusted, done.stderr
        if not trusted:
            assert "StoreTemporary" in done.stderr
            assert "certificate" in done.stderr.lower()
