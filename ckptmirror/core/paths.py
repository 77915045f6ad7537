"""Checks that relative paths from elsewhere are safe to use below a directory.

Rules:
* Only the text is checked; the code that opens the file must deal with links.
"""

from __future__ import annotations

from ckptmirror.core.errors import BrokenMeta

__all__ = ["check_relative_path"]

_MAX_PATH_BYTES = 1024
_MAX_COMPONENT_BYTES = 255


def check_relative_path(path: str) -> str:
    """Return ``path`` if it is safe to use below a directory.

    Raises:
        BrokenMeta: It is empty, absolute or too long, has an empty, ``.`` or ``..`` component, ends with a slash, or
            contains a backslash, a control character or text that UTF-8 cannot encode.
    """
    reason = _why_unsafe(path)
    if reason:
        raise BrokenMeta(f"The path {path[:80]!a} is refused: {reason}.")
    return path


def _why_unsafe(path: str) -> str:
    if not path:
        return "it is empty"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "it cannot be encoded"
    if len(encoded) > _MAX_PATH_BYTES:
        return f"it is longer than {_MAX_PATH_BYTES} bytes"
    if path.startswith("/"):
        return "it is absolute"
    if "\\" in path:
        return "it has a backslash"
    if any(ch < " " or "\x7f" <= ch <= "\x9f" or ch in "\u2028\u2029" for ch in path):
        return "it has a control character"
    for component in path.split("/"):
        if component in ("", ".", ".."):
            return f"it has the component {component!r}"
        if len(component.encode()) > _MAX_COMPONENT_BYTES:
            return f"it has a component longer than {_MAX_COMPONENT_BYTES} bytes"
    return ""
