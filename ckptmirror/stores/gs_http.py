"""Requests to Cloud Storage over http.client: kept connections, tokens, and what each status means.

Rules:
* Each thread has its own connections, kept alive between requests; any error closes the connection.
* Requests are repeated in two cases only: on a fresh connection if the server had closed the idle one (for requests
  that change nothing), and with a fresh token after a 401.
* A request goes to our endpoint and nowhere else, so a token does too: of an address that the service names, only path
  and query are used, and no redirect is followed.
* Only :func:`error_for` turns a status into a store error.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import socket
import ssl
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ckptmirror.core.errors import (
    BrokenMeta,
    BucketNotFound,
    CkptMirrorError,
    IntegrityError,
    NotAuthorised,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.core.sealed_json import json_object
from ckptmirror.stores.gs_answer import ANSWER_BYTES, Answer, AnswerRefusedError
from ckptmirror.stores.gs_auth import Anonymous, GoogleTokens
from ckptmirror.stores.gs_endpoint import CONNECTION_ERRORS, ENDPOINT_VARIABLE, Endpoint, Limits, answer_on
from ckptmirror.stores.gs_trust import hint_for, untrusted

__all__ = ["Transport", "error_for", "error_of", "read_json", "retry_after_s", "said"]

_ERROR_LIMIT_BYTES = 16 * 1024
_SAID_LETTERS = 1000
_LOGIN_HINT = NotAuthorised.hint


class _Kept(threading.local):
    """A thread's connection, and the process that opened it."""

    connection: http.client.HTTPConnection | None = None
    process = 0


class Transport:
    """Sends requests to one endpoint."""

    def __init__(self, endpoint: Endpoint, tokens: Anonymous | GoogleTokens, limits: Limits) -> None:
        self.endpoint = endpoint
        self.tokens = tokens
        self.limits = limits
        self._kept = _Kept()
        self._all: weakref.WeakKeyDictionary[http.client.HTTPConnection, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def get(self, target: str, headers: Mapping[str, str] | None = None) -> Iterator[Answer]:
        """Lend the response to a GET, whatever its status. The caller reads it inside the ``with``.

        Raises:
            StoreTemporary: No answer came in time, or the connection broke, also inside the ``with``.
        """
        with self.connection() as connection:
            sent = {**(headers or {}), **self.tokens.headers()}
            response = self._asked(connection, target, sent)
            if response.status == 401:
                response.read_whole()
                self.tokens.refresh(sent)
                response = self._asked(connection, target, {**(headers or {}), **self.tokens.headers()})
            yield response
            if not response.isclosed():
                connection.close()  # unread bytes would be taken for the next answer

    def _asked(self, connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str]) -> Answer:
        reused = connection.sock is not None
        try:
            return self.exchange(connection, "GET", target, headers)
        except (ConnectionResetError, BrokenPipeError):  # RemoteDisconnected is one too
            if not reused:
                raise
            connection.close()  # the server had closed the idle connection: no answer came, and nothing changed
            return self.exchange(connection, "GET", target, headers)

    def exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str | bytes],
        body: Iterable[memoryview] = (),
    ) -> Answer:
        """Send a request whose body comes in pieces, each with a time limit of its own, and return the answer."""
        self._open(connection)
        connection.putrequest(method, target)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        for piece in body:
            try:
                connection.send(piece)
            except OSError as error:
                return _early_answer(connection, error)
        return answer_on(connection)

    def _open(self, connection: http.client.HTTPConnection) -> None:
        """Connect if necessary, and set the time limit of the requests."""
        if connection.sock is not None and _is_spent(connection.sock):
            connection.close()
        if connection.sock is None:
            connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(self.limits.io_s)

    @contextmanager
    def connection(self, *, fresh: bool = False) -> Iterator[http.client.HTTPConnection]:
        """Lend this thread's connection, or a fresh one that is closed afterwards. It is closed if the body fails.

        Raises:
            StoreTemporary: The connection failed in the body.
        """
        connection = self._connect() if fresh else self._of_this_thread()
        try:
            yield connection
        except ssl.SSLCertVerificationError as error:
            connection.close()
            why = untrusted(error.verify_message)
            raise StoreTemporary(f"{self.endpoint.url}: {why}", hint=hint_for(error.verify_message)) from error
        except CONNECTION_ERRORS as error:
            connection.close()
            proxy = self.endpoint.proxy()
            through = f" through the proxy {proxy.url}" if proxy is not None else ""
            why = f"{error}." if isinstance(error, AnswerRefusedError) else f"{type(error).__name__}: {error}"
            raise StoreTemporary(f"{self.endpoint.url}{through}: {why}") from error
        except BaseException:
            connection.close()
            raise
        if fresh:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return self.endpoint.connect(self.limits, by_http_proxy=True)

    def _of_this_thread(self) -> http.client.HTTPConnection:
        kept = self._kept
        if kept.connection is None or kept.process != os.getpid():  # a forked child must not share it
            kept.connection, kept.process = self._connect(), os.getpid()
            with self._lock:
                self._all[kept.connection] = kept.process
        return kept.connection

    def close(self) -> None:
        """Close the connections of all threads; their current requests fail."""
        with self._lock:
            for connection, process in list(self._all.items()):
                if process == os.getpid() and connection.sock is not None:
                    with suppress(OSError):  # otherwise closing waits for a thread that is reading
                        connection.sock.shutdown(socket.SHUT_RDWR)
                connection.close()


