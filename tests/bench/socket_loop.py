"""The physical limit of a transfer: one plain socket, one thread, a trivial process at the other end.

python -m tests.bench.socket_loop sink|source   (prints its port; started by the bench)
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["peer", "receive", "send_file"]

_PIECE_BYTES = 4 * 1024 * 1024


@contextmanager
def peer(kind: str) -> Iterator[int]:
    """Run a ``sink`` that swallows all, or a ``source`` that sends as many bytes as asked; give its port."""
    command = [sys.executable, "-m", "tests.bench.socket_loop", kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
        process.stdin.close()


def send_file(port: int, path: Path) -> None:
    """Read a file and send it, until the sink has it all."""
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(os.fstat(file.fileno()).st_size.to_bytes(8, "big"))
        while count := file.readinto(buffer):
            connection.sendall(buffer[:count])
        connection.recv(1)


def receive(port: int, size_bytes: int) -> None:
    """Receive so many bytes into one kept buffer."""
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(size_bytes.to_bytes(8, "big"))
        left = size_bytes
        while left:
            left -= connection.recv_into(buffer[: min(left, _PIECE_BYTES)])


def _serve(kind: str) -> None:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                left = int.from_bytes(connection.recv(8), "big")
                while left:
                    piece = buffer[: min(left, _PIECE_BYTES)]
                    if kind == "source":
                        connection.sendall(piece)
                        left -= len(piece)
                    else:
                        count = connection.recv_into(piece)
                        if not count:
                            break
                        left -= count
                if kind == "sink":
                    connection.sendall(b"+")


if __name__ == "__main__":
    _serve(sys.argv[1])
