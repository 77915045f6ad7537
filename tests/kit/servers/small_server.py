"""A small HTTP server in a process of its own: what the proxies and the token services of the tests share.

A module that is one has a handler under ``Answers`` and calls ``serve``; a test runs it with ``running``. It is given
its facts as JSON, prints its URL and its port for TLS (0 unless ``certificate`` is among the facts), and ends with its
standard input. ``GET /asked`` says what was asked for so far.
"""

from __future__ import annotations

import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

HOME = Path(__file__).resolve().parents[3]


class Answers(http.server.BaseHTTPRequestHandler):
    """One request. The server's answer function appends to ``asked``."""

    facts: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        return self.say(200, self.asked) if self.path == "/asked" else self.say(404, {})

    def say(self, status: int, body: Any, content_type: str = "application/json", **headers: str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class SmallServer:
    """The process as a test sees it."""

    def __init__(self, url: str, tls_port: int) -> None:
        self.url = url
        self.tls_port = tls_port
        self.host = url.partition("://")[2]

    def asked(self) -> list[Any]:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{self.url}/asked") as answer:
            found: list[Any] = json.loads(answer.read())
            return found


@contextmanager
def running(module: str, facts: Mapping[str, Any]) -> Iterator[SmallServer]:
    """Run the server that a module is."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(dict(facts))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HOME)},
    )
    try:
        assert process.stdout is not None
        url, tls_port = process.stdout.readline().split()
        yield SmallServer(url, int(tls_port))
    finally:
        process.kill()
        process.communicate()


def serve(handler: type[Answers]) -> None:
    """Answer until standard input ends."""
    handler.facts = json.loads(sys.argv[1])
    certificate = handler.facts.get("certificate")
    print(f"http://127.0.0.1:{listen(handler)}", listen(handler, certificate) if certificate else 0, flush=True)
    sys.stdin.read()


def listen(handler: type[Answers], certificate: str | None = None) -> int:
    """Answer from now on, over TLS with a certificate; return the port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port
