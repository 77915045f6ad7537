"""Credentials for Cloud Storage: found late, refreshed by one thread at a time.

Rules:
* Credentials are looked for at the first request, not when a mirror is opened.
* A token that was refused is replaced once, however many threads met the refusal.
* A queue lives for days: a refresh that could not reach the token service is temporary, one that was refused is not.
* Against an emulator nobody's credentials are sent unless they were passed on purpose.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from ckptmirror.core.errors import NotAuthorised, StoreTemporary

__all__ = ["Anonymous", "GoogleTokens", "credentials_for_client", "token_errors"]

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_LOGIN_HINT = "Log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS."
_TOKEN_TIMEOUT_S = 30.0


class Anonymous:
    """No credentials: public buckets and emulators."""

    def headers(self) -> dict[str, str]:
        """Nothing."""
        return {}

    def refresh(self, refused: Mapping[str, str]) -> None:
        """Raise: there is nothing to refresh."""
        del refused
        raise NotAuthorised("The mirror wants credentials, and this store was opened without any.", hint=_LOGIN_HINT)


@contextmanager
def token_errors() -> Iterator[None]:
    """Turn an error of google.auth in the body into the one that it means."""
    from google.auth import exceptions

    try:
        yield
    except exceptions.DefaultCredentialsError as error:
        raise NotAuthorised(f"No credentials for Google Cloud were found: {error}", hint=_LOGIN_HINT) from error
    except exceptions.TransportError as error:
        raise StoreTemporary(f"The token service does not answer: {error}") from error
    except exceptions.GoogleAuthError as error:
        if getattr(error, "retryable", False):
            raise StoreTemporary(f"The token service is busy: {error}") from error
        raise NotAuthorised(f"The credentials were refused: {error}", hint=_LOGIN_HINT) from error


class GoogleTokens:
    """Tokens of google.auth credentials: those passed, or the application default ones."""

    def __init__(self, credentials: Any = None) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()

    def headers(self) -> dict[str, str]:
        """See :meth:`Tokens.headers`."""
        with self._lock, token_errors():
            if self._credentials is None:
                self._credentials = _default_credentials()
            if not self._credentials.token or self._credentials.expired:
                self._credentials.refresh(_request_token)
            headers: dict[str, str] = {}
            self._credentials.apply(headers)
            return {name.title(): value for name, value in headers.items()}

    def refresh(self, refused: Mapping[str, str]) -> None:
        """See :meth:`Tokens.refresh`."""
        with self._lock, token_errors():
            if refused.get("Authorization") == f"Bearer {self._credentials.token}":
                self._credentials.refresh(_request_token)


def _default_credentials() -> Any:
    import google.auth

    credentials, _ = google.auth.default(scopes=[_SCOPE], request=_request_token)
    return credentials


class _TokenAnswer:
    """What google.auth expects of an answer; its header names are compared without case."""

    def __init__(self, status: int, headers: Message, data: bytes) -> None:
        self.status = status
        self.headers = headers
        self.data = data


def _ask_token_service(
    url: str,
    method: str = "GET",
    body: bytes | str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **_: object,
) -> _TokenAnswer:
    from google.auth.exceptions import TransportError

    from ckptmirror.stores.gs_http import CONNECTION_ERRORS, Endpoint, Limits

    parts = urlsplit(url)
    limit_s = min(timeout or _TOKEN_TIMEOUT_S, _TOKEN_TIMEOUT_S)
    connection = Endpoint.parse(f"{parts.scheme}://{parts.netloc}").connect(Limits(limit_s, limit_s))
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(method, target, body=body, headers=dict(headers or {}))
        response = connection.getresponse()
        return _TokenAnswer(response.status, response.headers, response.read(1024 * 1024))
    except CONNECTION_ERRORS as error:
        raise TransportError(f"{parts.netloc}: {error}") from error  # type: ignore[no-untyped-call,unused-ignore]
    finally:
        connection.close()


# google.auth's own transport imports requests, which would cost a verb a quarter of its time to the first request.
_request_token: Any = _ask_token_service


class _Sent(threading.local):
    """What a thread sent last."""

    headers: Mapping[str, str] = MappingProxyType({})


def credentials_for_client(tokens: Anonymous | GoogleTokens) -> Any:
    """Return credentials for the client library that share our tokens, and the lock around their refresh."""
    from google.auth.credentials import AnonymousCredentials, Credentials

    if isinstance(tokens, Anonymous):
        return AnonymousCredentials()  # type: ignore[no-untyped-call,unused-ignore]

    sent = _Sent()

    class SharedCredentials(Credentials):  # type: ignore[misc,unused-ignore]
        """Credentials that ask our tokens."""

        def before_request(self, request: object, method: str, url: str, headers: dict[str, str]) -> None:
            del request, method, url
            sent.headers = tokens.headers()
            headers.update({name.lower(): value for name, value in sent.headers.items()})

        def refresh(self, request: object) -> None:
            del request
            tokens.refresh(sent.headers)

    return SharedCredentials()  # type: ignore[no-untyped-call,unused-ignore]
