"""A forward proxy for plain HTTP, in a process of its own; ``GET /asked`` says which requests it was asked to make."""

from __future__ import annotations

import http.client
from contextlib import AbstractContextManager
from urllib.parse import urlsplit

from tests.kit.servers.small_server import Answers, SmallServer, running, serve


class Forwards(Answers):
    """Asks the server that a whole URL names, and hands its answer on."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/asked":
            return super().do_GET()
        return self.forward()

    def forward(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
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

    do_PUT = do_POST = do_DELETE = do_PATCH = forward  # noqa: N815 - http.server looks for these names


def forward_proxy() -> AbstractContextManager[SmallServer]:
    """Run it."""
    return running("tests.kit.servers.forward_proxy", {})


if __name__ == "__main__":
    serve(Forwards)
