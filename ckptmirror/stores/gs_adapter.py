"""The client library's requests, sent as our own are.

Rules:
* They go over our connections (``gs_http``): the same limits of every answer, time limits, certificates and proxies.
* They go to our endpoint, whatever host their address names, because the library sends a token with each of them.
* No redirect is followed. No cookie is kept. An answer comes without its encoding, because none was accepted.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import requests
from requests.adapters import BaseAdapter
from requests.structures import CaseInsensitiveDict

from ckptmirror.stores.gs_http import Transport

__all__ = ["send_through"]

_SLICE_BYTES = 1024 * 1024  # each slice has a time limit of its own
_OURS = ("accept-encoding", "host")  # headers that are the connection's


def send_through(transport: Transport, session: requests.Session) -> None:
    """Make a session send all its requests through ``transport``."""
    for adapter in session.adapters.values():
        adapter.close()
    session.adapters.clear()
    for scheme in ("https://", "http://"):
        session.mount(scheme, _Adapter(transport))
    session.trust_env = False
    session.get_redirect_target = _never  # type: ignore[method-assign]


def _never(resp: requests.Response) -> str | None:
    """Return where a redirect leads: nowhere."""
    del resp
    return None


class _Adapter(BaseAdapter):
    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._transport = transport

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        assert request.method is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OURS}
        with self._transport.connection() as connection:
            body = _slices(request.body)
            answer = self._transport.exchange(connection, request.method, request.path_url, headers, body)
            data = answer.read_whole()
        response = requests.Response()
        response.status_code, response.reason = answer.status, answer.reason
        response.headers = CaseInsensitiveDict(answer.headers.items())
        response.encoding = "utf-8"
        response.raw, response.request, response.url = io.BytesIO(data), request, request.url or ""
        return response

    def close(self) -> None:
        """Nothing to free: the connections are the transport's."""


def _slices(body: Any) -> Iterator[memoryview]:
    data = memoryview(body.encode() if isinstance(body, str) else body or b"")
    for first in range(0, len(data), _SLICE_BYTES):
        yield data[first : first + _SLICE_BYTES]
