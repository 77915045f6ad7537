"""A server in a thread that answers with whatever bytes a test gives it: no length, header or status has to be true.

It counts what the client took, so a test sees by bytes, not by time or memory, that an answer without end was ended.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from io import BufferedReader

__all__ = ["Asked", "HostileServer", "answer", "endless", "hostile_server"]

MIB = 1024 * 1024
CAP_BYTES = 64 * MIB  # where "without end" ends, so that a client without a limit fails its test and not the machine


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    target: str
    headers: Message
    body: bytes

    @property
    def line(self) -> str:
        return f"{self.method} {self.target}"


Script = Callable[[Asked], Iterable[bytes]]


@dataclass
class HostileServer:
    """The server as a test sees it.

    Attributes:
        script: Yields the bytes of the answer to a request; the connection stays open after the last.
        asked: Every request so far.
        sent_bytes: What was sent so far, to all clients together.
    """

    script: Script
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    sent_bytes: int = 0

    def serve(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the test is over
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError, ValueError), client, client.makefile("rb") as received:
            while (asked := _request(received)) is not None:
                self.asked.append(asked)
                for piece in self.script(asked):
                    client.sendall(piece)
                    self.sent_bytes += len(piece)


def _request(received: BufferedReader) -> Asked | None:
    words = received.readline().decode("latin-1").split()
    if len(words) < 2:
        return None
    headers = http.client.parse_headers(received)
    return Asked(words[0], words[1], headers, received.read(int(headers.get("Content-Length", 0))))


@contextmanager
def hostile_server(script: Script) -> Iterator[HostileServer]:
    """Run it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)  # what is sent has nearly been taken
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = HostileServer(script, f"http://127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
        yield server


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    """Return a whole answer; ``Content_Length`` may lie."""
    fields = {"Content_Type": "application/json", "Content_Length": str(len(body)), **headers}
    lines = [
        f"HTTP/1.1 {status} Said",
        *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items() if value),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def endless(head: bytes, piece: bytes = b" " * 65536) -> Iterator[bytes]:
    """Yield ``head``, and then ``piece`` again and again."""
    yield head
    for _ in range(CAP_BYTES // len(piece)):
        yield piece
    raise ConnectionError  # the server ends the connection
