"""Whether standard error is a terminal, and what it can do. Only the light parts of the standard library are used."""

from __future__ import annotations

import os
import sys

__all__ = ["is_terminal", "moves_cursor"]


def is_terminal() -> bool:
    """Whether a person looks at standard error."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def moves_cursor() -> bool:
    """Whether standard error is a terminal on which a bar can be drawn, and a line be erased."""
    return is_terminal() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
