"""The gs:// store over TLS, as in production: an endpoint with a certificate, in front of the test server."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ckptmirror.testing import GcsServerProcess
from tests.contract.stores_under_test import server_with_bucket


def _certificate(directory: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = directory / "tls.pem"
    path.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
    (directory / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(256 * 1024):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextmanager
def _tls_in_front_of(server: GcsServerProcess, certificate: Path) -> Iterator[int]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    loop = asyncio.new_event_loop()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(_copy(reader, back[1]), _copy(back[0], writer))

    listening = loop.run_until_complete(asyncio.start_server(accept, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield listening.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


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
    certificate = _certificate(tmp_path)
    with server_with_bucket(tmp_path / "server") as server, _tls_in_front_of(server, certificate) as port:
        trust = {"SSL_CERT_FILE": str(tmp_path / "ca.pem"), "REQUESTS_CA_BUNDLE": str(tmp_path / "ca.pem")}
        done = subprocess.run(
            [sys.executable, "-c", _ROUND_TRIP, f"https://127.0.0.1:{port}"],
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
