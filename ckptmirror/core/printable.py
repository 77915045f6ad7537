"""Makes text from elsewhere safe for a terminal and a log: characters that move the cursor or hide are escaped.

Rules:
* Every character that Python calls not printable becomes an escape: control characters, direction marks, undecodable
  bytes of a file name.
* Text of others is one line: a line feed in it becomes an escape too, or it could add a line that we did not write. So
  readers pass what others wrote through :func:`printable_line`, and an error is one line whatever it quotes. Line
  feeds and tabs stay only in :func:`printable_text`, for our own output, which may have several lines.
"""

from __future__ import annotations

from typing import Any

__all__ = ["printable_line", "printable_strings", "printable_text"]


def printable_text(text: str) -> str:
    r"""Return ``text`` with unsafe characters escaped: ``\x1b`` for an escape character."""
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() or ch in "\n\t" else ascii(ch)[1:-1] for ch in text)


def printable_line(text: str) -> str:
    r"""Return ``text`` as one line, with unsafe characters escaped: ``\n`` for a line feed."""
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() else ascii(ch)[1:-1] for ch in text)


def printable_strings(value: Any) -> Any:
    """Return a JSON value with each text in it, keys too, as one printable line."""
    if isinstance(value, str):
        return printable_line(value)
    if isinstance(value, dict):
        return {printable_line(key): printable_strings(inner) for key, inner in value.items()}
    return [printable_strings(inner) for inner in value] if isinstance(value, list) else value
