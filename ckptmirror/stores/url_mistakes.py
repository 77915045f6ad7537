"""Suggestions for a mistyped mirror URL: the nearest valid ones.

Rules:
* A suggestion is shown, never used: it may be another bucket.
* A suggestion never contains what could be a secret (a user, a query).
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

__all__ = ["is_web_address", "nearest_urls"]

_WEB_HOSTS = (
    *("storage.googleapis.com", "www.googleapis.com"),
    *("storage.cloud.google.com", "console.cloud.google.com"),
)
_API_PATH = re.compile(r"((download|upload)/)?storage/v1/b/(?P<bucket>[^/]+)(/o(/(?P<name>.*))?)?")
_WRITTEN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)(?P<mark>:/*|/{2,})(?P<rest>.*)", re.DOTALL)


def is_web_address(url: str) -> bool:
    """Whether this is the web address of a bucket's page or object, not the bucket's URL."""
    scheme, _, rest = url.strip().partition("://")
    host = rest.partition("/")[0].rpartition("@")[2].lower()
    return scheme.lower() in ("http", "https") and (host in _WEB_HOSTS or host.endswith("." + _WEB_HOSTS[0]))


def nearest_urls(url: str) -> list[str]:
    """Return what the user may have meant, likeliest first; some of them may not be usable URLs."""
    text = url.strip()
    if not text or "\\" in text:
        return []
    if is_web_address(text):
        return [_bucket_of(text)]
    written = _WRITTEN.fullmatch(text)
    if written is None:
        path = os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  (made short, not looked at)
        is_path = text.startswith((".", "~"))
        return ["file://" + path] if is_path else ["gs://" + _tidy(text), "file://" + path]
    scheme, rest = written["scheme"].lower(), re.split(r"[?#]", written["rest"])[0]
    rest, is_path = rest.lstrip("/"), scheme == "file" and rest.startswith("/")
    host, _, prefix = rest.partition("/")
    host = host if is_path else host.rpartition("@")[2]
    if scheme == "file":
        return ["file:///" + _tidy(f"{host}/{prefix}")]
    tidy = _tidy(f"{host}/{prefix}")
    lower = _tidy(f"{host.lower()}/{prefix}")
    return [f"{scheme}://{one}" for one in dict.fromkeys((tidy, lower))]


def _tidy(path: str) -> str:
    return "/".join(part for part in path.split("/") if part and part != ".").strip()


def _bucket_of(address: str) -> str:
    host, _, path = re.split(r"[?#]", address.partition("://")[2])[0].partition("/")
    host = host.rpartition("@")[2].partition(":")[0].lower()
    bucket = host.removesuffix(_WEB_HOSTS[0]).rstrip(".") if host not in _WEB_HOSTS else ""
    own = _tidy(path).removeprefix("storage/browser/")
    if of_the_api := _API_PATH.fullmatch(own):
        own = f"{of_the_api['bucket']}/{of_the_api['name'] or ''}"
    return "gs://" + _tidy(unquote(f"{bucket}/{own}"))
