"""A proxy that needs a name and a password: ``HTTPS_PROXY=http://name:password@proxy:3128``.

Rules:
* Name and password are sent only to that proxy, in the request for the tunnel. No message contains them.
* Name and password end at the last ``@``; characters that a URL would have to escape may be written unescaped.
"""

from __future__ import annotations

import base64
import os
import re
from urllib.parse import quote, unquote

__all__ = ["escaped", "login_headers", "proxy_setting", "without_login"]


def proxy_setting(variable: str) -> str:
    """Return the value of ``HTTPS_PROXY`` or ``HTTP_PROXY``, in upper or lower case; "" if it is not set."""
    return os.environ.get(variable) or os.environ.get(variable.lower()) or ""


def without_login(proxy: str) -> str:
    """Return the proxy's URL without name and password."""
    scheme, _, rest = _parts(proxy)
    return scheme + rest


def escaped(proxy: str) -> str:
    """Return the proxy's URL with name and password percent-encoded, for strict parsers."""
    scheme, login, rest = _parts(proxy)
    words = ":".join(quote(unquote(word), safe="") for word in login.split(":", 1))
    return f"{scheme}{words}@{rest}" if login else proxy


def login_headers(proxy: str) -> dict[str, str]:
    """Return the headers with the proxy's login; empty if its URL has no name."""
    _, login, _ = _parts(proxy)
    if not login:
        return {}
    return {"Proxy-Authorization": f"Basic {base64.b64encode(unquote(login).encode()).decode()}"}


def _parts(proxy: str) -> tuple[str, str, str]:
    """Return the scheme with its slashes, name and password, and what follows the ``@``."""
    found = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", proxy)
    scheme = found[0] if found else ""
    login, _, rest = proxy[len(scheme) :].rpartition("@")
    return scheme, login, rest
