"""A proxy as companies have them, in a process of its own: ``python -m … '{"HOST:PORT": "…"}'``.

It knows CONNECT alone, and leads to where its first argument says, whatever the name means elsewhere; a place that does
not stand there is itself. ``GET /asked`` says which places were asked for, and with which ``Proxy-Authorization``.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager

from tests.kit.servers.small_server import Answers, SmallServer, running, serve

PIECE_BYTES = 1 << 16


class Tunnels(Answers):
    def do_CONNECT(self) -> None:
        self.asked.append([self.path, self.headers.get("Proxy-Authorization", "")])
        host, _, port = self.facts.get(self.path, self.path).rpartition(":")
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


def connect_proxy(leads_to: Mapping[str, str] | None = None) -> AbstractContextManager[SmallServer]:
    """Run it."""
    return running("tests.kit.servers.connect_proxy", leads_to or {})


if __name__ == "__main__":
    serve(Tunnels)
