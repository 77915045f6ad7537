"""Credentials for Cloud Storage: loaded at the first request, refreshed by one thread at a time.

Rules:
* Credentials are loaded at the first request, not when a mirror is opened.
* A refused token is replaced once, no matter how many threads got the refusal.
* A queue of uploads lives for days: if a refresh cannot reach the token service, that is temporary; if it is refused,
  that is permanent.
* The answer of a token service has the limits of any other (``gs_answer``). A token is visible ASCII of bounded length.
* An emulator gets no credentials unless the caller passes them or asks for them.
* Every error about credentials is one sentence that names the file, the account or the service.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.message import Message
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from ckptmirror.core.errors import ConfigError, NotAuthorised, StoreTemporary
from ckptmirror.stores.gs_endpoint import CONNECTION_ERRORS, Endpoint, Limits, answer_on
from ckptmirror.stores.own_random import draw_apart

__all__ = ["CREDENTIALS_VARIABLE", "Anonymous", "GoogleTokens", "credentials_for_client", "token_errors", "tokens_for"]

CREDENTIALS_VARIABLE = "CKPTMIRROR_GCS_CREDENTIALS"
_FILE_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_FILE_LIMIT_BYTES = 1024 * 1024
_SAID_LETTERS = 300
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_LOGIN_HINT = "Log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS."
_PATH = re.compile(r"[^\x00-\x1f{}]{1,4095}")
_WORD = re.compile(r"[a-z]{1,16}")  # what else a variable holds may be a key, and is not repeated
_FILE_HINT = f"{_FILE_VARIABLE} names the file of a key."
_NONE_HINT = f"{_LOGIN_HINT} A public bucket needs none: set {CREDENTIALS_VARIABLE}=anonymous."
_TOKEN_TIMEOUT_S = 30.0
_TOKEN = re.compile(r"[!-~]{1,16384}")


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
    """Turn an error of google.auth in the body into the store error that it means."""
    from google.auth import exceptions

    try:
        yield
    except exceptions.DefaultCredentialsError as error:
        raise NotAuthorised(f"No credentials for Google Cloud were found: {_said(error)}", hint=_NONE_HINT) from error
    except exceptions.TransportError as error:
        raise StoreTemporary(f"The token service does not answer: {_said(error)}") from error
    except exceptions.GoogleAuthError as error:
        if getattr(error, "retryable", False):
            raise StoreTemporary(f"The token service is busy: {_said(error)}") from error
        raise NotAuthorised(f"The credentials were refused: {_said(error)}", hint=_LOGIN_HINT) from error


def _said(error: Exception) -> str:
    """Return the text of a google.auth error in one line, with the service's message that it carries as JSON."""
    words = [str(error.args[0])] if error.args else [type(error).__name__]
    for more in error.args[1:]:
        try:
            body = json.loads(more) if isinstance(more, str | bytes) else more
            detail = body["error"]["message"] if isinstance(body["error"], dict) else body.get("error_description", "")
            words.append(str(detail))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            words.append("" if isinstance(more, BaseException) else str(more))
    found = dict.fromkeys(" ".join(word.split()).rstrip(".")[:_SAID_LETTERS] for word in words)
    first, *others = [word for word in found if word] or [type(error).__name__]
    return ": ".join([first, *(other for other in others if other not in first)]) + "."


class GoogleTokens:
    """Tokens of google.auth credentials: those of the caller, or the application default ones."""

    def __init__(self, credentials: Any = None) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()

    def headers(self) -> dict[str, str]:
        """Return the headers that authorise a request now."""
        with self._lock, token_errors():
            if self._credentials is None:
                self._credentials = _default_credentials()
            if not self._credentials.token or self._credentials.expired:
                self._replace_token()
            headers: dict[str, str] = {}
            self._credentials.apply(headers)
            return {name.title(): value for name, value in headers.items()}

    def refresh(self, refused: Mapping[str, str]) -> None:
        """Get a new token in place of the refused one, unless another thread has done so already.

        Raises:
            NotAuthorised: No other token can be had.
        """
        with self._lock, token_errors():
            if refused.get("Authorization") == f"Bearer {self._credentials.token}":
                self._replace_token()

    def _replace_token(self) -> None:
        try:
            self._credentials.refresh(_request_token)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # What google.auth raises where an answer has another form. Its text may contain the token.
            self._credentials.token = None
            why = f"The answer of the token service cannot be read ({type(error).__name__})."
            raise StoreTemporary(why) from error
        token = self._credentials.token
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            self._credentials.token = None
            raise StoreTemporary("The token service gave no token that could be sent.")


