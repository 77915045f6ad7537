"""Requests to Cloud Storage over http.client: kept connections, time limits, and what each status means.

Rules:
* Each thread has its own connections, kept alive between requests; any error closes the connection.
* Every connect, send and receive has a time limit. Requests are repeated in two cases only: on a fresh connection if
  the server had closed the idle one (for requests that change nothing), and with a fresh token after a 401.
* Only :func:`error_for` turns a status into a store error.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptmirror.core.errors import (
    BucketNotFound,
    CkptMirrorError,
    ConfigError,
    IntegrityError,
    NotAuthorised,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.stores.gs_proxy import login_headers, proxy_setting, without_login
from ckptmirror.stores.gs_trust import hint_for, tls_context, untrusted

if TYPE_CHECKING:
    from ckptmirror.stores.gs_auth import Anonymous, GoogleTokens

__all__ = [
    "CONNECTION_ERRORS",
    "EMULATOR_VARIABLE",
    "ENDPOINT_VARIABLE",
    "Endpoint",
    "Limits",
    "Transport",
    "error_for",
    "error_of",
    "read_json",
    "retry_after_s",
]

CONNECTION_ERRORS = (OSError, http.client.HTTPException)
_ANSWER_LIMIT_BYTES = 64 * 1024 * 1024
_ERROR_LIMIT_BYTES = 16 * 1024
EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"  # Google's own name for it; gets no credentials
ENDPOINT_VARIABLE = "CKPTMIRROR_GCS_ENDPOINT"  # another way to the service itself; gets credentials
_LOGIN_HINT = NotAuthorised.hint


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds: to connect, and for each send and receive."""

    connect_s: float = 10.0
    io_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Scheme, host and port of the service."""

    scheme: str
    host: str
    port: int

    @classmethod
    def from_environment(cls) -> Endpoint:
        """Return the real service, or the endpoint that STORAGE_EMULATOR_HOST or CKPTMIRROR_GCS_ENDPOINT names.

        Raises:
            ConfigError: A variable cannot be understood, or both are set.
        """
        set_to = {name: text for name in (EMULATOR_VARIABLE, ENDPOINT_VARIABLE) if (text := os.environ.get(name))}
        if len(set_to) > 1:
            raise ConfigError(
                f"{EMULATOR_VARIABLE} and {ENDPOINT_VARIABLE} are both set: which is it?", hint="Unset one of them."
            )
        for name, text in set_to.items():
            return cls.parse(text, name)
        return cls("https", "storage.googleapis.com", 443)

    @classmethod
    def parse(cls, text: str, variable: str = "STORAGE_EMULATOR_HOST") -> Endpoint:
        """Read ``http://host:port``; the default scheme is http. Errors name ``variable``, the text's source."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host or parts.username is not None or re.search(r"\s", host):
            raise ConfigError(f"{variable} is not http://host:port.", hint=f"Correct {variable}.")
        return cls(parts.scheme, host, port or (443 if parts.scheme == "https" else 80))

    @property
    def url(self) -> str:
        """The endpoint as text, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = {"https": 443, "http": 80}[self.scheme] == self.port
        return f"{self.scheme}://{host}" + ("" if default else f":{self.port}")

    @property
    def is_this_machine(self) -> bool:
        """Whether requests stay on this machine."""
        return self.host in ("localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", self.host) is not None

    def connect(self, limits: Limits, *, by_http_proxy: bool = False) -> http.client.HTTPConnection:
        """Make a connection, which connects at its first request; through HTTPS_PROXY if set, or HTTP_PROXY if asked.

        A metadata server, which uses http, is never reached through a proxy.
        """
        if self.scheme == "http":
            proxy = self.proxy() if by_http_proxy else None
            if proxy is not None:
                return _ThroughProxy(proxy, self, limits.connect_s)
            return http.client.HTTPConnection(self.host, self.port, timeout=limits.connect_s)
        proxy = self.proxy()
        if proxy is None:
            return http.client.HTTPSConnection(self.host, self.port, timeout=limits.connect_s, context=tls_context())
        connection = http.client.HTTPSConnection(
            proxy.host, proxy.port, timeout=limits.connect_s, context=tls_context()
        )
        connection.set_tunnel(self.host, self.port, headers=login_headers(proxy_setting("HTTPS_PROXY")))
        return connection

    def proxy(self) -> Endpoint | None:
        """The proxy that HTTPS_PROXY or HTTP_PROXY names for this endpoint, unless NO_PROXY excludes its host.

        Raises:
            ConfigError: The variable cannot be understood.
        """
        variable = f"{self.scheme.upper()}_PROXY"
        text = without_login(proxy_setting(variable))
        if not text:
            return None
        from urllib.request import proxy_bypass

        if proxy_bypass(f"{self.host}:{self.port}" if ":" not in self.host else self.host):
            return None
        try:
            proxy = Endpoint.parse(text, variable)
            if proxy.scheme == "https":
                raise ConfigError(f"{variable} is not http://host:port: proxies over TLS are not supported.")
            return proxy
        except ConfigError as error:
            raise ConfigError(error.message, hint=f"Correct {variable}, or name {self.host} in NO_PROXY.") from error


class _ThroughProxy(http.client.HTTPConnection):
    """A connection to a proxy; its requests contain whole URLs."""

    def __init__(self, proxy: Endpoint, target: Endpoint, connect_s: float) -> None:
        super().__init__(proxy.host, proxy.port, timeout=connect_s)
        self._before = target.url

    def putrequest(self, method: str, url: str, skip_host: bool = False, skip_accept_encoding: bool = False) -> None:
        super().putrequest(method, self._before + url, skip_host, skip_accept_encoding)
        for name, value in login_headers(proxy_setting("HTTP_PROXY")).items():
            self.putheader(name, value)


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
    def get(self, target: str, headers: Mapping[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        """Lend the response to a GET, whatever its status. The caller reads it inside the ``with``.

        Raises:
            StoreTemporary: No answer came in time, or the connection broke, also inside the ``with``.
        """
        with self.connection() as connection:
            sent = {**(headers or {}), **self.tokens.headers()}
            response = self._asked(connection, target, sent)
            if response.status == 401:
                response.read(_ERROR_LIMIT_BYTES)
                self.tokens.refresh(sent)
                response = self._asked(connection, target, {**(headers or {}), **self.tokens.headers()})
            yield response
            if not response.isclosed():
                connection.close()  # unread bytes would be taken for the next answer

    def _asked(
        self, connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        reused = connection.sock is not None
        try:
            return self._ask(connection, target, headers)
        except (ConnectionResetError, BrokenPipeError):  # RemoteDisconnected is one too
            if not reused:
                raise
            connection.close()  # the server had closed the idle connection: no answer came, and nothing changed
            return self._ask(connection, target, headers)

    def _ask(
        self, connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        self.open(connection)
        connection.request("GET", target, headers=dict(headers))
        return connection.getresponse()

    def open(self, connection: http.client.HTTPConnection) -> None:
        """Connect if necessary, and set the time limit of the requests."""
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
            text = f"{self.endpoint.url}{through}: {type(error).__name__}: {error}"
            raise StoreTemporary(text) from error
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


def read_json(response: http.client.HTTPResponse) -> dict[str, Any]:
    """Read a JSON answer whole.

    Raises:
        StoreTemporary: It is cut short, too long, or not a JSON object: what the request did is not known.
    """
    data = response.read(_ANSWER_LIMIT_BYTES)
    if response.length:
        raise StoreTemporary(f"An answer was cut {response.length} bytes short.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreTemporary("An answer is not JSON: it was cut short, or something between changed it.") from error
    if not isinstance(value, dict):
        raise StoreTemporary("An answer is not a JSON object.")
    return value


def retry_after_s(header: str | None) -> float | None:
    """Read a Retry-After header in seconds; None if there is none, or it is a date."""
    return float(header) if header is not None and re.fullmatch(r"[0-9]{1,6}", header) else None


def error_of(response: http.client.HTTPResponse, what: str) -> CkptMirrorError:
    """Read an error answer and return the error that it means."""
    text = response.read(_ERROR_LIMIT_BYTES).decode("utf-8", "replace")
    return error_for(response.status, what, _message(text), retry_after_s(response.headers.get("Retry-After")))


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return " ".join(text.split())[:300]


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
    return StorePermanent(text)
