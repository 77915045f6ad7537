"""Makes text from elsewhere safe for a terminal and a log: characters that move the cursor or hide are escaped.

Rules:
* Line feeds and tabs stay. Every other character that Python calls not printable becomes an escape: control characters,
  direction marks, and undecodable bytes of a file name.
"""

from __future__ import annotations

__all__ = ["printable_text"]


def printable_text(text: str) -> str:
    r"""Return ``text`` with unsafe characters escaped: ``\x1b`` for an escape character."""
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() or ch in "\n\t" else ascii(ch)[1:-1] for ch in text)
