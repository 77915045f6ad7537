"""A forward proxy for plain HTTP, as a process of its own: ``python -m tests.forward_proxy LOG``.

It listens on a free port of 127.0.0.1, prints it, and writes each request line that it was asked to ``LOG``.
"""

from __future__ import annotations

import http.client
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


class Forwards(BaseHTTPRequestHandler):
    """Asks the server that a whole URL names, and hands its answer on."""

    protocol_version = "HTTP/1.1"
    log_path: Path

    def forward(self) -> None:
        with self.log_path.open("a") as log:
            log.write(f"{self.command} {self.path}\n")
        target = urlsplit(self.path)
        if target.scheme != "http" or not target.hostname:
            self.send_error(400, "ask for a whole URL")
            return
        connection = http.client.HTTPConnection(target.hostname, target.port or 80, timeout=30)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        connection.request(self.command, f"{target.path}?{target.query}", body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = forward  # noqa: N815 - http.server looks for these names

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on stderr."""


def main() -> None:
    Forwards.log_path = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Forwards)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
