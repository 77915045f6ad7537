"""Mirrors: one file per URL scheme, and decorators around the one interface (:mod:`ckptmirror.stores.base`).

Rules:
* A store's file declares ``SCHEMES``, ``normalise(url)`` and ``open(url)``; adding a store is adding one file.
  ``SCHEMES = ("*",)`` takes every scheme that no other file claims.
* A store's file is imported at the first use of its scheme, so that a verb pays only for the mirrors that it uses.
* URLs are compared after :func:`normalise_url`, and never carry credentials.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from types import ModuleType

from ckptmirror.core.errors import ConfigError, StoreTemporary
from ckptmirror.core.events import EventBus
from ckptmirror.stores.base import Store

__all__ = ["normalise_url", "open_store"]

_SEVERAL = re.compile(r"[\s,;][A-Za-z][A-Za-z0-9+.-]*://")


def open_store(
    url: str,
    *,
    retry: bool = True,
    bytes_per_s: float | None = None,
    requests_per_s: float | None = None,
    bus: EventBus | None = None,
    on_wait: Callable[[str, float, StoreTemporary], None] | None = None,
) -> Store:
    """Open the mirror at ``url``. No request is sent before its first use.

    Args:
        url: ``gs://bucket/prefix``, ``file:///directory`` (or the directory's absolute path), ``memory://name``, or a
            URL that fsspec knows (``s3://bucket/prefix``; ``gcsfs+gs://bucket/prefix`` for gcsfs).
        retry: Retry temporary errors for two minutes, or for ``CKPTMIRROR_RETRY_S`` seconds (``RetryingStore``).
        bytes_per_s: Limit of uploads and downloads together (``ThrottledStore``).
        requests_per_s: Limit of calls of any kind.
        bus: Gets an event for every call (``ObservedStore``).
        on_wait: Called before each wait for the next try, with the URL, the seconds, and the reason.

    Raises:
        ConfigError: The URL is not understood, a limit is not above 0, or ``CKPTMIRROR_RETRY_S`` is not a number.
    """
    module, normalised = _understood(url)
    store: Store = module.open(normalised)
    if store.local_directory is not None:
        from ckptmirror.stores.hang_guarded import HangGuardedStore

        store = HangGuardedStore(store, store.local_directory)
    if bus is not None:
        from ckptmirror.stores.observed import ObservedStore

        store = ObservedStore(store, bus)
    if bytes_per_s is not None or requests_per_s is not None:
        from ckptmirror.stores.throttled import ThrottledStore

        store = ThrottledStore(store, bytes_per_s=bytes_per_s, requests_per_s=requests_per_s)
    if retry:
        from ckptmirror.stores.retrying import RetryingStore, total_s_of_environment

        return RetryingStore(store, total_s=total_s_of_environment(), on_wait=on_wait)
    return store


def normalise_url(url: str) -> str:
    """Return the one way to write this mirror's URL.

    Raises:
        ConfigError: The URL is not understood, or carries what could be a secret.
    """
    return _understood(url)[1]


def _understood(url: str) -> tuple[ModuleType, str]:
    """Return the scheme's module and the normalised URL. The hint of an error shows the nearest valid URL."""
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", url.strip()):  # blanks around it have a hint of their own
        raise ConfigError(f"{url!a} has characters that no mirror's URL has.", hint="For example gs://bucket/prefix.")
    if _SEVERAL.search(url.strip()):
        hint = 'Give each by itself: mirrors=["gs://one/run", "gs://two/run"], or with a comma in CKPTMIRROR_MIRRORS.'
        raise ConfigError("These are several URLs in one.", hint=hint)
    try:
        return _read(url)
    except ConfigError as error:
        from ckptmirror.stores.url_mistakes import nearest_urls

        right = [near for near in nearest_urls(url) if near != url and _can_be_used(near)]
        if right:
            error.hint = f"Write {' or '.join(right)}."
        raise


def _read(url: str) -> tuple[ModuleType, str]:
    if url.strip() != url:
        raise ConfigError("A mirror's URL must not have blanks around it.")
    if url.partition("://")[0].lower() in ("http", "https"):
        from ckptmirror.stores.url_mistakes import is_web_address

        if is_web_address(url):
            raise ConfigError("A bucket's web address is not a mirror.")
    module = _module_for(url)
    return module, str(module.normalise(_with_scheme(url)))


def _can_be_used(url: str) -> bool:
    try:
        _read(url)
    except ConfigError:
        return False
    return True


def _with_scheme(url: str) -> str:
    """An absolute path is a ``file://`` mirror; a scheme is lower case."""
    if url.startswith("/"):
        from urllib.parse import quote

        return "file://" + quote(url)
    scheme, separator, rest = url.partition("://")
    return scheme.lower() + separator + rest


def _module_for(url: str) -> ModuleType:
    scheme, separator, _ = _with_scheme(url).partition("://")
    if not separator or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        shown = "A mirror" if "@" in url else repr(url)  # a password may come before the @
        raise ConfigError(f"{shown} is not a URL or an absolute path.", hint="For example gs://bucket/prefix.")
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    rest_last = sorted(names, key=lambda name: name != scheme)  # try the file named like the scheme first
    for wanted in (scheme, "*"):
        for name in rest_last:
            module = importlib.import_module(f"{__name__}.{name}")
            if wanted in getattr(module, "SCHEMES", ()):
                return module
    raise ConfigError(f"There is no store for {scheme}:// URLs.", hint="Use gs:// or file://.")
