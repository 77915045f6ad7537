"""A proxy as companies have them, in a process of its own: ``python -m tests.connect_proxy '{"HOST:PORT": "…"}'``.

It knows CONNECT alone, and leads to where its first argument says, whatever the name means elsewhere; a place that does
not stand there is itself. It prints its URL; ``GET /asked`` says which places were asked for, and with which
``Proxy-Authorization``. It ends with its standard input.
"""

from __future__ import annotations

import http.server
import json
import os
import select
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

HOME = Path(__file__).resolve().parents[1]
PIECE_BYTES = 1 << 16


class Tunnels(http.server.BaseHTTPRequestHandler):
    leads_to: ClassVar[dict[str, str]] = {}
    asked: ClassVar[list[list[str]]] = []

    def do_CONNECT(self) -> None:
        self.asked.append([self.path, self.headers.get("Proxy-Authorization", "")])
        host, _, port = self.leads_to.get(self.path, self.path).rpartition(":")
        try:
            there = socket.create_connection((host, int(port)), timeout=30)
        except OSError:
            self.send_error(502, "Bad Gateway")
            return
        self.send_response(200, "Connection established")
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        with there:
            self.pass_on(there)

    def pass_on(self, there: socket.socket) -> None:
        """Carry bytes both ways until one side ends."""
        other = {self.connection: there, there: self.connection}
        while True:
            for ready in select.select(list(other), [], [], 60)[0]:
                data = ready.recv(PIECE_BYTES)
                if not data:
                    return
                other[ready].sendall(data)

    def do_GET(self) -> None:
        data = json.dumps(self.asked).encode()
        self.send_response(200 if self.path == "/asked" else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class Proxy:
    """The process as a test sees it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def asked(self) -> list[tuple[str, str]]:
        """Places and Proxy-Authorization headers, in order."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{self.url}/asked") as answer:
            return [(place, header) for place, header in json.loads(answer.read())]


@contextmanager
def connect_proxy(leads_to: Mapping[str, str] | None = None) -> Iterator[Proxy]:
    """Run it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.connect_proxy", json.dumps(leads_to or {})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HOME)},
    )
    try:
        assert process.stdout is not None
        yield Proxy(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tunnels)
    Tunnels.leads_to.update(json.loads(sys.argv[1]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