def tokens_for(credentials: Any, *, is_emulator: bool) -> Anonymous | GoogleTokens:
    """Return the tokens of a store.

    Args:
        credentials: google.auth credentials of the caller; None for those that the environment names.
        is_emulator: Whether the endpoint gets no credentials unless the caller asks for them.

    Raises:
        ConfigError: CKPTMIRROR_GCS_CREDENTIALS is neither ``default`` nor ``anonymous``.
    """
    if credentials is not None:
        is_anonymous = type(credentials).__name__ == "AnonymousCredentials"
        return Anonymous() if is_anonymous else GoogleTokens(credentials)
    wanted = os.environ.get(CREDENTIALS_VARIABLE) or ("anonymous" if is_emulator else "default")
    if wanted not in ("default", "anonymous"):
        shown = f"={wanted}" if _WORD.fullmatch(wanted) else ", as it is,"
        raise ConfigError(
            f"{CREDENTIALS_VARIABLE}{shown} is not understood.", hint=f"It is default or anonymous. {_FILE_HINT}"
        )
    return Anonymous() if wanted == "anonymous" else GoogleTokens()


def _default_credentials() -> Any:
    """Find the application default credentials.

    The file is read here, not by ``google.auth.default``, which would also look up its project by running gcloud or
    over the network. We do not need the project.
    """
    import google.auth

    _draw_apart()
    named = os.environ.get(_FILE_VARIABLE)
    if named and not _PATH.fullmatch(named):
        raise ConfigError(
            f"{_FILE_VARIABLE} is not the path of a file.", hint=f"{_FILE_HINT} The key itself does not fit."
        )
    path = Path(named) if named else _login_path()
    if named or os.path.isfile(path):  # noqa: PTH113 - Path's raises where the home may not be searched
        return _credentials_of(path, f"{_FILE_VARIABLE} names" if named else "The login is in")
    credentials, _ = google.auth.default(scopes=[_SCOPE], request=_request_token)
    return credentials


def _draw_apart() -> None:
    """Let google.auth draw its delays from a generator of its own, from its first request on."""
    with suppress(ImportError):
        import_module("google.auth._exponential_backoff")  # it imports that once it asks
    draw_apart()


def _login_path() -> Path:
    """Return the path of the file that ``gcloud auth application-default login`` writes."""
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")  # noqa: PTH111 - never raises
    return Path(folder) / "application_default_credentials.json"


def _credentials_of(path: Path, where: str) -> Any:
    import warnings

    import google.auth
    from google.auth.credentials import with_scopes_if_required
    from google.auth.exceptions import GoogleAuthError

    try:
        with path.open("rb") as file:
            info = json.loads(file.read(_FILE_LIMIT_BYTES))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it warns about files from untrusted sources
            load: Any = google.auth.load_credentials_from_dict
            found, _ = load(info, request=_request_token)
        with_scopes: Any = with_scopes_if_required
        return with_scopes(found, [_SCOPE])  # a user's login keeps its own scopes
    except OSError as error:
        why = f"which cannot be read: {error.strerror or error}"
    except GoogleAuthError as error:
        why = f"which holds no credentials: {_said(error).rstrip('.')}"
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        why = f"which holds no credentials: {type(error).__name__}: {str(error)[:_SAID_LETTERS]}"
    raise NotAuthorised(f"{where} {path}, {why}.", hint=_LOGIN_HINT)


class _TokenAnswer:
    """An answer in the form that google.auth expects; header names are compared without case."""

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

    try:
        parts = urlsplit(url)
        endpoint = Endpoint.parse(f"{parts.scheme}://{parts.netloc}")
    except (ConfigError, ValueError) as error:
        where = re.split(r"[?#]", url)[0].rpartition("@")[2][:_SAID_LETTERS]
        said = f"The credentials name a token service {where!a}, which is not http://host:port."
        raise NotAuthorised(said, hint=_LOGIN_HINT) from error
    limit_s = min(timeout or _TOKEN_TIMEOUT_S, _TOKEN_TIMEOUT_S)
    connection = endpoint.connect(Limits(limit_s, limit_s))
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(method, target, body=body, headers=dict(headers or {}))
        response = answer_on(connection)
        return _TokenAnswer(response.status, response.headers, response.read_whole())
    except CONNECTION_ERRORS as error:
        raise TransportError(f"{parts.netloc}: {error}") from error  # type: ignore[no-untyped-call,unused-ignore]
    finally:
        connection.close()


# google.auth's own transport imports requests, which takes a quarter of a verb's time to its first request.
_request_token: Any = _ask_token_service


class _Sent(threading.local):
    """The headers that a thread sent last."""

    headers: Mapping[str, str] = MappingProxyType({})


def credentials_for_client(tokens: Anonymous | GoogleTokens) -> Any:
    """Return credentials for the client library that share our tokens, and the lock around their refresh."""
    from google.auth.credentials import AnonymousCredentials, Credentials

    if isinstance(tokens, Anonymous):
        return AnonymousCredentials()  # type: ignore[no-untyped-call,unused-ignore]

    sent = _Sent()

    class SharedCredentials(Credentials):  # type: ignore[misc,unused-ignore]
        """Credentials that use our tokens."""

        def before_request(self, request: object, method: str, url: str, headers: dict[str, str]) -> None:
            del request, method, url
            sent.headers = tokens.headers()
            headers.update({name.lower(): value for name, value in sent.headers.items()})

        def refresh(self, request: object) -> None:
            del request
            tokens.refresh(sent.headers)

    return SharedCredentials()  # type: ignore[no-untyped-call,unused-ignore]