def _early_answer(connection: http.client.HTTPConnection, error: OSError) -> Answer:
    """Return the answer of a service that closed the connection while it was sent to, or raise ``error``."""
    try:
        answer = answer_on(connection)
    except CONNECTION_ERRORS:
        raise error from None
    if answer.status < 400:
        raise error
    return answer  # which says more than the broken pipe


def _is_spent(connected: socket.socket) -> bool:
    """Whether an idle connection was closed by the other side, or holds bytes that belong to no answer."""
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(0))


def read_json(response: Answer, limit_bytes: int = ANSWER_BYTES) -> dict[str, Any]:
    """Read a JSON answer whole.

    Raises:
        StoreTemporary: It is not a JSON object that may be read: what the request did is not known.
    """
    try:
        return json_object(response.read_whole(limit_bytes))
    except BrokenMeta as error:
        raise StoreTemporary(f"An answer was cut short, or something between changed it: {error.message}") from error


def retry_after_s(header: str | None) -> float | None:
    """Read a Retry-After header in seconds; None if there is none, or it is a date."""
    return float(header) if header is not None and re.fullmatch(r"[0-9]{1,6}", header) else None


def error_of(response: Answer, what: str) -> CkptMirrorError:
    """Read the beginning of an error answer and return the error that it means."""
    response.expect(_ERROR_LIMIT_BYTES)
    text = response.read(_ERROR_LIMIT_BYTES).decode("utf-8", "replace")
    return error_for(response.status, what, said(text), retry_after_s(response.headers.get("Retry-After")))


def said(text: str) -> str:
    """Return the service's message in the text of an error answer."""
    try:
        return str(json.loads(text)["error"]["message"])[:_SAID_LETTERS]
    except (ValueError, KeyError, TypeError, RecursionError):
        return " ".join(text[:_ERROR_LIMIT_BYTES].split())[:300]


def error_for(status: int, what: str, message: str, retry_after: float | None = None) -> CkptMirrorError:
    """Return the error that an answer's status means.

    Args:
        status: The HTTP status.
        what: The operation and the object, for the message.
        message: The service's message.
        retry_after: Its Retry-After in seconds.
    """
    text = f"{what}: {status} {message}".rstrip()
    if status in (408, 429) or status >= 500:
        error = StoreTemporary(text)
        error.retry_after_s = retry_after
        return error
    if status == 401:
        return NotAuthorised(text, hint=_LOGIN_HINT)
    if status == 403:
        role = "Viewer" if re.search(r"storage\.objects\.(get|list)\b", message) else "User"
        return NotAuthorised(text, hint=f"Give these credentials the role Storage Object {role} on the bucket.")
    if status == 404:
        if "bucket does not exist" in message.lower():
            return BucketNotFound(text)
        return ObjectNotFound(text)
    if status in (304, 409, 412):
        return PreconditionFailed(text)
    if status == 400 and re.search(r"crc32c|md5|checksum", message, re.IGNORECASE):
        return IntegrityError(text)
    if 300 <= status < 400:
        hint = f"See whether {ENDPOINT_VARIABLE}, or the variable of a proxy, names the right host."
        return StorePermanent(f"{text} (a redirect, which is never followed)", hint=hint)
    return StorePermanent(text)
