"""The certificates that are trusted: the same for our own requests and for the client library's.

Rules:
* ``REQUESTS_CA_BUNDLE``, ``CURL_CA_BUNDLE``, ``SSL_CERT_FILE``: the first that is set counts, for our own requests and
  for the client library's. By themselves OpenSSL would read only the last, and ``requests`` only the other two.
* Without any of them the system's certificates count; if it has none at all, those that ``requests`` includes.
* A context is created once, because reading the certificates is most of the cost of a connection.
"""

from __future__ import annotations

import os
import re
import ssl
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from ckptmirror.core.errors import ConfigError

__all__ = ["CA_VARIABLES", "UNTRUSTED_HINT", "ca_bundle", "hint_for", "tls_context", "untrusted"]

CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
UNTRUSTED_HINT = f"Set {CA_VARIABLES[0]} to a file with the certificate that signed the server's."


def _named() -> tuple[str, str] | None:
    return next(((name, os.environ[name]) for name in CA_VARIABLES if os.environ.get(name)), None)


def ca_bundle() -> str | None:
    """Return the file or directory of certificates that a variable names; None if none does.

    Raises:
        ConfigError: It does not exist.
    """
    named = _named()
    if named is None:
        return None
    variable, path = named
    if not Path(path).exists():
        raise ConfigError(f"{variable} names {path}, and there is no such file.", hint=f"Correct or unset {variable}.")
    return path


def tls_context() -> ssl.SSLContext:
    """Return the context for all our TLS connections.

    Raises:
        ConfigError: The certificates that a variable names cannot be read.
    """
    return _context(ca_bundle(), os.environ.get("SSL_CERT_DIR"))


@lru_cache(maxsize=4)
def _context(bundle: str | None, _directory: str | None) -> ssl.SSLContext:
    if bundle is None:
        paths = ssl.get_default_verify_paths()
        if paths.cafile is None and paths.capath is None:
            import certifi

            return ssl.create_default_context(cafile=certifi.where())
        return ssl.create_default_context()
    try:
        if Path(bundle).is_dir():
            return ssl.create_default_context(capath=bundle)
        return ssl.create_default_context(cafile=bundle)
    except OSError as error:  # ssl.SSLError is one too
        named = _named()
        variable = named[0] if named else CA_VARIABLES[0]
        why = "holds no certificate" if isinstance(error, ssl.SSLError) else f"cannot be read: {error.strerror}"
        raise ConfigError(f"{variable} names {bundle}, which {why}.", hint=f"Correct or unset {variable}.") from error


def untrusted(why: str) -> str:
    """Return a text that a server's certificate is not trusted, and by which certificates."""
    named = _named()
    by = f"{named[0]}={named[1]}" if named else "the system's certificates"
    return f"its certificate is not trusted by {by}: {why}."


def hint_for(why: str) -> str:
    """Return what to do about it, also for a certificate that is expired or not yet valid by this machine's clock."""
    if not re.search("certificate (has expired|is not yet valid)", why):
        return UNTRUSTED_HINT
    today = datetime.now(UTC).date().isoformat()
    return f"This machine's clock says {today}: set it if that is wrong; if it is right, renew the certificate."
