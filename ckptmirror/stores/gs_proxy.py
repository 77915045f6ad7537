"""A proxy that wants a name and a password: ``HTTPS_PROXY=http://name:password@proxy:3128``.

Rules:
* What is in the variable goes to that proxy alone, in the request for the tunnel, and stands in no message.
"""

from __future__ import annotations

import base64
import os
from urllib.parse import unquote

__all__ = ["login_headers", "proxy_setting", "without_login"]


def proxy_setting(variable: str) -> str:
    """Return what ``HTTPS_PROXY`` or ``HTTP_PROXY`` says, however it is spelled; "" without one."""
    return os.environ.get(variable) or os.environ.get(variable.lower()) or ""


def without_login(proxy: str) -> str:
    """Return the proxy's URL without name and password."""
    scheme, separator, rest = proxy.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def login_headers(proxy: str) -> dict[str, str]:
    """Return what tells the proxy who asks; empty where its URL has no name."""
    login = proxy.rpartition("://")[2].rpartition("@")[0]
    if not login:
        return {}
    return {"Proxy-Authorization": f"Basic {base64.b64encode(unquote(login).encode()).decode()}"}
