"""Which servers are trusted: the certificates that the usual variables name, the same for both ways we talk.

Rules:
* ``REQUESTS_CA_BUNDLE``, ``CURL_CA_BUNDLE``, ``SSL_CERT_FILE``: the first that is set says it all, for our own requests
  and for the client library's. Each alone would reach one of the two: OpenSSL reads the last, ``requests`` the others.
* Without one the system's certificates count; where it has none at all, those that ``requests`` brings.
* A context is made once: to read the certificates is most of what a connection costs.
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
    """Return the context of every TLS connection of ours.

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
    """Say that a server's certificate is not trusted, and who said what is."""
    named = _named()
    by = f"{named[0]}={named[1]}" if named else "the system's certificates"
    return f"its certificate is not trusted by {by}: {why}."


def hint_for(why: str) -> str:
    """Say what to do about it: of a certificate that is valid at another time than this machine says it is, too."""
    if not re.search("certificate (has expired|is not yet valid)", why):
        return UNTRUSTED_HINT
    today = datetime.now(UTC).date().isoformat()
    return f"This machine's clock says {today}: set it if that is wrong; if it is right, renew the certificate."
