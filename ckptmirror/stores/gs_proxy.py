"""A proxy that wants a name and a password: ``HTTPS_PROXY=http://name:password@proxy:3128``.

Rules:
* What is in the variable goes to that proxy alone, in the request for the tunnel, and stands in no message.
* Name and password end at the last ``@``: what a URL would have to escape may stand there bare.
"""

from __future__ import annotations

import base64
import os
import re
from urllib.parse import quote, unquote

__all__ = ["escaped", "login_headers", "proxy_setting", "without_login"]


def proxy_setting(variable: str) -> str:
    """Return what ``HTTPS_PROXY`` or ``HTTP_PROXY`` says, however it is spelled; "" without one."""
    return os.environ.get(variable) or os.environ.get(variable.lower()) or ""


def without_login(proxy: str) -> str:
    """Return the proxy's URL without name and password."""
    scheme, _, rest = _parts(proxy)
    return scheme + rest


def escaped(proxy: str) -> str:
    """Return the proxy's URL as those read it who take URLs by the letter."""
    scheme, login, rest = _parts(proxy)
    words = ":".join(quote(unquote(word), safe="") for word in login.split(":", 1))
    return f"{scheme}{words}@{rest}" if login else proxy


def login_headers(proxy: str) -> dict[str, str]:
    """Return what tells the proxy who asks; empty where its URL has no name."""
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
