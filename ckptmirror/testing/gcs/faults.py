"""The fault script that the server plays.

Rules:
* A request meets at most one fault, chosen once, as soon as its object's name is known.
* A fault that strikes in the middle of a body does so at an exact byte.
* A fault has fired when all of it has happened to a request, not when the request was chosen.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from ckptmirror.testing.fault import Fault
from ckptmirror.testing.gcs.answers import bad_request

__all__ = ["ArmedFault", "Dropped", "Script", "kill_self", "reset_connection", "throttle"]


class Dropped(Exception):
    """The connection was cut on purpose; there is nobody left to answer."""


class ArmedFault:
    """A fault with what it has seen so far.

    Attributes:
        seen: Requests that the matchers met.
        fired: Requests to which all of the fault happened.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.set_at_s = time.time()
        self.set_at_monotonic_s = time.monotonic()
        self.seen = 0
        self.fired = 0

    def claims(self, operation: str, method: str, name: str) -> bool:
        """Whether this request suffers; counts it."""
        fault = self.fault
        if not fault.meets(operation, method, name):
            return False
        if fault.unauthorised_after_s is not None and not self.is_due():
            return False
        self.seen += 1
        return self.seen >= fault.nth and not (fault.times and self.seen >= fault.nth + fault.times)

    def is_due(self) -> bool:
        """Whether the time before ``unauthorised_after_s`` is over."""
        return time.monotonic() >= self.set_at_monotonic_s + (self.fault.unauthorised_after_s or 0.0)

    def refuses_token_of(self, issued_s: float | None) -> bool:
        """Whether a token issued then (None: always known) is one of those that this fault declares expired."""
        return issued_s is None or issued_s < self.set_at_s + (self.fault.unauthorised_after_s or 0.0)

    def to_json(self) -> dict[str, Any]:
        return {**self.fault.to_json(), "seen": self.seen, "fired": self.fired}


class Script:
    """All faults, in the order in which they are asked."""

    def __init__(self) -> None:
        self.faults: list[ArmedFault] = []

    def extend(self, items: Any) -> None:
        """Add what was sent to ``POST /_faults``: a list, or one fault."""
        items = [items] if isinstance(items, dict) else items
        if not isinstance(items, Sequence) or not all(isinstance(item, dict) for item in items):
            raise bad_request("a fault script is a list of objects")
        try:
            faults = [Fault.from_json(item) for item in items]
        except (ValueError, TypeError, re.error) as error:
            raise bad_request(f"bad fault: {error}") from error
        self.faults.extend(ArmedFault(fault) for fault in faults)

    def choose(self, operation: str, method: str, name: str, token_issued_s: float | None) -> ArmedFault | None:
        """The fault that this request suffers, if any."""
        for armed in self.faults:
            if armed.fault.unauthorised_after_s is not None and not armed.refuses_token_of(token_issued_s):
                continue
            if armed.claims(operation, method, name):
                return armed
        return None


def reset_connection(request: web.BaseRequest) -> None:
    """Cut the connection with RST."""
    transport = request.transport
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def kill_self() -> None:
    """Die as from ``kill -9``."""
    os.kill(os.getpid(), signal.SIGKILL)


async def throttle(size_bytes: int, bytes_per_s: float | None) -> None:
    """Take as long as ``size_bytes`` do at that rate."""
    if bytes_per_s:
        await asyncio.sleep(size_bytes / bytes_per_s)
