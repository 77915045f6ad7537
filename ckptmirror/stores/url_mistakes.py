"""What somebody meant who wrote a mirror's URL wrong: the nearest URL that is right.

Rules:
* A guess is shown, never used: it may be another bucket.
* What could be a secret (a user, a query) is no part of a guess.
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
    """Whether this is the page or the object that a browser shows of a bucket, not the bucket."""
    scheme, _, rest = url.strip().partition("://")
    host = rest.partition("/")[0].rpartition("@")[2].lower()
    return scheme.lower() in ("http", "https") and (host in _WEB_HOSTS or host.endswith("." + _WEB_HOSTS[0]))


def nearest_urls(url: str) -> list[str]:
    """Return what may have been meant, likeliest first; not all of it need be a URL that can be used."""
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
    if scheme == "file":
        return ["file:///" + _tidy(rest)]
    host, _, prefix = rest.lstrip("/").partition("/")
    host = host.rpartition("@")[2]
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
