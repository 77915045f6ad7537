"""Lists everything below a directory of an fsspec file system, or fails.

Rules:
* fsspec's own ``find`` treats a directory that it could not list as empty, so a mirror that does not answer would look
  like one without saves. If a file system does not override it, the directories are listed here, one by one.
* A directory that does not exist is empty.
"""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["find"]


def find(fs: Any, top: str, begin: str) -> dict[str, Any]:
    """Return path -> info of every file below ``top``; if the file system can filter, only names that begin so.

    Raises:
        OSError: A directory cannot be listed. A file system may raise other exceptions then.
    """
    if _skips_errors(fs):
        return _listed(fs, top)
    chosen = {"prefix": begin} if begin and "prefix" in _parameters(fs) else {}
    try:
        return dict(fs.find(top, detail=True, withdirs=False, **chosen))
    except FileNotFoundError:
        return {}


def _skips_errors(fs: Any) -> bool:
    """Whether a file system uses fsspec's own ``find``, which skips errors."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if fs.async_impl:
        return getattr(type(fs), "_find", None) is AsyncFileSystem._find
    return type(fs).find is AbstractFileSystem.find


def _listed(fs: Any, top: str) -> dict[str, Any]:
    """List a directory before those in it."""
    found: dict[str, Any] = {}
    directories = [top]
    for directory in directories:  # the list grows meanwhile
        try:
            entries = fs.ls(directory, detail=True)
        except FileNotFoundError:  # not created yet, or already removed
            continue
        for entry in entries:
            path = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                found[path] = entry
            elif path.strip("/") != directory.strip("/"):  # some list a directory in itself
                directories.append(path)
    return found


def _parameters(fs: Any) -> Any:
    """Return the parameters of the listing behind ``find``, which passes on all its arguments."""
    return inspect.signature(getattr(fs, "_find", fs.find)).parameters
