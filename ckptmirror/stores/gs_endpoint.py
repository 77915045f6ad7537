"""Where the service is, and how it is reached: its endpoint, proxies, certificates, and time limits.

Rules:
* Every connect, send and receive has a time limit, and every answer has limits of its own (``gs_answer``).
* A connection leads to one endpoint, directly or through the proxy that the environment names for it.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from ckptmirror.core.errors import ConfigError
from ckptmirror.stores.gs_answer import Answer, Pace
from ckptmirror.stores.gs_proxy import login_headers, proxy_setting, without_login
from ckptmirror.stores.gs_trust import tls_context

__all__ = ["CONNECTION_ERRORS", "EMULATOR_VARIABLE", "ENDPOINT_VARIABLE", "Endpoint", "Limits", "answer_on"]

CONNECTION_ERRORS = (OSError, http.client.HTTPException)
EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"  # Google's own name for it; gets no credentials
ENDPOINT_VARIABLE = "CKPTMIRROR_GCS_ENDPOINT"  # another way to the service itself; gets credentials


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds: to connect, and for each send and receive. Tests pass their own clock."""

    connect_s: float = 10.0
    io_s: float = 60.0
    clock: Callable[[], float] = time.monotonic

    def answer(self, connected: socket.socket, debuglevel: int = 0, method: str | None = None) -> Answer:
        """Return the answer, not yet received, to a request that was sent with ``method``."""
        return Answer(connected, debuglevel, method, pace=Pace(self.io_s, self.clock))


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
        connection = self._connection(limits.connect_s, by_http_proxy=by_http_proxy)
        connection.response_class = limits.answer  # type: ignore[assignment]
        return connection

    def _connection(self, connect_s: float, *, by_http_proxy: bool) -> http.client.HTTPConnection:
        if self.scheme == "http":
            proxy = self.proxy() if by_http_proxy else None
            if proxy is not None:
                return _ThroughProxy(proxy, self, connect_s)
            return http.client.HTTPConnection(self.host, self.port, timeout=connect_s)
        proxy = self.proxy()
        if proxy is None:
            return http.client.HTTPSConnection(self.host, self.port, timeout=connect_s, context=tls_context())
        connection = http.client.HTTPSConnection(proxy.host, proxy.port, timeout=connect_s, context=tls_context())
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


def answer_on(connection: http.client.HTTPConnection) -> Answer:
    """Return the answer to the request that was sent on a connection of :meth:`Endpoint.connect`."""
    answer = connection.getresponse()
    assert isinstance(answer, Answer)
    return answer
