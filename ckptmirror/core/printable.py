"""Text from elsewhere, made fit for a terminal and a log: what would move the cursor, or hide, is spelled out.

Rules:
* Line feeds and tabs stay; every other character that Python calls not printable becomes an escape: control characters,
  marks of the writing direction, what a broken file name could not be decoded to.
"""

from __future__ import annotations

__all__ = ["printable_text"]


def printable_text(text: str) -> str:
    r"""Return ``text`` as it may be shown: ``\x1b`` for an escape character."""
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() or ch in "\n\t" else ascii(ch)[1:-1] for ch in text)
