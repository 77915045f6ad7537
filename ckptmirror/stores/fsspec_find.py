"""What lies below a directory of a file system of fsspec, or an error.

Rules:
* fsspec's own ``find`` takes a directory that could not be listed for an empty one, and so would a mirror that does not
  answer be taken for one without saves. Where it is not overridden, the directories are listed here, one by one.
* A directory that is not there holds nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["find"]


def find(fs: Any, top: str, begin: str) -> dict[str, Any]:
    """Return path -> info of every file below ``top``; where the file system can choose, of those that begin so.

    Raises:
        OSError: Some directory cannot be listed; or whatever else the file system raises then.
    """
    if _passes_over_errors(fs):
        return _listed(fs, top)
    chosen = {"prefix": begin} if begin and "prefix" in _parameters(fs) else {}
    try:
        return dict(fs.find(top, detail=True, withdirs=False, **chosen))
    except FileNotFoundError:
        return {}


def _passes_over_errors(fs: Any) -> bool:
    """Whether the ``find`` of a file system is fsspec's own."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if fs.async_impl:
        return getattr(type(fs), "_find", None) is AsyncFileSystem._find
    return type(fs).find is AbstractFileSystem.find


def _listed(fs: Any, top: str) -> dict[str, Any]:
    """List a directory before those in it."""
    found: dict[str, Any] = {}
    directories = [top]
    for directory in directories:  # which grows meanwhile
        try:
            entries = fs.ls(directory, detail=True)
        except FileNotFoundError:  # not there yet, or no more
            continue
        for entry in entries:
            path = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                found[path] = entry
            elif path.strip("/") != directory.strip("/"):  # some list a directory in itself
                directories.append(path)
    return found


def _parameters(fs: Any) -> Any:
    """The parameters of the listing behind ``find``, which passes on whatever it is given."""
    return inspect.signature(getattr(fs, "_find", fs.find)).parameters
